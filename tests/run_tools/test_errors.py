"""How errors are shown: in one line, with what is invisible escaped."""

import sys

import pytest
from tqdm import tqdm

from run_tools.errors import UserError, one_line, print_error


@pytest.mark.parametrize(
    "error, printed",
    [
        (UserError("a\x1b[31m"), "a\\x1b[31m"),
        (ValueError("two\n  lines"), "two lines"),
        (OSError(2, "No such file or directory", "x"), "No such file or directory: x."),
        (KeyError("x"), "KeyError: 'x'"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_error_is_one_line(error, printed):
    assert one_line(error) == printed


def test_an_error_below_a_progress_bar_has_its_own_line(capsys):
    bar = tqdm(total=2, file=sys.stderr, mininterval=0)
    bar.update()
    print_error("batch_size=0")
    bar.close()
    assert "\nerror: batch_size=0\n" in capsys.readouterr().err
    print_error("no bar")
    assert capsys.readouterr().err == "error: no bar\n"
