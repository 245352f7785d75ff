"""Definitions of the terms of files: the process behind `lexperts define terms`."""

import json
from dataclasses import dataclass
from zlib import crc32

from run_tools.corpus.failures import process_valid
from run_tools.fingerprints import fingerprint
from run_tools.jsonl import missing_columns
from run_tools.processes import prepare_process

TASK = "definition-modeling"


@dataclass
class DefinitionProcess:
    """Defines terms in context; see `run_tools.corpus.block_runs.Process`.

    Args:
        model, reward_model: folders or Hub ids; by default the packaged model, and none.
        seed: of sampling. Each block has its own seed, so that samples do not depend on interruptions.
        options: of the pipeline definition-modeling.
    """

    results = ("definition", "score")

    model: str | None
    reward_model: str | None
    batch_size: int
    device: str | None
    seed: int
    options: dict

    def describe(self) -> dict:
        """The settings. Loads the models."""
        from run_tools.model_loading import open_model, open_pipeline
        from run_tools.packaged import locate_model

        prepare_process()
        model = locate_model(self.model, TASK)
        self.define = open_pipeline(TASK, model, device=self.device, batch_size=self.batch_size)
        self.call_options = dict(self.options)
        if self.reward_model:
            from transformers import AutoModelForSequenceClassification

            from modeling_lexicon.generation_lexicon import load_reward_model

            reward = open_model(AutoModelForSequenceClassification, self.reward_model)
            self.call_options["reward_model"] = load_reward_model(reward, self.define.model.device)
        models = {
            "model": fingerprint(model),
            "reward_model": self.reward_model and fingerprint(self.reward_model),
        }
        return {**self.options, **models, "seed": self.seed, "batch_size": self.batch_size}

    def process_rows(self, rows: list[dict], progress=lambda documents: None) -> list[dict]:
        """The definition, or `error`, of each row."""
        import torch

        torch.manual_seed(self.seed + crc32(json.dumps(rows, default=str).encode()))

        def define(rows: list[dict]) -> list[dict]:
            found = []
            for start in range(0, len(rows), self.batch_size):
                part = rows[start : start + self.batch_size]
                found += self.define(part, **self.call_options)
                progress(len(part))
            return found

        return [{"error": error} if error else outputs for outputs, error in process_valid(define, rows, check_row)]

    def types(self) -> dict:
        """The Arrow types of the values to add, as far as they do not depend on the options."""
        import pyarrow

        return {"definition": pyarrow.string(), "score": pyarrow.float64(), "error": pyarrow.string()}


def check_row(row: dict) -> tuple[dict | None, str | None]:
    """A row with a term and a context, or why it has no definition."""
    if problem := missing_columns(row, ("term", "context")):
        return None, problem
    for name in ("term", "context"):
        value = row[name]
        if not isinstance(value, str) or not value.strip():
            return None, f"its {name} is {value!r:.60}, not a text"
    return row, None
