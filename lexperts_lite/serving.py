"""An HTTP server for a keyphrase pipeline: FastAPI, dynamic batching (see `batch_worker`), limits, health and metrics.

`lexperts keyphrases serve` runs it with uvicorn. The model is the pipeline that `create_app` is given: no request can name
another one.
"""

import asyncio
import copy
import hashlib
import json
import threading
import time
from contextlib import asynccontextmanager
from functools import partial

try:
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse, PlainTextResponse
    from fastapi_offline import FastAPIOffline
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.requests import ClientDisconnect
    from starlette.responses import RedirectResponse
except ImportError as error:
    raise ImportError(
        f"The server needs {error.name}. Install it with: pip install 'lexperts[serve]'", name=error.name
    ) from error

from run_tools.processes import MemoryRelease
from run_tools.versions import __version__

from .batch_worker import AbandonedError, BatchWorker, QueueFullError, WorkerStoppedError
from .candidates import parse_candidates
from .input_documents import split_into_blocks
from .reader import SORT_WINDOW
from .server_requests import Answer, Parameters, error_responses, list_documents, parse_body, request_schema
from .windows import replace_surrogates

BODY_TIMEOUT = 30  # seconds to send a request
DISCONNECTED = "The client has disconnected."  # with the status 499, which only /metrics shows
MANY = 10_000  # bytes of a request whose check would delay others, so that it runs in a thread
QUEUE_GROWTH = 4  # sub-tokens that may wait, as a multiple of those of the largest request
WARM_UP = "The first text takes longer than the others."
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


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
    """Raises a `ValueError` if a limit is less than 1, or `max_wait_ms` is not a number of milliseconds."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if not 0 <= max_wait_ms < float("inf"):  # also refuses NaN
        raise ValueError(f"max_wait_ms={max_wait_ms} must be a number of at least 0.")


def create_app(
    extract,
    *,
    batch_size: int = 16,
    max_wait_ms: float = 5,
    max_queue: int = 128,
    max_tokens: int = 50_000,
    max_candidates: int = 20_000,
    max_body_bytes: int = 1_000_000,
) -> FastAPI:
    """The app of a server: `POST /keyphrases`, `/healthz`, `/metrics`, and `/docs`, which loads nothing from other hosts.

    Its lifespan starts a thread that reads documents in batches, and at the end waits until all in the queue are read. Each
    app has its own thread, so its pipeline must not be used elsewhere meanwhile.

    Args:
        extract: a `KeyphraseExtractionPipeline`.
        batch_size: documents per batch, and windows per batch of the model.
        max_wait_ms: milliseconds that a document waits for others if the model is idle.
        max_queue: documents that may wait, and documents per request. Beyond that, requests get 503 at once; also if the documents
            that wait would have more than four times `max_tokens` together.
        max_tokens: sub-tokens of all documents of a request, with their titles.
        max_candidates: candidates and synonyms of a request, times its documents.
        max_body_bytes: of a request.

    Raises:
        ValueError: if a limit is less than 1, or `max_wait_ms` is negative.
    """
    limits = {"batch_size": batch_size, "max_queue": max_queue, "max_tokens": max_tokens}
    limits |= {"max_candidates": max_candidates, "max_body_bytes": max_body_bytes}
    check_limits(**limits, max_wait_ms=max_wait_ms)

    release = MemoryRelease()

    def on_batch(documents: int) -> None:
        metrics.batches.observe(documents)
        release()

    worker = BatchWorker(
        reader(extract, batch_size, max_candidates),
        batch_size=batch_size,
        max_wait=max_wait_ms / 1e3,
        max_queue=max_queue,
        max_size=QUEUE_GROWTH * max_tokens,
        on_batch=on_batch,
    )
    checks = RequestChecks(extract, max_queue, max_tokens, max_candidates)
    metrics = Metrics(worker)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        await asyncio.to_thread(extract, WARM_UP)
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPIOffline(
        title="Keyphrases",
        version=__version__,
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
        return JSONResponse(await answer(request, checks, worker, max_body_bytes))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        """Leads to the documentation."""
        return RedirectResponse("docs")

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


def reader(extract, batch_size: int, max_candidates: int):
    """The function with which the worker reads documents; it stops between two batches of the model if no request waits for them."""

    def read(documents: list, is_abandoned, **options) -> list:
        # candidates without mentions take memory too, in each document
        together = max(1, max_candidates // max(count_phrases(options.get("candidates")), 1))
        if options.get("candidates"):
            options["candidates"] = parse_candidates(options["candidates"])
        results: list = []
        for block in split_into_blocks(documents, min(together, SORT_WINDOW * batch_size)):
            finished: dict[int, list] = {}
            for part in extract.read_block(block, batch_size=batch_size, first=len(results), **options):
                finished |= part.finished
                if is_abandoned():
                    raise AbandonedError("The client has disconnected.")
            results += [finished[i] for i in range(len(block))]
        return results

    return read


def count_phrases(candidates) -> int:
    """The number of candidates with their synonyms."""
    if isinstance(candidates, dict):
        return len(candidates) + sum(map(len, candidates.values()))
    return len(candidates or ())


class RequestChecks:
    """The checks of requests against the limits of `create_app`, and of their options against the pipeline."""

    def __init__(self, extract, max_documents: int, max_tokens: int, max_candidates: int):
        self.extract, self.max_documents = extract, max_documents
        self.max_tokens, self.max_candidates = max_tokens, max_candidates
        self._tokenizer = copy.deepcopy(extract.tokenizer)  # the pipeline's is in use in another thread

    def check(self, documents: list[str | dict], options: dict) -> list[int]:
        """The number of sub-tokens of each document.

        Raises:
            HTTPException: 422 for too many documents, candidates or sub-tokens, and for invalid options.
        """
        if (count := len(documents)) > self.max_documents:
            raise HTTPException(422, f"inputs: {count} documents in one request; send at most {self.max_documents}.")
        phrases = count_phrases(options.get("candidates"))
        if phrases * count > self.max_candidates:
            raise HTTPException(
                422,
                f"parameters.candidates: {phrases} candidates with synonyms for {count} documents; send at most "
                f"{self.max_candidates // count} for so many documents, or fewer documents in one request.",
            )
        sizes = self.count_tokens(documents)
        if (total := sum(sizes)) > self.max_tokens:
            raise HTTPException(
                422,
                f"inputs: {total} sub-tokens, titles included; send at most {self.max_tokens} in one request. The longest document "
                f"is number {max(range(count), key=sizes.__getitem__)}.",
            )
        try:
            self.extract([], **options)  # options only
        except (ValueError, TypeError) as error:
            raise HTTPException(422, f"parameters: {error}") from error
        return sizes

    def count_tokens(self, documents: list[str | dict]) -> list[int]:
        """The number of sub-tokens of each document with its title, without special tokens."""
        counts = [0] * len(documents)
        parts = [(number, part) for number, document in enumerate(documents) for part in list_texts(document)]
        texts = [replace_surrogates(part) for _, part in parts]
        encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for (number, _), ids in zip(parts, encoded, strict=True):
            counts[number] += len(ids)
        return counts


def list_texts(document: str | dict) -> list[str]:
    """The text of a document, and its title if it has one."""
    return [document] if isinstance(document, str) else [document["text"], *filter(None, [document["title"]])]


async def answer(request: Request, checks: RequestChecks, worker: BatchWorker, max_body_bytes: int) -> dict:
    """The answer to `POST /keyphrases`; the arguments are those of `create_app`.

    Raises:
        HTTPException: for all that is wrong with the request, and 503 if it cannot be accepted now.
    """
    abandoned = threading.Event()
    try:
        content = await read_body(request, max_body_bytes)  # also if refused: an unread body resets the connection
        worker.check_room()
        body = parse_body(content)
        documents = list_documents(body.inputs)
        parameters = body.parameters or Parameters()
        given = parameters.model_dump(exclude_unset=True, exclude={"mentions"})
        given.setdefault("top_k", parameters.top_k)  # the pipeline by itself returns all candidates
        check = partial(checks.check, documents, given)
        sizes = await asyncio.to_thread(check) if len(content) > MANY else check()
        key = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
        futures = worker.submit(documents, given, key, sizes=sizes, abandoned=abandoned)
    except QueueFullError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": str(error.retry_after)}) from error
    except WorkerStoppedError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from error
    try:
        answers = await wait_for(futures, request)
    except BaseException:
        abandoned.set()
        raise
    results = [to_result(number, own, parameters.mentions) for number, own in enumerate(answers)]
    return {"results": results}


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
