"""What our reader of headers accepts, the safetensors library accepts, with the same tensors: seeded, damaged files."""

import json
import random
import struct

import pytest
from safetensors import SafetensorError, deserialize

from merge_tools import MergeError
from merge_tools.tensor_files import read_header

from .test_fuzz import damaged

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1}
SIZES = (-1, 0, 1, 2**31, 2**63, 2**64, 2**65, 1.0, 1e3, float("nan"))
ODD = (*SIZES, None, "", "F32", True, [], [0], [0, 0], {"x": 1}, "\ud800")


def valid_header(chance):
    """A header of up to four tensors, and the number of their bytes."""
    header, offset = {}, 0
    for number in range(chance.randrange(5)):
        dtype = chance.choice(list(DTYPES))
        shape = [chance.randrange(4) for _ in range(chance.randrange(4))]
        count = DTYPES[dtype]
        for dim in shape:
            count *= dim
        header[f"tensor {number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
    if chance.random() < 0.3:
        header["__metadata__"] = {"format": "pt"}
    return header, offset


def mutated(header, chance):
    """The header with an odd value somewhere."""
    if header and chance.random() < 0.8:
        entry = header[chance.choice(list(header))]
        key = chance.choice([*entry, "extra"])
        entry[key] = chance.choice(ODD)
        if isinstance(entry.get("shape"), list) and chance.random() < 0.4:
            entry["shape"] = [*entry["shape"], chance.choice(ODD)]
    else:
        header[chance.choice(["__metadata__", "x", "\ud800"])] = chance.choice(ODD)
    return header


def spelled(header, chance):
    """The header as bytes, in one of several spellings of JSON."""
    text = json.dumps(header, ensure_ascii=chance.random() < 0.7)
    text = chance.choice(["{}", " {}", "{}  ", "\n{}", "{}\n", "\ufeff{}", "{}x"]).replace("{}", text)
    if chance.random() < 0.1:
        text = text.replace(
            '{"tensor 0"', '{"tensor 0": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "tensor 0"'
        )
    return text.encode(chance.choice(["utf-8"] * 6 + ["utf-16", "utf-8-sig"]), errors="surrogatepass")


def case(number):
    """The bytes of a file: valid, with odd values, in an odd spelling, or damaged."""
    chance = random.Random(number)
    header, count = valid_header(chance)
    kind = number % 4
    if kind == 1:
        header = mutated(header, chance)
    text = spelled(header, chance) if kind == 2 else json.dumps(header).encode()
    text = damaged(text, chance) if kind == 3 else text
    return struct.pack("<Q", len(text)) + text + bytes(count)


def read_both(content, file):
    """(name -> (dtype, shape) or None if refused) of our reader, and of the library."""
    file.write_bytes(content)
    try:
        ours = {entry.name: (entry.dtype, list(entry.shape), entry.nbytes) for entry in read_header(file)}
    except MergeError:
        ours = None
    try:
        theirs = {name: (info["dtype"], info["shape"], len(info["data"])) for name, info in deserialize(content)}
    except SafetensorError:
        theirs = None
    return ours, theirs


@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_what_ours_accepts_safetensors_accepts(start, tmp_path):
    accepted = 0
    for number in range(start, start + 250):
        ours, theirs = read_both(case(number), tmp_path / "model.safetensors")
        if ours is not None:
            accepted += 1
            assert ours == theirs, (number, case(number))
    assert 60 < accepted < 190  # valid files are accepted, and many others are not


OVERFLOW = {"x": {"dtype": "U8", "shape": [2**63, 2**63, 0], "data_offsets": [0, 0]}}
FOUND = {
    "twice": b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "space before": b' {"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "overflow": json.dumps(OVERFLOW).encode(),
    "UTF-16": '{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16"),
    "surrogate": b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "metadata of numbers": b'{"__metadata__":{"a":1},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "metadata of text": b'{"__metadata__":"a","x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "NaN": b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"y":NaN}}',
}


@pytest.mark.parametrize("name", FOUND)
def test_headers_that_only_our_reader_accepted(name, tmp_path):
    text = FOUND[name]
    ours, theirs = read_both(struct.pack("<Q", len(text)) + text, tmp_path / "model.safetensors")
    assert ours is None or ours == theirs
