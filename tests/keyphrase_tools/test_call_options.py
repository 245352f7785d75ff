"""Options of a call: the same check in pipelines, classes and commands, and None undoes a pipeline's default."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import pipeline

from keyphrase_tools.extractor import KeyphraseExtractor
from lexperts_lite.call_options import OPTIONS, UNSET, check_call_options
from lexperts_lite.ranking import PhraseRanker

from .known_answers import names, random_text
from .test_ranking import WEIGHTS

NAN, TEXT = float("nan"), random_text(200)
WRONG = {
    "min_phrases": (-1, 2.5, "5", True),
    "top_k": (0, -1, 2.5, "5", True, NAN, [5]), "min_score": (NAN, 5, -0.1, "0.5", True, float("inf")), "style": (3, ["tags"], True),
    "threshold": (0, 1, NAN, "0.5", -1, True), "overlap": (-1, 1.5, "x", NAN), "max_length": (0, -5, 8.0, "64"),
    "max_title_length": (0, 2.5, "x"), "nested": (0, "yes"), "diversity": (NAN, -0.1, 1.5, "high", True),
    "language": ("klingon", "de", "German", "", 3, ["german"]), "batch_size": (0, -1, 2.5, "8", True),
    "candidates": ("graph", 5, {"graph": ["cut"]}, ["graph", 5], [["graph"]], [], [""], ["graph", " - "]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*OPTIONS, "batch_size"])
def test_a_wrong_value_is_named_by_pipeline_call_and_class_alike(lookup, name):
    extract = lookup()
    for value in WRONG[name]:
        calls = [
            lambda: extract("b p", **{name: value}),  # noqa: B023
            lambda: lookup(**{name: value}),  # noqa: B023
            lambda: KeyphraseExtractor(extract, **{name: value}),  # noqa: B023
            lambda: next(extract.read_block(["b p"], **{name: value})),  # noqa: B023
        ]
        messages = set()
        for call in calls:
            with pytest.raises((ValueError, TypeError), match=f"{name}=") as caught:
                call()
            messages.add(str(caught.value))
        assert len(messages) == 1 and "\n" not in messages.pop()


def test_numbers_of_numpy_are_numbers_and_a_misspelt_option_is_named():
    given = {"top_k": np.int64(3), "min_score": np.float32(0.5), "overlap": np.int32(0)}
    assert check_call_options(**given) == {"top_k": 3, "min_score": 0.5, "overlap": 0}
    assert check_call_options(top_k=UNSET, style=None) == {"style": None}
    with pytest.raises(TypeError, match="'top'.*'top_k'"):
        check_call_options(top=3)


def test_a_threshold_has_no_effect_on_candidates(lookup):
    with pytest.raises(ValueError, match="threshold=0.5"):
        lookup()("x", candidates=["x"], threshold=0.5)
    assert names(lookup(threshold=0.5)("x", candidates=["x"])) == ["x"]  # the pipeline's default for extraction


DEFAULTS = {"threshold": 0.99, "overlap": 3, "max_length": 12, "diversity": 1.0, "style": "tags"}


@pytest.mark.parametrize("name", [*DEFAULTS, "language", "candidates", "min_score"])
def test_none_undoes_a_default_of_the_pipeline(tiny_seke, tiny_tokenizer, name):
    model = tiny_seke(styles=["tags"])
    model.style_embedding.weight.data[1].normal_(std=9, generator=torch.Generator().manual_seed(0))
    model.classifier.weight.data *= 30
    open_with = partial(pipeline, "keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    more = {"max_length": 20} if name == "overlap" else {}
    plain = open_with(**more)
    best = {"language": "german", "candidates": ["b"], "min_score": plain(TEXT)[0]["score"]}
    changed = open_with(**{name: (DEFAULTS | best)[name]}, **more)
    assert changed(TEXT, **{name: None}) == plain(TEXT, **({name: None} if name == "language" else {}))
    assert name == "language" or changed(TEXT) != plain(TEXT)


def test_a_styles_ranker_is_used_without_a_ranker_of_the_model(tiny_seke, tiny_tokenizer):
    model, text = tiny_seke(styles=["tags", "words"]), "the graph cut of networks and the graph cuts for learning"
    by_labels = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    model.config.style_rankers = {"tags": WEIGHTS | {"bias": -4.0, "mentions": 8.0}}
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    block = extract.read([text], style="tags")
    words, p = block.documents[0].words, block.probabilities.document(0)
    ranked = PhraseRanker(model.config.style_rankers["tags"]).rank([(text, words, p)])[0]
    assert extract(text, style="tags", min_score=0.0) == ranked.phrases(10)
    for options in ({"style": "tags", "threshold": 0.2}, {}, {"style": "words"}):
        assert extract(text, **options) == by_labels(text, **options)
    assert names(extract(text, style="tags", diversity=0.5))
    model.config.style_rankers = {"tag": WEIGHTS}
    with pytest.raises(ValueError, match="'tag'.*'tags', 'words'"):
        pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)


def test_gates_of_the_chosen_experts_are_in_the_ratio_of_the_weights_by_which_they_are_mixed(tiny_seke, tiny_tokenizer):
    model, seen = tiny_seke(), []
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    model.moe.router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    gates = extract.read([random_text(20)], gates=True).gates[0]
    (_, weights, index), k = seen[0], model.config.num_experts_per_tok
    assert k < model.config.num_experts and gates.sum(1) == pytest.approx(1)
    mixed = torch.zeros(len(index), model.config.num_experts).scatter(1, index, weights)
    for gate in torch.tensor(gates, dtype=mixed.dtype):
        chosen = torch.where(gate >= gate.topk(k).values[-1], gate, 0)
        assert (mixed - chosen / chosen.sum()).abs().sum(1).min() < 1e-5
