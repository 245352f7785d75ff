"""A model with known outputs, and comparison of the pipeline's results."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

TEXT = "Graph cuts solve energy problems, and deep networks learn semi-supervised cuts. No 802.11 graph is cut."
LETTERS = "abcdefghjklmnopqrstuvwxyz"


class Lookup(PreTrainedModel):
    """Logits by a word's first piece: b and p begin a phrase, i and j go on, in each pair the first more surely.

    With `by_place` they also depend on the place in the window, so that it shows where a word was read.
    """

    config_class = BertConfig

    def __init__(self, config, tokenizer, by_place=False):
        super().__init__(config)
        self.by_place = by_place
        self.table = nn.Parameter(torch.tensor([[3.0, 0.0, 0.0]]).repeat(config.vocab_size, 1))
        for letter, label, logit in (("b", 1, 9.0), ("p", 1, 5.0), ("i", 2, 9.0), ("j", 2, 5.0)):
            self.table.data[tokenizer.convert_tokens_to_ids(letter), label] = logit
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, 1)  # the model's limit
        self.post_init()

    def forward(self, input_ids, **_):
        logits = self.table[input_ids]
        if self.by_place:
            place = torch.arange(input_ids.shape[1])
            logits = logits + torch.stack([torch.sin(place * n) for n in (1.0, 2.0, 3.0)], dim=-1) * 5
        return TokenClassifierOutput(logits=logits)


def names(phrases):
    return [phrase["keyphrase"] for phrase in phrases]


def assert_same(answers, others):
    """The same keyphrases in the same places; scores up to the last shown digit, which floating point may turn."""
    assert len(answers) == len(others)
    for answer, other in zip(answers, others, strict=True):
        one, two = (sorted(phrases, key=lambda phrase: phrase["start"]) for phrases in (answer, other))
        assert [(p["keyphrase"], p["start"], p["end"]) for p in one] == [
            (p["keyphrase"], p["start"], p["end"]) for p in two
        ]
        for p, q in zip(one, two, strict=True):
            assert p["score"] == pytest.approx(q["score"], abs=3e-6)
            assert [(m["start"], m["end"]) for m in p["mentions"]] == [(m["start"], m["end"]) for m in q["mentions"]]


def random_text(words, seed=0):
    rng = np.random.default_rng(seed)
    return " ".join("".join(rng.choice(list(LETTERS), rng.integers(1, 5))) for _ in range(words))
