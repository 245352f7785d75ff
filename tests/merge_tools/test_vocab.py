"""Different vocabularies with `--allow vocab`: the source of each row, and the tokenizer that is written."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from merge_tools import MergeError, add, check, check_and_plan, compose, extract, load_experts, remove, tune, verify
from merge_tools.recipe import read_recipe

from .conftest import edit_json, logits_of, open_model, read_tensors, recipe_of, save_expert

EXTRA = ("<owl>", "<mast>", "<saw>")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXT = "the owl <mast> is a saw <saw>"


@pytest.fixture(scope="module")
def shorter_and_longer(tmp_path_factory):
    """Three experts with 45, 48 and 47 tokens, the additional ones at the end; a base with 45."""
    root = tmp_path_factory.mktemp("vocab")
    counts = {"base": 0, "birds": 0, "ships": 3, "tools": 2}
    return {
        name: save_expert(root / name, seed, extra_tokens=EXTRA[:count])
        for seed, (name, count) in enumerate(counts.items())
    }


def composed(out, folders, average, **options):
    recipe = recipe_of([folders[name] for name in ("birds", "ships", "tools")], average=average, **options)
    compose(recipe | {"base_model": str(folders["base"])}, out, allow=["vocab"])
    return out


@pytest.mark.parametrize("average", ["mean", "base"])
@pytest.mark.parametrize("weights", [None, [1, 3, 1], [1, 0, 0]])
def test_rows_that_some_experts_have_are_their_mean(shorter_and_longer, tmp_path, average, weights):
    folder = composed(tmp_path / "out", shorter_and_longer, average, weights=weights)
    mixture, dense = read_tensors(folder), {name: read_tensors(f) for name, f in shorter_and_longer.items()}
    share = dict(zip(("birds", "ships", "tools"), weights or [1, 1, 1], strict=True))

    def mean(tensor, names, rows):
        total = sum(share[n] for n in names)  # rows that only experts of no weight have are their plain mean
        parts = [dense[n][tensor][rows].double() * (share[n] / total if total else 1 / len(names)) for n in names]
        return sum(parts).float()

    for tensor in (EMBEDDINGS, HEAD):
        assert mixture[tensor].shape == (48, 32)
        common = dense["base"][tensor] if average == "base" else mean(tensor, share, slice(0, 45))
        assert_close(mixture[tensor][:45], common, atol=1e-7, rtol=1e-7)
        both, one = mean(tensor, ["ships", "tools"], slice(45, 47)), dense["ships"][tensor][47:]
        assert_close(mixture[tensor][45:47], both, atol=1e-7, rtol=1e-7)
        assert torch.equal(mixture[tensor][47:], one)
        assert not torch.allclose(mixture[tensor][45:47], dense["ships"][tensor][45:47], atol=1e-3) or weights
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 48


@pytest.mark.parametrize("average", ["mean", "base"])
def test_rows_that_only_the_base_has_are_the_bases(experts, tmp_path, average):
    base = save_expert(tmp_path / "base", 9, extra_tokens=EXTRA)
    folders = experts(2)
    compose(recipe_of(folders, base_model=str(base), average=average), tmp_path / "out", allow=["vocab"])
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(f) for f in (base, *folders)]
    assert torch.equal(mixture[EMBEDDINGS][45:], dense[0][EMBEDDINGS][45:])
    common = dense[0] if average == "base" else {EMBEDDINGS: (dense[1][EMBEDDINGS] + dense[2][EMBEDDINGS][:45]) / 2}
    assert_close(mixture[EMBEDDINGS][:45], common[EMBEDDINGS][:45])


def test_extra_rows_come_from_zero_weight_experts_before_the_base(shorter_and_longer, tmp_path):
    base = save_expert(tmp_path / "base", 9, extra_tokens=EXTRA)
    folders = [shorter_and_longer[name] for name in ("birds", "ships")]
    compose(recipe_of(folders, base_model=str(base), weights=[1, 0]), tmp_path / "out", allow=["vocab"])
    mixture, birds, ships = (read_tensors(f)[EMBEDDINGS] for f in (tmp_path / "out", *folders))
    assert torch.equal(mixture, torch.cat([birds, ships[45:]]))


def test_the_longest_base_is_copied_unchanged(experts, tmp_path):
    """It is copied as a whole inside the kernel, although other sources have fewer rows."""
    base = save_expert(tmp_path / "base", 9, extra_tokens=EXTRA)
    plan = check_and_plan(recipe_of(experts(2), base_model=str(base), average="base"), allow=["vocab"])
    assert [t.name for t in plan.tensors if t.values is None and t.copy_source is None] == []
    averaged = check_and_plan(recipe_of(experts(2), base_model=str(base)), allow=["vocab"])
    assert EMBEDDINGS in [t.name for t in averaged.tensors if t.values is None and t.copy_source is None]


@pytest.mark.parametrize("tied", [False, True])
def test_the_longest_tokenizer_is_written_and_works(shorter_and_longer, tmp_path, tied):
    folders = shorter_and_longer
    if tied:
        counts = {"base": 0, "birds": 0, "ships": 3, "tools": 2}
        folders = {
            n: save_expert(tmp_path / n, s, extra_tokens=EXTRA[:c], tied=True)
            for s, (n, c) in enumerate(counts.items())
        }
    folder = composed(tmp_path / "out", folders, "mean")
    ours, ships, birds = (AutoTokenizer.from_pretrained(f) for f in (folder, folders["ships"], folders["birds"]))
    ids = ours(TEXT).input_ids
    assert len(ours) == 48 and ids == ships(TEXT).input_ids != birds(TEXT).input_ids
    assert 46 in ids and 47 in ids
    logits = logits_of(open_model(folder), torch.tensor([ids]))
    assert logits.shape == (1, len(ids), 48) and logits.isfinite().all()
    assert (HEAD in read_tensors(folder)) != tied


def test_different_vocabularies_need_allow_vocab(shorter_and_longer, tmp_path):
    recipe = recipe_of([shorter_and_longer[name] for name in ("birds", "ships", "tools")])
    report = check(recipe)
    assert not report.ok and {f.allow for f in report.errors} == {"vocab"}
    assert {f.subject for f in report.errors} == {"ships", "tools"}
    with pytest.raises(MergeError, match="--allow vocab"):
        compose(recipe, tmp_path / "out")
    assert compose(recipe, tmp_path / "out", allow=["vocab"])["warnings"]


def test_load_experts_pads_as_compose_does(shorter_and_longer, tmp_path):
    folder = composed(tmp_path / "out", shorter_and_longer, "mean", format="lexicon")
    names = ("birds", "ships", "tools")
    model = load_experts(
        [shorter_and_longer[name] for name in names], base_model=shorter_and_longer["base"], allow=["vocab"]
    )
    written = open_model(folder).state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in model.state_dict().items())
    assert model.config.vocab_size == 48


@pytest.mark.parametrize("average", ["mean", "base"])
def test_verify_repeats_the_padding(shorter_and_longer, tmp_path, average):
    folder = composed(tmp_path / "out", shorter_and_longer, average)
    result = verify(folder)
    assert result["ok"] and result["compared"]["shared"] == 15


def test_extract_from_a_padded_mixture_keeps_all_rows(shorter_and_longer, tmp_path):
    folder = composed(tmp_path / "out", shorter_and_longer, "base")
    shared = extract(folder, "birds", tmp_path / "birds")["shared"]
    tensors, own = read_tensors(tmp_path / "birds"), read_tensors(shorter_and_longer["birds"])
    assert torch.equal(tensors[EMBEDDINGS], read_tensors(folder)[EMBEDDINGS])
    assert open_model(tmp_path / "birds").config.vocab_size == 48
    base = read_tensors(shorter_and_longer["base"])
    gaps = [(base[name].double() - own[name].double()).abs().max().item() for name in base if ".mlp." not in name]
    assert shared["largest"] == max(gaps) and shared["differing"] == len(gaps)


@pytest.mark.parametrize("average", ["mean", "base"])
def test_a_longer_expert_is_added_and_removed(experts, tmp_path, average):
    """Without --recompose shared weights and their rows do not change; with it they equal a new compose."""
    folders, longer = experts(3), save_expert(tmp_path / "longer", 9, extra_tokens=EXTRA)
    recipe = recipe_of(folders, average=average, base_model=str(folders[0]))
    compose(recipe, tmp_path / "three")
    with pytest.raises(MergeError, match="--allow vocab"):
        add(tmp_path / "three", longer, tmp_path / "four")
    add(tmp_path / "three", longer, tmp_path / "four", allow=["vocab"])
    three, four = read_tensors(tmp_path / "three"), read_tensors(tmp_path / "four")
    assert torch.equal(three[EMBEDDINGS], four[EMBEDDINGS])
    result = verify(tmp_path / "four")
    assert result["ok"] and result["compared"]["shared"] == 15
    remove(tmp_path / "four", "birds", tmp_path / "others")
    assert verify(tmp_path / "others")["ok"]

    fresh = recipe_of([*folders, longer], average=average, base_model=str(folders[0]))
    compose(fresh, tmp_path / "fresh", allow=["vocab"])
    add(tmp_path / "three", longer, tmp_path / "again", allow=["vocab"], recompose=True)
    again = tmp_path / "again"
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "fresh" / "model.safetensors").read_bytes()
    assert len(AutoTokenizer.from_pretrained(again)) == 48
    remove(again, "tools", tmp_path / "still allowed", recompose=True)
    assert read_tensors(tmp_path / "still allowed")[EMBEDDINGS].shape[0] == 48


def other_tokens(folder):
    """Swaps two tokens in a folder's tokenizer: the same ids represent other texts."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["x"], vocab["z"] = vocab["z"], vocab["x"]
    path.write_text(json.dumps(content))


