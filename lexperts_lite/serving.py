"""An HTTP server for a keyphrase pipeline: FastAPI, dynamic batching, limits, health and metrics.

`lexperts keyphrases serve` and `lexperts-lite serve` run it with uvicorn. The model is the pipeline that `create_app` is given: no
request can name another one.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

try:
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
    from fastapi_offline import FastAPIOffline
    from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
    from prometheus_client import Counter as Total
    from pydantic import BaseModel, ConfigDict, FailFast, Field
    from typing_extensions import TypeAliasType
except ImportError as error:
    raise ImportError(f"The server needs {error.name}. Install the extra lexperts[serve].", name=error.name) from error

from run_tools.processes import MemoryRelease
from run_tools.versions import __version__

from .candidates import Candidates
from .words import LANGUAGES

SHOWN_ERRORS = 3
QUEUE_GROWTH = 4  # characters that may wait, as a multiple of those of the largest request
LONGEST_WAIT = 60  # seconds that a refused client is asked to wait, at most
DISCONNECTED = 499  # status, which only /metrics shows
WARM_UP = "The first text takes longer than the others."
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
EXAMPLE = {"inputs": "Graph cuts solve energy minimisation problems.", "parameters": {"top_k": 5}}

logger = logging.getLogger(__name__)


class Strict(BaseModel):
    """Types as in JSON, without conversions; other fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Document(Strict):
    """A document."""

    text: str
    title: str | None = None


Documents = TypeAliasType("Documents", Annotated[list[str | Document], FailFast(), Field(min_length=1)])
Phrases = TypeAliasType("Phrases", Annotated[list[str], FailFast(), Field(min_length=1)])


class Parameters(Strict):
    """Options of the pipeline; those that are left out have its defaults."""

    top_k: Annotated[int | None, Field(ge=1, le=1000, description="Maximum number of keyphrases; null for all.")] = 10
    min_phrases: Annotated[
        int | None, Field(ge=0, le=1000, description="Minimum number, of a text that has so many.")
    ] = None
    min_score: Annotated[float | None, Field(ge=0, le=1)] = None
    threshold: Annotated[float | None, Field(gt=0, lt=1)] = None
    style: Annotated[str | None, Field(description="A style of annotation, if the model has several.")] = None
    diversity: Annotated[float | None, Field(ge=0, le=1)] = None
    candidates: Annotated[Phrases | None, Field(description="Phrases to score.")] = None
    nested: Annotated[bool | None, Field(description="false: no keyphrase inside another one.")] = None
    language: Annotated[
        Literal[LANGUAGES] | None, Field(description="The stemmer's language; null for no stemming.")
    ] = None
    mentions: Annotated[bool, Field(description="Return all mentions of each keyphrase.")] = False


class KeyphraseRequest(Strict):
    """One document, or a list of them, and options that hold for all."""

    inputs: str | Document | Documents
    parameters: Parameters = Parameters()
    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE})


class Mention(BaseModel):
    """An occurrence of a keyphrase: offsets in the text, or in the `field` of a document with a title."""

    start: int
    end: int
    score: float
    field: Literal["title", "text"] | None = None


class Keyphrase(BaseModel):
    """A keyphrase and its first mention. Score and offsets of a candidate without mentions are null."""

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


@dataclass(eq=False)
class Task:
    """A document that waits for its keyphrases. Those with equal keys have equal options."""

    document: str | dict
    options: dict
    key: Any
    future: asyncio.Future

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.document) if isinstance(self.document, str) else sum(map(len, self.document.values()))


