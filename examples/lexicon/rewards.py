"""Pairs of a gold definition and one of the model's own, or of two of its own, and a reward that prefers the first (LM-Lexicon, Eq. 7).

trl's RewardTrainer puts prompt and answer together by a chat template, or takes texts; here the prompt ends in EOS and must be that of
`encode_rows` to the token, and the rejected definitions come with the chosen one's prompt, so that the stock Trainer does.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from resumable import write_lines
from scores import bleu, without_full_stops
from transformers import Trainer

from modeling_lexicon import encode_rows
from modeling_lexicon.defining_lexicon import Definer


def same(a: str, b: str) -> bool:
    """Whether two definitions are one, but for case, spaces and the full stop."""
    return " ".join(a.lower().split()).rstrip(". ") == " ".join(b.lower().split()).rstrip(". ")


def rejected_of(samples: Sequence[dict], gold: str, kept: int) -> list[str]:
    """Samples, likeliest first -> the first `kept` that are not the gold definition, nor one another."""
    found: list[str] = []
    for sample in samples:
        text = sample["definition"]
        if text and not same(text, gold) and not any(same(text, other) for other in found):
            found.append(text)
    return found[:kept]


def gold_pair(samples: Sequence[dict], gold: str, kept: int) -> tuple[str, list[str]]:
    """The gold definition and the likeliest samples (Eq. 7): what is learnt is to tell the one kind from the other."""
    return gold, rejected_of(samples, gold, kept)


def nearest_pair(samples: Sequence[dict], gold: str, kept: int) -> tuple[str, list[str]]:
    """The sample of the largest BLEU against the gold definition, and the `kept` of the least: what a choice among samples needs."""
    metric, _ = bleu()
    texts = list(dict.fromkeys(sample["definition"] for sample in samples if sample["definition"]))
    near = {text: metric(without_full_stops(text), without_full_stops(gold)) for text in texts}
    chosen = max(texts, key=near.get, default="")
    further = [text for text in sorted(texts, key=near.get) if near[text] < near[chosen]]
    return chosen, further[:kept]


PAIRS = {"gold": gold_pair, "nearest": nearest_pair}


def write_pairs(
    model,
    tokenizer,
    rows: list[dict],
    path: Path,
    *,
    samples: int,
    kept: int,
    batch_size: int,
    seed: int,
    chosen: str = "gold",
    **options,
):
    """A line for each row: term, context, chosen, rejected (a list); resumable, see `write_lines`. `chosen`: a name in PAIRS."""
    definer = Definer(model, tokenizer, best_of=samples, num_definitions=samples, **options)

    def pairs_of(own: list[dict], start: int) -> list[dict]:
        pairs = []
        for row, found in zip(own, definer(own, first=start, batch_size=batch_size), strict=True):
            best, rejected = PAIRS[chosen](found if samples > 1 else [found], row["definition"], kept)
            pairs.append({"term": row["term"], "context": row["context"], "chosen": best, "rejected": rejected})
        return pairs

    write_lines(path, rows, pairs_of, batch_size=batch_size, seed=seed, desc="samples")


def read_pairs(path: Path) -> Iterator[tuple[dict, str, str]]:
    """-> row, chosen, rejected: a pair for each rejected definition."""
    for line in path.read_bytes().splitlines():  # texts would break at more signs than line ends
        row = json.loads(line)
        for rejected in row["rejected"]:
            yield row, row["chosen"], rejected


def encode_pairs(path: Path, tokenizer, max_length: int) -> tuple[dict[str, list], int]:
    """Pairs -> columns `chosen` and `rejected` of token ids, and how many were too long.

    Raises:
        ValueError: when none is left.
    """
    rows = [(row["term"], row["context"], chosen, rejected) for row, chosen, rejected in read_pairs(path)]
    columns: dict[str, list] = {"chosen": [], "rejected": []}
    for term, context, *both in rows:
        batch = {"term": [term] * 2, "context": [context] * 2, "definition": both}
        ids = encode_rows(batch, tokenizer, max_length)["input_ids"]
        if len(ids) == 2:
            columns["chosen"].append(ids[0])
            columns["rejected"].append(ids[1])
    if not columns["chosen"]:
        raise ValueError(f"None of the {len(rows):,} pairs in {path} has at most max_length={max_length} tokens.")
    return columns, len(rows) - len(columns["chosen"])


class PairCollator:
    """Rows of chosen and rejected ids -> `input_ids` and `attention_mask` (2 B, T): all chosen, then all rejected."""

    def __init__(self, tokenizer):
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = [row[name] for name in ("chosen", "rejected") for row in rows]
        T = max(map(len, ids))
        mask = torch.arange(T) < torch.tensor([len(own) for own in ids])[:, None]
        padded = torch.tensor([[*own, *[self.padding] * (T - len(own))] for own in ids])
        return {"input_ids": padded, "attention_mask": mask.long()}


def reward_loss(rewards: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r(x, chosen) - r(x, rejected)), the mean over pairs   (Eq. 7); rewards (2 B,), all chosen first."""
    chosen, rejected = rewards.float().chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


class RewardTrainer(Trainer):
    """The stock Trainer with Eq. 7 as its loss; predictions are a pair's rewards (B, 2)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = reward_loss(outputs.logits[:, 0])
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        pairs = torch.stack(outputs.logits[:, 0].float().chunk(2), 1)
        return loss, None if prediction_loss_only else pairs, torch.zeros(len(pairs), device=pairs.device)


def preferred(prediction) -> dict[str, float]:
    """`compute_metrics`: the share of pairs whose chosen definition has the larger reward."""
    chosen, rejected = prediction.predictions.T
    return {"accuracy": float((chosen > rejected).mean())}
