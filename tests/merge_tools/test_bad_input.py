"""Incompatible or corrupt experts: all errors are reported at once, before the first byte is written."""

import re

import pytest
import torch

from merge_tools import MergeError, check, compose, value_checks

from .conftest import read_tensors, recipe_of
from .corruptions import (
    BROKEN,
    GATE,
    MODEL,
    Q_PROJ,
    config,
    copied,
    errors_of,
    refused,
    rope,
    shard,
    snapshot,
    tensors,
    tokenizer,
    truncate,
    value,
)


@pytest.fixture
def trio(tmp_path, experts):
    """birds, ships, tools, copied; `ships` is the one to break."""
    return copied(experts(3), tmp_path / "experts")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_expert_is_refused(name, trio, tmp_path):
    breaks, pattern = BROKEN[name]
    breaks(trio[1])
    result = refused(tmp_path, recipe_of(trio), pattern)
    assert all(line.startswith("ships: ") for line in result)  # no other expert is blamed


@pytest.mark.parametrize("name", ["rope base", "swapped ids", "missing tensor", "hidden size", "truncated file", "NaN"])
def test_a_broken_base_is_refused(name, trio, tmp_path):
    breaks, _ = BROKEN[name]
    breaks(trio[1])
    for average in ("mean", "base"):
        recipe = recipe_of([trio[0], trio[2]], base_model=str(trio[1]), average=average)
        refused(tmp_path, recipe, "base")


def test_three_valid_experts_merge(trio, tmp_path):
    """The negative control of the tables above: the same three, one of them sharded, merge without warnings."""
    shard(trio[1])
    report = check(recipe_of(trio), tmp_path / "out", deep=True)
    assert report.ok and not report.warnings
    before = snapshot(tmp_path / "experts")
    assert compose(recipe_of(trio), tmp_path / "out")["warnings"] == []
    assert snapshot(tmp_path / "experts") == before and (tmp_path / "out" / MODEL).is_file()


def test_all_errors_are_reported_at_once(trio, tmp_path):
    for breaks in (value(GATE, 0, float("nan")), rope(rope_theta=5e5), config(rms_norm_eps=1e-5, hidden_act="gelu")):
        breaks(trio[1])
    tensors(lambda state: state.pop(Q_PROJ))(trio[1])
    BROKEN["swapped ids"][0](trio[1])
    truncate(MODEL, 10)(trio[2])
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    result = refused(tmp_path, recipe_of(trio), "is missing")
    problems = [
        "ships.*NaN",
        "rope_theta",
        "rms_norm_eps",
        "hidden_act",
        "2 tokens differ",
        "tools.*truncated",
        "not empty",
    ]
    for pattern in problems:
        assert sum(bool(re.search(pattern, line)) for line in result) == 1, (pattern, result)
    assert len(result) == 8


