"""Ways in which an expert can be broken, what is said of each, and how a refusal is told from an accident."""

import hashlib
import json
import re
import shutil
import struct
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

import merge_tools.composing
from merge_tools import MergeError, check, compose

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
    """-> a breaker that puts another expert in its place."""

    def make(folder):
        shutil.rmtree(folder)
        save_expert(folder, 7, **options)

    return make


def tensors(change):
    """-> a breaker that changes the dict of tensors, in place."""

    def rewrite(folder):
        found = load_file(folder / MODEL)
        change(found)
        save_file(found, folder / MODEL, metadata={"format": "pt"})

    return rewrite


def value(name, place, number):
    """-> a breaker that puts a number at one place of a tensor."""

    def put(found):
        found[name].view(-1)[place] = number

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
    found = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    names = sorted(found)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({name: found[name] for name in held}, folder / file, metadata={"format": "pt"})
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


def cut(name, count):
    """-> takes `count` bytes off the end of a file."""

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
    return tensors(lambda found: found.__setitem__(name, content))


# name -> (how it is broken, what is said of it)
BROKEN = {
    "other vocabulary": (made(extra_tokens=("zebra",)), "vocab_size is 46, and 45 in birds.*--allow vocab"),
    "longer tokenizer": (made(extra_tokens=("zebra",)), "1 token at the end of one only: 'zebra'.*--allow vocab"),
    "swapped ids": (tokenizer(swap_ids), "2 tokens differ, the first 'a': id 6 here, 5 there: the same ids mean"),
    "other merges": (tokenizer(lambda t: t["model"]["merges"].reverse()), "by other merges: the same text becomes"),
    "other pre-tokenizer": (
        tokenizer(lambda t: t.__setitem__("pre_tokenizer", None)),
        "another pre_tokenizer: the same",
    ),
    "other unknown token": (tokenizer(lambda t: t["model"].__setitem__("byte_fallback", True)), "model.byte_fallback"),
    "garbage tokenizer": (bytes_of("tokenizer.json", b"{]"), "tokenizer.json is no tokenizer that can be read"),
    "tokenizer without ids": (
        bytes_of("tokenizer.json", b'{"model": {"vocab": {"a": "b"}}}'),
        "no tokenizer that can be",
    ),
    "rope base": (rope(rope_theta=500000.0), "rope_theta is 500000.0, and 10000.0 in birds.*--allow rope"),
    "rope base in the old spelling": (
        config(rope_parameters=None, rope_theta=1e6),
        "rope_theta is 1000000.0, and 10000.0",
    ),
    "rope type": (rope(rope_type="linear", factor=4.0), "factor is 4.0, and not set in birds, rope_type is linear"),
    "rope without sense": (config(rope_parameters="llama3"), "rope_parameters is 'llama3', no rotary settings"),
    "hidden size": (made(hidden_size=48), "hidden_size is 48, and 32 in birds: its tensors have other shapes"),
    "intermediate size": (
        made(intermediate_size=96),
        "intermediate_size is 96, and 64 in birds: its MLPs have another",
    ),
    "layers": (made(num_hidden_layers=3), "num_hidden_layers is 3, and 2 in birds"),
    "layers of another configuration": (
        config(num_hidden_layers=4),
        "says num_hidden_layers 4, and .* the tensors of 2",
    ),
    "heads": (made(num_attention_heads=8), "num_attention_heads is 8, and 4 in birds: its attention is divided"),
    "key heads": (made(num_key_value_heads=4), "num_key_value_heads is 4, and 2 in birds"),
    "attention biases": (
        made(attention_bias=True),
        "attention_bias is True, and False in birds: its biases would be lost",
    ),
    "MLP biases": (made(mlp_bias=True), "mlp_bias is True, and False in birds: its biases would be lost"),
    "unknown biases": (
        add("model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
        "holds 'model.layers.0.self_attn.q_proj.bias', a bias that its configuration does not know and the merge would drop",
    ),
    "unknown tensor": (
        add("model.vision.weight", torch.ones(3)),
        "holds 'model.vision.weight', which is no tensor of a",
    ),
    "activation": (config(hidden_act="gelu"), "hidden_act is gelu, and silu in birds: its MLPs apply another function"),
    "norms": (config(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05, and 1e-06 in birds: its norms compute something else"),
    "tied": (made(tied=True), "tie_word_embeddings is True, and False in birds"),
    "model type": (config(model_type="qwen2"), "model_type is 'qwen2', and experts are Llamas"),
    "no model type": (config(model_type=None), "model_type is None, and experts are Llamas"),
    "no size": (config(hidden_size=None), "hidden_size is missing in its config.json"),
    "size as a text": (config(hidden_size="32"), "hidden_size is '32', no size in its config.json"),
    "size of nothing": (config(num_attention_heads=0), "num_attention_heads is 0, no size in its config.json"),
    "NaN": (value(GATE, 0, float("nan")), f"'{GATE}' holds NaN or infinite values: the expert is broken"),
    "infinity": (value(GATE, -1, float("-inf")), f"'{GATE}' holds NaN or infinite values"),
    "missing tensor": (tensors(lambda found: found.pop(GATE)), f"lacks the tensor '{GATE}'"),
    "other shape": (
        tensors(lambda found: found.update({GATE: found[GATE][:50].clone()})),
        rf"'{GATE}' has shape \[50, 32\] where its configuration says \[64, 32\]",
    ),
    "integers": (
        tensors(lambda found: found.update({GATE: found[GATE].to(torch.int8)})),
        "has dtype I8: quantised weights",
    ),
    "eight bits": (
        tensors(lambda found: found.update({GATE: found[GATE].to(torch.float8_e4m3fn)})),
        f"tensor '{GATE}' has the dtype F8_E4M3, which cannot be merged",
    ),
    "missing shard": (sharded(lambda f: (f / SHARDS[1]).unlink()), f"lacks {SHARDS[1]} of the 2 shards that its index"),
    "truncated shard": (sharded(cut(SHARDS[0], 100)), f"{SHARDS[0]} is cut short"),
    "truncated file": (cut(MODEL, 100), f"{MODEL} is cut short: it holds .* of .*, and '.*' is missing bytes"),
    "longer file": (lambda f: (f / MODEL).open("ab").write(b"123"), f"{MODEL} holds 3 bytes more than its header"),
    "garbage header": (
        bytes_of(MODEL, struct.pack("<Q", 5) + b"{abc}" + bytes(100)),
        "has a header that cannot be read",
    ),
    "header of nothing": (bytes_of(MODEL, struct.pack("<Q", 2) + b"[]"), "has a header that cannot be read"),
    "deep header": (bytes_of(MODEL, struct.pack("<Q", 90000) + b"[" * 90000), "has a header that cannot be read"),
    "empty file": (bytes_of(MODEL, b""), f"{MODEL} holds 0 bytes, fewer than a safetensors header"),
    "header beyond the file": (bytes_of(MODEL, struct.pack("<Q", 1 << 40) + bytes(100)), "its header should take"),
    "Git LFS pointer": (bytes_of(MODEL, b"version https://git-lfs.github.com/spec/v1\noid"), "Run: git lfs pull"),
    "overlapping tensors": (header(overlap), "does not begin where the one before it ends"),
    "negative shape": (header(lambda h: h[GATE].update(shape=[-64, -32])), "has a header that cannot be read"),
    "shape of texts": (header(lambda h: h[GATE].update(shape=["64", 32])), "has a header that cannot be read"),
    "offsets of three": (header(lambda h: h[GATE].update(data_offsets=[0, 1, 2])), "has a header that cannot be read"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "holds no config.json: it is no checkpoint"),
    "garbage configuration": (bytes_of("config.json", b"\x80{"), "config.json cannot be read"),
    "list as configuration": (
        bytes_of("config.json", b"[1]"),
        "config.json holds a list, not the keys of a configuration",
    ),
    "checkpoints below": (nested, "but checkpoints below it. Give one: .*checkpoint-500"),
    "only pickle": (only_pickle, "It holds pytorch_model.bin. Pickled weights are never opened here"),
    "no weights": (lambda f: (f / MODEL).unlink(), "It holds no weights. Save it again"),
    "file beside an index": (beside_an_index, "holds model.safetensors beside an index of shards"),
    "link to nothing": (dangling, "model.safetensors is a link to a file that is not there"),
    "index of another order": (
        weight_map(lambda m: m.update({GATE: SHARDS[1]})),
        f"holds '{GATE}', which the index puts into",
    ),
    "index that knows less": (weight_map(lambda m: m.pop(GATE)), f"holds '{GATE}', which the index does not know"),
    "index that knows more": (
        weight_map(lambda m: m.update(other=SHARDS[0])),
        "puts 'other' into .*, which does not hold",
    ),
    "index of numbers": (weight_map(lambda m: m.update(other=3)), "holds no weight_map from tensors to files"),
    "garbage index": (sharded(bytes_of(INDEX, b"{")), f"{INDEX} cannot be read"),
}


def copied(folders, place):
    """Experts of a test's own, to break."""
    for folder in folders:
        shutil.copytree(folder, place / folder.name)
    return [place / folder.name for folder in folders]


def snapshot(folder):
    """Every path below a folder: its bytes, and when it was last written to."""
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
    """Fails where a compose comes to the point of writing."""

    def growing_folder(*_):
        raise AssertionError("the refusal came too late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_tools.composing, "growing_folder", growing_folder)
        yield


def refused(root, recipe, pattern, out=None, **options):
    """`check` finds it, `compose` raises it before it writes, nothing below `root` has changed -> all errors."""
    out = out or root / "out"
    before = snapshot(root)
    found = errors_of(check(recipe, out, **options))
    assert any(re.search(pattern, line) for line in found), found
    with nothing_written(), pytest.raises(MergeError) as refusal:
        compose(recipe, out, **options)
    assert re.search(pattern, str(refusal.value)), str(refusal.value)
    assert snapshot(root) == before
    return found
