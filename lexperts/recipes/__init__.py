"""The trainings of `lexperts train`: `lexperts train seke minilm_cpu --train-files train.jsonl`.

One package per system. Each has `arguments.py` (the options, without importing torch), one script per training with a
function `train`, and its configurations as YAML files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A script `lexperts.recipes.RECIPE.MODULE`, and what it does in a line."""

    recipe: str
    module: str
    summary: str


TRAIN = {
    "seke": Command("seke", "train", "Fine-tune a keyphrase extractor (SEKE) and score it."),
    "exhird": Command("exhird", "train", "Train a keyphrase generator (ExHiRD) and score it."),
    "hypernet-keyphrases": Command("hypernet", "keyphrases", "Train a title-conditioned keyphrase extractor."),
    "hypernet-classes": Command("hypernet", "classes", "Train a title-conditioned text classifier."),
    "hypernet-qa": Command("hypernet", "answers", "Train a question-conditioned extractive reader."),
    "moesumm": Command("moesumm", "train", "Fine-tune a summariser of several domains (MoeSumm)."),
    "language": Command("language", "train", "Fine-tune an expert on texts, chats or definitions."),
}
