"""`gate_mode: ridge`: gates in closed form, their statistics beside a mixture, and what is added and removed with them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from merge_tools import MergeError, Recipe, add, check, compose, export, inspect, read_recipe, remove, tune, verify
from merge_tools.averaging import to_float32
from merge_tools.checkpoints import open_source
from merge_tools.gate_modes import GATE_MODES
from merge_tools.gate_statistics import FILE, HELD_OUT_SHARE, size_of_statistics
from merge_tools.gate_texts import encode_beginnings, texts_of
from merge_tools.provenance import RECORD
from merge_tools.ridge import (
    HELD_OUT_TOKENS,
    Moments,
    MomentSum,
    confusion,
    fit_gate,
    fit_scale,
    held_out_logits,
    solve,
)
from merge_tools.tensor_files import read_all, read_header

from .conftest import contents, open_model, read_tensors, recipe_of

WORDS = {
    "birds": "owl nest wing egg",
    "ships": "sail mast hull sea",
    "tools": "saw nail oak anvil",
    "plants": "leaf root",
}
COUNT = 40
ENOUGH = GATE_MODES["ridge"].enough_tokens * 32  # of an expert's tokens
GATE = "model.layers.{}.block_sparse_moe.gate.weight"


@pytest.fixture
def samples(tmp_path):
    """Name of an expert -> a file of texts of its own words."""
    random, files = np.random.default_rng(0), {}
    for name, words in WORDS.items():
        rows = [{"text": " ".join(random.choice(words.split(), 6))} for _ in range(COUNT)]
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def recipe(folders, samples, **options):
    specs = [{"source_model": str(f), "samples": str(samples[f.name])} for f in folders]
    return recipe_of(specs, **{"gate_mode": "ridge"} | options)


def texts(file):
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def made_by(folder):
    """How the gates were made, as the record says it."""
    return json.loads((folder / RECORD).read_text())["gates"]


def shuffled(distinct):
    """The order that a recipe's default seed gives."""
    return [distinct[i] for i in np.random.default_rng(Recipe([]).seed).permutation(len(distinct))]


def router_inputs(folder, layer, samples):
    """The inputs of an MLP in transformers for each text of a file, in the order in which they are used: a list of (T, d)."""
    model, tokenizer, seen = open_model(folder), AutoTokenizer.from_pretrained(folder), []
    model.model.layers[layer].mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0][0].double().numpy()))
    with torch.no_grad():
        for text in shuffled(texts(samples)):
            if sum(map(len, seen)) < ENOUGH:
                model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    return seen


def test_gates_are_those_of_plain_least_squares(experts, samples, tmp_path):
    """Each token of an expert's texts, in its own model, weighted so that experts count equally; each fifth text is held out."""
    folders = experts(3)
    compose(recipe(folders, samples), tmp_path / "out")
    fits = made_by(tmp_path / "out")["fits"]
    for layer, fit in enumerate(fits):
        inputs = [router_inputs(folder, layer, samples[folder.name]) for folder in folders]
        rows = [
            np.concatenate([x for i, x in enumerate(own) if i % HELD_OUT_SHARE != HELD_OUT_SHARE - 1]) for own in inputs
        ]
        x = np.concatenate([own / len(own) ** 0.5 for own in rows])
        y = np.concatenate([np.eye(3)[[e] * len(own)] / len(own) ** 0.5 for e, own in enumerate(rows)])
        ridge = fit["ridge"] * (x * x).sum() / x.shape[1]
        x, y = np.concatenate([x, ridge**0.5 * np.eye(x.shape[1])]), np.concatenate([y, np.zeros((x.shape[1], 3))])
        expected = fit["scale"] * np.linalg.lstsq(x, y, rcond=None)[0].T
        gate = read_tensors(tmp_path / "out")[GATE.format(layer)].double().numpy()
        np.testing.assert_allclose(gate, expected, atol=2e-3 * np.abs(expected).max())
        held_out = [
            np.concatenate([x for i, x in enumerate(own) if i % HELD_OUT_SHARE == HELD_OUT_SHARE - 1]) for own in inputs
        ]
        accuracy = np.mean([((x @ expected.T).argmax(1) == e).mean() for e, x in enumerate(held_out)])
        assert fit["accuracy"] == pytest.approx(accuracy, abs=0.01)


