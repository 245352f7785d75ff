"""Evaluation: the Trainer's logits and a pipeline give the same scores."""

from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    pipeline,
)

from keyphrase_tools.calibration import calibrate, calibration_error
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline, keep_best, score_phrases

CUTS = (5, 10)
LABELS = (None,)  # the most likely label, no threshold
PLAIN = {0: "O", 1: "B", 2: "I"}
TYPED = dict(enumerate(["B-PER", "O", "I-LOC", "I-PER", "B-LOC"]))


@pytest.fixture(scope="module")
def model(sharp_seke):
    return sharp_seke()


@pytest.fixture(scope="module")
def documents(model, tiny_tokenizer):
    """Short, long and empty texts; the gold is half of what the model extracts, and phrases that it cannot."""
    rng, letters = np.random.default_rng(0), list("abcdefghklmno")
    texts = [" ".join("".join(rng.choice(letters, rng.integers(1, 4))) for _ in range(n)) for n in (20, 150, 5, 0, 60)]
    texts.append("semi-supervised graph cuts, and 802.11 networks: Bayes's rule!")
    texts.append("deep learn-\ning of net\u00adworks,&nbsp;graph\n  cuts &amp; semi-\nsupervised, semi-supervised")
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    keyphrases = [[phrase["keyphrase"] for phrase in answer[::2]] for answer in extract(texts)]
    for phrases, text in zip(keyphrases, texts, strict=True):
        phrases += ["quantum", *text.split()[3:5]]
    return texts, keyphrases


def evaluate(model, tokenizer, metrics, folder):
    """What the stock Trainer predicts and measures."""
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(folder, per_device_eval_batch_size=3, **options)
    collator = DataCollatorForTokenClassification(tokenizer)
    return Trainer(model, arguments, data_collator=collator, compute_metrics=metrics).predict(
        Dataset.from_dict(metrics.rows)
    )


@pytest.mark.parametrize("kind, rules, overlap", [
    ("seke", "lexperts", None), ("seke", "lexperts", 0), ("seke", "seke", 7), ("typed labels", "lexperts", None),
])  # fmt: skip
def test_the_trainers_logits_and_the_pipeline_give_the_same_scores(
    model, backbone_config, tiny_tokenizer, documents, tmp_path, kind, rules, overlap
):
    if kind == "typed labels":
        torch.manual_seed(0)
        model = BertForTokenClassification(backbone_config("bert", id2label=TYPED)).eval()
        model.classifier.weight.data *= 30
    options, windows = {"rules": rules, "k": (1, 5, 10)}, {"overlap": overlap, "thresholds": LABELS}
    metrics = ExtractionMetrics(*documents, tiny_tokenizer, model.config.id2label, **windows, **options)
    predicted = evaluate(model, tiny_tokenizer, metrics, tmp_path)
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, overlap=overlap)
    logits, scores = predicted.predictions, metrics(EvalPrediction(predicted.predictions, None))
    assert scores.items() <= {name.removeprefix("test_"): score for name, score in predicted.metrics.items()}.items()
    assert np.isfinite(predicted.metrics["test_loss"])
    for size in (1, 16):
        assert scores == pytest.approx(evaluate_pipeline(extract, *documents, batch_size=size, **options), abs=1e-9)
    assert metrics(EvalPrediction((logits, np.zeros(3)), None)) == scores  # outputs beside the logits are ignored
    assert 0 < scores["f1@5"] < 1
    # negative control: the logits of other documents are worth less
    assert metrics(EvalPrediction(logits[::-1], None))["f1@10"] < scores["f1@10"]


def test_the_threshold_reported_is_the_best_of_those_tried(model, tiny_tokenizer, documents, tmp_path):
    thresholds, by_threshold = (0.9, 0.5, 0.4, 0.2, 0.05), {}
    metrics = ExtractionMetrics(*documents, tiny_tokenizer, model.config.id2label, thresholds=thresholds)
    found = metrics(EvalPrediction(evaluate(model, tiny_tokenizer, metrics, tmp_path).predictions, None))
    for threshold in thresholds:
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, threshold=threshold)
        by_threshold[threshold] = evaluate_pipeline(extract, *documents, k=CUTS)
    assert found.pop("threshold") == max(by_threshold, key=lambda t: by_threshold[t]["f1@10"])
    assert found == pytest.approx(max(by_threshold.values(), key=lambda scores: scores["f1@10"]), abs=1e-9)
    assert len({scores["f1@10"] for scores in by_threshold.values()}) > 1  # it matters


