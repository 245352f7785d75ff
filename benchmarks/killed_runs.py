"""Are the rows of `lexperts keyphrases extract` the same after a kill as without one?

    python benchmarks/killed_runs.py --data DIR

DIR/*/test.jsonl are data sets with id, title and text. The documents are written to one Parquet file, one in a thousand without a
text. Each run is killed by SIGKILL at ten moments, from its start to the joining of its blocks, and then repeated:

    local, process         the only process
    ray, driver            the process of the command
    ray, machine           the process of the command, Ray and the workers, together
    ray, worker            one of two workers; this run goes on, and nothing is repeated
    ray, one of two nodes  all processes of a Ray node with one of two workers; this run goes on too

Finished blocks are compared with the unbroken run's byte for byte when the run is killed, and the output at the end. The model is
tiny, with random weights.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from common import Record, make_parser
from many_documents import BAD, EXTRACT, make_source
from timing import describe
from tiny_model import read_documents, save_tiny_model

from run_tools.claims import RECORD
from run_tools.resume import ResumableOutput

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 50  # documents
FRACTIONS = (0, 0.01, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the blocks that are finished
MOMENTS = ("starting", *FRACTIONS, "joining")
LOST = ("starting", *FRACTIONS, 0.97)  # the workers have gone when blocks are joined
GOES_ON = ("ray, worker", "ray, one of two nodes")  # runs that are not repeated
LIMIT = 900  # seconds of a run
MISSED = 5  # a run that ended before it could be killed is repeated


class Run:
    """A run of the command.

    Args:
        source, output, model: paths.
        options: of the command.
    """

    def __init__(self, source: Path, output: Path, model: Path, options: list[str]):
        self.output, self.parts = output, Path(f"{output}.parts")
        command = [*EXTRACT, str(source), str(output), "--model", str(model), "--block-size", str(BLOCK), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.log = Path(f"{output}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def finished(self) -> dict[int, int]:
        """The blocks that have files."""
        try:
            return ResumableOutput(self.output, "").blocks()
        except FileNotFoundError:
            return {}

    def wait_for(self, moment: str | float, blocks: int, is_ready: Callable[[], bool]) -> bool:
        """Waits for a moment -> whether the run goes on."""

        def reached() -> bool:
            if moment == "starting":
                return is_ready()
            if moment == "joining":
                return (self.parts / "joined.jsonl").exists()
            return (self.parts / RECORD).exists() and len(self.finished()) >= moment * blocks and is_ready()

        end = time.monotonic() + LIMIT
        while not reached():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.0005 if moment == "joining" else 0.005)
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The process, and those that it started."""
        try:
            return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The workers of Ray."""
        return [process for process in self.processes() if name_of(process).startswith("ray::Worker")]

    def end(self, is_repeated: bool = False) -> None:
        """Waits for its end.

        Raises:
            RuntimeError: if it fails, unless it repeats one that was killed after it had written the whole output.
        """
        self.process.wait(LIMIT)
        log = self.log.read_text(encoding="utf-8")
        if self.process.returncode and not (is_repeated and "already exists and is complete" in log):
            raise RuntimeError(f"the run failed:\n{log[-3000:]}")


def name_of(process: psutil.Process) -> str:
    """The title of a process, empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill(processes: list[psutil.Process]) -> None:
    """Kills processes together."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def still_there(processes: list[psutil.Process], seconds: float = 30) -> int:
    """The number of processes that live on some time after their parent was killed."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + seconds
    while (count := sum(map(lives, processes))) and time.monotonic() < end:
        time.sleep(0.2)
    return count


