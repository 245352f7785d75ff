"""`ExclusionLogitsProcessor`: a plain reference; `test_prompted_generation` generates with it."""

import pytest
import torch

from modeling_exhird import ExclusionLogitsProcessor

from .llamas import llama_tokenizer

SEPARATOR, MARK, V = 2, 3, 12


def split(ids: list[int]) -> list[list[int]]:
    """The phrases of an answer; the last one may be unfinished or empty."""
    phrases: list[list[int]] = [[]]
    for token in ids:
        phrases[-1].append(token)
        if token in (SEPARATOR, MARK):
            phrases.append([])
    return phrases


def excluded(answer: list[int], window: int) -> set[int]:
    """The reference: what the next token may not be."""
    *earlier, current = split(answer)
    if current or not window:
        return set()
    return {phrase[0] for phrase in (earlier if window < 0 else earlier[-window:])}


@pytest.mark.parametrize("window", [0, 1, 2, 4, -1])
def test_it_excludes_what_the_reference_excludes(window):
    draw = torch.Generator().manual_seed(window)
    for length in range(9):
        prompt = torch.randint(0, V, (64, 5), generator=draw)
        answer = torch.randint(2, 7, (64, length), generator=draw)  # every second token ends a phrase
        scores = torch.randn(64, V, generator=draw)
        before = scores.clone()
        processor = ExclusionLogitsProcessor(None, [SEPARATOR, MARK], window, prompt_length=5)
        limited = processor(torch.cat([prompt, answer], 1), scores)
        assert torch.equal(scores, before)
        masked = [excluded(ids, window) for ids in answer.tolist()]
        expected = torch.tensor([[token in own for token in range(V)] for own in masked])
        assert torch.equal(limited, before.masked_fill(expected, -torch.inf))


def test_a_row_that_would_allow_no_token_keeps_its_scores():
    """Other processors allow the excluded tokens alone."""
    ids, scores = torch.tensor([[5, SEPARATOR], [6, SEPARATOR]]), torch.full((2, V), -torch.inf)
    scores[:, 5], scores[0, 7] = 1.0, 0.0
    limited = ExclusionLogitsProcessor(None, SEPARATOR, 1, prompt_length=0)(ids, scores)
    assert limited[0, 5] == -torch.inf and limited[0, 7] == 0 and torch.equal(limited[1], scores[1])
    again = torch.where(torch.arange(V) == 5, scores, -torch.inf)
    assert torch.equal(ExclusionLogitsProcessor(None, SEPARATOR, 1, prompt_length=0)(ids, again), again)


def test_separators_are_named_as_texts_or_ids():
    tokenizer = llama_tokenizer()
    (separator,), (mark,) = (tokenizer(text)["input_ids"] for text in (" ;", " |"))
    assert ExclusionLogitsProcessor(tokenizer, prompt_length=1).separators == [separator]
    assert ExclusionLogitsProcessor(tokenizer, [" ;", mark], prompt_length=1).separators == [separator, mark]
