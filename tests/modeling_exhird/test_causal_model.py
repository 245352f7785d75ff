"""`ExhirdForCausalLM`: its backbone, factors of low rank, checkpoints that share the backbone's file, and generation."""

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from modeling_exhird import ExhirdCausalConfig, ExhirdForCausalLM
from modeling_exhird.causal_data_exhird import PromptFormat
from modeling_exhird.low_rank_exhird import LowRankLinear

from .causal import BACKBONES, backbone_config, causal_tokenizer, fit, fitted, padded, tiny_causal
from .conftest import DOCUMENTS

LINEARS = 7  # of a layer


def prompts() -> list[list[int]]:
    documents = list(zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True))
    encoded = PromptFormat(causal_tokenizer(), tiny_causal().config).encode(documents, [128] * len(documents))
    return [prompt.input_ids for prompt in encoded]


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.fixture
def backbone(tmp_path):
    """A saved decoder with its tokenizer."""

    def save(kind="llama", **changes):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(backbone_config(kind, **changes)).eval()
        for part in (model, causal_tokenizer()):
            part.save_pretrained(tmp_path / "backbone")
        return tmp_path / "backbone", model

    return save


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_new_model_equals_its_backbone(kind, rank, backbone):
    folder, stock = backbone(kind, tie_word_embeddings=kind == "llama")
    model = ExhirdForCausalLM.from_backbone(folder, adapter_rank=rank, exclusion_window=4).eval()
    batch = padded(prompts())
    assert torch.equal(logits(model, batch), logits(stock, batch))
    assert model.config.exclusion_window == 4 and model.config.eos_token_id == stock.config.eos_token_id
    (separator,), (mark,) = (causal_tokenizer()(text)["input_ids"] for text in (" ;", " |"))
    assert model.config.marks == [separator, mark]
    factors = {name for name in model.state_dict() if "lora_" in name}
    assert {name.removeprefix("backbone.") for name in model.state_dict()} - {
        name.removeprefix("backbone.") for name in factors
    } == set(stock.state_dict())
    assert len(factors) == (0 if rank is None else 2 * 2 * LINEARS)


def test_only_factors_are_trained_and_they_can_be_merged(tmp_path):
    model = fit(tiny_causal(adapter_rank=2), steps=5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all((p.grad is not None) == ("lora_" in name) or p.grad is None for name, p in model.named_parameters())
    initial = dict(tiny_causal(adapter_rank=2).named_parameters())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, initial[name])}
    assert changed == trained
    batch = padded(prompts())
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    again = ExhirdForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, batch), expected)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    merged = again.merge_adapter()
    assert merged.config.adapter_rank is None and not any(isinstance(m, LowRankLinear) for m in merged.modules())
    torch.testing.assert_close(logits(merged, batch), expected, rtol=0, atol=1e-4)
    merged.backbone.save_pretrained(tmp_path / "llama")
    assert torch.equal(
        logits(LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval(), batch), logits(merged, batch)
    )


def share(folder, source, model) -> None:
    """Writes a checkpoint that lists the backbone's own file, with its own names, and a small one of the factors."""
    factors = {
        name.removeprefix("backbone."): p.contiguous() for name, p in model.state_dict().items() if "lora_" in name
    }
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    save_file(factors, folder / "factors.safetensors", {"format": "pt"})
    shutil.copyfile(source / "model.safetensors", folder / "backbone.safetensors")
    parts = {"backbone.safetensors": load_file(source / "model.safetensors"), "factors.safetensors": factors}
    size = sum(p.numel() * p.element_size() for part in parts.values() for p in part.values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "options", [{"key_mapping": {r"^(model|lm_head)\.": r"backbone.\1."}}, {}], ids=["mapped", "plain"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_shares_the_backbones_file(tied, options, backbone, tmp_path):
    folder, _ = backbone(tie_word_embeddings=tied)
    model = fit(ExhirdForCausalLM.from_backbone(folder, adapter_rank=2, max_source_length=128), steps=3)
    share(tmp_path / "shared", folder, model)
    for opens in (ExhirdForCausalLM, AutoModelForCausalLM):
        again = opens.from_pretrained(tmp_path / "shared", **options)
        batch = padded(prompts())
        assert type(again) is ExhirdForCausalLM and torch.equal(logits(again, batch), logits(model, batch))
        again.save_pretrained(tmp_path / "again")
        copy = ExhirdForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(logits(copy, batch), logits(model, batch))
        saved = load_file(tmp_path / "again" / "model.safetensors")
        assert options or all(name.startswith("backbone.") for name in saved)  # transformers maps names back


def test_a_tokenizer_without_the_marks_is_named(backbone, tmp_path):
    folder, _ = backbone()
    model = ExhirdForCausalLM.from_backbone(folder, separator_token_id=7, absent_token_id=8)
    assert model.config.marks == [7, 8]
    unmarked = ExhirdForCausalLM(ExhirdCausalConfig(text_config=backbone_config()))
    with pytest.raises(ValueError, match="separator_token_id=None"):
        unmarked.generate(**padded(prompts()[:1]), max_new_tokens=2)
    with pytest.raises(ValueError, match="adapter_rank=2 is not supported with a quantization_config"):
        ExhirdForCausalLM.from_backbone(folder, adapter_rank=2, quantization_config=object())
    with pytest.raises(ValueError, match="adapter_rank=2 already"):
        tiny_causal(adapter_rank=2).lora_config()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"exclusion_window": -2}, "exclusion_window=-2"),
        ({"adapter_rank": 0}, "adapter_rank=0"),
        ({"max_phrases": 0}, "max_phrases=0"),
        ({"prompt_template": "{text} {title}"}, "prompt_template"),
        ({"prompt_template": "{title}"}, "prompt_template"),
        ({"separator_token_id": 10**6}, "separator_token_id=1000000"),
        ({"separator_token_id": 5, "absent_token_id": 5}, "both 5"),
    ],
)
def test_values_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ExhirdCausalConfig(text_config=backbone_config(), **options)


