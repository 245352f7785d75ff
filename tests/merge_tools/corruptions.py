"""Ways to corrupt an expert, the error for each, and a check that errors are raised before anything is written."""

import hashlib
import importlib
import json
import re
import shutil
import struct
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_tools import MergeError, check, compose
from merge_tools.families import FAMILIES

from .conftest import edit_json, save_expert

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
GATE = "model.layers.0.mlp.gate_proj.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def config(**changes):
    """-> a breaker that changes config.json; None removes a key."""
    return lambda folder: edit_json(folder / "config.json", **changes)


def rope(**changes):
    def change(folder):
        known = json.loads((folder / "config.json").read_text())["rope_parameters"]
        edit_json(folder / "config.json", rope_parameters={**known, **changes})

    return change


def made(**options):
    """-> a breaker that replaces the expert."""

    def make(folder):
        shutil.rmtree(folder)
        save_expert(folder, 7, **options)

    return make


def tensors(change):
    """-> a breaker that changes the dict of tensors, in place."""

    def rewrite(folder):
        state = load_file(folder / MODEL)
        change(state)
        save_file(state, folder / MODEL, metadata={"format": "pt"})

    return rewrite


def value(name, index, number):
    """-> a breaker that sets one element of a tensor."""

    def put(state):
        state[name].view(-1)[index] = number

    return tensors(put)


def tokenizer(change):
    def rewrite(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return rewrite


def swap_ids(content):
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def shard(folder):
    """Two shards and an index instead of one file."""
    state = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    names = sorted(state)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({name: state[name] for name in held}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, held in halves.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def sharded(change):
    def rewrite(folder):
        shard(folder)
        change(folder)

    return rewrite


def weight_map(change):
    def rewrite(folder):
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return sharded(rewrite)


def truncate(name, count):
    """-> a breaker that removes `count` bytes from the end of a file."""

    def shorten(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) - count])

    return shorten