class Trial:
    """Runs that are killed, and their comparison with an unbroken one.

    Args:
        folder: for the files.
        data: folder of data sets.
        documents: their number.
    """

    def __init__(self, folder: Path, data: Path, documents: int):
        self.folder, self.source, self.model = folder, folder / "in.parquet", folder / "model"
        make_source(data, documents, self.source)
        save_tiny_model(self.model, read_documents(data))
        Run(self.source, folder / "whole.jsonl", self.model, []).end()
        self.lines = (folder / "whole.jsonl").read_bytes().splitlines(keepends=True)
        self.ids = [json.loads(line)["id"] for line in self.lines]
        self.blocks = -(-documents // BLOCK)

    def run(self, kind: str, moment: str | float) -> dict:
        """Kills one run -> what became of it."""
        for attempt in range(MISSED):
            output = self.folder / f"{kind.replace(' ', '_')}-{moment}-{attempt}.jsonl"
            if (row := self.kill_once(kind, moment, output)) is not None:
                print(f"{kind} at {moment}: {describe(row)}", flush=True)
                return row
        raise RuntimeError(f"{kind} at {moment} ended {MISSED} times before it could be killed")

    def kill_once(self, name: str, moment: str | float, output: Path) -> dict | None:
        """One attempt; `None` if the run ended too early."""
        is_repeated, options = name not in GOES_ON, []
        with Nodes(name) as nodes:
            if name.startswith("ray"):
                options = ["--engine", "ray", "--workers", "2", *nodes.options]
            run = Run(self.source, output, self.model, options)
            ready = {"ray, worker": lambda: len(run.workers()) == 2, "ray, one of two nodes": nodes.has_worker}
            if moment == "starting" and is_repeated:
                time.sleep(2)
            if not run.wait_for(moment, self.blocks, ready.get(name, lambda: True)):
                run.end()
                return None
            own, others = run.processes()[:1], run.processes()[1:]
            victims = {"ray, machine": own + others, "ray, worker": run.workers()[:1]}.get(name, own)
            if name == "ray, one of two nodes":
                nodes.kill()
            else:
                kill(victims)
            if is_repeated:
                run.process.wait()
            finished = run.finished()
            kept = self.compare_blocks(run, finished)
            left = still_there(others) if is_repeated else 0
            if is_repeated:
                Run(self.source, output, self.model, options).end(is_repeated=True)
            else:
                run.end()
        return {
            "moment": moment,
            "blocks_finished": len(finished),
            **kept,
            "processes_left": left,
            **self.compare(output),
        }

    def compare_blocks(self, run: Run, finished: dict[int, int]) -> dict:
        """Whether finished blocks are those of the unbroken run; the files of a run that goes on may be gone."""
        same = different = 0
        for start, end in finished.items():
            try:
                content = (run.parts / f"{start:012d}-{end:012d}.jsonl").read_bytes()
            except FileNotFoundError:
                continue
            is_same = content == b"".join(self.lines[start:end])
            same, different = same + is_same, different + (not is_same)
        return {"blocks_same": same, "blocks_different": different}

    def compare(self, output: Path) -> dict:
        """Rows lost and rows written twice, and whether the bytes are the same."""
        lines = output.read_bytes().splitlines(keepends=True)
        ids = [json.loads(line)["id"] for line in lines]
        return {
            "lost": len(set(self.ids) - set(ids)),
            "twice": len(ids) - len(set(ids)),
            "same_rows": set(lines) == set(self.lines),
            "same_bytes": lines == self.lines,
            "leftover_files": sum(1 for path in output.parent.glob(f"{output.name}.*") if path.suffix != ".log"),
        }


class Nodes:
    """A Ray cluster of two nodes on this machine, for "ray, one of two nodes"; otherwise nothing."""

    def __init__(self, name: str):
        self.is_needed, self.options = name == "ray, one of two nodes", []

    def __enter__(self):
        if self.is_needed:
            from ray.cluster_utils import Cluster

            os.environ["PYTHONPATH"] = str(ROOT)
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            self.node = self.cluster.add_node(num_cpus=1)
            self.cluster.wait_for_nodes()
            self.options = ["--address", self.cluster.address]
        return self

    def __exit__(self, *_):
        if self.is_needed:
            self.cluster.shutdown()

    def has_worker(self) -> bool:
        """Whether the second node runs a worker."""
        raylet = psutil.Process(self.node.all_processes["raylet"][0].process.pid)
        return any(name_of(child).startswith("ray::Worker") for child in raylet.children(recursive=True))

    def kill(self) -> None:
        """Kills all processes of the second node."""
        pids = [info.process.pid for infos in self.node.all_processes.values() for info in infos]
        raylet = psutil.Process(self.node.all_processes["raylet"][0].process.pid)
        kill([*raylet.children(recursive=True), *map(psutil.Process, pids)])


def main() -> None:
    """Kills runs at each moment, for each kind."""
    kinds = ["local, process", "ray, driver", "ray, machine", *GOES_ON]
    parser = make_parser(__doc__, "killed_runs", "data sets")
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--moments", type=int, default=10, help="number of moments, from the first")
    args = parser.parse_args()
    bad = -(-args.documents // BAD)
    record = Record(args.name, overwrite=args.overwrite, documents=args.documents, block_size=BLOCK, bad_rows=bad)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), args.data, args.documents)
        moments = {kind: (LOST if kind in GOES_ON else MOMENTS)[: args.moments] for kind in args.kinds}
        record.complete(
            trial.run, [{"kind": kind, "moment": moment} for kind in args.kinds for moment in moments[kind]]
        )


if __name__ == "__main__":
    main()
