"""Scores of keyphrases, summaries, definitions and answers, of lists or files, with intervals and paired tests."""

from .compare import compare
from .scores import Score, score_answers, score_definitions, score_keyphrases, score_summaries

__all__ = ["Score", "compare", "score_answers", "score_definitions", "score_keyphrases", "score_summaries"]
