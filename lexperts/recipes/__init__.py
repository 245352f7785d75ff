"""The trainings of `lexperts train`: `lexperts train seke minilm_cpu --train-files train.jsonl`.

One package per system. Each has `arguments.py` (the options, without importing torch), one script per training with a function
`train`, and its configurations as YAML files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A script `lexperts.recipes.RECIPE.MODULE`, and what it does in a line."""

    recipe: str
    module: str
    summary: str
    extras: str = "train"

    @property
    def name(self) -> str:
        """The full name of the module."""
        return f"lexperts.recipes.{self.recipe}.{self.module}"


TRAIN = {
    "seke": Command("seke", "train", "Fine-tune a keyphrase extractor (SEKE) and score it."),
    "exhird": Command("exhird", "train", "Train a keyphrase generator (ExHiRD) and score it."),
    "hypernet-keyphrases": Command("hypernet", "keyphrases", "Train a title-conditioned keyphrase extractor."),
    "hypernet-classes": Command("hypernet", "classes", "Train a title-conditioned text classifier."),
    "hypernet-qa": Command("hypernet", "answers", "Train a question-conditioned extractive reader."),
    "moesumm": Command("moesumm", "train", "Fine-tune one summariser for several domains (MoeSumm)."),
    "language": Command(
        "language", "train", "Fine-tune an expert, or the gates of a mixture, on texts, chats or definitions."
    ),
}
EVALUATE = {
    "exhird": Command("exhird", "evaluate", "Generate keyphrases for test sets and score them."),
    "moesumm": Command(
        "moesumm",
        "evaluate",
        "Write summaries of test sets and compare systems by ROUGE and BERTScore.",
        "train,summaries",
    ),
    "definitions": Command("lexicon", "evaluate", "Score generated definitions by up to five metrics.", "definitions"),
}
DEFINE = {
    "prepare": Command("lexicon", "prepare", "Split public dictionaries into train, validation and test files."),
    "generate": Command("lexicon", "generate", "Write the definitions of a file of terms in context."),
}