def test_other_rows_labels_and_numbers_are_refused(tiny_tokenizer):
    texts, keyphrases = ["graph cuts", "the network"], [["graph"], ["network"]]
    metrics = ExtractionMetrics(texts, keyphrases, tiny_tokenizer, PLAIN)
    logits, labels = np.zeros((2, 4, 3)), np.array(metrics.rows["labels"])
    metrics(EvalPrediction(logits, labels))
    on_the_left = np.pad(labels, ((0, 0), (2, 0)), constant_values=-100)
    for call, shown in (
        (lambda: metrics(EvalPrediction(logits, labels[::-1])), r"ExtractionMetrics.rows.*padding_side='right'"),
        (lambda: metrics(EvalPrediction(np.zeros((2, 6, 3)), on_the_left)), "ExtractionMetrics.rows"),
        (lambda: metrics(EvalPrediction(logits[:1], None)), "shorter"),
        (lambda: ExtractionMetrics(texts, keyphrases, tiny_tokenizer, {0: "O", 1: "X"}), "labels are 'O', 'X'"),
        (lambda: ExtractionMetrics(texts, [["graph"]], tiny_tokenizer, PLAIN), "1 lists of keyphrases for 2 texts"),
        (lambda: evaluate_pipeline(gold_extractor(["graph"]), texts, [["graph"]]), "1 lists of keyphrases for 2 texts"),
    ):
        with pytest.raises(ValueError, match=shown):
            call()


def gold_extractor(*answers):
    """A pipeline with fixed results, of which it returns ten by default."""

    def extract(texts, batch_size, top_k=10, language="english"):
        return [[{"keyphrase": phrase} for phrase in answer][:top_k] for answer in answers]

    return extract


def test_only_keyphrases_that_occur_in_the_text_are_gold():
    assert evaluate_pipeline(gold_extractor(["graph"]), ["a graph"], [["graph", "quantum"]], k=5)["recall@5"] == 1
    half = gold_extractor(["a"], ["cut"])
    assert evaluate_pipeline(half, ["a graph", "cut"], [["graph"], ["cut"]], k=5)["f1@5"] == 0.5
    # the reference's rules miss what ends the text: nothing is gold then
    with pytest.raises(ValueError, match="None of the 1 documents"):
        evaluate_pipeline(gold_extractor(["graph"]), ["a graph"], [["graph"]], rules="seke", k=5)


@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from(["seke", "exhird"]))
@settings(deadline=None, max_examples=40)
def test_perfect_predictions_are_cut_nowhere(number, k, convention):
    phrases = [a + b for a in "bcdfghk" for b in "lmnpqrt"][:number]
    scoring = {"convention": convention, "k": (k, "k", "M")}
    for found in (
        score_phrases([phrases], [phrases], **scoring),
        evaluate_pipeline(gold_extractor(phrases), [" . ".join(phrases)], [phrases], **scoring),
    ):
        correct = min(k, number)
        precision, recall = correct / (k if convention == "exhird" else correct), correct / number
        assert (found[f"precision@{k}"], found[f"recall@{k}"]) == (precision, recall)
        assert found[f"f1@{k}"] == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-4)
        assert all(found[f"{part}@{cut}"] == 1 for part in ("precision", "recall", "f1") for cut in ("k", "M"))


def test_a_pipeline_that_was_opened_with_a_top_k_keeps_it(lookup):
    assert evaluate_pipeline(lookup(top_k=3), ["b p b bi pi bj"], [["b"]], k="M")["precision@M"] == 1 / 3


UNUSABLE = {
    "empty": [["", " "], []], "joined by commas": [["alpha, beta"], ["graph, cuts"]], "other words": [["Graphenschnitt"], ["-"]],
}  # fmt: skip