def test_many_faulty_tensors_are_counted_not_listed(trio):
    tensors(lambda state: [state.pop(name) for name in list(state) if "norm" in name])(trio[1])
    assert [line for line in errors_of(check(recipe_of(trio))) if "more" in line] == ["ships: 2 more such tensors."]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compose_and_a_deep_check_find_one_bad_element_outside_the_samples(number, dtype, tmp_path, make_expert):
    """The tensor has 256 kB, of which the samples cover four blocks of 16 kB; `compose` names expert and tensor."""
    sizes = {"intermediate_size": 4096, "dtype": dtype}
    folders = [make_expert(tmp_path / "experts" / name, seed, **sizes) for seed, name in enumerate(("birds", "ships"))]
    value(GATE, 4096 * 8 // 2 + 9000, number)(folders[1])
    before = snapshot(tmp_path)
    assert check(recipe_of(folders)).ok
    deep = errors_of(check(recipe_of(folders), deep=True))
    assert len(deep) == 1 and re.search(f"ships: '{GATE}' holds NaN", deep[0])
    with pytest.raises(MergeError, match=f"ships: {MODEL}: '{GATE}' holds NaN"):
        compose(recipe_of(folders), tmp_path / "new" / "deeper" / "out")
    assert snapshot(tmp_path) == before  # neither the staging folder nor its new parents


HARMLESS = {
    "dtype": (config(dtype="bfloat16"), "note", "dtype is bfloat16 .float32 in birds.*has float32"),
    "dtype in the old spelling": (config(dtype=None, torch_dtype="float16"), "note", "dtype is float16 .float32"),
    "dropout": (config(attention_dropout=0.1), "note", "attention_dropout is 0.1 .0.0 in birds.*has 0.0"),
    "end of text": (config(eos_token_id=[2, 3]), "warning", r"eos_token_id is \[2, 3\] .2 in birds.*has 2"),
    "no padding": (config(pad_token_id=None), "warning", "pad_token_id is not set .0 in birds"),
    "context": (config(max_position_embeddings=64), "warning", "max_position_embeddings is 64 .128 in birds"),
    "truncation": (
        tokenizer(lambda t: t.__setitem__("truncation", {"max_length": 8})),
        "note",
        "same tokens, different truncation",
    ),
    "special tokens around": (
        tokenizer(lambda t: t.__setitem__("post_processor", None)),
        "warning",
        "same tokens, different post_processor",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "note", "ships has no tokenizer"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_differences_are_reported_and_accepted(name, trio, tmp_path):
    changes, level, pattern = HARMLESS[name]
    changes(trio[1])
    result = [f for f in check(recipe_of(trio)).findings if f.level not in ("ok",)]
    assert [f.level for f in result] == [level] and re.search(pattern, result[0].message), result
    warnings = compose(recipe_of(trio), tmp_path / "out")["warnings"]
    assert len(warnings) == (level == "warning")


def test_unused_tensors_are_noted(tmp_path, experts):
    """A tied head that is stored anyway, and the rotary buffers of old releases."""
    folders = copied(experts(2, tied=True), tmp_path / "experts")
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    unused = {"lm_head.weight", rotary}
    tensors(
        lambda state: state.update(
            {rotary: torch.ones(4), "lm_head.weight": state["model.embed_tokens.weight"].clone()}
        )
    )(folders[1])
    notes = [f.message for f in check(recipe_of(folders, experts_per_token=1)).findings if f.level != "ok"]
    assert len(notes) == 2 and all(any(repr(name) in note for note in notes) for name in unused)
    compose(recipe_of(folders), tmp_path / "out")
    assert not unused & set(read_tensors(tmp_path / "out"))


NORM = "model.norm.weight"


@pytest.mark.parametrize("name", [GATE, NORM])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_above_the_range_of_a_float16_base_is_found_by_check(name, dtype, tmp_path, make_expert):
    """The recipe has no dtype, so the output has the base's; the value is in no sample."""
    base = make_expert(tmp_path / "experts" / "base", 0, dtype="float16", hidden_size=64, intermediate_size=1024)
    expert = make_expert(tmp_path / "experts" / "own", 1, dtype=dtype, hidden_size=64, intermediate_size=1024)
    recipe = recipe_of([base, expert])
    assert check(recipe).ok
    value(name, 20_000 if name == GATE else 3, -140_000.0)(expert)
    (error,) = refused(tmp_path, recipe, f"own: '{name}' has values above float16's maximum of 65,504")
    assert check(recipe, dtype="bfloat16").ok
    if name == NORM:  # is not routed, and so not written
        assert check(recipe, average="base", base_model=str(base)).ok
        value(name, 3, 120_000.0)(expert)  # the mean is within the range
        assert check(recipe).ok


@pytest.mark.parametrize("name", [GATE, NORM])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_that_exceed_the_range_of_the_output(dtype, name, trio, tmp_path, monkeypatch):
    """Found by `check` (in a sample, or for float16 in all values), or when the value is written; nothing is left."""
    recipe = recipe_of(trio, dtype=dtype)
    for folder in trio:
        value(name, 3, 3.4e38)(folder)
    refused(tmp_path, recipe, f"'{name}' has values above")
    before = snapshot(tmp_path)
    monkeypatch.setattr(value_checks, "find_overflow", lambda *_: None)
    monkeypatch.setattr(value_checks, "find_float16_overflows", lambda _: [])
    with pytest.raises(MergeError, match="' has values above"):
        compose(recipe, tmp_path / "out")
    assert snapshot(tmp_path) == before
    assert check(recipe, dtype="float32").ok
