"""Masks of H^u and H^v for the pair formats of BERT, RoBERTa and DeBERTa, from every source of segments."""

import copy

import pytest
import torch
from tokenizers import processors

from modeling_hypernet import DataCollatorForTextPairs, HypernetConfig, tokenize_pairs
from modeling_hypernet.segments_hypernet import LeftAlignedTokens, find_segments, split_segments

U, V = "graph cuts", "learning the network"  # three tokens each, or more


@pytest.fixture(scope="module")
def tokenizers_by_kind(tiny_tokenizer):
    """BERT and DeBERTa: [CLS] u [SEP] v [SEP], with types. RoBERTa: <s> u </s></s> v </s>, without."""
    ids = [(name, tiny_tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    actual = {kind: copy.deepcopy(tiny_tokenizer) for kind in ("bert", "deberta", "roberta")}
    for kind in ("bert", "deberta"):
        actual[kind].model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    actual["roberta"].backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ids
    )
    actual["roberta"].model_input_names = ["input_ids", "attention_mask"]
    return actual


@pytest.fixture(scope="module")
def config(tiny_tokenizer):
    return HypernetConfig(cls_token_id=tiny_tokenizer.cls_token_id, sep_token_id=tiny_tokenizer.sep_token_id)


def expected_masks(tokenizer, title, text):
    """From the tokenizer's `sequence_ids`."""
    encoded = tokenizer(title, text) if title else tokenizer(text)
    segments = encoded.sequence_ids(0)
    main = 1 if title else 0
    meta = [i == 0 or (title is not None and s == 0) for i, s in enumerate(segments)]
    return torch.tensor([meta]), torch.tensor([[s == main for s in segments]])


@pytest.mark.parametrize("kind", ["bert", "deberta", "roberta"])
@pytest.mark.parametrize("title", [U, None])
@pytest.mark.parametrize("source", ["collator", "types", "separators"])
def test_both_texts_are_found_exactly(kind, title, source, tokenizers_by_kind, config):
    tokenizer = tokenizers_by_kind[kind]
    expected = expected_masks(tokenizer, title, V)
    if source == "collator":
        row = DataCollatorForTextPairs(tokenizer)(
            [{k: v[0] for k, v in tokenize_pairs([title], [V], tokenizer).items()}]
        )
    else:
        row = dict(tokenizer(*filter(None, (title, V)), return_tensors="pt"))
        if source == "separators":
            row.pop("token_type_ids", None)
    assert ("meta_mask" in row) == (source == "collator")
    meta, main = find_segments(config, **row)
    assert torch.equal(meta, expected[0]) and torch.equal(main, expected[1])
    u, v = split_segments(meta, main)
    words = tokenizer(V, add_special_tokens=False)["input_ids"]
    assert v.gather(row["input_ids"][..., None]).flatten().tolist() == words
    title_words = tokenizer(title, add_special_tokens=False)["input_ids"] if title else []
    assert u.gather(row["input_ids"][..., None]).flatten().tolist() == [tokenizer.cls_token_id, *title_words]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_of_a_batch_has_its_own_segments(kind, side, tokenizers_by_kind, config):
    tokenizer = copy.deepcopy(tokenizers_by_kind[kind])
    tokenizer.padding_side = side
    pairs = [(U, V), (None, V), ("of", "graph cut")]
    singles = [tokenizer(*filter(None, pair)) for pair in pairs]
    batch = tokenizer.pad([dict(single) for single in singles], return_tensors="pt")
    meta, main = find_segments(config, **batch)
    for i, (title, text) in enumerate(pairs):
        real = batch["attention_mask"][i].bool()
        expected = expected_masks(tokenizer, title, text)
        assert torch.equal(meta[i, real], expected[0][0]) and torch.equal(main[i, real], expected[1][0])
        assert not meta[i, ~real].any() and not main[i, ~real].any()
    split_segments(meta, main)


def test_an_empty_title_or_text_in_a_pair_is_empty(tokenizers_by_kind, config):
    tokenizer = tokenizers_by_kind["bert"]
    meta, main = find_segments(config, **tokenizer("", V, return_tensors="pt"))
    assert meta.sum() == 1 and main.sum() == len(tokenizer(V, add_special_tokens=False)["input_ids"])
    title = tokenizer(U, add_special_tokens=False)["input_ids"]
    row = torch.tensor([[config.cls_token_id, *title, config.sep_token_id, config.sep_token_id]])
    for types in (None, torch.tensor([[0] * (len(title) + 2) + [1]])):
        meta, main = find_segments(config, row, torch.ones_like(row), types)
        assert meta.sum() == 1 + len(title) and main.sum() == 0
    with pytest.raises(ValueError, match="Text 1 is empty"):
        tokenize_pairs([U, U], [V, " "], tokenizer)


def test_a_meta_mask_alone_is_enough(tokenizers_by_kind, config):
    tokenizer = tokenizers_by_kind["roberta"]
    row = tokenizer(U, V, return_tensors="pt")
    expected = expected_masks(tokenizer, U, V)
    actual = find_segments(config, **row, meta_mask=expected[0].long())
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_a_pair_that_lost_its_separator_is_named(tokenizers_by_kind, config):
    row = dict(tokenizers_by_kind["bert"](["a b c d", U], ["c d", V], padding=True, return_tensors="pt"))
    separator = (row["input_ids"][1] == config.sep_token_id).int().argmax()
    lost = {name: torch.cat([x[:, :separator], x[:, separator + 1 :]], 1) for name, x in row.items()}
    meta, main = find_segments(config, **lost)
    with pytest.raises(ValueError, match="row 1 .*without a separator"):
        split_segments(meta, main)


def test_masks_of_another_shape_and_unknown_separators_get_an_error(tokenizers_by_kind, config):
    row = tokenizers_by_kind["bert"](U, V, return_tensors="pt")
    with pytest.raises(ValueError, match=r"meta_mask has the shape \(1, 3\)"):
        find_segments(config, **row, meta_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="inputs_embeds.*main_mask"):
        find_segments(config, None, row["attention_mask"])
    with pytest.raises(ValueError, match="config.sep_token_id"):
        find_segments(HypernetConfig(), **row)


def test_tokens_are_left_aligned_and_scattered_back():
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]).bool()
    x = torch.arange(1.0, 16.0).view(3, 5, 1)
    tokens = LeftAlignedTokens(mask, 3)
    actual = tokens.gather(x)
    assert actual[..., 0].tolist() == [[2, 4, 5], [0, 0, 0], [11, 15, 0]] and tokens.lengths.tolist() == [3, 0, 2]
    assert torch.equal(tokens.scatter(actual), x * mask[..., None])