def bytes_of(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def header(change):
    """-> rewrites the JSON header of the weights."""

    def rewrite(folder):
        raw = (folder / MODEL).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        known = json.loads(raw[8 : 8 + length])
        change(known)
        text = json.dumps(known).encode()
        (folder / MODEL).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return rewrite


def overlap(known):
    known["model.norm.weight"]["data_offsets"] = known["model.layers.0.input_layernorm.weight"]["data_offsets"]


def only_pickle(folder):
    torch.save(load_file(folder / MODEL), folder / "pytorch_model.bin")
    (folder / MODEL).unlink()


def beside_an_index(folder):
    kept = (folder / MODEL).read_bytes()
    shard(folder)
    (folder / MODEL).write_bytes(kept)


def dangling(folder):
    (folder / MODEL).unlink()
    (folder / MODEL).symlink_to("../blobs/1234")


def nested(folder):
    shutil.copytree(folder, folder / "checkpoint-500")
    for name in ("config.json", MODEL):
        (folder / name).unlink()


def add(name, content):
    return tensors(lambda state: state.__setitem__(name, content))


# name -> (how it is broken, what the message contains)
BROKEN = {
    "other vocabulary": (made(extra_tokens=("zebra",)), "vocab_size is 46 .45 in birds.*--allow vocab"),
    "longer tokenizer": (made(extra_tokens=("zebra",)), "1 token: 'zebra'.*--allow vocab"),
    "swapped ids": (tokenizer(swap_ids), "2 tokens differ, .* 'a': id 6 .* 5.*--allow tokenizer"),
    "other merges": (tokenizer(lambda t: t["model"]["merges"].reverse()), "different merges.*--allow tokenizer"),
    "other pre-tokenizer": (tokenizer(lambda t: t.__setitem__("pre_tokenizer", None)), "pre_tokenizer.*--allow"),
    "other unknown token": (tokenizer(lambda t: t["model"].__setitem__("byte_fallback", True)), "model.byte_fallback"),
    "garbage tokenizer": (bytes_of("tokenizer.json", b"{]"), "tokenizer.json is not a readable tokenizer"),
    "tokenizer without ids": (
        bytes_of("tokenizer.json", b'{"model": {"vocab": {"a": "b"}}}'),
        "tokenizer.json is not a readable tokenizer",
    ),
    "rope base": (rope(rope_theta=500000.0), "rope_theta is 500000.0 .10000.0 in birds.*--allow rope"),
    "rope base in the old spelling": (config(rope_parameters=None, rope_theta=1e6), "rope_theta is 1000000.0 .10000.0"),
    "rope type": (rope(rope_type="linear", factor=4.0), "factor is 4.0 .not set in birds.*rope_type is linear"),
    "hidden size": (made(hidden_size=48), "hidden_size is 48 .32 in birds"),
    "intermediate size": (made(intermediate_size=96), "intermediate_size is 96 .64 in birds"),
    "layers": (made(num_hidden_layers=3), "num_hidden_layers is 3 .2 in birds"),
    "layers of another configuration": (config(num_hidden_layers=4), "num_hidden_layers is 4 .* of 2 layers"),
    "heads": (made(num_attention_heads=8), "num_attention_heads is 8 .4 in birds"),
    "key heads": (made(num_key_value_heads=4), "num_key_value_heads is 4 .2 in birds"),
    "attention biases": (made(attention_bias=True), "attention_bias is True .False in birds"),
    "MLP biases": (made(mlp_bias=True), "mlp_bias is True .False in birds"),
    "unknown biases": (
        add("model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
        "'model.layers.0.self_attn.q_proj.bias' is a bias",
    ),
    "unknown tensor": (add("model.vision.weight", torch.ones(3)), "'model.vision.weight' is not a tensor of a llama"),
    "activation": (config(hidden_act="gelu"), "hidden_act is gelu .silu in birds"),
    "norms": (config(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05 .1e-06 in birds"),
    "tied": (made(tied=True), "tie_word_embeddings is True .False in birds"),
    "model type": (config(model_type="gpt2"), f"model_type is 'gpt2'; .* {', '.join(FAMILIES)}"),
    "no size": (config(hidden_size=None), "config.json: hidden_size is missing"),
    "NaN": (value(GATE, 0, float("nan")), f"'{GATE}' holds NaN"),
    "infinity": (value(GATE, -1, float("-inf")), f"'{GATE}' holds NaN or infinity"),
    "missing tensor": (tensors(lambda state: state.pop(GATE)), f"'{GATE}' is missing"),
    "other shape": (
        tensors(lambda state: state.update({GATE: state[GATE][:50].clone()})),
        rf"'{GATE}' has shape \[50, 32\], .* \[64, 32\]",
    ),
    "integers": (tensors(lambda state: state.update({GATE: state[GATE].to(torch.int8)})), "dtype I8"),
    "eight bits": (
        tensors(lambda state: state.update({GATE: state[GATE].to(torch.float8_e4m3fn)})),
        f"'{GATE}' has dtype F8_E4M3",
    ),
    "missing shard": (sharded(lambda f: (f / SHARDS[1]).unlink()), f"missing {SHARDS[1]} of the 2 shards"),
    "truncated shard": (sharded(truncate(SHARDS[0], 100)), f"{SHARDS[0]} is truncated"),
    "truncated file": (truncate(MODEL, 100), f"{MODEL} is truncated"),
    "longer file": (lambda f: (f / MODEL).open("ab").write(b"123"), f"{MODEL} has 3 bytes more"),
    "garbage header": (bytes_of(MODEL, struct.pack("<Q", 5) + b"{abc}" + bytes(100)), "invalid header"),
    "empty header": (bytes_of(MODEL, struct.pack("<Q", 2) + b"[]"), "invalid header"),
    "deep header": (bytes_of(MODEL, struct.pack("<Q", 90000) + b"[" * 90000), "invalid header"),
    "empty file": (bytes_of(MODEL, b""), f"{MODEL} has 0 bytes"),
    "header beyond the file": (bytes_of(MODEL, struct.pack("<Q", 1 << 40) + bytes(100)), "header of 1,100 GB"),
    "Git LFS pointer": (bytes_of(MODEL, b"version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    "overlapping tensors": (header(overlap), "does not start where the previous one ends"),
    "negative shape": (header(lambda h: h[GATE].update(shape=[-64, -32])), "invalid header"),
    "shape of strings": (header(lambda h: h[GATE].update(shape=["64", 32])), "invalid header"),
    "three offsets": (header(lambda h: h[GATE].update(data_offsets=[0, 1, 2])), "invalid header"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "garbage configuration": (bytes_of("config.json", b"\x80{"), "config.json cannot be read"),
    "list as configuration": (bytes_of("config.json", b"[1]"), "config.json must be a JSON object, but is a list"),
    "checkpoints below": (nested, "no config.json, .*checkpoint-500"),
    "only pickle": (only_pickle, "It has pytorch_model.bin. Pickled weights are not opened"),
    "no weights": (lambda f: (f / MODEL).unlink(), "It has no weights"),
    "file and index": (beside_an_index, "both model.safetensors and model.safetensors.index.json"),
    "broken link": (dangling, "model.safetensors is a broken symbolic link"),
    "index of another order": (weight_map(lambda m: m.update({GATE: SHARDS[1]})), f"'{GATE}', which is in {SHARDS[1]}"),
    "index that lacks a tensor": (weight_map(lambda m: m.pop(GATE)), f"'{GATE}', which is not in the index"),
    "index with another tensor": (weight_map(lambda m: m.update(other=SHARDS[0])), f"'other' in {SHARDS[0]}"),
    "index of numbers": (weight_map(lambda m: m.update(other=3)), "has no weight_map"),
    "garbage index": (sharded(bytes_of(INDEX, b"{")), f"{INDEX} cannot be read"),
}


def copied(folders, target):
    """Copies of experts, to corrupt."""
    for folder in folders:
        shutil.copytree(folder, target / folder.name)
    return [target / folder.name for folder in folders]


def snapshot(folder):
    """Every path below a folder with its modification time and hash."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def errors_of(report):
    return [f"{f.subject}: {f.message}" + (f" --allow {f.allow}" if f.allow else "") for f in report.errors]


@contextmanager
def nothing_written():
    """Fails if `compose` starts to write."""

    def staging_folder(*_):
        raise AssertionError("the error was raised too late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("merge_tools.shard_writer"), "staging_folder", staging_folder)
        yield


def refused(root, recipe, pattern, out=None, **options):
    """`check` reports the error, `compose` raises it before writing, nothing below `root` changes. Returns the errors."""
    out = out or root / "out"
    before = snapshot(root)
    errors = errors_of(check(recipe, out, **options))
    assert any(re.search(pattern, line) for line in errors), errors
    assert all(line.isprintable() and len(line) < 1000 for line in errors), errors
    with nothing_written(), pytest.raises(MergeError) as refusal:
        compose(recipe, out, **options)
    assert re.search(pattern, str(refusal.value)), str(refusal.value)
    assert snapshot(root) == before
    return errors
