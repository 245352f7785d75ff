"""Untrained gates: random, zero, or computed from the experts' texts by the base model."""

import json
import re
import shutil
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer, LlamaConfig

from merge_tools import MergeError, Progress, Recipe, add, compose, gate_texts, gates
from merge_tools.checkpoints import open_source
from merge_tools.encoding import open_encoder, plain_tokenizer
from merge_tools.layout import RoutedPart, Shape
from tests.corpora import write_jsonl

from .conftest import edit_json, old_spelling, open_model, read_tensors, recipe_of, run_python

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


def composed(out, specs, **options):
    compose(recipe_of(specs, **options), out)
    return {name: tensor.float() for name, tensor in read_tensors(out).items() if name.endswith("gate.weight")}


@lru_cache
def all_seen_by(folder, texts):
    """Name of a module -> its mean input for each text in the dense model, one text at a time: (texts, d)."""
    model, tokenizer, result = open_model(folder), AutoTokenizer.from_pretrained(folder), {}

    def listen(name):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs.get("hidden_states")
            result.setdefault(name, []).append(x[0].double().mean(0))

        return hook

    for name, module in model.named_modules():
        if re.search(r"layers\.\d+(\.mlp|\..*_proj)?$", name):
            module.register_forward_pre_hook(listen(name), with_kwargs=True)
    with torch.no_grad():
        for text in texts:
            model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    return {name: torch.stack(rows) for name, rows in result.items()}


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
    recipe = Recipe([], gate_mode="random")
    shape = Shape.from_config(LlamaConfig().to_dict())
    parts = [RoutedPart(layer, "mlp") for layer in range(8)]
    rows = np.concatenate([gates.drawn_gate(recipe, part, shape, [0]) for part in parts])
    assert abs(rows.std() - 0.02) < 0.0005 and abs(rows.mean()) < 0.0005
    assert np.abs(np.corrcoef(rows) - np.eye(8)).max() < 0.1
    assert 0.0017 < (np.abs(rows) > 0.06).mean() < 0.0037  # beyond three standard deviations: 0.0027 of a normal


def test_random_gates_differ_by_seed_layer_part_and_expert(experts, tmp_path):
    specs = as_experts(experts(3))
    layers = {"router_layers": ["q_proj", "k_proj"]}
    one, again = (composed(tmp_path / n, specs, seed=1, **layers) for n in ("one", "again"))
    other = composed(tmp_path / "other", specs, seed=2, **layers)
    assert one.keys() == again.keys() and all(torch.equal(one[name], again[name]) for name in one)
    rows = torch.cat([*one.values(), *other.values()])
    assert len(rows) == 2 * 2 * 2 * 3 and len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_router_input_gates_are_the_mean_router_input(experts, tmp_path):
    folders = experts(3)
    result = composed(tmp_path / "out", as_experts(folders), gate_mode="router_input")
    for layer in range(2):
        expected = expected_gate(folders[0], f"model.layers.{layer}.mlp", POSITIVE)
        assert_close(result[MLP.format(layer)], expected, atol=1e-5, rtol=1e-5)
        # negative control: the layer's own input, before attention and norm
        before = expected_gate(folders[0], f"model.layers.{layer}", POSITIVE)
        assert (result[MLP.format(layer)] - before).abs().max() > 0.1


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_router_inputs_are_those_of_the_base(experts, make_expert, tmp_path, rope):
    folders, base = experts(3, rope=rope), make_expert(tmp_path / "base", seed=1, rope=rope)
    linears = ["v_proj", "o_proj", "down_proj"]
    recipe = recipe_of(as_experts(folders), base_model=str(base), gate_mode="router_input", router_layers=linears)
    compose(recipe, tmp_path / "out")
    result = read_tensors(tmp_path / "out")
    for layer in range(2):
        for name in linears:
            module = f"model.layers.{layer}.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}"
            gate = result[f"{module}.gate.weight"]
            assert_close(gate, expected_gate(base, module, POSITIVE), atol=1e-5, rtol=1e-5)
            assert (gate - expected_gate(folders[0], module, POSITIVE)).abs().max() > 0.05  # negative control