def test_with_allow_tokenizer_the_bases_is_written(experts, tmp_path):
    """Even if another tokenizer is longer, because its ids represent other texts."""
    base = experts(1)[0]
    other = save_expert(tmp_path / "other", 9, extra_tokens=EXTRA, vocab_size=45)
    other_tokens(other)
    with pytest.raises(MergeError, match="--allow tokenizer"):
        compose(recipe_of([base, other]), tmp_path / "out")
    compose(recipe_of([base, other]), tmp_path / "out", allow=["tokenizer"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    compose(recipe_of([other, base]), tmp_path / "turned", allow=["tokenizer"])
    assert (tmp_path / "turned" / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def two_named(tmp_path, **options):
    """A base with 45 tokens, and two experts that each give id 45 to a token of its own."""
    tokens = {"base": (), "ships": ("<mast>",), "tools": ("<saw>", "<file>")}
    return {
        name: save_expert(tmp_path / name, s, extra_tokens=t, **options) for s, (name, t) in enumerate(tokens.items())
    }


@pytest.mark.parametrize("same_rows", [True, False])
def test_one_id_for_two_tokens_is_an_error(tmp_path, same_rows):
    folders = two_named(tmp_path, **({"vocab_size": 48} if same_rows else {}))
    recipe = recipe_of([folders["ships"], folders["tools"]], base_model=str(folders["base"]), average="mean")
    (error,) = check(recipe, allow=["vocab"]).errors
    assert error.subject == "tools" and error.allow == "tokenizer"
    assert "ships" in error.message and ("'<mast>'" in error.message or "'<saw>'" in error.message)
    assert check(recipe, allow=["vocab", "tokenizer"]).ok


@pytest.mark.parametrize("average", ["mean", "base", "ties"])
def test_a_padded_row_belongs_to_the_experts_with_its_token(tmp_path, average):
    folders = two_named(tmp_path, vocab_size=48)
    recipe = recipe_of([folders["ships"], folders["tools"]], base_model=str(folders["base"]), average=average)
    compose(recipe, tmp_path / "out", allow=["vocab", "tokenizer"])
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<mast>") == 45
    mixture, base, ships, tools = (read_tensors(f) for f in (tmp_path / "out", *folders.values()))
    for tensor in (EMBEDDINGS, HEAD):
        assert torch.equal(mixture[tensor][45], ships[tensor][45])
        rest = base[tensor] if average == "base" else (ships[tensor] + tools[tensor]) / 2
        if average != "ties":
            assert_close(mixture[tensor][46:], rest[46:])  # rows of no token
            assert_close(mixture[tensor][:45], rest[:45])
    assert verify(tmp_path / "out")["ok"]
    compose(recipe, tmp_path / "turned", allow=["vocab", "tokenizer"], tokenizer_source="tools")
    turned = read_tensors(tmp_path / "turned")
    assert torch.equal(turned[EMBEDDINGS][45:47], tools[EMBEDDINGS][45:47])
    assert verify(tmp_path / "turned")["ok"]


def test_a_new_token_of_two_experts_is_their_mean(tmp_path):
    """Not the base's row, and not that of an expert which has the row, but not the token."""
    counts = {"base": 0, "birds": 0, "ships": 2, "tools": 1}
    folders = {
        n: save_expert(tmp_path / n, s, extra_tokens=EXTRA[:c], vocab_size=48)
        for s, (n, c) in enumerate(counts.items())
    }
    folder = composed(tmp_path / "out", folders, "mean", weights=[5, 3, 1])
    mixture, ships, tools = (read_tensors(f)[EMBEDDINGS] for f in (folder, folders["ships"], folders["tools"]))
    assert_close(mixture[45], (3 * ships[45] + tools[45]) / 4)
    assert torch.equal(mixture[46], ships[46])


def chat_expert(folder, seed, end, **options):
    """An expert with its own end of text, chat template and temperature."""
    save_expert(folder, seed, extra_tokens=[end] if end != "</s>" else (), **options)
    edit_json(folder / "tokenizer_config.json", eos_token=end)
    (folder / "chat_template.jinja").write_text(f"{{{{ messages }}}}{end}")
    ids = 2 if end == "</s>" else 45
    edit_json(folder / "config.json", eos_token_id=ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "temperature": 0.5 + seed}))
    return folder


@pytest.fixture
def chat(tmp_path):
    return {
        name: chat_expert(tmp_path / name, s, end)
        for s, (name, end) in enumerate({"plain": "</s>", "chat": "<end>"}.items())
    }


def written(out):
    """What decides the end of a text in a mixture: (eos_token, template, generation, configuration, rows)."""
    read = {
        name: json.loads((out / f"{name}.json").read_text())
        for name in ("tokenizer_config", "generation_config", "config")
    }
    template = (out / "chat_template.jinja").read_text()
    end = read["tokenizer_config"]["eos_token"]
    return (
        end,
        template[-5:],
        read["generation_config"]["eos_token_id"],
        read["config"]["eos_token_id"],
        read["config"]["vocab_size"],
    )


@pytest.mark.parametrize(
    "source, expected",
    [
        (None, ("<end>", "<end>", 2, 2, 46)),
        ("union", ("<end>", "<end>", 2, 2, 46)),
        ("base", ("</s>", "}</s>", 2, 2, 45)),
        ("plain", ("</s>", "}</s>", 2, 2, 45)),
        ("chat", ("<end>", "<end>", 45, 45, 46)),
    ],
)
def test_what_is_written_is_what_the_warnings_say(chat, tmp_path, source, expected):
    recipe = recipe_of(chat.values(), base_model=str(chat["plain"]), average="base", tokenizer_source=source)
    result = compose(recipe, tmp_path / "out", allow=["vocab"])
    assert written(tmp_path / "out") == expected
    assert read_tensors(tmp_path / "out")[EMBEDDINGS].shape[0] == expected[-1]
    assert verify(tmp_path / "out")["ok"]
    owner = "chat" if expected[0] == "<end>" else source
    (warning,) = [w for w in result["warnings"] if "chat_template" in w]
    assert warning.startswith("plain: " if owner == "chat" else "chat: ") and f"Those of {owner} are written" in warning
    other_ids = [w for w in result["warnings"] if "tokenizer_source: chat" in w]
    assert len(other_ids) == (source in (None, "union"))  # the end of its texts is not the configuration's
    (ids,) = [w for w in result["warnings"] if "eos_token_id is" in w]
    assert f"the output has {expected[3]}" in ids


def test_tokenizer_source_must_be_a_source_with_a_tokenizer(chat, tmp_path):
    recipe = recipe_of(chat.values(), base_model=str(chat["plain"]))
    assert read_recipe(recipe).tokenizer_source is None
    assert read_recipe(recipe, tokenizer_source=str(chat["chat"])).tokenizer_source == "chat"  # as in mergekit
    with pytest.raises(MergeError, match="tokenizer_source.*3"):
        read_recipe(recipe, tokenizer_source=3)
    (error,) = check(recipe, tokenizer_source="cat", allow=["vocab"]).errors
    assert "'cat'" in error.message and "'chat'" in error.message
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (chat["plain"] / name).unlink()
    (error,) = check(recipe, tokenizer_source="base", allow=["vocab"]).errors
    assert "tokenizer_source: base has no tokenizer" in error.message


def test_a_union_needs_one_tokenizer_with_all_tokens(chat, tmp_path):
    other = save_expert(tmp_path / "other", 5, extra_tokens=["<file>", "<saw>"])
    recipe = recipe_of([*chat.values(), other], tokenizer_source="union")
    assert not check(recipe, allow=["vocab"]).ok


def test_the_expert_with_the_tokenizer_stays(chat, tmp_path, experts):
    recipe = recipe_of([*chat.values(), experts(1)[0]], tokenizer_source="chat")
    compose(recipe, tmp_path / "out", allow=["vocab"])
    with pytest.raises(MergeError, match="'chat' provides the tokenizer"):
        remove(tmp_path / "out", "chat", tmp_path / "less")
    remove(tmp_path / "out", "plain", tmp_path / "less")
    assert written(tmp_path / "less")[:4] == ("<end>", "<end>", 45, 45)


def test_additional_chat_templates_travel_and_are_compared(experts, tmp_path):
    folders = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in experts(3)]
    for number, folder in enumerate(folders):
        (folder / "additional_chat_templates").mkdir()
        for name in ("rag", "tool_use"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name} {number * (name == 'rag')}")
    report = check(recipe_of(folders))
    assert [f.subject for f in report.warnings if "additional_chat_templates/rag.jinja differ" in f.message] == [
        "ships",
        "tools",
    ]
    assert not any("tool_use" in f.message for f in report.warnings)
    out = tmp_path / "out"
    compose(recipe_of(folders), out, tokenizer_source="ships")
    expected = {"rag": "rag 1", "tool_use": "tool_use 0"}

    def stored(folder):
        assert AutoTokenizer.from_pretrained(folder).chat_template == expected
        return {file.stem: file.read_text() for file in (folder / "additional_chat_templates").iterdir()}

    assert stored(out) == expected and verify(out)["ok"]
    remove(out, "tools", tmp_path / "less")
    extract(out, "birds", tmp_path / "dense")
    (tmp_path / "texts.txt").write_text("the birds\nthe ships\n" * 8)
    tune(out, tmp_path / "tuned", {"birds": tmp_path / "texts.txt"}, steps=1)
    assert all(stored(tmp_path / name) == expected for name in ("less", "dense", "tuned"))
    (out / "additional_chat_templates" / "rag.jinja").write_text("other")
    assert verify(out)["faults"] == ["additional_chat_templates/rag.jinja has changed since the merge."]


def test_a_merge_that_was_interrupted_among_its_templates_resumes(experts, tmp_path, monkeypatch):
    folders = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in experts(2)]
    (folders[0] / "additional_chat_templates").mkdir()
    (folders[0] / "additional_chat_templates" / "rag.jinja").write_text("rag")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupt)
        compose(recipe_of(folders), tmp_path / "out")
    assert (tmp_path / ".out.partial" / "additional_chat_templates" / "rag.jinja").is_file()
    foreign = tmp_path / ".out.partial" / "additional_chat_templates" / "mine.jinja"
    foreign.write_text("mine")
    with pytest.raises(MergeError, match="additional_chat_templates/mine.jinja"):
        compose(recipe_of(folders), tmp_path / "out", resume=True)
    assert foreign.read_text() == "mine"
    foreign.unlink()
    compose(recipe_of(folders), tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").read_text() == "rag"


def interrupt(*_):
    raise KeyboardInterrupt