class Batcher:
    """Reads documents of several requests in batches, in a thread.

    A batch begins with the oldest document. It holds only documents with the same options, and is read once it is full, or `max_wait`
    seconds later. If reading it fails, its documents are read one by one, so that the failure of one does not affect the others.
    Reading stops between two batches of the model if no request waits for any of the documents.
    """

    def __init__(self, extract, batch_size: int, max_wait: float, max_queue: int, max_characters: int):
        self.extract, self.batch_size, self.max_wait = extract, batch_size, max_wait
        self.max_queue, self.max_characters = max_queue, max_characters
        self.tasks: deque[Task] = deque()
        self.arrived, self.seconds = asyncio.Event(), 0.0  # per document, a moving average
        self.release = MemoryRelease()
        self.registry = CollectorRegistry()
        sizes = [2**i for i in range(batch_size.bit_length() + 1)]
        shared: dict = {"registry": self.registry}
        self.batches = Histogram("keyphrases_batch_documents", "Documents per batch.", buckets=sizes, **shared)
        Gauge("keyphrases_queue_documents", "Documents that wait.", **shared).set_function(lambda: len(self.tasks))

    def add(self, tasks: list[Task]) -> None:
        """Puts documents into the queue, all or none. Raises an `HTTPException` if they do not fit."""
        waiting = [task for task in self.tasks if not task.future.done()]
        size = sum(task.size for task in (*waiting, *tasks))
        if len(waiting) + len(tasks) > self.max_queue or (waiting and size > QUEUE_GROWTH * self.max_characters):
            seconds = str(min(max(math.ceil(2 * len(waiting) * self.seconds), 1), LONGEST_WAIT))
            message = f"The server is busy: {len(waiting)} documents wait. Try again in {seconds} s."
            raise HTTPException(503, message, headers={"Retry-After": seconds})
        self.tasks = deque((*waiting, *tasks))
        self.arrived.set()

    def take(self) -> list[Task]:
        """The next batch."""
        batch, size = [], 0
        for task in [task for task in self.tasks if not task.future.done()]:
            if not batch or (task.key == batch[0].key and size + task.size <= self.max_characters):
                batch, size = [*batch, task], size + task.size
            if len(batch) == self.batch_size:
                break
        return batch

    async def run(self) -> None:
        """Reads what arrives, forever."""
        while True:
            await self.arrived.wait()
            if len(self.take()) < self.batch_size:
                await asyncio.sleep(self.max_wait)
            batch, start = self.take(), time.monotonic()
            self.tasks = deque(task for task in self.tasks if task not in batch and not task.future.done())
            if not self.tasks:
                self.arrived.clear()
            if batch:
                results = await asyncio.to_thread(self.read, batch)
                for task, result in zip(batch, results, strict=True):
                    if not task.future.done():
                        task.future.set_result(result)
                self.batches.observe(len(batch))
                self.release()
                self.seconds = 0.8 * self.seconds + 0.2 * (time.monotonic() - start) / len(batch)

    def read(self, batch: list[Task]) -> list[list[dict] | Exception]:
        """The keyphrases of each document, or why it has none."""
        found: dict[int, list[dict] | Exception] = {}
        try:
            documents = [task.document for task in batch]
            for finished in self.extract.read_block(documents, batch_size=self.batch_size, **batch[0].options):
                found |= finished
                if all(task.future.cancelled() for task in batch):
                    break
        except Exception as error:
            if len(batch) > 1:
                return [result for task in batch for result in self.read([task])]
            if not isinstance(error, (ValueError, TypeError)):
                logger.exception("a document could not be read")
            found[0] = error
        return [found.get(number, []) for number in range(len(batch))]


class LimitBodies:
    """ASGI middleware of /keyphrases: refuses bodies of more than `max_bytes`, counts requests by status, and measures them."""

    def __init__(self, app, max_bytes: int, registry: CollectorRegistry):
        self.app, self.max_bytes = app, max_bytes
        self.requests = Total("keyphrases_requests", "Requests to /keyphrases.", ["status"], registry=registry)
        self.seconds = Histogram("keyphrases_request_seconds", "Latency.", buckets=SECONDS, registry=registry)

    async def __call__(self, scope, receive, send):
        """Passes a request on."""
        if scope["type"] != "http" or scope["path"] != "/keyphrases":
            return await self.app(scope, receive, send)
        size, status, start = 0, 500, time.monotonic()
        encoding = dict(scope["headers"]).get(b"content-encoding", b"identity").decode("latin-1")

        async def receive_some():
            nonlocal size
            if encoding != "identity":
                raise HTTPException(415, f"Content-Encoding {encoding:.20} is not read. Send plain JSON.")
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                raise HTTPException(413, f"The body is larger than {self.max_bytes} bytes.")
            return message

        async def send_and_note(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive_some, send_and_note)
        finally:
            self.requests.labels(status).inc()
            if status == 200:
                self.seconds.observe(time.monotonic() - start)


