"""Different vocabularies with `--allow vocab`: the source of each row, and the tokenizer that is written."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from merge_tools import MergeError, add, check, check_and_plan, compose, extract, load_experts, remove, verify

from .conftest import logits_of, open_model, read_tensors, recipe_of, save_expert

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
    """Without --reaverage shared weights and their rows do not change; with it they equal a new compose."""
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
    add(tmp_path / "three", longer, tmp_path / "again", allow=["vocab"], reaverage=True)
    again = tmp_path / "again"
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "fresh" / "model.safetensors").read_bytes()
    assert len(AutoTokenizer.from_pretrained(again)) == 48
    remove(again, "tools", tmp_path / "still allowed", reaverage=True)
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
