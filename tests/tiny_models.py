"""A tiny model of every public class, with inputs: for tests of what all classes have in common."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import BartConfig, BertConfig, PreTrainedModel

from modeling_exhird import ExHirdConfig, ExHirdEncoder, ExHirdForKeyphraseGeneration
from modeling_hypernet import (
    HypernetConfig,
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    HypernetModel,
)
from modeling_lexicon import LexiconConfig, LexiconForCausalLM, LexiconForSequenceClassification, LexiconModel
from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
from modeling_seke import SekeConfig, SekeForTokenClassification

VOCABULARY, LENGTH = 130, 12


class Case(NamedTuple):
    """A class, a configuration of it, and the names of what its `forward` needs."""

    cls: type[PreTrainedModel]
    config: Callable
    inputs: tuple[str, ...]


def encoder_config() -> BertConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes)


def summariser_config() -> BartConfig:
    sizes = {"d_model": 16, "max_position_embeddings": 32, "pad_token_id": 1}
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
    }
    ids = {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return BartConfig(vocab_size=VOCABULARY, **sizes, **halves, **ids)


def seke_config() -> SekeConfig:
    return SekeConfig(text_config=encoder_config())


def hypernet_config() -> HypernetConfig:
    sizes = {"meta_size": 4, "meta_hidden_size": 8, "hidden_size": 8}
    labels = {0: "O", 1: "B-KEY", 2: "I-KEY"}
    return HypernetConfig(text_config=encoder_config(), cls_token_id=2, sep_token_id=3, id2label=labels, **sizes)


def exhird_config() -> ExHirdConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ExHirdConfig(vocab_size=VOCABULARY, max_phrases=3, **sizes)


def lexicon_config() -> LexiconConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LexiconConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=1, **sizes)


def moesumm_config() -> MoeSummConfig:
    return MoeSummConfig(
        text_config=summariser_config(), datasets=["news", "mail"], deputy_size=8, deputy_output_std=0.5
    )


TEXT = ("input_ids", "attention_mask")
PAIR = (*TEXT, "token_type_ids")
CASES = {
    case.cls.__name__: case
    for case in (
        Case(SekeForTokenClassification, seke_config, TEXT),
        Case(HypernetModel, hypernet_config, PAIR),
        Case(HypernetForTokenClassification, hypernet_config, (*PAIR, "word_start_mask")),
        Case(HypernetForSequenceClassification, hypernet_config, PAIR),
        Case(HypernetForQuestionAnswering, hypernet_config, PAIR),
        Case(ExHirdEncoder, exhird_config, TEXT),
        Case(ExHirdForKeyphraseGeneration, exhird_config, (*TEXT, "labels")),
        Case(MoeSummForConditionalGeneration, moesumm_config, (*TEXT, "decoder_input_ids", "dataset_ids")),
        Case(LexiconModel, lexicon_config, TEXT),
        Case(LexiconForCausalLM, lexicon_config, TEXT),
        Case(LexiconForSequenceClassification, lexicon_config, TEXT),
    )
}


def make_model(name: str) -> PreTrainedModel:
    """The model of a case in eval mode, always with the same weights."""
    torch.manual_seed(0)
    case = CASES[name]
    return case.cls(case.config()).eval()


def make_inputs(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, the second of which is padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (2, LENGTH), generator=draw)
    ids[:, 0], ids[:, 4], ids[:, -1] = 2, 3, 3
    mask = torch.ones_like(ids)
    mask[1, -3:], ids[1, -4], ids[1, -3:] = 0, 3, 1
    segments = (torch.arange(LENGTH) > 4).long().expand(2, -1).contiguous()
    phrases = torch.full((2, 3, 4), -100)
    phrases[:, 0], phrases[:, 1], phrases[:, 2, :1] = torch.tensor([5, 9, 10, 4]), torch.tensor([6, 11, 4, -100]), 3
    every = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": segments,
        "word_start_mask": segments * mask,
        "labels": phrases,
        "decoder_input_ids": ids[:, :6],
        "dataset_ids": torch.tensor([0, 1]),
    }
    return {name: every[name] for name in CASES[name].inputs}


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first tensor of the outputs that is not a loss."""
    with torch.no_grad():
        outputs = model(**inputs)
    for name in ("logits", "start_logits", "last_hidden_state"):
        if outputs.get(name) is not None:
            return outputs[name]
    return outputs[1]
