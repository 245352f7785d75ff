"""`keyphrase_f1` as a module of the library evaluate: `evaluate.load(keyphrase_tools.metrics.EVALUATE_MODULE)`."""

import datasets
import evaluate

from keyphrase_tools.metrics import keyphrase_f1

_DESCRIPTION = """
Precision, recall and F1 at k of keyphrases, under SEKE's or ExHiRD's scoring convention.
"""

_INPUTS = """
Args:
    predictions: one list of phrases per document, best first; with convention="exhird" also one string per document.
    references: the gold phrases, in the same form.
    convention: "seke" (default) or "exhird".
    sources: optionally one text per document, to score present and absent phrases separately.
    k: cutoffs, any of 1, 2, ..., "k" and "M".
    Every switch of keyphrase_tools.metrics.keyphrase_f1 is accepted too.
Returns:
    precision@k, recall@k, f1@k, mean_f1@k, correct@k for each k, and the sums;
    with sources three such dictionaries: "total", "present", "absent".
"""

_CITATION = """
@inproceedings{chen2020exclusive,
  title = {Exclusive Hierarchical Decoding for Deep Keyphrase Generation},
  author = {Chen, Wang and Chan, Hou Pong and Li, Piji and King, Irwin},
  booktitle = {Proceedings of ACL},
  year = {2020}
}
"""


class KeyphraseF1(evaluate.Metric):
    """F1@k of keyphrases. Pass sources to compute(), not to add_batch(), since declared inputs cannot be left out."""

    def _info(self) -> evaluate.MetricInfo:
        phrases = datasets.Sequence(datasets.Value("string"))
        line = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": phrases, "references": phrases}),
                datasets.Features({"predictions": line, "references": line}),
            ],
        )

    def _compute(self, predictions, references, **switches) -> dict:
        return keyphrase_f1(predictions, references, **switches)
