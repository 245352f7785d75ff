"""Coverage-guided fuzzing of the reader of safetensors headers, run by hand, for as long as it is allowed to.

    pip install atheris  # into the environment of the tests
    python tests/merge_tools/fuzz_header.py -max_total_time=300

A file is either refused with a MergeError, or the safetensors library accepts it too, with the same tensors. Options are those
of libFuzzer. atheris has wheels for Python 3.11 to 3.13 on Linux.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
with atheris.instrument_imports(include=["merge_tools.tensor_files", "json"]):
    from merge_tools.errors import MergeError
    from merge_tools.tensor_files import read_header

from safetensors import deserialize

FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
FILE = FOLDER / "model.safetensors"
SEEDS = (
    {},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}},
    {
        "a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
        "b": {"dtype": "F16", "shape": [0], "data_offsets": [1, 1]},
    },
)


def with_length(header: bytes, data: bytes) -> bytes:
    """A file with this header."""
    return struct.pack("<Q", len(header)) + header + data


def examine(content: bytes):
    """Reads one file with both readers."""
    FILE.write_bytes(content)
    try:
        entries = read_header(FILE)
    except MergeError as error:
        assert str(error).strip() and str(error).isprintable()
        return
    theirs = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in deserialize(content)}
    assert theirs == {entry.name: (entry.dtype, entry.shape) for entry in entries}


def one_input(content: bytes):
    """The input unchanged, and as the header of a file whose length is right."""
    examine(content)
    header, _, data = content.partition(b"\xff")
    examine(with_length(header, data))


def main():
    """Starts libFuzzer with a few valid files."""
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS):
        text = json.dumps(seed).encode()
        (corpus / f"{number}").write_bytes(text + b"\xff" + bytes(8))
        (corpus / f"{number} with its length").write_bytes(with_length(text, bytes(8)))
    atheris.Setup([*sys.argv, str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
