"""How commands end: one line, an exit status, and what an interruption or a reader that left does."""

import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from run_tools.errors import UserError, print_error, user_errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "error, status, printed",
    [
        (UserError("a\x1b[31m\nb"), 2, "error: a\\x1b[31m\nerror: b\n"),
        (ValueError("two\n  lines"), 2, "error: two lines\n"),
        (OSError(28, "No space left on device", "x"), 2, "error: No space left on device: x.\n"),
        (RuntimeError("out of memory"), 2, "error: out of memory\n"),
        (RecursionError("deep"), 2, "error: RecursionError: deep\n"),
        (KeyError("x"), 2, "error: KeyError: 'x'\n"),
        (MemoryError(), 2, "error: MemoryError\n"),
        (KeyboardInterrupt(), 130, "interrupted: Repeat the command.\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_status(error, status, printed, capsys):
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == status and capsys.readouterr().err.endswith(printed)


def test_an_error_below_a_progress_bar_has_its_own_line(capsys):
    bar = tqdm(total=2, file=sys.stderr, mininterval=0)
    with pytest.raises(SystemExit), user_errors():
        bar.update()
        raise UserError("batch_size=0")
    bar.close()
    assert "\nerror: batch_size=0\n" in capsys.readouterr().err
    print_error("no bar")
    assert capsys.readouterr().err == "error: no bar\n"


def test_a_reader_that_left_is_no_error():
    code = "from run_tools.errors import user_errors\nwith user_errors():\n    while True: print('x' * 999)"
    writer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.wait(60) == 1 and writer.stderr.read() == ""
