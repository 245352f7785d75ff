"""Training that users run: `lexperts train seke minilm_cpu --train-files train.jsonl`.

One package per system. Each has `arguments.py` (what its commands take, without importing torch), one module per command
with a `main(argv)`, and its configurations as YAML files. `common/` holds what they share.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A module `lexperts.recipes.RECIPE.MODULE`, what it does in a line, and the extras that it needs, separated by commas."""

    recipe: str
    module: str
    summary: str
    extras: str = "train"

    @property
    def name(self) -> str:
        """The full name of the module."""
        return f"lexperts.recipes.{self.recipe}.{self.module}"


TRAIN = {
    "expert": Command("expert", "train", "Train an expert of a mixture on texts or chats of its domain."),
    "seke": Command("seke", "train", "Fine-tune a keyphrase extractor (SEKE) and score it."),
    "exhird": Command("exhird", "train", "Train a keyphrase generator (ExHiRD) and score it."),
    "exhird-data": Command("exhird", "prepare", "Prepare documents once for several ExHiRD trainings."),
    "hypernet-keyphrases": Command("hypernet", "train_keyphrases", "Train a title-conditioned keyphrase extractor."),
    "hypernet-classes": Command("hypernet", "train_classification", "Train a title-conditioned text classifier."),
    "hypernet-qa": Command("hypernet", "train_qa", "Train a question-conditioned extractive reader."),
    "moesumm": Command("moesumm", "train", "Fine-tune one summariser for several domains (MoeSumm)."),
    "lexicon-expert": Command("lexicon", "train_expert", "Fine-tune a Llama on definitions."),
    "lexicon-router": Command("lexicon", "tune_router", "Fine-tune the routers of a mixture on definitions."),
}
DEFINE = {
    "prepare": Command("lexicon", "prepare", "Split public dictionaries into train, validation and test files."),
}