def flat(ids, config) -> list[list[int]]:
    """The tokens of `generate_phrases` as one sequence per document."""
    ends, rows = {*config.marks, *config.ends}, []
    for document in ids.tolist():
        row: list[int] = []
        for phrase in document:
            if row and row[-1] in config.ends:
                break
            row += phrase[: next(i for i, token in enumerate(phrase) if token in ends) + 1]
        rows.append(row)
    return rows


@pytest.mark.parametrize("window", [0, 1, -1])
def test_phrase_by_phrase_is_greedy_search(window):
    """With the window 0 also of the stock backbone."""
    model, batch = fitted(), padded(prompts())
    outputs = model.generate_phrases(**batch, exclusion_window=window, max_phrases=8, max_tokens_per_phrase=30)
    written, length = flat(outputs.ids, model.config), batch["input_ids"].shape[1]
    assert sum(row.count(mark) for row in written for mark in model.config.marks) > 4
    assert any(row[-1] in model.config.ends for row in written)
    runs = [model.generate(**batch, max_new_tokens=60, do_sample=False, exclusion_window=window)]
    runs += [] if window else [model.backbone.generate(**batch, max_new_tokens=60, do_sample=False)]
    for sequences in runs:
        for row, ids in zip(written, sequences[:, length:].tolist(), strict=True):
            assert row[:60] == ids[: len(row)]


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_kind_of_decoder_writes_what_generate_writes(kind):
    model, batch = tiny_causal(kind), padded(prompts())
    for window in (0, 2):
        options = {"max_phrases": 1, "max_tokens_per_phrase": 6, "exclusion_window": window}
        written, width = model.generate_phrases(**batch, **options).ids[:, 0, :6], batch["input_ids"].shape[1]
        expected = model.generate(**batch, max_new_tokens=6, do_sample=False, exclusion_window=window)[:, width:]
        ended = torch.isin(written, torch.tensor([*model.config.marks, *model.config.ends])).cumsum(1) > 0
        assert torch.equal(written.masked_fill(ended, 0), expected.masked_fill(ended, 0)) and not ended.all()


