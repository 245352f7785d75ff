"""A table of hostile folders: refused with one line per error, or merged with a warning; nothing outside OUT is touched.

A row is (what is changed in a folder, "refused" or "warned", what the message contains).
"""

import dataclasses
import itertools
import json
import os
import re
import shutil

import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from merge_tools import MergeError, check, compose, config_checks
from merge_tools.config_checks import COUNTS, IGNORED, ORDINARY, TRIED, find_opening_errors, is_plain

from .conftest import edit_json, save_expert
from .corruptions import (
    INDEX,
    MODEL,
    SHARDS,
    bytes_of,
    config,
    copied,
    rope,
    shard,
    snapshot,
    tensors,
    tokenizer,
)

NAN, INF = float("nan"), float("inf")


def rows(field, values, expected="refused", make=config, pattern=None):
    """One row for each value of a field of config.json."""
    return {
        f"{field} = {value!r:.40} {make.__name__}": (
            lambda folder, value=value: make(**{field: value})(folder),
            expected,
            pattern or field,
        )
        for value in values
    }


SIZES = [0, -1, 1.5, "32", True, [32], {"a": 1}, 10**30, NAN, INF]
CONFIGS = {
    **{
        key: row
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for key, row in rows(field, SIZES).items()
    },
    **rows("num_key_value_heads", [0, -2, "2", 3, True, 1e400]),
    **rows("head_dim", [0, -8, "8", [8]]),
    **rows("max_position_embeddings", [0, -5, "128", INF, True, [128], 10**30]),
    **rows("rms_norm_eps", ["1e-5", -1, 0, True, [1e-5], NAN, INF, {}, 2.0]),
    **rows("hidden_act", ["nope", ["silu"], 3, True, {}, ""], pattern="hidden_act|act|nope|KeyError"),
    **rows("attention_dropout", [-0.1, 1.5, "0.1", NAN, [0]]),
    **rows("initializer_range", ["0.02", -1, INF]),
    **rows("tie_word_embeddings", ["false", 1, []], pattern="tie_word_embeddings"),
    **rows("attention_bias", ["yes", 1]),
    **rows("mlp_bias", ["yes", 1]),
    **rows("use_cache", ["yes", 2]),
    **rows("bos_token_id", ["<s>", 1.5, True, [1], -7]),
    **rows("eos_token_id", ["</s>", [], [1, "a"], {}, [True]]),
    **rows("pad_token_id", ["<pad>", 0.5, -9]),
    **rows("pad_token_id", [10_000], pattern="adding_idx|pad_token_id"),
    **rows("dtype", ["nope", 3, ["float32"]]),
    **rows("torch_dtype", ["nope", 3]),
    **rows("rope_parameters", ["llama3", 3, [1]]),
    **rows("rope_scaling", ["llama3", 3, [1]]),
    **rows("rope_theta", [0, -1, True, "10000", NAN, INF, [1e4]], make=rope),
    **rows("rope_type", ["nope", 3, ["default"], "llama3", "yarn", "linear"], make=rope, pattern="rope|factor"),
    **rows("factor", [-1, 0, "4", NAN, True], make=lambda **change: rope(rope_type="linear", **change)),
    **rows("factor", [0.5], make=lambda **change: rope(rope_type="linear", **change), pattern="factor"),
    **rows("rope_theta", [0, -1, True, "1", INF]),
    **rows("model_type", ["nope", 3, None, "../llama", ["llama"], {}], pattern="model_type"),
    **rows("quantization_config", [{"quant_method": "awq"}, {"load_in_4bit": True}, "gptq"]),
    **rows("partial_rotary_factor", [0.5]),
    **rows("sliding_window", [16, 4096], "warned"),
    **rows("pretraining_tp", [2, 8], "warned"),
}  # fmt: skip


def index_of(name):
    """-> moves a shard out of the folder, and lets the index follow it."""

    def change(folder):
        shard(folder)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / SHARDS[0], target)
        content = json.loads((folder / INDEX).read_text())
        places = {tensor: name if file == SHARDS[0] else file for tensor, file in content["weight_map"].items()}
        edit_json(folder / INDEX, weight_map=places)

    return change


def absolute_index(folder):
    index_of(str(folder.parent / "stolen.safetensors"))(folder)


def tokenizer_config(**changes):
    return lambda folder: edit_json(folder / "tokenizer_config.json", **changes)


def deep_config(folder):
    (folder / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)


def large_config(folder):
    (folder / "config.json").write_text(json.dumps({"x" * 1000: "y" * 60_000_000}))


def many_keys(folder):
    edit_json(folder / "config.json", hidden_act=3, **{f"key {i}": i for i in range(60_000)})


