"""An HTTP server for a keyphrase pipeline: FastAPI, dynamic batching (see `batch_worker`), limits, health and metrics.

`lexperts keyphrases serve` runs it with uvicorn. The model is the pipeline that `create_app` is given: no request can name
another one.
"""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

try:
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse, PlainTextResponse
    from fastapi_offline import FastAPIOffline
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(
        f"The server needs {error.name}. Install it with: pip install lexperts[serve]", name=error.name
    ) from error
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError
from typing_extensions import TypeAliasType

from .batch_worker import BatchWorker, QueueFullError, WorkerStoppedError
from .processes import MemoryRelease
from .stemming import LANGUAGES

BODY_TIMEOUT = 30  # seconds to send a request
DISCONNECTED = "The client has disconnected."  # with the status 499, which only /metrics shows
SHOWN_ERRORS = 3
KINDS = ("str", "dict", "list")  # of inputs in JSON
WARM_UP = "The first text takes longer than the others."
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Strict(BaseModel):
    """Types as in JSON, without conversions; other fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Document(Strict):
    """A document."""

    text: str
    title: str | None = None


def kind_of(value) -> str | None:
    """The kind of an input, one of `KINDS`."""
    kind = type(value).__name__
    return kind if kind in KINDS else None


def one_of(kinds, message: str):
    """A union whose errors are those of the kind that was sent."""
    return Annotated[kinds, Discriminator(kind_of, custom_error_type="inputs", custom_error_message=message)]


OneInput = Annotated[str, Tag("str")] | Annotated[Document, Tag("dict")]
EachInput = one_of(OneInput, 'Must be a text, or an object with "text" and optionally "title"')
EachInputs = TypeAliasType("EachInputs", Annotated[list[EachInput], FailFast(), Field(min_length=1)])
Inputs = one_of(
    OneInput | Annotated[EachInputs, Tag("list")],
    'Must be a text, an object with "text" and optionally "title", or a list of them',
)
Phrases = TypeAliasType("Phrases", Annotated[list[str], FailFast(), Field(min_length=1)])
Synonyms = TypeAliasType("Synonyms", dict[str, Annotated[list[str], FailFast()]])


class Parameters(Strict):
    """Options of the pipeline; those that are left out have its defaults."""

    top_k: Annotated[int | None, Field(ge=1, le=10_000, description="Maximum number of keyphrases; null for all.")] = 10
    min_score: Annotated[float | None, Field(ge=0, le=1)] = None
    threshold: Annotated[float | None, Field(gt=0, lt=1)] = None
    style: Annotated[str | None, Field(description="A style of annotation, if the model has several.")] = None
    diversity: Annotated[float | None, Field(ge=0, le=1)] = None
    candidates: Annotated[
        Phrases | Synonyms | None, Field(description="Phrases to score, or names with lists of synonyms.")
    ] = None
    language: Annotated[
        Literal[LANGUAGES] | None, Field(description="The stemmer's language; null for no stemming.")
    ] = None
    on_long: Annotated[Literal["window", "error", "truncate"] | None, Field(description="For long documents.")] = None
    mentions: Annotated[bool, Field(description="Return all mentions of each keyphrase.")] = False


class KeyphraseRequest(Strict):
    """One document, or a list of them, and options that hold for all."""

    inputs: Inputs
    parameters: Parameters | None = None


class Mention(BaseModel):
    """An occurrence of a keyphrase: offsets in the text, or in the `field` of a document with a title."""

    start: int
    end: int
    score: float
    field: Literal["title", "text"] | None = None


class Keyphrase(BaseModel):
    """A keyphrase. Score and offsets of a candidate without mentions are null."""

    keyphrase: str
    score: float | None
    start: int | None
    end: int | None
    field: Literal["title", "text"] | None = None
    mentions: list[Mention] | None = None


class Result(BaseModel):
    """The keyphrases of a document, best first, or the reason why it could not be read."""

    keyphrases: list[Keyphrase] | None = None
    error: str | None = None


class Answer(BaseModel):
    """One result per document, in their order."""

    results: list[Result]


class Metrics:
    """What /metrics shows, of one app."""

    def __init__(self, worker: BatchWorker):
        self.registry = CollectorRegistry()
        shared = {"registry": self.registry}
        self.requests = Counter("keyphrases_requests", "Requests to /keyphrases.", ["status"], **shared)
        self.seconds = Histogram(
            "keyphrases_request_seconds", "Latency of answered requests.", buckets=SECONDS, **shared
        )
        sizes = [2**i for i in range(worker.batch_size.bit_length() + 1)]
        self.batches = Histogram("keyphrases_batch_documents", "Documents per batch.", buckets=sizes, **shared)
        Gauge("keyphrases_queue_documents", "Documents that wait.", **shared).set_function(lambda: len(worker))
        Gauge("keyphrases_ready", "1 if documents are accepted.", **shared).set_function(lambda: worker.is_ready)


class CountRequests:
    """ASGI middleware: counts requests to /keyphrases by status, and measures those that succeed."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        """Passes a request on."""
        if scope["type"] != "http" or scope["path"] != "/keyphrases":
            return await self.app(scope, receive, send)
        status, start = 500, time.monotonic()

        async def send_and_note(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.requests.labels(status).inc()
            if status == 200:
                self.metrics.seconds.observe(time.monotonic() - start)


def check_limits(max_wait_ms: float, **limits: int) -> None:
    """Raises a `ValueError` if a limit is less than 1, or `max_wait_ms` is negative."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if max_wait_ms < 0:
        raise ValueError(f"max_wait_ms={max_wait_ms} must be at least 0.")