def create_app(
    extract,
    *,
    batch_size: int = 16,
    max_wait_ms: float = 5,
    max_queue: int = 128,
    max_characters: int = 250_000,
    max_candidates: int = 20_000,
    max_body_bytes: int = 1_000_000,
) -> FastAPI:
    """The app of a server: `POST /keyphrases`, `/healthz`, `/metrics`, and `/docs`, which loads nothing from other hosts.

    Its lifespan starts a task that reads documents in batches. Each app has its own, so its pipeline must not be used elsewhere
    meanwhile.

    Args:
        extract: a `KeyphraseExtractionPipeline`, or a `lexperts_lite.KeyphraseExtractor`.
        batch_size: documents per batch, and windows per batch of the model.
        max_wait_ms: milliseconds that a document waits for others if the model is idle.
        max_queue: documents that may wait, and documents per request. Beyond that, requests get 503 at once; also if the documents
            that wait would have more than four times `max_characters` together.
        max_characters: of all documents of a request, with their titles.
        max_candidates: candidates of a request, times its documents.
        max_body_bytes: of a request.

    Raises:
        ValueError: if a limit is less than 1, or `max_wait_ms` is negative.
    """
    limits = {"batch_size": batch_size, "max_queue": max_queue, "max_characters": max_characters}
    limits |= {"max_candidates": max_candidates, "max_body_bytes": max_body_bytes}
    if wrong := [f"{name}={value}" for name, value in limits.items() if value < 1]:
        raise ValueError(f"{wrong[0]} is less than 1.")
    if not 0 <= max_wait_ms < math.inf:  # also refuses NaN
        raise ValueError(f"max_wait_ms={max_wait_ms} is not a number of at least 0.")
    batcher = Batcher(extract, batch_size, max_wait_ms / 1e3, max_queue, max_characters)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        await asyncio.to_thread(extract, WARM_UP)
        app.state.batcher = batcher
        app.state.reading = asyncio.create_task(batcher.run())
        yield
        app.state.reading.cancel()

    about = {"title": "Keyphrases", "version": __version__, "redoc_url": None, "redirect_slashes": False}
    description = "Keyphrases of texts, with scores and offsets."
    app = FastAPIOffline(description=description, lifespan=lifespan, separate_input_output_schemas=False, **about)
    app.add_middleware(LimitBodies, max_bytes=max_body_bytes, registry=batcher.registry)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        """The places and messages of the first errors, without the texts."""
        lines = [f"{place_of(each['loc'])}: {each['msg']}" for each in error.errors()[:SHOWN_ERRORS]]
        return JSONResponse({"detail": "; ".join(lines)}, 422)

    @app.post("/keyphrases", response_model=Answer)
    async def keyphrases(request: Request, body: KeyphraseRequest) -> JSONResponse:
        """The keyphrases of one document or of a list of documents."""
        json.loads(await request.body(), object_pairs_hook=refuse_duplicates)
        tasks = await make_tasks(body, extract, limits)
        batcher.add(tasks)
        futures = [task.future for task in tasks]
        try:
            while (await asyncio.wait(futures, timeout=0.5))[1]:
                if await request.is_disconnected():
                    return JSONResponse(None, DISCONNECTED)
        finally:
            for future in futures:
                future.cancel()
        return JSONResponse({"results": [to_result(future.result(), body.parameters.mentions) for future in futures]})

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        """Leads to the documentation."""
        return RedirectResponse("docs")

    @app.get("/healthz", responses={503: {"description": "The model cannot be used."}})
    async def healthz() -> dict[str, str]:
        """Whether the server accepts documents."""
        if app.state.reading.done():
            raise HTTPException(503, "The server does not accept documents.")
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counters in the format of Prometheus."""
        return PlainTextResponse(generate_latest(batcher.registry), media_type="text/plain; version=0.0.4")

    return app


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raises an `HTTPException` for a JSON object with two fields of one name."""
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise HTTPException(422, f"{twice[0]:.60} is given twice.")


def place_of(place: Sequence[str | int]) -> str:
    """Where a field is, without the kinds of values that were tried: "inputs.1.text"."""
    parts = [str(part)[:60] for part in place[1:] if "[" not in str(part) and part not in ("str", "Document")]
    return ".".join(parts) or "body"


async def make_tasks(body: KeyphraseRequest, extract, limits: dict[str, int]) -> list[Task]:
    """A task for each document of a request. Raises an `HTTPException` for what exceeds a limit, and for invalid options."""
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    documents = [each if isinstance(each, str) else each.model_dump(exclude_none=True) for each in inputs]
    options = body.parameters.model_dump(exclude_unset=True, exclude={"mentions"})
    options.setdefault("top_k", body.parameters.top_k)  # the pipeline by itself returns all candidates
    phrases, key = options.pop("candidates", None), str(options)
    loop = asyncio.get_running_loop()
    try:
        body.model_dump_json()  # fails for half of a character, which no answer could hold
        if phrases is not None:
            options["candidates"], key = await asyncio.to_thread(Candidates, phrases), id(body)
        extract.merge_options(**options)
    except (ValueError, TypeError) as error:
        raise HTTPException(422, str(error)) from error
    tasks = [Task(document, options, key, loop.create_future()) for document in documents]
    counts = {
        "max_queue": len(tasks),
        "max_characters": sum(task.size for task in tasks),
        "max_candidates": len(phrases or ()) * len(tasks),
    }
    for name, count in counts.items():
        if count > limits[name]:
            raise HTTPException(422, f"inputs: {count} exceeds {name}={limits[name]}.")
    return tasks


def to_result(answer: list[dict] | Exception, mentions: bool) -> dict:
    """The JSON object of a document. Raises an `HTTPException` for an error that is not about the document."""
    if isinstance(answer, (ValueError, TypeError)):
        return {"error": str(answer)}
    if isinstance(answer, Exception):
        raise HTTPException(500, f"The model failed with {type(answer).__name__}. The server's log says more.")
    hidden = set() if mentions else {"mentions"}
    return {"keyphrases": [{name: phrase[name] for name in phrase if name not in hidden} for phrase in answer]}