@pytest.mark.parametrize("keyphrases", UNUSABLE.values(), ids=UNUSABLE)
def test_an_evaluation_without_a_usable_gold_phrase_is_an_error_everywhere(lookup, tiny_tokenizer, keyphrases):
    texts, extract = ["alpha beta and graph", "the cuts of graphs"], lookup(top_k=None)
    for call in (
        partial(evaluate_pipeline, extract, texts, keyphrases, convention="exhird"),
        partial(ExtractionMetrics, texts, keyphrases, tiny_tokenizer, PLAIN),
        partial(calibrate, extract, texts, keyphrases),
        partial(calibration_error, extract, texts, keyphrases),
        partial(score_phrases, [["graph"], []], [[""], [" "]]),
    ):
        with pytest.raises(ValueError, match="None of the 2 documents"):
            call()


def test_german_documents_are_evaluated_with_german_stems(lookup, tiny_tokenizer):
    texts, keyphrases = ["b p bäume . häuser"], [["Baum", "Haus", "b"]]
    extract = lookup()
    extract.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    found = evaluate_pipeline(extract, texts, keyphrases, k="M", language="german")
    assert (found["recall@M"], found["precision@M"]) == (1, 3 / 4)
    extract.model.config.keyphrase_language = "german"
    assert evaluate_pipeline(extract, texts, keyphrases, k="M") == found  # that of the pipeline
    options = {"k": ("M",), "thresholds": LABELS}
    for language, present, share in (("german", 3, 3 / 4), ("english", 1, 1 / 4)):
        metrics = ExtractionMetrics(texts, keyphrases, tiny_tokenizer, PLAIN, language=language, **options)
        logits = np.tile([0.0, 5.0, 0.0], (1, len(metrics.rows["labels"][0]), 1))
        assert (metrics(EvalPrediction(logits, None)) == found) is (language == "german")
        assert sum(metrics.rows["num_present"]) == present
        bins = calibration_error(extract, texts, keyphrases, language=language)["before_bins"]
        assert bins[-1]["share"] == share


STEPS = {"eval_strategy": "steps", "save_strategy": "steps"}


@pytest.mark.parametrize("given, kept", [
    ({}, "epoch"), (STEPS | {"eval_steps": 5, "save_steps": 10}, "steps"), ({"eval_strategy": "epoch"}, None),
    ({"eval_strategy": "epoch", "save_strategy": "no"}, None), (STEPS | {"eval_steps": 10, "save_steps": 5}, None),
])  # fmt: skip
def test_the_best_model_is_kept_and_checkpoints_that_miss_it_are_refused(given, kept, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, **given)
    if kept is None:
        with pytest.raises(ValueError, match="eval_strategy='.*' .* save_strategy='.*'"):
            keep_best(args, "span_f1")
        return
    keep_best(args, "span_f1")
    assert args.load_best_model_at_end and args.do_eval and args.eval_strategy == args.save_strategy == kept
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_span_f1", True)


def test_a_model_that_labels_every_word_outside_is_reported_once(tiny_seke, tiny_tokenizer, caplog):
    model, texts = tiny_seke(), ["the graph cut of the network is the problem of learning"] * 40
    model.classifier.weight.data.zero_()
    model.classifier.bias.data = torch.tensor([5.0, 0.0, 0.0])
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    metrics = ExtractionMetrics(texts, [["graph cut"]] * 40, tiny_tokenizer, model.config.id2label)
    logits = np.zeros((len(metrics.rows["labels"]), max(map(len, metrics.rows["labels"])), 3))
    for call, expected in (
        (lambda: evaluate_pipeline(extract, texts, [["graph cut"]] * 40, batch_size=4), 1),
        (lambda: extract(" ".join(texts)), 1),
        (lambda: metrics(EvalPrediction(logits + [5.0, 0.0, 0.0], None)), 1),
        (lambda: extract(texts[:5]), 0),  # too few words to say
        (lambda: extract(texts, threshold=0.001), 0),
    ):
        caplog.clear()
        call()
        assert sum("as O" in record.getMessage() for record in caplog.records) == expected
