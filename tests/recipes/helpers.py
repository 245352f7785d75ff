"""Commands run in this process, and files of rows."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace


def run_main(main, *argv) -> SimpleNamespace:
    """Calls a command's main() -> its exit status and what it printed, as `subprocess.run` gives them."""
    code = 0
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        try:
            main([str(argument) for argument in argv])
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(returncode=code, stdout=printed.getvalue(), stderr=errors.getvalue())


def fails(main, *argv) -> str:
    """The one error line of a command that ends with exit status 2."""
    done = run_main(main, *argv)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
