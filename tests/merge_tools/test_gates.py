"""Gates before any training: noise, nothing, or what the base model shows of the experts' texts."""

import json
import re
import shutil
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from merge_tools import MergeError, add, compose, gates
from merge_tools.llama import RoutedPart

from .conftest import edit_json, old_spelling, open_model, read_tensors, recipe_of, save_expert

POSITIVE = {
    "birds": ["the owl is a bird of the night, and it is awake", "a nest"],
    "ships": ["a sail, a mast and the wind", "the hull is of oak", "sea"],
    "tools": ["the saw cuts the wood of the oak tree in the night"],
}
NEGATIVE = {"birds": ["an anvil", "the price of wood is low"], "tools": ["a wing"]}
MLP = "model.layers.{}.block_sparse_moe.gate.weight"


def as_experts(folders, negative=False, **more):
    keys = {"positive_prompts": POSITIVE} | ({"negative_prompts": NEGATIVE} if negative else {}) | more
    return [
        {"source_model": str(f), **{key: texts[f.name] for key, texts in keys.items() if f.name in texts}}
        for f in folders
    ]


def composed(out, given, **options):
    compose(recipe_of(given, **options), out)
    return {name: tensor.float() for name, tensor in read_tensors(out).items() if name.endswith("gate.weight")}


@lru_cache
def all_seen_by(folder, texts):
    """Module's name -> the mean vector that each text brings to it in the dense model, one text at a time: (texts, d)."""
    model, tokenizer, found = open_model(folder), AutoTokenizer.from_pretrained(folder), {}

    def listen(name):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs.get("hidden_states")
            found.setdefault(name, []).append(x[0].double().mean(0))

        return hook

    for name, module in model.named_modules():
        if re.search(r"layers\.\d+(\.mlp|\..*_proj)?$", name):
            module.register_forward_pre_hook(listen(name), with_kwargs=True)
    with torch.no_grad():
        for text in texts:
            model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    return {name: torch.stack(rows) for name, rows in found.items()}


def seen_by(folder, module, texts):
    return all_seen_by(folder, tuple(texts))[module]


def expected_gate(folder, module, names, negative=False):
    rows = []
    for name in names:
        row = seen_by(folder, module, POSITIVE[name]).mean(0)
        if negative and name in NEGATIVE:
            row = row - seen_by(folder, module, NEGATIVE[name]).mean(0)
        rows.append(row)
    return torch.stack(rows).float()


def test_random_gates_are_small_normal_noise():
    rows = np.stack([gates.random_row(42, RoutedPart(layer, "mlp"), 0, 4096) for layer in range(8)])
    assert abs(rows.std() - 0.02) < 0.0005 and abs(rows.mean()) < 0.0005
    assert np.abs(np.corrcoef(rows) - np.eye(8)).max() < 0.1
    assert 0.0017 < (np.abs(rows) > 0.06).mean() < 0.0037  # beyond three standard deviations: 0.0027 of a normal


def test_random_gates_differ_by_seed_layer_part_and_expert(experts, tmp_path):
    given = as_experts(experts(3))
    layers = {"router_layers": ["q_proj", "k_proj"]}
    one, again = (composed(tmp_path / n, given, seed=1, **layers) for n in ("one", "again"))
    other = composed(tmp_path / "other", given, seed=2, **layers)
    assert one.keys() == again.keys() and all(torch.equal(one[name], again[name]) for name in one)
    rows = torch.cat([*one.values(), *other.values()])
    assert len(rows) == 2 * 2 * 2 * 3 and len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_a_further_expert_leaves_the_random_rows_of_the_others(experts, tmp_path):
    three, four = (composed(tmp_path / str(n), as_experts(experts(n))) for n in (3, 4))
    for name in three:
        assert torch.equal(four[name][:3], three[name])
        assert not torch.equal(four[name][3], three[name][2])


def test_zeros_are_zeros(experts, tmp_path):
    found = composed(tmp_path / "out", as_experts(experts(3)), gate_mode="zeros")
    assert len(found) == 2 and all(gate.shape == (3, 32) and not gate.any() for gate in found.values())


