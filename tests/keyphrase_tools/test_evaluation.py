"""Evaluation: the Trainer's logits and a pipeline give the same scores."""

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
from keyphrase_tools.labels import tokenize_documents
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.words import split_words

CUTS = (5, 10)
LABELS = (None,)  # the most likely label, no threshold
NAMES = {f"{part}@{k}" for part in ("precision", "recall", "f1") for k in CUTS}


@pytest.fixture(scope="module")
def model(tiny_seke):
    """A tiny SEKE whose weights are large enough that its labels differ from word to word."""
    model = tiny_seke()
    model.classifier.weight.data *= 30
    return model


@pytest.fixture(scope="module")
def documents(model, tiny_tokenizer):
    """Short, long and empty texts; the gold is half of what the model extracts, and phrases that it cannot."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghklmno")
    texts = [" ".join("".join(rng.choice(letters, rng.integers(1, 4))) for _ in range(n)) for n in (20, 150, 5, 0, 60)]
    texts.append("semi-supervised graph cuts, and 802.11 networks: Bayes's rule!")
    texts.append(
        "deep learn-\ning of net\u00adworks,&nbsp;graph\n  cuts &amp; semi-\nsupervised, semi-supervised ideas"
    )
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    keyphrases = [[phrase["keyphrase"] for phrase in answer[::2]] for answer in extract(texts)]
    for phrases, text in zip(keyphrases, texts, strict=True):
        phrases += ["quantum", *text.split()[3:5]]
    return texts, keyphrases


def logits_like_the_trainers(model, tokenizer, rows, batch_size=4):
    """Logits of all rows, batch by batch, padded with -100 to the longest as the Trainer does."""
    inputs = [
        {name: rows[name][i] for name in ("input_ids", "attention_mask", "labels")} for i in range(len(rows["labels"]))
    ]
    collate = DataCollatorForTokenClassification(tokenizer)
    parts = []
    for start in range(0, len(inputs), batch_size):
        with torch.no_grad():
            parts.append(model(**collate(inputs[start : start + batch_size])).logits.numpy())
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0)), constant_values=-100) for part in parts]
    )


@pytest.mark.parametrize("overlap", [None, 0, 7])
@pytest.mark.parametrize("rules", ["lexperts", "seke"])
def test_the_trainers_logits_and_the_pipeline_give_the_same_scores(model, tiny_tokenizer, documents, rules, overlap):
    texts, keyphrases = documents
    options = {"rules": rules, "k": (1, 5, 10)}
    windows = {"overlap": overlap, "thresholds": LABELS}
    metrics = ExtractionMetrics(texts, keyphrases, tiny_tokenizer, model.config.id2label, **windows, **options)
    logits = logits_like_the_trainers(model, tiny_tokenizer, metrics.rows)
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, overlap=overlap)
    expected = evaluate_pipeline(extract, texts, keyphrases, **options)
    scores = metrics(EvalPrediction(logits, metrics.rows["labels"]))
    assert scores == pytest.approx(expected, abs=1e-9)
    assert 0 < scores["f1@5"] < 1
    # negative control: the logits of other documents are worth less
    assert metrics(EvalPrediction(logits[::-1], None))["f1@10"] < scores["f1@10"]


def test_the_threshold_reported_is_the_best_of_those_tried(model, tiny_tokenizer, documents):
    options = {"thresholds": (0.9, 0.5, 0.4, 0.2, 0.05)}
    metrics = ExtractionMetrics(*documents, tiny_tokenizer, model.config.id2label, **options)
    found = metrics(EvalPrediction(logits_like_the_trainers(model, tiny_tokenizer, metrics.rows), None))
    by_threshold = {}
    for threshold in options["thresholds"]:
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, threshold=threshold)
        by_threshold[threshold] = evaluate_pipeline(extract, *documents, k=CUTS)
    assert found.pop("threshold") == max(by_threshold, key=lambda t: by_threshold[t]["f1@10"])
    assert found == pytest.approx(max(by_threshold.values(), key=lambda scores: scores["f1@10"]), abs=1e-9)
    assert len({scores["f1@10"] for scores in by_threshold.values()}) > 1  # it matters


def test_outputs_beside_the_logits_are_ignored(model, tiny_tokenizer, documents):
    metrics = ExtractionMetrics(*documents, tiny_tokenizer, model.config.id2label, thresholds=LABELS)
    logits = logits_like_the_trainers(model, tiny_tokenizer, metrics.rows)
    alone = metrics(EvalPrediction(logits, None))
    assert metrics(EvalPrediction((logits, np.zeros(3)), None)) == alone
    assert set(alone) == NAMES


def test_the_stock_trainer_reports_the_pipelines_scores(model, tiny_tokenizer, documents, tmp_path):
    metrics = ExtractionMetrics(*documents, tiny_tokenizer, model.config.id2label, thresholds=LABELS)
    arguments = TrainingArguments(
        tmp_path, per_device_eval_batch_size=3, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=DataCollatorForTokenClassification(tiny_tokenizer),
        eval_dataset=Dataset.from_dict(metrics.rows),
        compute_metrics=metrics,
    )
    reported = trainer.evaluate()
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    for name, value in evaluate_pipeline(extract, *documents, k=CUTS).items():
        assert reported[f"eval_{name}"] == pytest.approx(value, abs=1e-9)
    assert np.isfinite(reported["eval_loss"])


def test_types_of_labels_are_added_up_as_in_the_pipeline(backbone_config, tiny_tokenizer, documents):
    torch.manual_seed(0)
    id2label = dict(enumerate(["B-PER", "O", "I-LOC", "I-PER", "B-LOC"]))
    model = BertForTokenClassification(backbone_config("bert", id2label=id2label)).eval()
    model.classifier.weight.data *= 30
    texts, _ = documents
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    keyphrases = [[phrase["keyphrase"] for phrase in answer] for answer in extract(texts)]
    metrics = ExtractionMetrics(texts, keyphrases, tiny_tokenizer, model.config.id2label, thresholds=LABELS)
    scores = metrics(EvalPrediction(logits_like_the_trainers(model, tiny_tokenizer, metrics.rows), None))
    assert scores == pytest.approx(evaluate_pipeline(extract, texts, keyphrases, k=CUTS))
    assert scores["precision@10"] == 1  # what the pipeline extracts is the gold
    with pytest.raises(ValueError, match="The model's labels are 'O', 'X'"):
        ExtractionMetrics(texts, keyphrases, tiny_tokenizer, {0: "O", 1: "X"})


def test_its_rows_are_those_of_tokenize_documents(tiny_tokenizer, documents):
    texts, keyphrases = documents
    options = {"max_length": 30, "overlap": 5, "rules": "seke"}
    metrics = ExtractionMetrics(texts, keyphrases, tiny_tokenizer, {0: "O", 1: "B", 2: "I"}, **options)
    assert metrics.rows == tokenize_documents({"text": texts, "keyphrases": keyphrases}, tiny_tokenizer, **options)
    assert len(metrics.rows["labels"]) > len(texts)


def test_logits_of_another_number_of_windows_are_refused(tiny_tokenizer):
    metrics = ExtractionMetrics(["graph", "cut"], [["graph"], ["cut"]], tiny_tokenizer, {0: "O", 1: "B", 2: "I"})
    with pytest.raises(ValueError, match="shorter"):
        metrics(EvalPrediction(np.zeros((1, 3, 3)), None))


def test_rows_in_another_order_or_padded_on_the_left_are_refused(tiny_tokenizer):
    metrics = ExtractionMetrics(
        ["graph cuts", "the network"], [["graph"], ["network"]], tiny_tokenizer, {0: "O", 1: "B", 2: "I"}
    )
    logits, labels = np.zeros((2, 4, 3)), np.array(metrics.rows["labels"])
    metrics(EvalPrediction(logits, labels))
    with pytest.raises(ValueError, match=r"ExtractionMetrics.rows.*padding_side='right'"):
        metrics(EvalPrediction(logits, labels[::-1]))
    with pytest.raises(ValueError, match="ExtractionMetrics.rows"):
        metrics(EvalPrediction(np.zeros((2, 6, 3)), np.pad(labels, ((0, 0), (2, 0)), constant_values=-100)))


def test_documents_and_keyphrases_of_different_numbers_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="1 lists of keyphrases for 2 texts"):
        ExtractionMetrics(["graph", "cut"], [["graph"]], tiny_tokenizer, {0: "O", 1: "B", 2: "I"})
    with pytest.raises(ValueError, match="1 lists of keyphrases for 2 texts"):
        evaluate_pipeline(gold_extractor(["graph"]), ["graph", "cut"], [["graph"]])


# ---- what is right


def gold_extractor(*answers):
    """A pipeline with fixed results, of which it returns ten by default."""

    def extract(texts, batch_size, top_k=10, language="english"):
        return [[{"keyphrase": phrase} for phrase in answer][:top_k] for answer in answers]

    return extract


@pytest.mark.parametrize("convention", ["seke", "exhird"])
def test_the_gold_itself_scores_one_and_its_shadow_nothing(convention):
    texts = ["Semi-supervised graph cuts, of five kinds: a b c", "Client/server networks"]
    gold = [["semi supervised graph cut", "kinds", "a", "b", "c"], ["client-server networks", *"defg"]]
    answer = [["Semi-supervised graph cuts", "kinds", "a", "b", "c"], ["Client/server networks"]]
    right = evaluate_pipeline(gold_extractor(*answer), texts, gold, convention=convention, k=("M",))
    assert right == {"precision@M": 1, "recall@M": 1, "f1@M": 1}
    wrong = evaluate_pipeline(gold_extractor(*answer[::-1]), texts, gold, convention=convention, k=("M",))
    assert wrong == {"precision@M": 0, "recall@M": 0, "f1@M": 0}


def test_only_keyphrases_that_occur_in_the_text_are_gold():
    scores = evaluate_pipeline(gold_extractor(["graph"]), ["a graph"], [["graph", "quantum"]], k=5)
    assert scores["recall@5"] == 1
    # the reference's rules miss what ends the text: nothing is gold then
    with pytest.raises(ValueError, match="None of the 1 documents"):
        evaluate_pipeline(gold_extractor(["graph"]), ["a graph"], [["graph"]], rules="seke", k=5)


@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from(["seke", "exhird"]))
@settings(deadline=None, max_examples=60)
def test_perfect_predictions_are_cut_nowhere(number, k, convention):
    phrases = [a + b for a in "bcdfghk" for b in "lmnpqrt"][:number]
    text, cuts = " . ".join(phrases), (k, "k", "M")
    scores = [
        score_phrases([phrases], [phrases], convention=convention, k=cuts),
        evaluate_pipeline(gold_extractor(phrases), [text], [phrases], convention=convention, k=cuts),
    ]
    for found in scores:
        correct = min(k, number)
        precision = correct / (k if convention == "exhird" else correct)
        recall = correct / number
        assert (found[f"precision@{k}"], found[f"recall@{k}"]) == (precision, recall)
        assert found[f"f1@{k}"] == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-4)
        assert all(found[f"{part}@{cut}"] == 1 for part in ("precision", "recall", "f1") for cut in ("k", "M"))


def test_a_real_pipeline_is_asked_for_as_many_phrases_as_k_needs(lookup):
    extract = lookup()
    extract.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    words = [a + b for a in "bcdf" for b in "lmnpq"]
    for k in (20, "k", "M"):
        assert evaluate_pipeline(extract, [" . ".join(words)], [words], k=k)[f"f1@{k}"] == 1
    assert evaluate_pipeline(lookup(top_k=3), ["b p b bi pi bj"], [["b"]], k=("M",))["precision@M"] == 1 / 3


UNUSABLE = {
    "no list": [[], []],
    "empty": [["", " "], ["-"]],
    "joined by commas": [["alpha, beta"], ["graph, cuts"]],
    "another language": [["Graphenschnitt"], []],
}


@pytest.mark.parametrize("keyphrases", UNUSABLE.values(), ids=UNUSABLE)
def test_an_evaluation_without_a_usable_gold_phrase_is_an_error_everywhere(lookup, tiny_tokenizer, keyphrases):
    texts, extract = ["alpha beta and graph", "the cuts of graphs"], lookup(top_k=None)
    calls = [
        lambda: evaluate_pipeline(extract, texts, keyphrases),
        lambda: evaluate_pipeline(extract, texts, keyphrases, convention="exhird"),
        lambda: ExtractionMetrics(texts, keyphrases, tiny_tokenizer, {0: "O", 1: "B", 2: "I"}),
        lambda: calibrate(extract, texts, keyphrases),
        lambda: calibration_error(extract, texts, keyphrases),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="None of the 2 documents"):
            call()
    for nothing in ([[], []], [[""], [" "]]):
        with pytest.raises(ValueError, match="None of the 2 documents"):
            score_phrases([["graph"], []], nothing)


def test_german_documents_are_evaluated_with_german_stems(lookup, tiny_tokenizer):
    texts, keyphrases = ["b p bäume . häuser"], [["Baum", "Haus", "b"]]
    extract = lookup()
    extract.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    found = evaluate_pipeline(extract, texts, keyphrases, k="M", language="german")
    assert (found["recall@M"], found["precision@M"]) == (1, 3 / 4)
    extract.model.config.keyphrase_language = "german"
    assert evaluate_pipeline(extract, texts, keyphrases, k="M") == found  # that of the pipeline
    assert evaluate_pipeline(extract, texts, keyphrases, k="M", language="english")["precision@M"] == 1 / 4
    metrics = [
        ExtractionMetrics(
            texts, keyphrases, tiny_tokenizer, {0: "O", 1: "B", 2: "I"}, k=("M",), thresholds=LABELS, language=l
        )
        for l in ("german", "english")
    ]
    logits = np.tile([0.0, 5.0, 0.0], (1, len(metrics[0].rows["labels"][0]), 1))
    assert metrics[0](EvalPrediction(logits, None)) == found != metrics[1](EvalPrediction(logits, None))
    assert [sum(m.rows["num_present"]) for m in metrics] == [3, 1]
    extract.model.config.keyphrase_temperature = None
    counts = [calibration_error(extract, texts, keyphrases, language=l)["before_bins"] for l in ("german", "english")]
    assert [bins[-1]["share"] for bins in counts] == [3 / 4, 1 / 4]


def test_the_batch_size_does_not_change_the_scores(model, tiny_tokenizer, documents):
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    one, many = (evaluate_pipeline(extract, *documents, batch_size=size, k=CUTS) for size in (1, 16))
    assert one == many and set(one) == NAMES


def test_ranking_decides_what_the_first_k_are():
    text = "alpha beta"
    sure_of_beta = np.array([[0.2, 0.7, 0.1], [0.05, 0.9, 0.05]])
    phrases = [rank_phrases(text, split_words(text), sure_of_beta)]
    assert score_phrases(phrases, [["beta"]], k=1)["precision@1"] == 1
    assert score_phrases(phrases, [["alpha"]], k=1)["precision@1"] == 0


@pytest.mark.parametrize(
    "given", [{}, {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 10}]
)
def test_the_best_model_is_kept_with_and_without_an_eval_strategy(given, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, **given)
    keep_best(args, "span_f1")
    kept = given.get("eval_strategy", "epoch")
    assert args.load_best_model_at_end and args.eval_strategy == args.save_strategy == kept
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_span_f1", True)


@pytest.mark.parametrize(
    "given",
    [
        {"eval_strategy": "epoch"},
        {"eval_strategy": "epoch", "save_strategy": "no"},
        {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 5},
    ],
)
def test_checkpoints_that_miss_the_best_score_are_refused(given, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, **given)
    with pytest.raises(ValueError, match="eval_strategy='.*' .* save_strategy='.*'"):
        keep_best(args, "span_f1")


def test_a_model_that_labels_every_word_outside_is_reported_once(tiny_seke, tiny_tokenizer, caplog):
    model, texts = tiny_seke(), ["the graph cut of the network is the problem of learning"] * 40
    model.classifier.weight.data.zero_()
    model.classifier.bias.data = torch.tensor([5.0, 0.0, 0.0])
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)

    def warnings(call):
        caplog.clear()
        call()
        return sum("as O" in record.getMessage() for record in caplog.records)

    assert warnings(lambda: evaluate_pipeline(extract, texts, [["graph cut"]] * 40, batch_size=1)) == 1
    assert warnings(lambda: list(extract(iter(texts), batch_size=1))) == 1
    assert warnings(lambda: extract(" ".join(texts))) == 1
    for call in (
        lambda: extract(texts[:5]),  # too few words to say
        lambda: extract(texts, candidates=["graph cut"]),
        lambda: extract(texts, threshold=0.001),
    ):
        assert warnings(call) == 0
    metrics = ExtractionMetrics(texts, [["graph cut"]] * 40, tiny_tokenizer, model.config.id2label)
    logits = np.zeros((len(metrics.rows["labels"]), max(map(len, metrics.rows["labels"])), 3))
    labels = np.array([[*row] + [-100] * (logits.shape[1] - len(row)) for row in metrics.rows["labels"]])
    for outside, count in ((5.0, 1), (-5.0, 0)):
        logits[..., 0] = outside
        assert warnings(lambda: metrics(EvalPrediction(logits, labels))) == count