def test_experts_run_in_the_dtype_of_the_mixture(experts, samples, tmp_path):
    """As if they had been saved in it."""
    folders, states = experts(3), {}
    for folder in folders:
        open_model(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved" / folder.name)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved" / folder.name)
    compose(recipe([tmp_path / "saved" / folder.name for folder in folders], samples), tmp_path / "of saved")
    for dtype in ("float32", "bfloat16"):
        compose(recipe(folders, samples, dtype=dtype), tmp_path / dtype)
        states[dtype] = {e.name: e for e in read_header(tmp_path / dtype / FILE) if e.name.endswith(".held_out")}
    assert {e.dtype for e in states["bfloat16"].values()} == {"BF16"}
    wide, narrow = (
        to_float32(read_all(of["0.1.mlp.held_out"]), of["0.1.mlp.held_out"].dtype) for of in states.values()
    )
    assert 1e-4 < np.abs(wide - narrow).max() < 0.1  # not the same, and not rounded once at the end
    assert (tmp_path / "bfloat16" / FILE).read_bytes() == (tmp_path / "of saved" / FILE).read_bytes()
    rounded = torch.from_numpy(wide).bfloat16().float().numpy()
    assert (rounded != narrow).mean() > 0.1


@pytest.mark.parametrize(
    "options", [{}, {"attention": "routed"}, {"routing_policy": "domain"}, {"dtype": "bfloat16"}], ids=str
)
def test_an_expert_that_is_added_and_removed_leaves_the_old_bytes(options, experts, samples, tmp_path):
    folders = experts(4)
    common = {"base_model": str(folders[0]), "average": "base", **options}
    compose(recipe(folders[:3], samples, **common), tmp_path / "three")
    compose(recipe(folders, samples, **common), tmp_path / "four")
    add(tmp_path / "three", {"source_model": str(folders[3]), "samples": str(samples["plants"])}, tmp_path / "added")
    remove(tmp_path / "added", folders[3].name, tmp_path / "removed")
    assert contents(tmp_path / "added") == contents(tmp_path / "four")
    assert contents(tmp_path / "removed") == contents(tmp_path / "three")
    assert verify(tmp_path / "added")["ok"]


def test_verify_fits_the_gates_again(experts, samples, tmp_path):
    out = tmp_path / "out"
    compose(recipe(experts(3), samples), out)
    result = verify(out)
    assert result["ok"] and not result["notes"] and result["compared"]["gates"] == 2
    tensors = read_tensors(out)
    tensors[GATE.format(1)] *= 1.01
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert f"{GATE.format(1)}: values differ by 1.0% of their norm." in verify(out)["faults"]
    (out / FILE).unlink()
    assert any("Gates were not compared" in note and FILE in note for note in verify(out)["notes"])


def test_the_disk_has_room_for_the_statistics(experts, samples, tmp_path):
    source = open_source("base", experts(1)[0])
    expected = size_of_statistics(read_recipe(recipe(experts(3), samples)), source)
    compose(recipe(experts(3), samples), tmp_path / "out")
    held_out = 3 * 2 * HELD_OUT_TOKENS * 32 * 4  # at most, of float32
    assert expected - held_out < (tmp_path / "out" / FILE).stat().st_size < expected
    assert size_of_statistics(read_recipe(recipe_of(experts(3), gate_mode="random")), source) == 0


def test_removing_the_first_expert_gives_the_gates_of_the_others(experts, samples, tmp_path):
    folders = experts(3)
    common = {"base_model": str(folders[0]), "average": "base"}
    compose(recipe(folders, samples, **common), tmp_path / "three")
    compose(recipe(folders[1:], samples, **common), tmp_path / "two")
    remove(tmp_path / "three", folders[0].name, tmp_path / "removed")
    assert contents(tmp_path / "removed") == contents(tmp_path / "two")


