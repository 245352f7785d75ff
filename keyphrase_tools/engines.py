"""Where blocks of documents are processed: in this process, or by workers of Ray."""

import math
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .corpus import Block

RETRIES = 3  # of a block whose worker was lost
TIMEOUT = 10  # seconds for the address of a cluster to answer


class Engine:
    """Processes blocks. It is a context manager; `start` comes before `run`."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, process) -> dict:
        """Loads the model where it will run, and returns `process.describe()`."""
        raise NotImplementedError

    def run(self, blocks: Iterable[Block], progress: Callable[[float], None]) -> Iterator[tuple[Block, list[dict]]]:
        """Yields each block, not necessarily in order, with the results of its readable rows.

        Args:
            progress: is called with the number of documents that were read, which may be a fraction.
        """
        raise NotImplementedError


class LocalEngine(Engine):
    """One block after the other in this process."""

    def start(self, process) -> dict:
        """As in `Engine`."""
        self._process = process
        return process.describe()

    def run(self, blocks, progress):
        """As in `Engine`."""
        for block in blocks:
            yield block, self._process.process_rows(readable_rows(block), progress)


class RayEngine(Engine):
    """Workers of Ray, one model each. The block of a lost worker is processed again by a new one.

    Documents are read, and results are written, by the process that runs the engine, so workers need neither the source nor the
    output. They need lexperts and the model.

    Args:
        address: of a cluster, such as "auto", "10.0.0.1:6379" or "ray://10.0.0.1:10001"; by default Ray is started on this
            machine and stopped at the end.
        workers: by default as many as the cluster has GPUs, or cores for `gpus_per_worker=0`, enough for.
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
            raise ImportError("The engine ray needs Ray. Install it with: pip install lexperts[ray]") from error
        self._ray, self._actors, self._is_own = ray, [], False

    def __enter__(self):
        ray = self._ray
        check_address(self.address)
        if not ray.is_initialized():
            try:
                options = (
                    {"address": self.address} if self.address else {"address": "local", "include_dashboard": False}
                )
                ray.init(**options, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConnectionError(
                    f"Ray at {self.address or 'this machine'} refused the connection: {error}. Check that the cluster runs Ray "
                    f"{ray.__version__} and, if it requires a token, that this process has it."
                ) from error
            self._is_own = True
        return self

    def __exit__(self, *_):
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def start(self, process) -> dict:
        """As in `Engine`.

        Raises:
            ValueError: if the model does not load in a worker.
        """
        ray = self._ray
        resources = ray.cluster_resources()
        unit, needed = ("GPU", self.gpus_per_worker) if self.gpus_per_worker else ("CPU", 1)
        largest = math.floor(resources.get(unit, 0) / needed)
        workers = self.workers or max(1, largest)
        if workers > largest and self.address is None:
            raise ValueError(
                f"{workers} workers need {workers * needed:g} {unit}s, and this machine has {resources.get(unit, 0):g}. Use "
                f"--workers {largest} or less{' and no --gpus-per-worker' if not largest else ''}."
            )
        worker = ray.remote(Worker).options(
            num_cpus=1, num_gpus=self.gpus_per_worker, max_restarts=-1, max_task_retries=RETRIES
        )
        self._actors = [worker.remote(process) for _ in range(workers)]
        try:
            ready, _ = ray.wait([actor.describe.remote() for actor in self._actors], num_returns=1)
            return ray.get(ready[0])
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ValueError(f"The model does not load in a worker: {cause}") from error

    def run(self, blocks, progress):
        """As in `Engine`.

        Raises:
            RuntimeError: if a block fails, or its worker is lost too often.
        """
        ray, blocks = self._ray, iter(blocks)
        idle, pending = deque(self._actors * 2), {}  # a second block waits at each worker
        while True:
            while idle and (block := next(blocks, None)) is not None:
                actor = idle.popleft()
                pending[actor.process.remote(readable_rows(block))] = block, actor
            if not pending:
                return
            (done,), _ = ray.wait(list(pending), num_returns=1)
            block, actor = pending.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or f"its worker was lost {RETRIES + 1} times ({error})"
                raise RuntimeError(
                    f"Documents {block.start:,} to {block.end - 1:,} could not be processed: {cause}"
                ) from error
            idle.append(actor)
            progress(len(block.rows))
            yield block, results


class Worker:
    """The actor of `RayEngine`."""

    def __init__(self, process):
        self._process = process

    def describe(self) -> dict:
        """Loads the model."""
        return self._process.describe()

    def process(self, rows: list[dict]) -> list[dict]:
        """The results of rows."""
        return self._process.process_rows(rows)


def readable_rows(block: Block) -> list[dict]:
    """The columns of the rows that were read."""
    return [row.values for row in block.rows if row.values is not None]


def check_address(address: str | None) -> None:
    """Connects to the address of a cluster, because Ray waits long for one that does not answer.

    Raises:
        ConnectionError: if it does not answer.
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
