"""Dynamic batching: documents of several requests wait in a bounded queue, and one thread reads them in batches."""

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

LONGEST_WAIT = 60  # seconds that a refused client is asked to wait, at most

logger = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """The queue has no room for the documents.

    Attributes:
        retry_after: seconds, at random from the time in which the documents in the queue should be read to twice that time; 1 to 60.
    """

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class WorkerStoppedError(RuntimeError):
    """The worker has been closed, or its thread has ended."""


class AbandonedError(RuntimeError):
    """No request waits for the documents that are being read any more."""


@dataclass(eq=False)
class Task:
    """A document that waits for its result."""

    document: Any
    options: dict
    key: str  # tasks with equal keys have equal options
    abandoned: threading.Event
    size: int = 0
    future: Future = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class BatchWorker:
    """Reads documents in batches, in a thread of its own.

    A batch begins with the oldest document. It holds only documents with the same options, and is read once it is full, or once
    its first document has waited for `max_wait` seconds. While a batch is being read, the next ones collect.

    If reading a batch fails, its documents are read one by one, so that the failure of one does not affect the others.

    Args:
        read: `read(documents, is_abandoned, **options)` returns a list with one result per document. It may raise an
            `AbandonedError` once `is_abandoned()` is true: no request waits for any of the documents.
        batch_size: maximum number of documents in a batch.
        max_wait: seconds.
        max_queue: maximum number of documents that wait. Those being read are not counted.
        max_size: maximum of the sum of their sizes, except that an empty queue accepts everything.
        on_batch: called with the number of documents of each batch.
    """

    def __init__(
        self,
        read: Callable[..., Sequence],
        *,
        batch_size: int = 16,
        max_wait: float = 0.005,
        max_queue: int = 128,
        max_size: float = math.inf,
        on_batch: Callable[[int], None] = lambda documents: None,
    ):
        self._read, self._on_batch = read, on_batch
        self.batch_size, self.max_wait, self.max_queue, self.max_size = batch_size, max_wait, max_queue, max_size
        self._queue: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds = 0.0  # per document, a moving average
        self._thread = threading.Thread(target=self._run, name="batch-worker", daemon=True)

    def __len__(self) -> int:
        """The number of documents that wait."""
        return len(self._queue)

    @property
    def is_ready(self) -> bool:
        """Whether documents are accepted: the thread lives and `close` has not been called."""
        return self._thread.is_alive() and not self._closed

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Refuses new documents, and returns once all that wait have been read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def submit(
        self,
        documents: Sequence,
        options: dict,
        key: str,
        *,
        sizes: Sequence[int] | None = None,
        abandoned: threading.Event | None = None,
    ) -> list[Future]:
        """Puts documents into the queue, all or none. A document whose future is cancelled in time is not read.

        Args:
            documents: of one request.
            options: passed to `read`.
            key: equal for equal options.
            sizes: of the documents, in any unit; by default 0.
            abandoned: is set by the caller once it does not wait for these documents any more.

        Returns:
            One future per document. Its result is that of `read`, its exception the one that `read` raised for this document.

        Raises:
            QueueFullError: if they do not all fit.
            WorkerStoppedError: after `close`.
        """
        sizes, abandoned = sizes or [0] * len(documents), abandoned or threading.Event()
        tasks = [Task(document, options, key, abandoned, size) for document, size in zip(documents, sizes, strict=True)]
        with self._changed:
            if not self.is_ready:
                raise WorkerStoppedError("The server is shutting down.")
            self.check_room(len(tasks), sum(sizes))
            self._queue.extend(tasks)
            self._changed.notify_all()
        return [task.future for task in tasks]

    def check_room(self, documents: int = 1, size: int = 0) -> None:
        """Raises a `QueueFullError` if this number of documents, of this size together, does not fit."""

        def is_full() -> bool:
            total = sum(task.size for task in self._queue)
            return len(self._queue) + documents > self.max_queue or bool(self._queue and total + size > self.max_size)

        with self._changed:
            if is_full():
                self._queue = deque(task for task in self._queue if not task.future.cancelled())
            waiting = len(self._queue)
            if is_full():
                least = max(math.ceil(waiting * self._seconds), 1)
                # spread, so that clients that were refused together do not come back together
                seconds = min(random.randint(least, 2 * least), LONGEST_WAIT)
                raise QueueFullError(
                    f"The server is busy: {waiting} documents wait. Try again in {seconds} s.", seconds
                )

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._answer(batch)
        finally:
            with self._changed:  # also if the thread dies, so that no request waits forever
                self._closed = True
                for task in self._queue:
                    if task.future.set_running_or_notify_cancel():
                        task.future.set_exception(WorkerStoppedError("The server has stopped."))
                self._queue.clear()

    def _next_batch(self) -> list[Task]:
        """Waits for a batch; an empty one means that the worker is closed and the queue is empty."""
        with self._changed:
            while True:
                while self._queue and self._queue[0].future.cancelled():
                    self._queue.popleft()
                if self._queue:
                    first = self._queue[0]
                    same = (task for task in self._queue if task.key == first.key and not task.future.cancelled())
                    batch = list(islice(same, self.batch_size))
                    left = first.arrived + self.max_wait - time.monotonic()
                    if len(batch) == self.batch_size or left <= 0 or self._closed:
                        taken = set(map(id, batch))
                        self._queue = deque(task for task in self._queue if id(task) not in taken)
                        if batch := [task for task in batch if task.future.set_running_or_notify_cancel()]:
                            return batch
                    else:
                        self._changed.wait(left)
                elif self._closed:
                    return []
                else:
                    self._changed.wait()

    def _answer(self, batch: list[Task]) -> None:
        """Reads a batch and completes its futures."""
        start = time.monotonic()
        results, done = [], 0
        try:
            results = self._results(batch)
            self._on_batch(len(batch))  # before the answers: who has one finds it in the metrics
            for task, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    task.future.set_exception(result)
                else:
                    task.future.set_result(result)
                done += 1
        finally:
            for task in batch[done:]:
                task.future.set_exception(WorkerStoppedError("The server has stopped."))
        seconds = (time.monotonic() - start) / len(batch)
        self._seconds = 0.8 * self._seconds + 0.2 * seconds if self._seconds else seconds

    def _results(self, batch: list[Task]) -> list:
        """One result or exception per document."""

        def is_abandoned() -> bool:
            return all(task.abandoned.is_set() for task in batch)

        try:
            return list(self._read([task.document for task in batch], is_abandoned, **batch[0].options))
        except AbandonedError as error:
            return [error] * len(batch)
        except Exception as error:
            if len(batch) > 1:
                return [self._results([task])[0] for task in batch]
            if not isinstance(error, (ValueError, TypeError)):
                logger.exception("a document could not be read")
            return [error]
