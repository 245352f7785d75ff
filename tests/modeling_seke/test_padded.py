"""The padded formulation that is exported equals the packed one in values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_seke import SekeConfig, SekeForTokenClassification
from modeling_seke.padded_seke import PaddedSeke

HEADS = [
    {}, {"rnn_type": "gru"}, {"use_moe": False}, {"use_rnn": False, "expert_init": "uniform"}, {"use_moe": False, "use_rnn": False},
    {"num_experts": 1, "num_experts_per_tok": 1}, {"num_experts": 8, "num_experts_per_tok": 3, "rnn_num_layers": 1},
    {"styles": ["tags", "words"]},
]  # fmt: skip
SIDES = ["left", "right", "between"]


def random_mask(rows: int, length: int, side: str) -> torch.Tensor:
    """(B, S): each row has 1 to S real tokens, the first row S."""
    lengths = torch.randint(1, length + 1, (rows,))
    lengths[0] = length
    real = torch.arange(length) < lengths[:, None]
    if side == "between":
        return torch.stack([row[torch.randperm(length)] for row in real]).long()
    return (real if side == "right" else real.flip(1)).long()


@pytest.fixture(name="build", scope="module")
def fixture_build(backbone_config):
    """build(**head) -> a model whose experts, router and labels differ from token to token, in evaluation mode."""

    def build(**head):
        torch.manual_seed(0)
        config = backbone_config("bert", max_position_embeddings=512)
        model = SekeForTokenClassification(SekeConfig(text_config=config, **head)).eval()
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone"):
                parameter.data += 0.1 * torch.randn_like(parameter)
        return model

    return build


def both(model, mask: torch.Tensor, padded: PaddedSeke | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the padded and of the packed formulation."""
    ids = torch.randint(5, 90, mask.shape)
    styles = torch.arange(len(mask)) % 3 if model.config.styles else None
    inputs = {"token_type_ids": torch.zeros_like(ids), "style_ids": styles}
    padded = padded or PaddedSeke(model)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **inputs)
        logits, _ = padded(ids, mask, *(inputs[name] for name in padded.inputs[2:]))
    return logits, expected.logits


@pytest.mark.parametrize("head", HEADS, ids=str)
@given(st.integers(1, 12), st.integers(1, 80), st.sampled_from(SIDES), st.booleans())
@settings(max_examples=6, deadline=None)
def test_every_head_and_size_equals_the_packed_one(build, head, rows, length, side, is_last_empty):
    mask = random_mask(rows + is_last_empty, length, side)
    mask[rows:] = 0  # a row without tokens
    logits, expected = both(build(**head), mask)
    assert not logits[rows:].any() and expected.abs().max() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_a_recurrent_encoder_that_reads_padding_would_be_seen(build, monkeypatch):
    model = build()
    padded, mask = PaddedSeke(model), random_mask(5, 23, "right")
    plain = padded.recurrent.forward
    monkeypatch.setattr(padded.recurrent, "forward", lambda x, lengths: plain(x, torch.full_like(lengths, x.shape[1])))
    logits, expected = both(model, mask, padded)
    assert (logits - expected).abs().max() > 1e-4