CARD_BOMB = "---\na: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")
) + "license: [*j]\n---\n"  # fmt: skip
FOLDERS = {
    "index above the folder": (index_of("../stolen.safetensors"), "refused", "is not a file of this folder"),
    "index into a subfolder": (index_of("sub/stolen.safetensors"), "refused", "is not a file of this folder"),
    "absolute index": (absolute_index, "refused", "is not a file of this folder"),
    "index with a NUL": (
        lambda f: (shard(f), edit_json(f / INDEX, weight_map={"a": "x\0y"})), "refused", "is not a file"),
    "index of dots": (lambda f: (shard(f), edit_json(f / INDEX, weight_map={"a": ".."})), "refused", "is not a file"),
    "index of nothing": (lambda f: (shard(f), edit_json(f / INDEX, weight_map={"a": ""})), "refused", "is not a file"),
    "index with an escape": (
        lambda f: (shard(f), edit_json(f / INDEX, weight_map={"a": "\x1b[31mx"})), "refused", r"\\x1b\[31m"),
    "deep configuration": (deep_config, "refused", "config.json cannot be read"),
    "large configuration": (large_config, "refused", "larger than"),
    "many keys": (many_keys, "refused", "hidden_act"),
    "escape in a value": (config(hidden_act="\x1b[2J\x1b[31m"), "refused", r"x1b\[2J"),
    "newline in a value": (config(model_type="llama\nerror: all fine"), "refused", r"llama\\nerror"),
    "surrogate in a value": (bytes_of("config.json", b'{"model_type": "\\ud800"}'), "refused", "model_type"),
    "other bos": (tokenizer_config(bos_token="<unk>"), "warned", "bos_token"),
    "other eos": (tokenizer_config(eos_token={"content": "<unk>"}), "warned", "eos_token"),
    "other pad": (tokenizer_config(pad_token="<unk>"), "warned", "pad_token"),
    "adds bos": (tokenizer_config(add_bos_token=True), "warned", "add_bos_token"),
    "adds eos": (tokenizer_config(add_eos_token=True), "warned", "add_eos_token"),
    "chat template": (tokenizer_config(chat_template="{{ messages }}"), "warned", "chat_template"),
    "chat template file": (bytes_of("chat_template.jinja", b"{{ messages }}"), "warned", "chat_template"),
    "broken tokenizer_config": (bytes_of("tokenizer_config.json", b"{"), "refused", "tokenizer_config.json"),
    "other prefix space": (tokenizer_config(add_prefix_space=True), "warned", "add_prefix_space"),
    "other special tokens": (tokenizer_config(additional_special_tokens=["<x>"]), "warned", "additional_special_tokens"),
    "flags of an added token": (
        tokenizer(lambda t: t["added_tokens"][1].update(lstrip=True)), "warned", "added tokens differ in lstrip"),
    "generation settings": (
        bytes_of("generation_config.json", b'{"temperature": 0.1, "eos_token_id": [2, 3]}'), "warned",
        "generation_config"),
    "broken generation settings": (bytes_of("generation_config.json", b"["), "refused", "generation_config.json"),
    "two RoPE bases": (config(rope_theta=5e5), "refused", "contradict each other"),
    "two RoPE types": (rope(type="linear", factor=4.0), "refused", "contradict each other"),
    "two RoPE spellings": (config(rope_scaling={"rope_type": "linear", "factor": 4.0}), "refused", "contradict each other"),
    "a device as configuration": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("/dev/zero")), "refused", "config.json"),
    "a pipe as weights": (lambda f: ((f / MODEL).unlink(), os.mkfifo(f / MODEL)), "refused", "weights"),
    "a pipe as an index": (lambda f: ((f / MODEL).unlink(), os.mkfifo(f / INDEX)), "refused", "weights"),
    "a pipe as a tokenizer": (
        lambda f: ((f / "tokenizer.json").unlink(), os.mkfifo(f / "tokenizer.json")), "merged", ""),
    "a pipe as a card": (lambda f: os.mkfifo(f / "README.md"), "silent", ""),
    "a licence of aliases": (bytes_of("README.md", CARD_BOMB.encode()), "silent", ""),
    "an escape in a licence": (bytes_of("README.md", b'---\nlicense: "\\e[31mred"\n---\n'), "silent", ""),
    "no weights but a folder": (lambda f: ((f / MODEL).unlink(), (f / MODEL).mkdir()), "refused", "weights"),
    "a pipe as configuration": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")), "refused", "config.json"),
}  # fmt: skip


@pytest.fixture
def pair(tmp_path, experts):
    return copied(experts(2), tmp_path / "experts")


def merge(recipe, root):
    """("refused" or "warned" or "silent", messages); fails if anything but OUT changes, or an error has many lines."""
    before, out = snapshot(root), root / "out"
    report = check(recipe, out)
    messages = [f"{f.subject}: {f.message}" for f in (report.errors or report.warnings)]
    assert snapshot(root) == before
    assert all(m.isprintable() and len(m) < 1000 for m in messages), messages
    if report.ok:
        compose(recipe, out)
        after = {path: state for path, state in snapshot(root).items() if not path.startswith("out")}
        assert {**after, "": 0} == {**before, "": 0}
        return ("warned" if messages else "silent"), messages
    with pytest.raises(MergeError):
        compose(recipe, out)
    assert snapshot(root) == before
    return "refused", messages


