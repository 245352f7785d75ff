"""Masks of H^u and H^v for the pair formats of BERT and RoBERTa, from the collator and from the separators."""

import copy

import pytest
import torch
from tokenizers import processors

from modeling_hypernet import DataCollatorForTextPairs, HypernetConfig, tokenize_pairs
from modeling_hypernet.segments_hypernet import find_segments

from ..tools import as_rows

U, V = "graph cuts", "learning the network"  # three tokens each, or more
PAIRS = [(U, V), (None, V), ("of", "graph cut")]


@pytest.fixture(scope="module")
def tokenizers_by_kind(tiny_tokenizer):
    """BERT: [CLS] u [SEP] v [SEP]. RoBERTa: <s> u </s></s> v </s>."""
    ids = [(name, tiny_tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    roberta = copy.deepcopy(tiny_tokenizer)
    roberta.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ids
    )
    return {"bert": copy.deepcopy(tiny_tokenizer), "roberta": roberta}


@pytest.fixture(scope="module")
def config(tiny_tokenizer):
    return HypernetConfig(cls_token_id=tiny_tokenizer.cls_token_id, sep_token_id=tiny_tokenizer.sep_token_id)


def expected_masks(tokenizer, title, text):
    """From the tokenizer's `sequence_ids`."""
    encoded = tokenizer(title, text) if title else tokenizer(text)
    segments = encoded.sequence_ids(0)
    main = 1 if title else 0
    meta = [i == 0 or (title is not None and s == 0) for i, s in enumerate(segments)]
    return torch.tensor(meta), torch.tensor([s == main for s in segments])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("source", ["collator", "separators"])
def test_both_texts_of_each_row_are_found_exactly(kind, side, source, tokenizers_by_kind, config):
    tokenizer = tokenizers_by_kind[kind]
    tokenizer.padding_side = side
    if source == "collator":
        rows = as_rows(tokenize_pairs(*zip(*PAIRS, strict=True), tokenizer))
        batch = DataCollatorForTextPairs(tokenizer)(rows)
    else:
        batch = tokenizer.pad([dict(tokenizer(*filter(None, pair))) for pair in PAIRS], return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    u, v = find_segments(config, ids, mask, batch.get("meta_mask"), batch.get("main_mask"))
    assert ("meta_mask" in batch) == (source == "collator")
    for i, (title, text) in enumerate(PAIRS):
        real = mask[i].bool()
        for tokens, expected in zip((u, v), expected_masks(tokenizer, title, text), strict=True):
            assert torch.equal(tokens.mask[i, real], expected) and not tokens.mask[i, ~real].any()
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert v.gather(ids[..., None])[i, : len(words), 0].tolist() == words and v.lengths[i] == len(words)


def test_an_empty_title_or_text_in_a_pair_is_empty(tokenizers_by_kind, config):
    u, v = (tokenizers_by_kind["bert"](text, add_special_tokens=False)["input_ids"] for text in (U, V))
    cls, sep = config.cls_token_id, config.sep_token_id
    for ids, lengths in (([cls, sep, *v, sep], (1, len(v))), ([cls, *u, sep, sep], (1 + len(u), 0))):
        ids = torch.tensor([ids])
        assert tuple(int(tokens.lengths) for tokens in find_segments(config, ids, torch.ones_like(ids))) == lengths


def test_a_main_mask_alone_is_a_text_without_title(config):
    ids = torch.tensor([[config.cls_token_id, 7, 8, config.sep_token_id]])
    u, v = find_segments(config, None, torch.ones_like(ids), None, torch.tensor([[0, 0, 1, 0]]))
    assert (u.index[0, :1].tolist(), v.index[0, :1].tolist()) == ([0], [2])