@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_the_base_uses_its_rope_settings_in_either_spelling(experts, tmp_path, rope):
    folders, result = experts(3, rope=rope), {}
    for spelling in ("new", "old"):
        base = shutil.copytree(folders[0], tmp_path / spelling)
        if spelling == "old":
            old_spelling(base)
        recipe = recipe_of(as_experts(folders), base_model=str(base), gate_mode="router_input")
        compose(recipe, tmp_path / f"{spelling} out")
        result[spelling] = read_tensors(tmp_path / f"{spelling} out")[MLP.format(1)]
    assert torch.equal(result["new"], result["old"])
    edit_json(tmp_path / "old" / "config.json", rope_scaling=None)  # negative control: the settings lost
    recipe = recipe_of(as_experts(folders), base_model=str(tmp_path / "old"), gate_mode="router_input", allow=["rope"])
    compose(recipe, tmp_path / "lost")
    assert (read_tensors(tmp_path / "lost")[MLP.format(1)] - result["old"]).abs().max() > 1e-3


def test_batches_change_nothing(experts, tmp_path, monkeypatch):
    """All texts in one batch, and each text alone."""
    recipe = recipe_of(as_experts(experts(3)), gate_mode="router_input")
    compose(recipe, tmp_path / "together")
    monkeypatch.setattr(gate_texts, "BATCH_TOKENS", 1)
    compose(recipe, tmp_path / "alone")
    together, alone = (read_tensors(tmp_path / name)[MLP.format(1)] for name in ("together", "alone"))
    assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_negative_prompts_are_subtracted(experts, tmp_path):
    folders = experts(3)
    result = composed(tmp_path / "out", as_experts(folders, negative=True), gate_mode="router_input")[MLP.format(1)]
    assert_close(result, expected_gate(folders[0], "model.layers.1.mlp", POSITIVE, negative=True), atol=1e-5, rtol=1e-5)
    without = composed(tmp_path / "without", as_experts(folders), gate_mode="router_input")[MLP.format(1)]
    assert_close(result[1], without[1], atol=1e-6, rtol=1e-5)
    assert (result - without)[[0, 2]].abs().amax(1).min() > 0.01


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
    result = composed(tmp_path / "out", as_experts(folders, samples=samples), gate_mode="centroid")
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    for layer in range(2):
        rows, even = [], []
        for texts in TEXTS.values():
            means = seen_by(folders[0], f"model.layers.{layer}.mlp", texts)
            lengths = torch.tensor([len(tokenizer(text).input_ids) for text in texts], dtype=torch.float64)
            rows.append((means * lengths[:, None]).sum(0) / lengths.sum())
            even.append(means.mean(0))
        assert_close(result[MLP.format(layer)], torch.stack(rows).float(), atol=1e-5, rtol=1e-5)
        assert (result[MLP.format(layer)] - torch.stack(even)).abs().max() > 1e-3  # negative control: texts, not tokens


def test_centroid_gates_read_enough_tokens_and_not_all_samples(experts, tmp_path):
    folders, specs = experts(2), []
    for folder, word in zip(folders, ("owl", "sail"), strict=True):
        (tmp_path / f"{folder.name}.txt").write_text("\n".join(f"{'a ' * (i % 50)}{word}" for i in range(200)))
        specs.append({"source_model": str(folder), "samples": str(tmp_path / f"{folder.name}.txt")})

    def tokens_and_gate(out, **options):
        seen = Counted()
        compose({"experts": specs, "gate_mode": "centroid", **options}, tmp_path / out, progress=seen)
        assert seen.done == seen.total > 0
        return seen.total // 4, read_tensors(tmp_path / out)[MLP.format(1)]  # two routers, two experts

    tokens, gate = tokens_and_gate("default")
    assert 8 * 32 <= tokens < 8 * 32 + gate_texts.BEGINNING
    again, other = (tokens_and_gate(str(seed), seed=seed)[1] for seed in (42, 1))
    assert torch.equal(gate, again) and not torch.equal(gate, other)
    few, _ = tokens_and_gate("few", gate_tokens=20)
    whole, mean = tokens_and_gate("whole", gate_tokens=10**6)
    assert 20 <= few < 20 + gate_texts.BEGINNING < tokens < whole and (gate - mean).abs().max() < mean.abs().max()


class Counted(Progress):
    """The units of the gates."""

    total = done = 0

    def start(self, phase, total):
        self.total += total * (phase == "gates")

    def advance(self, phase, count):
        self.done += count * (phase == "gates")


def test_samples_are_selected_by_the_seed(tmp_path):
    file = tmp_path / "many.txt"
    file.write_text("\n".join(f"text {i}" for i in range(1000)))
    one, again, other = (gate_texts.read_samples(file, seed, 256) for seed in (1, 1, 2))
    assert len(one) == len(set(one)) == 256 and one == again != other
    numbers = [int(text.split()[1]) for text in one]
    assert numbers == sorted(numbers) and numbers[-1] > 900