@pytest.mark.parametrize("beams", [1, 3])
def test_phrases_do_not_depend_on_the_batch_and_the_side_of_padding(beams):
    model, rows = fitted(), prompts()
    options = {"num_beams": beams, "exclusion_window": 2}
    expected = model.generate_phrases(**padded(rows), **options)
    other = model.generate_phrases(**padded(rows, "right"), **options)
    assert torch.equal(other.ids, expected.ids)
    torch.testing.assert_close(other.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)
    for number, row in enumerate(rows):
        alone = model.generate_phrases(torch.tensor([row]), **options)
        assert flat(alone.ids, model.config)[0] == flat(expected.ids, model.config)[number]
        count = alone.log_probs.shape[1]
        torch.testing.assert_close(alone.log_probs[0], expected.log_probs[number, :count], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_are_those_of_the_phrases(beams):
    """Of one forward pass over each answer."""
    model, rows = fitted(), prompts()
    outputs = model.generate_phrases(**padded(rows), num_beams=beams, exclusion_window=0, max_tokens_per_phrase=40)
    ends = {*model.config.marks, *model.config.ends}
    for prompt, ids, scores in zip(rows, flat(outputs.ids, model.config), outputs.log_probs, strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        each, at_ends = log_p[torch.arange(len(ids)), torch.tensor(ids)], log_p[:, list(ends)].logsumexp(1)
        expected = [0.0]
        for token, value, end in zip(ids, each.tolist(), at_ends.tolist(), strict=True):
            expected[-1] += end if token in ends else value
            if token in ends:
                expected.append(0.0)
        torch.testing.assert_close(scores[: len(expected) - 1], torch.tensor(expected[:-1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_the_score_of_a_phrase_does_not_depend_on_what_may_follow(beams):
    """The last phrase of a document, with and without a further one."""
    model, options = copy.deepcopy(fitted()), {"num_beams": beams, "exclusion_window": 0}
    with torch.no_grad():  # where EOS is likely, a separator is next
        weight = model.get_output_embeddings().weight
        weight[model.config.marks[0]] = 0.97 * weight[model.config.ends[0]]
    compared = 0
    for row in prompts():
        one = model.generate_phrases(torch.tensor([row]), **options)
        last = one.ids.shape[1] - 1
        if last + 2 > model.config.max_phrases:
            continue
        more = model.generate_phrases(torch.tensor([row]), min_phrases=last + 2, **options)
        length = int(torch.isin(one.ids[0, last], torch.tensor(model.config.ends)).nonzero()[0])
        same = torch.equal(more.ids[0, : last + 1, :length], one.ids[0, :, :length])
        if same and more.ids[0, last, length] in model.config.marks:  # a word may follow, too
            torch.testing.assert_close(more.log_probs[0, : last + 1], one.log_probs[0], rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared


def test_beams_find_phrases_of_higher_mean_probability():
    """The first phrase, which does not depend on earlier ones, against all hypotheses of up to two tokens."""
    model = tiny_causal(max_tokens_per_phrase=1, max_phrases=1)
    row = torch.tensor([prompts()[1]])
    wide = model.generate_phrases(row, num_beams=len(causal_tokenizer()))
    ends = torch.tensor([*model.config.marks, *model.config.ends])
    with torch.no_grad():
        first = model(row).logits[0, -1].log_softmax(-1)
    # one token and a certain separator, or an end at once
    assert wide.log_probs[0, 0] == pytest.approx(first.max().item(), abs=1e-4)
    assert wide.ids[0, 0, 0] == first.argmax() and (
        first.argmax() in ends or wide.ids[0, 0, 1] == model.config.marks[0]
    )


@pytest.mark.parametrize("beams", [1, 2])
def test_phrases_do_not_begin_as_recent_ones(beams):
    """Of an untrained model, which repeats itself."""
    model, batch, repeats = tiny_causal(), padded(prompts()), {}
    for window in (0, 1, 3, -1):
        options = {"exclusion_window": window, "num_beams": beams, "max_phrases": 9, "max_tokens_per_phrase": 2}
        first = [[phrase[0] for phrase in row] for row in model.generate_phrases(**batch, **options).ids.tolist()]
        size = 9 if window < 0 else window or 1
        repeats[window] = sum(row[i] in row[max(i - size, 0) : i] for row in first for i in range(len(row)))
    assert repeats.pop(0) and not any(repeats.values())


def test_limits_of_phrases_and_tokens():
    model, batch = fitted(), padded(prompts())
    outputs = model.generate_phrases(**batch, max_phrases=2, max_tokens_per_phrase=2)
    assert outputs.ids.shape[1] <= 2 and outputs.ids.shape[2] == 3
    ends = torch.tensor([*model.config.marks, *model.config.ends])
    assert torch.isin(outputs.ids[:, 0], ends).any(1).all()  # the limit ends a phrase
    for name in ("max_phrases", "max_tokens_per_phrase", "num_beams"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            model.generate_phrases(**batch, **{name: 0})


@pytest.mark.parametrize("beams", [1, 2])
def test_at_least_so_many_phrases(beams):
    model, batch = fitted(), padded(prompts())
    marks, ends = set(model.config.marks), set(model.config.ends)
    free = flat(model.generate_phrases(**batch, num_beams=beams, exclusion_window=0).ids, model.config)
    counts = [sum(token in marks | ends for token in row) for row in free]
    assert min(counts) < 5 and any(row[-1] in ends for row in free)
    for least in (0, 1, 5):
        options = {"min_phrases": least, "exclusion_window": 0, "num_beams": beams}
        written = flat(model.generate_phrases(**batch, **options).ids, model.config)
        for row, before, count in zip(written, free, counts, strict=True):
            assert sum(token in marks | ends for token in row) >= least
            assert row == before if count >= least else beams > 1 or row[: len(before) - 1] == before[:-1]
    for wrong, message in ((-1, "min_phrases=-1"), (6, "min_phrases=6 exceeds max_phrases=5")):
        with pytest.raises(ValueError, match=message):
            model.generate_phrases(**batch, min_phrases=wrong)


def test_two_threads_generate_what_one_does():
    model, batch = fitted(), padded(prompts())

    def run(window):
        return model.generate(**batch, max_new_tokens=20, do_sample=False, exclusion_window=window).tolist()

    expected = [run(window) for window in (0, -1)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [0, -1] * 2)) == expected * 2
