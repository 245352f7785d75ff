"""Batches of rows by workers of Ray: this process reads, and appends results in order, so that a run that was killed resumes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .run_over import process_each

RESTARTS = 3  # of a worker that was lost


class Worker:
    """An actor with a model of its own."""

    def __init__(self, open_process: Callable, check: Callable):
        self.process, self.check = open_process(), check

    def results(self, rows: list) -> list[dict]:
        """The results of rows."""
        return process_each(self.process, rows, self.check)


def process_by_ray(open_process: Callable, check: Callable, batches: Iterable[tuple], workers: int) -> Iterator[tuple]:
    """The batches in order, each with the results of its rows. That of a lost worker is processed again.

    The cluster is that of RAY_ADDRESS; by default Ray is started on this machine. Workers share its GPUs, if there are some.

    Raises:
        ImportError: without Ray.
        RuntimeError: if the model does not load in a worker, or a worker is lost too often.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--workers needs Ray. Install it with: pip install 'lexperts[ray]'") from error

    def first() -> tuple:
        start, rows, result = pending.popleft()
        try:
            return start, rows, ray.get(result)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise RuntimeError(
                f"Rows {start:,} to {start + len(rows) - 1:,} could not be processed: {cause}"
            ) from error

    pending: deque[tuple] = deque()
    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=False, logging_level="error")
    try:
        gpus = min(1, ray.cluster_resources().get("GPU", 0) / workers)
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": RESTARTS, "max_task_retries": RESTARTS}
        actors = [ray.remote(Worker).options(**options).remote(open_process, check) for _ in range(workers)]
        for number, (start, rows) in enumerate(batches):
            if len(pending) == 2 * workers:
                yield first()
            pending.append((start, rows, actors[number % workers].results.remote(rows)))
        while pending:
            yield first()
    finally:
        if is_own:
            ray.shutdown()
