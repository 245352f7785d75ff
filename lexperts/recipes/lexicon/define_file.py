"""Definitions of the terms of files: the model behind `lexperts define terms`."""

import json
from zlib import crc32

from run_tools.jsonl import missing_columns
from run_tools.processes import prepare_process

TASK = "definition-modeling"


def open_definer(name: str, reward_model: str | None, batch_size: int, device: str | None, seed: int, options: dict):
    """Loads a model -> a function from rows with a term and a context to definitions, for `run_over`.

    Args:
        reward_model: folder or Hub id of a sequence classifier that ranks samples.
        seed: of sampling. Each batch of rows has its own seed, so that samples do not depend on interruptions.
        options: of the pipeline definition-modeling.
    """
    import torch

    from run_tools.loading import open_model, open_pipeline

    prepare_process()
    define = open_pipeline(TASK, name, device=device, batch_size=batch_size)
    if reward_model:
        from transformers import AutoModelForSequenceClassification

        from modeling_lexicon.generation_lexicon import load_reward_model

        reward = open_model(AutoModelForSequenceClassification, reward_model)
        options = {**options, "reward_model": load_reward_model(reward, define.model.device)}

    def process(rows: list[dict]) -> list[dict]:
        torch.manual_seed(seed + crc32(json.dumps(rows, default=str).encode()))
        return [one for i in range(0, len(rows), batch_size) for one in define(rows[i : i + batch_size], **options)]

    return process


def check_row(row: dict) -> dict:
    """A row with a term and a context. Raises a `ValueError` if it lacks one."""
    if problem := missing_columns(row, ("term", "context")):
        raise ValueError(problem)
    for name in ("term", "context"):
        value = row[name]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"its {name} is {value!r:.60}, not a text")
    return row
