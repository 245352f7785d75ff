"""Where blocks of documents are processed: in this process, or by workers of Ray."""

import math
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..memory import release_memory
from ..settings import find_changes
from ..versions import __version__
from .documents import Block

RETRIES = 3  # of a block whose worker was lost
PATIENCE = 30  # seconds until the user is told that no worker has started
TIMEOUT = 10  # seconds for the address of a cluster to answer


class Engine(ABC):
    """Processes blocks. It is a context manager; `start` comes before `run`."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        return None

    @abstractmethod
    def start(self, process) -> dict:
        """Loads the model where it will run, and returns `process.describe()` with the version of lexperts there."""

    @abstractmethod
    def run(self, blocks: Iterable[Block], progress: Callable[[float], None]) -> Iterator[tuple[Block, list[dict]]]:
        """Yields each block, not necessarily in order, with the results of its readable rows.

        Args:
            progress: is called with the number of documents that were read, which may be a fraction.
        """


class LocalEngine(Engine):
    """One block after the other in this process."""

    def start(self, process) -> dict:
        """As in `Engine`."""
        self._process = process
        return describe(process)

    def run(self, blocks, progress):
        """As in `Engine`."""
        for block in blocks:
            results = self._process.process_rows(readable_rows(block), progress)
            release_memory()
            yield block, results


class RayEngine(Engine):
    """Workers of Ray, one model each. The block of a lost worker is processed again by a new one.

    Documents are read, and results are written, by the process that runs the engine, so workers need neither the source nor the
    output. They need lexperts and the model.

    Args:
        address: of a cluster, such as "auto", "10.0.0.1:6379" or "ray://10.0.0.1:10001"; by default Ray is started on this
            machine and stopped at the end.
        workers: by default as many as fit on the cluster's GPUs, or on its cores with `gpus_per_worker=0`.
        gpus_per_worker: GPUs of each worker, which may be a fraction.

    Raises:
        ImportError: without Ray.
        ConnectionError: if the address does not answer.
        ValueError: if Ray is started on this machine, and it has too few cores or GPUs for the workers.
    """

    def __init__(self, address: str | None = None, workers: int | None = None, gpus_per_worker: float = 0):
        self.address, self.workers, self.gpus_per_worker = address, workers, gpus_per_worker
        try:
            import ray
        except ImportError as error:
            raise ImportError("The engine ray needs Ray. Install it with: pip install 'lexperts[ray]'") from error
        self._ray, self._is_own = ray, False
        self._actors: list = []
        self._idle: deque = deque()
        self._description: dict = {}
        self._starting: dict = {}  # the result of `describe` -> worker, and how many were lost before it

    def __enter__(self):
        ray = self._ray
        check_address(self.address)
        if not ray.is_initialized():
            try:
                options = (
                    {"address": self.address} if self.address else {"address": "local", "include_dashboard": False}
                )
                ray.init(**options, log_to_driver=False, logging_level="error")
            except Exception as error:  # a Ray that does not start in time raises an Exception of no other type
                raise ConnectionError(self._describe_refusal(error)) from error
            self._is_own = True
        return self

    def _describe_refusal(self, error: Exception) -> str:
        """The message for a Ray that cannot be started or connected to."""
        if self.address is None:
            return f"Ray does not start on this machine: {error} Try again when the machine is less busy, or use --engine local."
        return (
            f"Ray at {self.address} refused the connection: {error}. Check that the cluster runs Ray {self._ray.__version__} and, if "
            "it requires a token, that this process has it."
        )

    def __exit__(self, *_):
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def start(self, process) -> dict:
        """As in `Engine`. Raises a `ValueError` if the model does not load in a worker."""
        resources = self._ray.cluster_resources()
        unit, needed = ("GPU", self.gpus_per_worker) if self.gpus_per_worker else ("CPU", 1)
        available = resources.get(unit, 0)
        largest = math.floor(available / needed)
        workers = self.workers or max(1, largest)
        if workers > largest and self.address is None:
            raise ValueError(
                f"{workers} workers need {workers * needed:g} {unit}s, and this machine has {available:g}. Use "
                f"--workers {largest} or less{' and no --gpus-per-worker' if not largest else ''}."
            )
        self._process = process
        for _ in range(workers):
            self._add_worker()
        while not self._description:
            ready, _ = self._ray.wait(list(self._starting), num_returns=1, timeout=PATIENCE)
            if ready:
                self._accept_worker(ready[0])
            else:
                print(
                    f"no worker has loaded the model yet: each needs {needed:g} {unit}, and the cluster has {available:g}, perhaps in use",
                    file=sys.stderr,
                )
        return self._description

    def _add_worker(self, losses: int = 0) -> None:
        """Starts a worker, which loads the model.

        Args:
            losses: workers in whose place it comes that were lost while they loaded the model.
        """
        worker = self._ray.remote(Worker).options(num_cpus=1, num_gpus=self.gpus_per_worker)
        actor = worker.remote(self._process)
        self._actors.append(actor)
        self._starting[actor.describe.remote()] = actor, losses

    def _remove(self, actor) -> None:
        """Gives up a worker that was lost, or that cannot be reached."""
        self._actors.remove(actor)
        self._idle = deque(other for other in self._idle if other != actor)
        self._ray.kill(actor)

    def _accept_worker(self, ref) -> None:
        """Makes a worker that has loaded the model idle, or replaces it if it was lost meanwhile. Raises a `ValueError` if
        the model does not load, or differs from that of the first worker.
        """
        ray, (actor, losses) = self._ray, self._starting.pop(ref)
        try:
            description = ray.get(ref)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError) or losses == RETRIES:
                cause = getattr(error, "cause", None) or error
                raise ValueError(f"The model does not load in a worker: {cause}") from error
            self._remove(actor)
            self._add_worker(losses + 1)
            return
        self._description = self._description or description
        if names := find_changes(self._description, description):
            raise ValueError(
                f"The model is not the same in all workers: they differ in {', '.join(names)}. Copy it to all machines again."
            )
        self._idle += [actor, actor]  # a second block waits at each worker

    def _next_worker(self, busy: list):
        """The worker for the next block: one without a block, or one where it waits if no other worker is about to start."""
        free = next((actor for actor in self._idle if actor not in busy), None)
        if free is None and self._idle and not self._starting:
            return self._idle[0]
        return free

    def run(self, blocks, progress):
        """As in `Engine`. Raises a `RuntimeError` if a block fails, or its worker is lost too often."""
        ray, again, blocks = self._ray, deque(), ((block, 0) for block in blocks)
        pending: dict = {}  # the result of `process` -> block, how many of its workers were lost, worker
        while True:
            while (actor := self._next_worker([worker for *_, worker in pending.values()])) is not None:
                job = again.popleft() if again else next(blocks, None)
                if job is None:
                    break
                self._idle.remove(actor)
                pending[actor.process.remote(readable_rows(job[0]))] = *job, actor
            if not pending and not again and self._idle:
                return
            (done,), _ = ray.wait([*pending, *self._starting], num_returns=1)
            if done in self._starting:
                self._accept_worker(done)
                continue
            block, losses, actor = pending.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise RuntimeError(describe_failure(block, getattr(error, "cause", None) or error)) from error
            except ray.exceptions.RayError as error:  # the worker or its machine was lost
                is_first = actor in self._actors  # the other block only waited
                if is_first:
                    self._remove(actor)
                    if losses == RETRIES:
                        cause = f"its worker was lost {RETRIES + 1} times ({error})"
                        raise RuntimeError(describe_failure(block, cause)) from error
                    self._add_worker()
                again.append((block, losses + is_first))
                continue
            if actor in self._actors:
                self._idle.append(actor)
            progress(len(block.rows))
            yield block, results


def describe(process) -> dict:
    """`process.describe()`, and the version of the code that runs it."""
    return {**process.describe(), "lexperts": __version__}


def describe_failure(block: Block, cause) -> str:
    """The message for a block that was not processed."""
    return f"Documents {block.start:,} to {block.end - 1:,} could not be processed: {cause}"


class Worker:
    """The actor of `RayEngine`."""

    def __init__(self, process):
        self._process = process

    def describe(self) -> dict:
        """Loads the model."""
        return describe(self._process)

    def process(self, rows: list[dict]) -> list[dict]:
        """The results of rows."""
        results = self._process.process_rows(rows)
        release_memory()
        return results


def readable_rows(block: Block) -> list[dict]:
    """The columns of the rows that were read."""
    return [row.values for row in block.rows if row.values is not None]


def check_address(address: str | None) -> None:
    """Connects to the address of a cluster, because Ray waits for minutes for one that does not answer. Raises a
    `ConnectionError` if it does not answer, or does not use Ray's protocol.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT).close()
    except OSError as error:
        raise ConnectionError(
            f"The Ray cluster at {address} does not answer: {error}. Start it with `ray start --head`, or correct --address."
        ) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0" and not answers_grpc(f"{host}:{port}"):
        raise ConnectionError(
            f"Port {port} of {host} is open, but no Ray cluster answers there within {TIMEOUT} s. Correct --address: "
            "`ray start --head` prints it, and ray:// addresses usually have the port 10001."
        )


def answers_grpc(address: str) -> bool:
    """Whether a server of gRPC, as Ray's are, answers at HOST:PORT in time."""
    try:
        import grpc
    except ImportError:  # part of the Ray client
        return True
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(TIMEOUT)
        except grpc.FutureTimeoutError:
            return False
    return True