@pytest.mark.parametrize("which", ["base", "expert"])
@pytest.mark.parametrize("name", [*CONFIGS, *FOLDERS])
def test_hostile_folders(name, which, pair, tmp_path):
    change, expected, pattern = {**CONFIGS, **FOLDERS}[name]
    change(pair[which == "expert"])
    done, messages = merge({"experts": [{"source_model": str(folder)} for folder in pair]}, tmp_path)
    assert done in (("warned", "silent") if expected == "merged" else (expected,)), messages
    assert not pattern or any(re.search(pattern, message) for message in messages), messages
    if done != "refused":
        card, record = ((tmp_path / "out" / name).read_text() for name in ("README.md", "merge_record.json"))
        assert "\x1b" not in card + record and len(card) < 20_000


@pytest.mark.parametrize("name", [b"\xff\xfe", b"caf\xe9", b"two\nlines", b"\x1b[31m"])
def test_hostile_folder_names(name, pair, tmp_path):
    """A folder whose name is not printable text is refused; with a name of its own it merges if it is UTF-8."""
    folder = os.path.join(os.fsencode(tmp_path / "experts"), name)
    os.rename(pair[1], folder)
    source = os.fsdecode(folder)
    done, messages = merge({"experts": [str(pair[0]), source]}, tmp_path)
    assert done == "refused", messages
    done, _ = merge({"experts": [str(pair[0]), {"source_model": source, "name": "ships"}]}, tmp_path)
    assert done == ("silent" if name.isascii() else "refused")


def test_a_base_without_a_tokenizer_is_warned_about(pair, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (pair[0] / file).unlink()
    assert merge({"experts": [str(folder) for folder in pair]}, tmp_path)[0] == "warned"


def tied(folder, seed, head="differs"):
    """A tied expert whose file also has an lm_head: another one, or the embeddings."""
    shutil.rmtree(folder)
    save_expert(folder, seed, tied=True)

    def add(state):
        embeddings = state["model.embed_tokens.weight"]
        state["lm_head.weight"] = embeddings + 1 if head == "differs" else embeddings.clone()

    tensors(add)(folder)


def test_a_tied_model_whose_head_differs_from_its_embeddings(pair, tmp_path):
    for seed, folder in enumerate(pair):
        tied(folder, seed, "equal")
    recipe = {"experts": [str(folder) for folder in pair]}
    assert merge(recipe, tmp_path)[0] == "silent"
    shutil.rmtree(tmp_path / "out")
    tied(pair[1], 1)
    done, messages = merge(recipe, tmp_path)
    assert done == "refused" and "differs from the embeddings" in messages[0]


@pytest.mark.parametrize("mode", ["hidden", "cheap_embed"])
def test_gates_that_cannot_tell_experts_apart_are_warned_about(mode, pair, tmp_path):
    recipe = {
        "experts": [{"source_model": str(folder), "positive_prompts": ["a bird is"]} for folder in pair],
        "gate_mode": mode,
        "base_model": str(pair[0]),
    }
    done, messages = merge(recipe, tmp_path)
    assert done == "warned" and "has the same texts as birds" in messages[0]
    recipe["experts"][1]["positive_prompts"] = ["a bird is", "a bird is"]
    result = compose(recipe, tmp_path / "parallel")
    assert any("equal or parallel" in warning for warning in result["warnings"])
    recipe["experts"][1]["positive_prompts"] = ["a ship of the line"]
    assert not any("parallel" in warning for warning in compose(recipe, tmp_path / "different")["warnings"])


def test_ordinary_configurations_are_recognised_without_transformers(experts, tmp_path):
    """What `is_plain` accepts, transformers opens; hostile values are never plain."""
    configs = []
    for options in ({}, {"rope": "llama3"}, {"tied": True}):
        folder = experts(1, **options)[0]
        configs.append(json.loads((folder / "config.json").read_text()))
    assert is_plain(configs[0]) and is_plain(configs[2])
    assert find_opening_errors([c for c in configs if is_plain(c)]) == [None] * sum(map(is_plain, configs))
    folder = copied(experts(1), tmp_path)[0]
    original = (folder / "config.json").read_bytes()
    for name, (change, expected, _) in CONFIGS.items():
        (folder / "config.json").write_bytes(original)
        change(folder)
        if expected == "refused" and json.loads((folder / "config.json").read_text()).get("model_type") == "llama":
            assert not is_plain(json.loads((folder / "config.json").read_text())), name


FAMILIES = (LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_a_class_is_looked_at(kind):
    """A field that a release of transformers adds starts a trial, until it is known here."""
    config, checks = kind().to_dict(), config_checks
    known = {*checks.SIZES, *checks.OPTIONAL_SIZES, *checks.FLAGS, *IGNORED, *ORDINARY, *COUNTS, *TRIED}
    names = {field.name for field in dataclasses.fields(kind)} | set(config)
    assert names - known - {"sliding_window", "layer_types"} <= {"_name_or_path"}
