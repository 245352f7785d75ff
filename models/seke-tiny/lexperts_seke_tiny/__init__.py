"""A small keyphrase extraction model of lexperts: this folder is a checkpoint that `from_pretrained` opens."""

from pathlib import Path

PATH = Path(__file__).parent  # SekeForTokenClassification.from_pretrained(PATH)