def test_samples_end_at_line_feeds_only(tmp_path):
    """Line separators of Unicode (U+2028, U+0085) are allowed inside JSON strings and inside texts."""
    texts = ["one\u2028still one", "zwölf\x85 Möwen", "three\x0bstill three"]
    (tmp_path / "rows.jsonl").write_bytes(
        "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode() + b"\n"
    )
    assert gate_texts.read_samples(tmp_path / "rows.jsonl", 1, 256) == texts
    (tmp_path / "rows.txt").write_bytes("\r\n".join(texts).encode())
    assert gate_texts.read_samples(tmp_path / "rows.txt", 1, 256) == texts


def test_samples_are_read_by_the_kind_of_their_file(tmp_path):
    texts = ["one", "two"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for name, content in {
        "rows.json": lines,
        "array.json": json.dumps([{"text": text} for text in texts], indent=1),
        "ROWS.JSONL": lines,
        "ROWS.TXT": "\n".join(texts),
    }.items():
        (tmp_path / name).write_text(content)
        assert gate_texts.read_samples(tmp_path / name, 1, 256) == texts
    (tmp_path / "rows.md").write_text("one")
    with pytest.raises(MergeError, match="rows.md is neither JSON Lines nor text, by its name. Give a .jsonl or .txt"):
        gate_texts.read_samples(tmp_path / "rows.md", 1, 256)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": ""}, "line 1 needs text, prompt, or term and context: its text is empty. Remove the row."),
        (
            {"messages": []},
            "line 1 needs text, prompt, or term and context. Chats train experts; for gates and losses write each as",
        ),
        ({"txt": "a"}, "line 1 needs text, prompt, or term and context.$"),
    ],
)
def test_a_row_that_is_no_sample_says_what_to_do(row, message, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(MergeError, match=message):
        gate_texts.read_samples(path, 1, 256)


def unit(row):
    return row / row.norm()


def last_states(folder, texts):
    """The input of each layer at the last token, averaged over the texts: (layers, d)."""
    model, tokenizer = open_model(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = [
            model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False), output_hidden_states=True)
            for text in texts
        ]
    return torch.stack([torch.stack(outputs.hidden_states[:-1])[:, 0, -1].double() for outputs in found]).mean(0)


def test_hidden_gates_are_the_layers_input_at_the_last_token(experts, tmp_path):
    """As in mergekit-moe: of the layer, before attention and norm, minus that of the negative prompts, of length 1."""
    folders = experts(3)
    specs = as_experts(folders, negative=True)
    compose(recipe_of(specs, gate_mode="hidden"), tmp_path / "out")
    rows = [
        last_states(folders[0], POSITIVE[n]) - (last_states(folders[0], NEGATIVE[n]) if n in NEGATIVE else 0)
        for n in POSITIVE
    ]
    for layer in range(2):
        result = read_tensors(tmp_path / "out")[MLP.format(layer)]
        assert_close(result, torch.stack([unit(row[layer]) for row in rows]).float(), atol=1e-5, rtol=1e-5)


def test_cheap_embed_is_the_direction_of_the_summed_embeddings_at_every_router(experts, tmp_path):
    """As in mergekit-moe: the sum over all prompts, of length 1, minus that of the negative prompts, of length 1."""
    folders = experts(3)
    result = composed(tmp_path / "out", as_experts(folders, negative=True), gate_mode="cheap_embed")
    table, tokenizer = read_tensors(folders[0])["model.embed_tokens.weight"], AutoTokenizer.from_pretrained(folders[0])

    def summed(texts):
        return unit(torch.stack([table[tokenizer(text).input_ids].sum(0) for text in texts]).sum(0))

    rows = [unit(summed(POSITIVE[n]) - (summed(NEGATIVE[n]) if n in NEGATIVE else 0)) for n in POSITIVE]
    for gate in result.values():
        assert_close(gate, torch.stack(rows), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gate_mode", ["hidden", "cheap_embed"])
def test_routers_whose_input_is_not_a_hidden_state_need_router_input(experts, tmp_path, gate_mode):
    with pytest.raises(MergeError, match=f"{gate_mode} .*down_proj.*router_input"):
        composed(tmp_path / "out", as_experts(experts(3)), gate_mode=gate_mode, router_layers=["down_proj"])


def test_gates_are_rounded_to_the_mixtures_dtype(experts, tmp_path):
    specs = as_experts(experts(3))
    exact = composed(tmp_path / "exact", specs, gate_mode="router_input")
    rounded = composed(tmp_path / "rounded", specs, gate_mode="router_input", dtype="bfloat16")
    for name in exact:
        assert torch.equal(exact[name].bfloat16().float(), rounded[name])


def test_a_domain_mixture_has_its_first_gate_or_none(experts, tmp_path):
    specs = as_experts(experts(3))
    assert composed(tmp_path / "none", specs, routing_policy="domain") == {}
    result = composed(tmp_path / "first", specs, routing_policy="domain", gate_mode="router_input")
    everywhere = composed(tmp_path / "token", specs, gate_mode="router_input")
    assert list(result) == [MLP.format(0)] and torch.equal(result[MLP.format(0)], everywhere[MLP.format(0)])


def set_class(folder):
    edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")


def truncate(folder):
    edit_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    )