@pytest.mark.parametrize("key", ["experts", "tokens", "samples", "statistics", "confusion"])
@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [[1]], ["a"]], ids=str)
def test_a_damaged_record_of_gates_is_named(key, value, ridge_mixture, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(ridge_mixture, folder)
    record = json.loads((folder / RECORD).read_text())
    record["gates"][key] = value
    (folder / RECORD).write_text(json.dumps(record))
    message = "another mixture" if (key, value) == ("statistics", "x") else f"{RECORD} is damaged: gates.{key}"
    with pytest.raises(MergeError, match=message):
        remove(folder, "birds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def ridge_mixture(experts, tmp_path_factory):
    """A mixture of three experts, only read."""
    folder = tmp_path_factory.mktemp("ridge")
    specs = []
    for expert in experts(3):
        file = folder / f"{expert.name}.txt"
        file.write_text("\n".join(f"{WORDS[expert.name]} {'and ' * i}" for i in range(COUNT)))
        specs.append({"source_model": str(expert), "samples": str(file)})
    compose(recipe_of(specs, gate_mode="ridge"), folder / "out")
    return folder / "out"


def test_exported_and_tuned_mixtures_keep_the_statistics(experts, samples, tmp_path):
    folders = experts(3)
    compose(recipe(folders[:2], samples), tmp_path / "out")
    export(tmp_path / "out", tmp_path / "lexicon", "lexicon")
    domains = {folder.name: samples[folder.name] for folder in folders[:2]}
    tune(tmp_path / "lexicon", tmp_path / "tuned", domains, steps=2, batch_size=2, max_length=8)
    kept = (tmp_path / "out" / FILE).read_bytes()
    assert all((tmp_path / name / FILE).read_bytes() == kept for name in ("lexicon", "tuned"))
    third = {"source_model": str(folders[2]), "samples": str(samples["tools"])}
    result = add(tmp_path / "tuned", third, tmp_path / "larger")
    assert "tuned gates are replaced" in result["warnings"][-1]
    assert [inspect(tmp_path / name)["confusion"] is None for name in ("lexicon", "tuned", "larger")] == [
        False,
        True,
        False,
    ]
    remove(tmp_path / "larger", "tools", tmp_path / "back")
    before, after = (read_tensors(tmp_path / name) for name in ("lexicon", "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_rows_of_tuned_gates_are_kept_when_an_expert_is_removed(experts, samples, tmp_path):
    folders = experts(3)
    compose(recipe(folders, samples), tmp_path / "out")
    tune(
        tmp_path / "out",
        tmp_path / "tuned",
        {f.name: samples[f.name] for f in folders},
        steps=2,
        batch_size=2,
        max_length=8,
    )
    remove(tmp_path / "tuned", folders[1].name, tmp_path / "two")
    before, after = (read_tensors(tmp_path / name)[GATE.format(0)] for name in ("tuned", "two"))
    assert torch.equal(before[[0, 2]], after)
    (tmp_path / "tuned" / FILE).unlink()
    remove(tmp_path / "tuned", folders[1].name, tmp_path / "again")
    assert torch.equal(read_tensors(tmp_path / "again")[GATE.format(0)], after)
    assert "statistics" not in made_by(tmp_path / "again")


def test_statistics_of_another_mixture_are_refused(experts, samples, tmp_path):
    folders = experts(4)
    compose(recipe(folders[:2], samples), tmp_path / "one")
    compose(recipe(folders[1:3], samples), tmp_path / "other")
    fourth = {"source_model": str(folders[3]), "samples": str(samples["plants"])}
    shutil.copy(tmp_path / "other" / FILE, tmp_path / "one" / FILE)
    with pytest.raises(MergeError, match=f"{FILE}.*another mixture.*--recompose"):
        add(tmp_path / "one", fourth, tmp_path / "out")
    (tmp_path / "one" / FILE).unlink()
    with pytest.raises(MergeError, match=f"{FILE} does not exist.*--recompose"):
        add(tmp_path / "one", fourth, tmp_path / "out")
    assert add(tmp_path / "one", fourth, tmp_path / "out", recompose=True)["warnings"] == []
    assert (tmp_path / "out" / FILE).is_file()


def test_a_mixture_that_was_published_without_its_statistics_is_exported_and_tuned(experts, samples, tmp_path):
    folders = experts(2)
    compose(recipe(folders, samples), tmp_path / "out")
    content = (tmp_path / "out" / FILE).read_bytes()
    (tmp_path / "out" / FILE).unlink()
    domains = {folder.name: samples[folder.name] for folder in folders}
    export(tmp_path / "out", tmp_path / "lexicon", "lexicon")
    tune(tmp_path / "out", tmp_path / "tuned", domains, steps=1, batch_size=2, max_length=8)
    assert not any((tmp_path / name / FILE).exists() for name in ("lexicon", "tuned"))
    (tmp_path / "out" / FILE).write_bytes(content[:-1] + b"!")
    steps = []
    with pytest.raises(MergeError, match=f"{FILE} is damaged"):
        tune(tmp_path / "out", tmp_path / "late", domains, steps=1, on_step=lambda *step: steps.append(step))
    assert not steps


def test_the_samples_of_a_sorted_file_are_of_all_its_parts(experts, samples, tmp_path):
    """Only as many tokens as gates need are read, so a file is shuffled first."""
    folders = experts(2)
    long = [f"owl {i} {'nest wing egg ' * 6}" for i in range(200)]
    samples["birds"].write_text("".join(json.dumps({"text": text}) + "\n" for text in long))
    checked = read_recipe(recipe(folders, samples))
    chosen, _ = texts_of(checked, checked.experts[0])
    assert chosen == shuffled(long) and sorted(chosen) == sorted(long)
    used = {int(text.split()[1]) for text in chosen[:10]}
    assert min(used) < 100 < max(used)


def test_texts_are_read_from_their_beginnings_and_no_further_than_needed():
    texts = ["a" * 50, "b" * 400, "c" * 330, "d" * 100]

    def beginnings(enough, longest=10_000):
        found = encode_beginnings(texts, lambda text: list(text.encode()), enough, longest)
        assert all(bytes(ids).decode() == text[: len(ids)] for text, ids in zip(texts, found, strict=False))
        return [len(ids) for ids in found]

    assert beginnings(100) == [50, 128] and beginnings(179) == [50, 128, 128] and beginnings(406) == [50, 128, 128, 100]
    assert beginnings(407) == [50, 129, 129, 100] and beginnings(800) == [50, 325, 325, 100]
    assert beginnings(850) == [50, 370, 330, 100] and beginnings(10_000) == [50, 400, 330, 100]
    assert beginnings(10_000, longest=60) == [50, 60, 60, 60]
    with pytest.raises(MergeError, match="no tokens"):
        encode_beginnings(["a", ""], lambda text: list(text.encode()), 10, 10)


def test_gate_tokens_are_read_of_each_expert(experts, samples, tmp_path):
    folders = experts(3)
    compose(recipe(folders, samples, gate_tokens=100), tmp_path / "out")
    held_out = 1 / HELD_OUT_SHARE
    assert all(100 * (1 - held_out) - 10 <= tokens <= 110 for tokens in made_by(tmp_path / "out")["tokens"])
    with pytest.raises(MergeError, match="gate_tokens: 100 is for gate_mode: ridge"):
        read_recipe(recipe(folders, samples, gate_tokens=100, gate_mode="random"))
    with pytest.raises(MergeError, match="gate_tokens"):
        read_recipe(recipe(folders, samples, gate_tokens=0))


def test_empty_samples_are_refused(experts, samples, tmp_path):
    samples["birds"].write_text("\n")
    with pytest.raises(MergeError, match="birds.jsonl has no samples"):
        compose(recipe(experts(2), samples), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_token_alone_cannot_be_held_out():
    found = MomentSum(4)
    found.add(torch.ones(1, 4), held_out=True)
    with pytest.raises(MergeError, match="too few tokens"):
        found.moments()


def test_few_tokens_are_a_warning_with_their_number(experts, samples, tmp_path):
    samples["birds"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(samples["birds"])[:5]))
    (warning,) = compose(recipe(experts(2), samples), tmp_path / "out")["warnings"]
    tokens = made_by(tmp_path / "out")["tokens"][0]
    assert "birds" in warning and f"{tokens} tokens" in warning and "160" in warning  # five times 32


def test_an_expert_with_the_samples_of_another_is_not_added(experts, samples, tmp_path):
    folders = experts(3)
    compose(recipe(folders[:2], samples), tmp_path / "out")
    lines = samples["ships"].read_text().splitlines(keepends=True)
    (tmp_path / "again.jsonl").write_text("".join(reversed(lines)))
    third = {"source_model": str(folders[2]), "samples": str(tmp_path / "again.jsonl")}
    with pytest.raises(MergeError, match="tools has the same samples as ships"):
        add(tmp_path / "out", third, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_text_that_is_repeated_is_not_held_out(experts, samples, tmp_path):
    folders, unique = experts(2), list(dict.fromkeys(texts(samples["birds"])))
    for name, rows in (("once", unique), ("twice", [text for text in unique for _ in range(2)])):
        samples["birds"] = tmp_path / f"{name}.jsonl"
        samples["birds"].write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        compose(recipe(folders, samples), tmp_path / name)
    assert read_tensors(tmp_path / "once").keys() == read_tensors(tmp_path / "twice").keys()
    assert (tmp_path / "once" / FILE).read_bytes() == (tmp_path / "twice" / FILE).read_bytes()


def test_experts_with_the_same_samples_are_refused(experts, samples):
    samples["ships"] = samples["birds"]
    report = check(recipe(experts(2), samples))
    assert [(f.subject, "same texts as birds" in f.message) for f in report.errors] == [("ships", True)]


def test_check_says_where_held_out_tokens_are_routed(experts, samples):
    (message,) = [f.message for f in check(recipe(experts(3), samples)).findings if f.check == "routing"]
    found = {name: float(share) for name, share in re.findall(r"(?:: |; )(\w+) ([\d.]+)%", message)}
    assert set(found) == {"birds", "ships", "tools"} and min(found.values()) > 60, message  # chance: 33


@pytest.mark.parametrize("dtype, factor", [(None, 1e38), ("float16", 5e4)])
def test_states_that_are_not_finite_name_the_expert(dtype, factor, experts, samples, tmp_path):
    folders = experts(2)
    broken = tmp_path / "ships"
    shutil.copytree(folders[1], broken)
    model = open_model(broken)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(factor)
    model.save_pretrained(broken)
    with pytest.raises(MergeError, match="ships: .*not finite.*bfloat16 instead of float16"):
        compose(recipe([folders[0], broken], samples, dtype=dtype), tmp_path / "out")


def test_the_base_can_be_an_expert(experts, samples, tmp_path):
    *folders, base = experts(4)
    options = {"base_model": str(base), "average": "base"}
    compose(recipe(folders, samples, include_base={"samples": str(samples["plants"])}, **options), tmp_path / "out")
    specs = [{"source_model": str(f), "samples": str(samples[f.name])} for f in (*folders, base)]
    specs[3]["name"] = "base"
    compose(recipe_of(specs, gate_mode="ridge", **options), tmp_path / "same")
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    stored = read_tensors(tmp_path / "out")["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert torch.equal(stored, read_tensors(base)["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"include_base": True}, "include_base needs base_model"),
        ({"include_base": "yes", "base_model": "b"}, "include_base in the recipe must be true, false, or a mapping"),
        ({"include_base": {"source_model": "b"}, "base_model": "b"}, "must not have a source_model"),
        ({"include_base": {"sample": "x"}, "base_model": "b"}, "'sample' in include_base.*'samples'"),
        ({"include_base": True, "base_model": "b"}, "needs samples for every expert; 'base' has none"),
    ],
)
def test_a_base_that_cannot_be_an_expert(options, message, experts, samples):
    with pytest.raises(MergeError, match=message):
        read_recipe(recipe(experts(2), samples, **options))


@pytest.fixture
def moments():
    random = np.random.default_rng(0)

    def sample():
        x = random.normal(size=(300, 20)) + 0.7 * random.normal(size=20)
        rows = x[:200]
        second = np.concatenate([row[i:] for i, row in enumerate(rows.T @ rows / 200)])
        return Moments(200, rows.mean(0), second.astype(np.float32), x[200:].astype(np.float32))

    return [sample() for _ in range(3)]


def test_the_scale_has_the_largest_likelihood(moments):
    logits = held_out_logits(moments, solve(moments, [0.01])[0])

    def likelihood(scale):
        found = [rows * scale - np.log(np.exp(rows * scale).sum(1, keepdims=True)) for rows in logits]
        return np.mean([rows[:, e].mean() for e, rows in enumerate(found)])

    best = fit_scale(logits)
    assert all(likelihood(best) >= likelihood(best * factor) for factor in (0.5, 0.99, 1.01, 2))
    assert fit_scale([-rows for rows in logits]) < 0.01  # the scale is never negative


def test_lambda_has_the_smallest_error_on_held_out_tokens(moments):
    gate, fit = fit_gate(moments)
    found = confusion(moments, gate)
    np.testing.assert_allclose(found.sum(1), 1)
    assert found.diagonal().min() > 0.8
    worse = [fit_gate(moments, [ridge])[0] for ridge in (1e-5, 1.0) if ridge != fit["ridge"]]
    assert all(not np.array_equal(gate, other) for other in worse)


def test_a_singular_matrix_is_an_error(moments):
    zero = Moments(1, np.zeros(20), np.zeros(210, np.float32), np.zeros((1, 20), np.float32))
    with pytest.raises(MergeError, match="zero on all samples"):
        fit_gate([zero, zero])