def create_app(
    extract,
    *,
    batch_size: int = 16,
    max_wait_ms: float = 5,
    max_queue: int = 128,
    max_characters: int = 100_000,
    max_body_bytes: int = 1_000_000,
) -> FastAPI:
    """The app of a server: `POST /keyphrases`, `/healthz`, `/metrics`, and `/docs`, which loads nothing from other hosts.

    Its lifespan starts a thread that reads documents in batches, and at the end waits until all in the queue are read. Each
    app has its own thread, so its pipeline must not be used elsewhere meanwhile.

    Args:
        extract: a `KeyphraseExtractionPipeline`.
        batch_size: documents per batch, and windows per batch of the model.
        max_wait_ms: milliseconds that a document waits for others if the model is idle.
        max_queue: documents that may wait, and documents per request. Beyond that, requests get 503 at once.
        max_characters: of a document with its title.
        max_body_bytes: of a request.

    Raises:
        ValueError: if a limit is less than 1, or `max_wait_ms` is negative.
    """
    limits = {"batch_size": batch_size, "max_queue": max_queue, "max_characters": max_characters}
    check_limits(**limits, max_body_bytes=max_body_bytes, max_wait_ms=max_wait_ms)

    release = MemoryRelease()

    def read(documents: list, **options) -> list:
        return extract(documents, batch_size=batch_size, **options)

    def on_batch(documents: int) -> None:
        metrics.batches.observe(documents)
        release()

    worker = BatchWorker(
        read,
        batch_size=batch_size,
        max_wait=max_wait_ms / 1e3,
        max_queue=max_queue,
        on_batch=on_batch,
    )
    metrics = Metrics(worker)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        await asyncio.to_thread(extract, WARM_UP)
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPIOffline(
        title="Keyphrases",
        description="Keyphrases of texts, with scores and offsets.",
        lifespan=lifespan,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.add_middleware(CountRequests, metrics=metrics)
    app.state.worker = worker

    @app.post("/keyphrases", response_model=Answer, openapi_extra=request_schema(), responses=error_responses())
    async def keyphrases(request: Request) -> JSONResponse:
        """The keyphrases of one document or of a list of documents."""
        return JSONResponse(await answer(request, extract, worker, max_characters, max_body_bytes))

    @app.get("/healthz", responses={503: {"description": "The model cannot be used."}})
    async def healthz() -> dict[str, str]:
        """Whether the server accepts documents."""
        if not worker.is_ready:
            raise HTTPException(503, "The server does not accept documents.")
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> PlainTextResponse:
        """Counters in the format of Prometheus."""
        return PlainTextResponse(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return app


async def answer(request: Request, extract, worker: BatchWorker, max_characters: int, max_body_bytes: int) -> dict:
    """The answer to `POST /keyphrases`; the arguments are those of `create_app`.

    Raises:
        HTTPException: for all that is wrong with the request, and 503 if it cannot be accepted now.
    """
    try:
        content = await read_body(request, max_body_bytes)  # also if refused: an unread body resets the connection
        worker.check_room()
        body = parse_body(content)
        documents = list_documents(body.inputs)
        check_sizes(documents, worker.max_queue, max_characters)
        parameters = body.parameters or Parameters()
        given = parameters.model_dump(exclude_unset=True, exclude={"mentions"})
        try:
            check = partial(extract, [], **given)  # options only
            await asyncio.to_thread(check) if given.get("candidates") else check()
        except (ValueError, TypeError) as error:
            raise HTTPException(422, f"parameters: {error}") from error
        futures = worker.submit(documents, given, json.dumps(given, sort_keys=True))
    except QueueFullError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": str(error.retry_after)}) from error
    except WorkerStoppedError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from error
    answers = await wait_for(futures, request)
    results = [to_result(number, own, parameters.mentions) for number, own in enumerate(answers)]
    return {"results": results}


def request_schema() -> dict[str, Any]:
    """The OpenAPI entry of the request, whose body is parsed by `parse_body`."""
    schema = KeyphraseRequest.model_json_schema()
    definitions = schema.pop("$defs")

    def inline(node):
        """Replaces references, since an operation cannot define components."""
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: inline(value) for key, value in node.items()}

    example = {"inputs": "Graph cuts solve energy minimisation problems.", "parameters": {"top_k": 5}}
    content = {"application/json": {"schema": inline(schema), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def error_responses() -> dict[int, dict]:
    """The OpenAPI entries of errors, each with a JSON object `{"detail": message}`."""
    descriptions = {
        400: "The body is not JSON.",
        408: "The body took too long.",
        413: "The body is too large.",
        415: "The content type is not application/json.",
        422: "A field, an option or a length is invalid.",
        503: "Too many documents wait. Try again after the seconds of Retry-After.",
    }
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}}
    content = {"application/json": {"schema": detail}}
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: 415 for another type than JSON, 413 for too many bytes, 408 for a body that takes too long, 499 if the
            client disconnects.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"The content type must be application/json, not {kind[:60]!r}.")
    too_large = HTTPException(413, f"The body is larger than {max_bytes} bytes. Send fewer or shorter documents.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise HTTPException(408, f"The body was not received within {BODY_TIMEOUT} s.") from error
    except ClientDisconnect as error:
        raise HTTPException(499, DISCONNECTED) from error
    return bytes(body)


def parse_body(body: bytes) -> KeyphraseRequest:
    """The request of a body.

    Raises:
        HTTPException: 400 if it is not JSON, 422 if a field is missing, unknown or invalid. The message does not repeat values.
    """
    try:
        return KeyphraseRequest.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        raise HTTPException(400, errors[0]["msg"])
    lines = []
    for entry in errors[:SHOWN_ERRORS]:
        *parts, last = entry["loc"] or ("body",)
        place = ".".join(str(part)[:60] for part in (*(part for part in parts if part not in KINDS), last))
        problem = "is not a field. See /docs" if entry["type"] == "extra_forbidden" else entry["msg"]
        lines.append(f"{place}: {problem}")
    more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
    raise HTTPException(422, "; ".join(lines) + more)


def list_documents(inputs: str | Document | list) -> list[str | dict]:
    """The documents of a request, as the pipeline takes them."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    return [document if isinstance(document, str) else document.model_dump() for document in inputs]


def check_sizes(documents: list[str | dict], max_documents: int, max_characters: int) -> None:
    """Raises an `HTTPException` 422 for too many documents, and for one that is too long."""
    if len(documents) > max_documents:
        raise HTTPException(422, f"inputs: {len(documents)} documents in one request; send at most {max_documents}.")
    for number, document in enumerate(documents):
        parts = [document] if isinstance(document, str) else [document["text"], document["title"] or ""]
        if (length := sum(map(len, parts))) > max_characters:
            raise HTTPException(
                422, f"inputs.{number}: {length} characters; send at most {max_characters}, title included."
            )


async def wait_for(futures: list, request: Request) -> list:
    """The results of the futures, or their exceptions. If the client disconnects, what has not been read is cancelled."""
    answers = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    disconnect = asyncio.ensure_future(request.receive())  # the body has been read, so nothing else can come
    try:
        await asyncio.wait({answers, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise HTTPException(499, DISCONNECTED)
    finally:
        disconnect.cancel()
        if answers.cancel():
            answers.add_done_callback(asyncio.Future.exception)  # otherwise logged as never retrieved
    return answers.result()


def to_result(number: int, answer, mentions: bool) -> dict:
    """The JSON object of a document.

    Args:
        number: the index of the document in its request.
        answer: its keyphrases, or the exception of the pipeline.
        mentions: whether to return all mentions.

    Raises:
        HTTPException: 503 if the worker has stopped, 500 for another exception that is not about the document.
    """
    if isinstance(answer, WorkerStoppedError):
        raise HTTPException(503, str(answer), headers={"Retry-After": "1"})
    if isinstance(answer, (ValueError, TypeError)):
        return {"error": str(answer).replace("Document 0 ", f"Document {number} ")}
    if isinstance(answer, BaseException):
        raise HTTPException(500, f"The model failed with {type(answer).__name__}. The server's log says more.")
    if mentions:
        return {"keyphrases": answer}
    return {"keyphrases": [{name: phrase[name] for name in phrase if name != "mentions"} for phrase in answer]}