def name_token(folder):
    edit_json(folder / "tokenizer_config.json", eos_token="the")


def prepend_nothing(folder):
    edit_json(folder / "tokenizer_config.json", add_bos_token=False)


# Change to a tokenizer's files -> whether the tokenizers library alone gives the same ids.
TOKENIZERS = {
    "as saved": (lambda folder: None, True),
    "of transformers 4": (
        lambda folder: (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}'),
        True,
    ),
    "truncation": (truncate, True),
    "another class": (set_class, False),
    "a special token of words": (name_token, False),
    "another map": (lambda folder: (folder / "special_tokens_map.json").write_text('{"eos_token": "a"}'), False),
    "no bos": (prepend_nothing, False),
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_texts_are_encoded_as_by_transformers(change, make_expert, tmp_path):
    folder, (make, plain) = make_expert(tmp_path / "birds", 1, extra_tokens=("owl", "<x>")), TOKENIZERS[change]
    make(folder)
    assert (plain_tokenizer(folder, "llama") is not None) == plain
    encode, first = open_encoder(open_source("birds", str(folder)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert first == tokenizer.bos_token
    for text in ("the owl is awake", " <x>the</s> a", "</s>", "Ω the  sea\n"):
        for special in (True, False):
            assert encode(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]


STARTED = """
import json, sys
from merge_tools import compose
random, hidden = json.loads(sys.stdin.read())
compose(*random)
assert not {"torch", "transformers"} & set(sys.modules)
compose(*hidden)
assert "torch" in sys.modules and "transformers" not in sys.modules
"""


def test_composing_does_not_start_transformers(make_expert, tmp_path):
    """Also with fields that no class of transformers has."""
    folders = [make_expert(tmp_path / name, seed) for seed, name in enumerate(POSITIVE)]
    for folder in folders:
        edit_json(folder / "config.json", unk_token_id=3, _model_name_or_path="a run", made_by={"tool": [1, None]})
    recipes = [[recipe_of(as_experts(folders), gate_mode=mode), str(tmp_path / mode)] for mode in ("random", "hidden")]
    run_python("-c", STARTED, input=json.dumps(recipes))


def table_of(card):
    """The rows of the card's table of prompts: prompt -> shares."""
    lines = card.split("## Routing of the prompts")[1].split("##")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return rows[0][1:], {row[0]: [float(share) for share in row[1:]] for row in rows[2:]}


def test_the_card_shows_the_routing_of_prompts(experts, tmp_path):
    folders = experts(3)
    result = composed(tmp_path / "out", as_experts(folders), gate_mode="router_input")
    names, rows = table_of((tmp_path / "out" / "README.md").read_text())
    assert names == ["birds", "ships", "tools"]
    shown = [text for texts in POSITIVE.values() for text in texts[:2]]
    assert list(rows) == shown
    vectors = [seen_by(folders[0], f"model.layers.{layer}.mlp", shown).float() for layer in range(2)]
    for i, text in enumerate(shown):
        chosen = [int((result[MLP.format(layer)] @ vectors[layer][i]).argmax()) for layer in range(2)]
        assert rows[text] == [chosen.count(e) / 2 for e in range(3)]
    assert len({tuple(shares) for shares in rows.values()}) > 1
    composed(tmp_path / "random", as_experts(folders))
    assert "Routing of the prompts" not in (tmp_path / "random" / "README.md").read_text()


def test_the_card_omits_the_routing_of_prompts_after_the_experts_change(experts, tmp_path):
    folders = experts(4)
    composed(tmp_path / "out", as_experts(folders[:3]), gate_mode="router_input")
    new = {"source_model": str(folders[3]), "positive_prompts": ["a leaf of the oak"]}
    add(tmp_path / "out", new, tmp_path / "more")
    assert "Routing of the prompts" not in (tmp_path / "more" / "README.md").read_text()