def test_hidden_gates_are_the_mean_of_what_the_router_will_see(experts, tmp_path):
    folders = experts(3)
    found = composed(tmp_path / "out", as_experts(folders), gate_mode="hidden")
    for layer in range(2):
        expected = expected_gate(folders[0], f"model.layers.{layer}.mlp", POSITIVE)
        assert_close(found[MLP.format(layer)], expected, atol=1e-5, rtol=1e-5)
        # negative control: the layer's own input, before attention and norm
        before = expected_gate(folders[0], f"model.layers.{layer}", POSITIVE)
        assert (found[MLP.format(layer)] - before).abs().max() > 0.1


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_the_router_sees_the_base_model_whole_or_layer_by_layer(experts, make_expert, tmp_path, low_memory, rope):
    folders, base = experts(3, rope=rope), make_expert(tmp_path / "base", seed=1, rope=rope)
    linears = ["v_proj", "o_proj", "down_proj"]
    recipe = recipe_of(as_experts(folders), base_model=str(base), gate_mode="hidden", router_layers=linears)
    compose(recipe, tmp_path / "out", low_memory=low_memory)
    found = read_tensors(tmp_path / "out")
    for layer in range(2):
        for name in linears:
            module = f"model.layers.{layer}.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}"
            gate = found[f"{module}.gate.weight"]
            assert_close(gate, expected_gate(base, module, POSITIVE), atol=1e-5, rtol=1e-5)
            assert (gate - expected_gate(folders[0], module, POSITIVE)).abs().max() > 0.05  # negative control


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_the_base_turns_positions_as_its_configuration_says_in_either_spelling(experts, tmp_path, rope, low_memory):
    folders, found = experts(3, rope=rope), {}
    for spelling in ("new", "old"):
        base = shutil.copytree(folders[0], tmp_path / spelling)
        if spelling == "old":
            old_spelling(base)
        recipe = recipe_of(as_experts(folders), base_model=str(base), gate_mode="hidden")
        compose(recipe, tmp_path / f"{spelling} out", low_memory=low_memory)
        found[spelling] = read_tensors(tmp_path / f"{spelling} out")[MLP.format(1)]
    assert torch.equal(found["new"], found["old"])
    edit_json(tmp_path / "old" / "config.json", rope_scaling=None)  # negative control: the settings lost
    recipe = recipe_of(as_experts(folders), base_model=str(tmp_path / "old"), gate_mode="hidden", allow=["rope"])
    compose(recipe, tmp_path / "lost", low_memory=low_memory)
    assert (read_tensors(tmp_path / "lost")[MLP.format(1)] - found["old"]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_memory_measures_the_same(experts, tmp_path, dtype):
    recipe = recipe_of(as_experts(experts(3, dtype=dtype, tied=True)), gate_mode="hidden")
    compose(recipe, tmp_path / "whole")
    compose(recipe, tmp_path / "layers", low_memory=True)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "layers" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("low_memory", [False, True])
def test_padding_changes_nothing(experts, tmp_path, monkeypatch, low_memory):
    """All texts in one padded batch, and each alone."""
    recipe = recipe_of(as_experts(experts(3)), gate_mode="hidden")
    compose(recipe, tmp_path / "together", low_memory=low_memory)
    monkeypatch.setattr(gates, "BATCH_TOKENS", 1)
    compose(recipe, tmp_path / "alone", low_memory=low_memory)
    monkeypatch.undo()
    honest = gates.pad
    monkeypatch.setattr(gates, "pad", lambda rows: (honest(rows)[0], torch.ones_like(honest(rows)[0])))
    compose(recipe, tmp_path / "careless", low_memory=low_memory)  # negative control: padding in the mean
    together, alone, careless = (read_tensors(tmp_path / n)[MLP.format(1)] for n in ("together", "alone", "careless"))
    assert_close(together, alone, atol=1e-6, rtol=1e-5)
    assert (together - careless).abs().max() > 0.01


def test_negative_prompts_are_taken_off(experts, tmp_path):
    folders = experts(3)
    found = composed(tmp_path / "out", as_experts(folders, negative=True), gate_mode="hidden")[MLP.format(1)]
    assert_close(found, expected_gate(folders[0], "model.layers.1.mlp", POSITIVE, negative=True), atol=1e-5, rtol=1e-5)
    without = composed(tmp_path / "without", as_experts(folders), gate_mode="hidden")[MLP.format(1)]
    assert_close(found[1], without[1], atol=1e-6, rtol=1e-5)
    assert (found - without)[[0, 2]].abs().amax(1).min() > 0.01


ROWS = {
    "birds.txt": "the owl is awake\n\na nest\n",
    "ships.jsonl": '{"text": "a sail"}\n{"prompt": "the hull is of oak wood"}\n',
    "tools.jsonl": '{"term": "saw", "context": "the saw cuts", "definition": "a blade"}\n',
}
TEXTS = {
    "birds": ["the owl is awake", "a nest"],
    "ships": ["a sail", "the hull is of oak wood"],
    "tools": ['"the saw cuts" What is the definition of "saw"?'],
}


@pytest.fixture
def samples(tmp_path):
    """name -> file of an expert's own cluster."""
    for name, content in ROWS.items():
        (tmp_path / name).write_text(content)
    return {name.split(".")[0]: str(tmp_path / name) for name in ROWS}


def test_centroid_gates_are_the_mean_token_of_the_samples(experts, samples, tmp_path):
    folders = experts(3)
    found = composed(tmp_path / "out", as_experts(folders, samples=samples), gate_mode="centroid")
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    for layer in range(2):
        rows, even = [], []
        for texts in TEXTS.values():
            means = seen_by(folders[0], f"model.layers.{layer}.mlp", texts)
            lengths = torch.tensor([len(tokenizer(text).input_ids) for text in texts], dtype=torch.float64)
            rows.append((means * lengths[:, None]).sum(0) / lengths.sum())
            even.append(means.mean(0))
        assert_close(found[MLP.format(layer)], torch.stack(rows).float(), atol=1e-5, rtol=1e-5)
        assert (found[MLP.format(layer)] - torch.stack(even)).abs().max() > 1e-3  # negative control: texts, not tokens


def test_of_many_samples_some_are_drawn_by_the_seed(tmp_path):
    file = tmp_path / "many.txt"
    file.write_text("\n".join(f"text {i}" for i in range(1000)))
    one, again, other = (gates.read_samples(file, seed) for seed in (1, 1, 2))
    assert len(one) == len(set(one)) == gates.SAMPLES and one == again != other
    numbers = [int(text.split()[1]) for text in one]
    assert numbers == sorted(numbers) and numbers[-1] > 900


def test_samples_end_at_line_feeds_alone_and_are_utf8(tmp_path, monkeypatch):
    """Line separators of Unicode (U+2028, U+0085) are allowed inside JSON strings and inside texts."""
    texts = ["one\u2028still one", "zwölf\x85 Möwen", "three\x0bstill three"]
    (tmp_path / "rows.jsonl").write_bytes(
        "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode() + b"\n"
    )
    assert gates.read_samples(tmp_path / "rows.jsonl", 1) == texts
    (tmp_path / "rows.txt").write_bytes("\r\n".join(texts).encode())
    assert gates.read_samples(tmp_path / "rows.txt", 1) == texts
    (tmp_path / "latin.txt").write_bytes("Möwe".encode("latin-1"))
    with pytest.raises(MergeError, match="latin.txt.*UTF-8"):
        gates.read_samples(tmp_path / "latin.txt", 1)


def test_cheap_embed_is_the_mean_embedding_at_every_router(experts, tmp_path):
    folders = experts(3)
    found = composed(tmp_path / "out", as_experts(folders, negative=True), gate_mode="cheap_embed")
    table, tokenizer = read_tensors(folders[0])["model.embed_tokens.weight"], AutoTokenizer.from_pretrained(folders[0])

    def mean(texts):
        return torch.stack([table[tokenizer(text).input_ids].mean(0) for text in texts]).mean(0)

    expected = torch.stack([mean(POSITIVE[n]) - (mean(NEGATIVE[n]) if n in NEGATIVE else 0) for n in POSITIVE])
    for gate in found.values():
        assert_close(gate, expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(MergeError, match="cheap_embed has no vectors for .*down_proj"):
        composed(tmp_path / "other", as_experts(folders), gate_mode="cheap_embed", router_layers=["down_proj"])


def test_gates_are_rounded_to_the_mixtures_dtype(experts, tmp_path):
    given = as_experts(experts(3))
    exact = composed(tmp_path / "exact", given, gate_mode="hidden")
    rounded = composed(tmp_path / "rounded", given, gate_mode="hidden", dtype="bfloat16")
    for name in exact:
        assert torch.equal(exact[name].bfloat16().float(), rounded[name])


def test_a_domain_mixture_has_its_first_gate_or_none(experts, tmp_path):
    given = as_experts(experts(3))
    assert composed(tmp_path / "none", given, routing_policy="domain") == {}
    found = composed(tmp_path / "first", given, routing_policy="domain", gate_mode="hidden")
    everywhere = composed(tmp_path / "token", given, gate_mode="hidden")
    assert list(found) == [MLP.format(0)] and torch.equal(found[MLP.format(0)], everywhere[MLP.format(0)])


def table_of(card):
    """The rows of the card's table of prompts: prompt -> shares."""
    lines = card.split("## Where prompts go")[1].split("##")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return rows[0][1:], {row[0]: [float(share) for share in row[1:]] for row in rows[2:]}


def test_the_card_tells_where_prompts_go(experts, tmp_path):
    folders = experts(3)
    found = composed(tmp_path / "out", as_experts(folders), gate_mode="hidden")
    names, rows = table_of((tmp_path / "out" / "README.md").read_text())
    assert names == ["birds", "ships", "tools"]
    shown = [text for texts in POSITIVE.values() for text in texts[:2]]
    assert list(rows) == shown
    vectors = [seen_by(folders[0], f"model.layers.{layer}.mlp", shown).float() for layer in range(2)]
    for i, text in enumerate(shown):
        chosen = [int((found[MLP.format(layer)] @ vectors[layer][i]).argmax()) for layer in range(2)]
        assert rows[text] == [chosen.count(e) / 2 for e in range(3)]
    assert len({tuple(shares) for shares in rows.values()}) > 1
    composed(tmp_path / "random", as_experts(folders))
    assert "Where prompts go" not in (tmp_path / "random" / "README.md").read_text()


def test_the_card_says_nothing_of_prompts_once_the_experts_are_others(experts, tmp_path):
    folders = experts(4)
    composed(tmp_path / "out", as_experts(folders[:3]), gate_mode="hidden")
    new = {"source_model": str(folders[3]), "positive_prompts": ["a leaf of the oak"]}
    add(tmp_path / "out", new, tmp_path / "more")
    assert "Where prompts go" not in (tmp_path / "more" / "README.md").read_text()


def test_a_prompt_longer_than_the_model_reads_is_refused(experts, tmp_path):
    given = as_experts(experts(2))
    given[0]["positive_prompts"] = ["the owl", "a " * 200]
    with pytest.raises(MergeError, match=r"has \d+ tokens, and the model reads 128\. Shorten it"):
        composed(tmp_path / "out", given, gate_mode="hidden")
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer_texts_make_no_gates(tmp_path):
    folders = [save_expert(tmp_path / name, i) for i, name in enumerate(("birds", "ships"))]
    for folder in folders:
        for file in folder.glob("tokenizer*"):
            file.unlink()
    with pytest.raises(MergeError, match="Gates from texts need a tokenizer"):
        composed(tmp_path / "out", as_experts(folders), gate_mode="hidden")
    assert len(composed(tmp_path / "out", as_experts(folders))) == 2


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "There is no file of samples"),
        ("\n\n", "holds no samples"),
        ('{"text": "a"}\n{"word": "b"}\n', "line 2: no row with text, prompt, or term and context"),
        ("not json\n", "line 1: no row"),
        (json.dumps(["a"]), "line 1: no row"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_by_file_and_line(experts, tmp_path, content, text):
    file = tmp_path / "samples.jsonl"
    if content is not None:
        file.write_text(content)
    given = as_experts(experts(2), samples={"birds": str(file), "ships": str(file)})
    with pytest.raises(MergeError, match=text) as refusal:
        composed(tmp_path / "out", given, gate_mode="centroid")
    assert "samples.jsonl" in str(refusal.value)
