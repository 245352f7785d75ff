"""Pairs of definitions, and a reward model that prefers the first of each pair (LM-Lexicon, Eq. 7).

trl's RewardTrainer joins prompt and answer by a chat template, or takes texts. Here the prompt ends in EOS and must have the
same tokens as in `tokenize_definitions`, and so the stock Trainer is used.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from modeling_lexicon import tokenize_definitions
from modeling_lexicon.generation_lexicon import DefinitionGenerator
from run_tools.jsonl import read_lines

from .scores import bleu, without_full_stops


def equal_definitions(a: str, b: str) -> bool:
    """Whether two definitions are equal except for case, spaces and the full stop."""
    return " ".join(a.lower().split()).rstrip(". ") == " ".join(b.lower().split()).rstrip(". ")


def select_rejected(samples: Sequence[dict], gold: str, kept: int) -> list[str]:
    """Samples, most likely first -> the first `kept` that differ from the gold definition and from one another."""
    rejected: list[str] = []
    for sample in samples:
        text = sample["definition"]
        if text and not equal_definitions(text, gold) and not any(equal_definitions(text, one) for one in rejected):
            rejected.append(text)
    return rejected[:kept]


def gold_pair(samples: Sequence[dict], gold: str, kept: int) -> tuple[str, list[str]]:
    """The gold definition over the most likely samples (Eq. 7). The reward learns to tell gold definitions from samples."""
    return gold, select_rejected(samples, gold, kept)


def nearest_pair(samples: Sequence[dict], gold: str, kept: int) -> tuple[str, list[str]]:
    """The sample with the highest BLEU over the `kept` with the lowest. The reward learns to rank samples."""
    metric, _ = bleu()
    texts = list(dict.fromkeys(sample["definition"] for sample in samples if sample["definition"]))
    scores = {text: metric(without_full_stops(text), without_full_stops(gold)) for text in texts}
    chosen = max(texts, key=scores.get, default="")
    rejected = [text for text in sorted(texts, key=scores.get) if scores[text] < scores[chosen]]
    return chosen, rejected[:kept]


PAIRS = {"gold": gold_pair, "nearest": nearest_pair}


def write_pairs(model, tokenizer, rows, file, *, samples, kept, batch_size, seed, chosen="gold", **options):
    """Writes term, context, chosen and a list `rejected` of each row; the options are those of `DefinitionGenerator`."""
    generator = DefinitionGenerator(model, tokenizer, best_of=samples, num_definitions=samples, **options)

    def make_pairs(batch: Sequence[dict], first: int) -> list[dict]:
        pairs = []
        for row, outputs in zip(batch, generator(batch, first=first, batch_size=batch_size), strict=True):
            best, rejected = PAIRS[chosen](outputs if samples > 1 else [outputs], row["definition"], kept)
            pairs.append({"term": row["term"], "context": row["context"], "chosen": best, "rejected": rejected})
        return pairs

    file.write(rows, make_pairs, batch_size=batch_size, seed=seed, desc="samples")
    file.finish_output()


def encode_pairs(path: Path, tokenizer, max_length: int) -> tuple[dict[str, list], int]:
    """Columns `chosen` and `rejected` of token ids, and the number of pairs too long; a `ValueError` if none is left."""
    pairs = [(row, rejected) for row in read_lines(path) for rejected in row["rejected"]]
    columns: dict[str, list] = {"chosen": [], "rejected": []}
    for row, rejected in pairs:
        definitions = [row["chosen"], rejected]
        batch = {"term": [row["term"]] * 2, "context": [row["context"]] * 2, "definition": definitions}
        ids = tokenize_definitions(batch, tokenizer, max_length)["input_ids"]
        if len(ids) == 2:
            columns["chosen"].append(ids[0])
            columns["rejected"].append(ids[1])
    if not columns["chosen"]:
        raise ValueError(f"All {len(pairs):,} pairs in {path} exceed max_length={max_length} tokens.")
    return columns, len(pairs) - len(columns["chosen"])


def collate_pairs(rows: list[dict], padding: int) -> dict[str, torch.Tensor]:
    """Rows of chosen and rejected ids -> `input_ids` and `attention_mask` (2 B, T): all chosen, then all rejected."""
    ids = [torch.tensor(row[name]) for name in ("chosen", "rejected") for row in rows]
    mask = pad_sequence([torch.ones_like(tokens) for tokens in ids], batch_first=True)
    return {"input_ids": pad_sequence(ids, batch_first=True, padding_value=padding), "attention_mask": mask}


def reward_loss(rewards: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r(x, chosen) - r(x, rejected)), the mean over pairs   (Eq. 7); rewards (2 B,), all chosen first."""
    chosen, rejected = rewards.float().chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


class RewardTrainer(Trainer):
    """The stock Trainer with Eq. 7 as its loss; predictions are the rewards of pairs (B, 2)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Eq. 7."""
        outputs = model(**inputs)
        loss = reward_loss(outputs.logits[:, 0])
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss, the rewards of each pair, and labels that only count the pairs."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        pairs = torch.stack(outputs.logits[:, 0].float().chunk(2), 1)
        return loss, None if prediction_loss_only else pairs, torch.zeros(len(pairs), device=pairs.device)


def pair_accuracy(prediction) -> dict[str, float]:
    """`compute_metrics`: the share of pairs whose chosen definition has the larger reward."""
    chosen, rejected = prediction.predictions.T
    return {"accuracy": float((chosen > rejected).mean())}
