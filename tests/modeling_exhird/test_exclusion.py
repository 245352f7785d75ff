"""`ExclusionLogitsProcessor`: a plain reference, and what `generate` of stock models writes with it."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from modeling_exhird import ExclusionLogitsProcessor

from .llamas import llama_tokenizer

PAD, EOS, SEPARATOR, MARK, V = 0, 1, 2, 3, 12
WINDOWS = (0, 1, 2, 4, -1)


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


def tiny_llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, initializer_range=0.6, **sizes, **ids, **options)).eval()


def tiny_bart():
    torch.manual_seed(0)
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder")
              for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()}  # fmt: skip
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 4, "decoder_start_token_id": 4}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=V, d_model=32, init_std=0.6, forced_eos_token_id=None, **halves, **ids)
    ).eval()


def inputs():
    """Prompts that contain separators, the second one padded."""
    ids = torch.tensor([[5, SEPARATOR, 6, 7, MARK, 8], [PAD, PAD, 6, SEPARATOR, 6, 9]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@pytest.mark.parametrize("window", WINDOWS)
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
        for row, (ids, values) in enumerate(zip(answer.tolist(), limited, strict=True)):
            masked = excluded(ids, window)
            assert set((values == -torch.inf).nonzero().flatten().tolist()) == masked
            kept = [i for i in range(V) if i not in masked]
            assert torch.equal(values[kept], before[row, kept])


def test_a_row_that_would_allow_no_token_keeps_its_scores():
    """Other processors allow the excluded tokens alone."""
    ids, scores = torch.tensor([[5, SEPARATOR], [6, SEPARATOR]]), torch.full((2, V), -torch.inf)
    scores[:, 5] = 1.0
    limited = ExclusionLogitsProcessor(None, SEPARATOR, 1, prompt_length=0)(ids, scores)
    assert torch.equal(limited, scores)
    scores[0, 7] = 0.0
    limited = ExclusionLogitsProcessor(None, SEPARATOR, 1, prompt_length=0)(ids, scores)
    assert limited[0, 5] == -torch.inf and limited[0, 7] == 0 and torch.equal(limited[1], scores[1])


SEARCHES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 16},
    "beams": {"num_beams": 4, "num_return_sequences": 4},
}


@pytest.mark.parametrize(
    "kind, search", [("causal", "greedy"), ("causal", "sampling"), ("causal", "beams"), ("seq2seq", "sampling")]
)
def test_phrases_of_stock_models_do_not_begin_as_recent_ones(kind, search):
    model, batch, repeats = tiny_llama() if kind == "causal" else tiny_bart(), inputs(), 0
    length = batch["input_ids"].shape[1] if kind == "causal" else 1
    options = {"max_new_tokens": 40, **SEARCHES[search]}
    for window in WINDOWS:
        torch.manual_seed(1)
        exclusion = ExclusionLogitsProcessor(None, [SEPARATOR, MARK], window, prompt_length=length)
        sequences = model.generate(**batch, **options, logits_processor=[exclusion])
        if not window:
            torch.manual_seed(1)
            assert torch.equal(sequences, model.generate(**batch, **options))
        for ids in sequences[:, length:].tolist():
            answer = ids[: ids.index(EOS)] if EOS in ids else ids
            first = [phrase[0] for phrase in split(answer) if phrase]
            near = [first[max(i - window, 0) if window > 0 else 0 : i] for i in range(len(first))]
            repeats += not window and any(token in before[-1:] for token, before in zip(first, near, strict=True))
            assert not window or all(token not in before for token, before in zip(first, near, strict=True))
    if search == "sampling":
        assert repeats  # without exclusion


def test_a_batch_is_excluded_as_its_rows_are():
    model, batch = tiny_llama(), inputs()
    processor = ExclusionLogitsProcessor(None, [SEPARATOR, MARK], 2, prompt_length=6)
    together = model.generate(**batch, max_new_tokens=30, do_sample=False, logits_processor=[processor])
    for row in range(2):
        start = int(batch["attention_mask"][row].argmax())
        alone = {name: x[row : row + 1, start:] for name, x in batch.items()}
        shorter = ExclusionLogitsProcessor(None, [SEPARATOR, MARK], 2, prompt_length=6 - start)
        ids = model.generate(**alone, max_new_tokens=30, do_sample=False, logits_processor=[shorter])[0, 6 - start :]
        assert together[row, 6:].tolist()[: len(ids)] == ids.tolist()


def test_separators_are_named_as_texts_or_ids():
    tokenizer = llama_tokenizer()
    (separator,), (mark,) = (tokenizer(text)["input_ids"] for text in (" ;", " |"))
    assert ExclusionLogitsProcessor(tokenizer, prompt_length=1).separators == [separator]
    assert ExclusionLogitsProcessor(tokenizer, [" ;", mark], prompt_length=1).separators == [separator, mark]
