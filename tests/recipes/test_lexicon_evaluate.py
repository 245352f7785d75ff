"""Scores of definitions: the reference implementations' own numbers, both protocols, seeds, tests, and what is missing."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    RobertaTokenizer,
)

from lexperts.recipes.common.bertscore import BertScore
from lexperts.recipes.lexicon import evaluate
from lexperts.recipes.lexicon import scores as metrics
from lexperts.recipes.lexicon.arguments import BLEU_KINDS, METRICS
from lexperts.recipes.lexicon.mauve import Mauve
from tests.recipes.helpers import fails, write_rows

LEXICAL = ("bleu", "rouge", "meteor")
WORDS = [
    "a",
    "the",
    "of",
    "in",
    "small",
    "large",
    "running",
    "runs",
    "boats",
    "boat",
    "tree",
    "trees",
    "3.5",
    "water,",
    "(of",
]


@pytest.fixture(scope="module")
def bert(backbone_config, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert", initializer_range=0.5)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder whose name says gpt2, so that mauve-text would load it by itself."""
    folder = tmp_path_factory.mktemp("gpt2")
    vocabulary = {word: i for i, word in enumerate(("<|endoftext|>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return str(folder)


def some_texts(number: int, seed: int, longest: int = 12) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest))) for _ in range(number)]


PAIRS = list(zip(some_texts(150, 0), some_texts(150, 1), strict=True))
PAIRS += [(text, text) for text in some_texts(5, 2)]
PAIRS += [("", "a tree"), ("boat", "a tree"), ("Boats run", "a boat runs")]


def run(*arguments) -> None:
    evaluate.main([*map(str, arguments)])


def results(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_full_stops_go_except_in_numbers():
    strip = metrics.without_full_stops
    assert strip("a five-dollar  bill .") == "a five-dollar bill"
    assert strip("e.g. 3.5 m, or .5 m.") == "eg 3.5 m, or .5 m"


def test_bleu_is_that_of_sacrebleu_of_nltk_and_of_moses():
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from sacrebleu.metrics import BLEU

    scorer, smoothing = BLEU(effective_order=True), SmoothingFunction().method2
    ours = {kind: metrics.score_pairs(metrics.bleu(kind)[0], PAIRS) for kind in BLEU_KINDS}
    theirs = [scorer.sentence_score(prediction, [reference]).score for prediction, reference in PAIRS]
    np.testing.assert_allclose(ours["sacrebleu"], theirs, atol=1e-9)
    printed = str(scorer.get_signature())
    assert printed  # as the settings name it
    spaced = [(prediction.split(), [reference.split()]) for prediction, reference in PAIRS if prediction]
    theirs = [100 * sentence_bleu(r, p, smoothing_function=smoothing, auto_reweigh=True) for p, r in spaced]
    np.testing.assert_allclose([x for x, (p, _) in zip(ours["nltk"], PAIRS, strict=True) if p], theirs, atol=1e-9)
    assert 0 < np.mean(ours["sacrebleu"]) < np.mean(ours["nltk"]) < np.mean(ours["moses"])
    assert all(values[-3] == 0 for values in ours.values())  # of nothing
    moses = metrics.bleu("moses")[0]
    # the case of its own unit test: 6 of 6, 4 of 5, 2 of 4 and 1 of 3 n-grams, a reference of 7 words
    assert moses("a b c d e f", "a b c d x e f") == pytest.approx(59.85, abs=0.01)
    assert moses("a b c", "x y z") == pytest.approx(100 * (1 / 24) ** 0.25)


def test_rouge_l_is_that_of_rouge_score():
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    theirs = [100 * scorer.score(reference, prediction)["rougeL"].fmeasure for prediction, reference in PAIRS]
    np.testing.assert_allclose(metrics.score_pairs(metrics.rouge_l()[0], PAIRS), theirs, atol=1e-9)
    assert len({round(value) for value in theirs}) > 20
    long = [
        (" ".join(some_texts(30, seed)), " ".join(some_texts(30, seed + 1))) for seed in range(3)
    ]  # beyond a word of 64 bits
    for prediction, reference in long:
        expected = scorer.score(reference, prediction)["rougeL"].fmeasure
        assert metrics.rouge_l()[0](prediction, reference) == pytest.approx(100 * expected)


def test_meteor_is_that_of_nltk_and_its_formula():
    from nltk import word_tokenize
    from nltk.translate.meteor_score import single_meteor_score

    class NoWordNet:
        def synsets(self, word):
            return []

    score, facts = metrics.meteor()
    pairs = [[word_tokenize(text, preserve_line=True) for text in pair] for pair in PAIRS]
    if "without the WordNet stage" in facts["settings"]:
        theirs = [100 * single_meteor_score(reference, own, wordnet=NoWordNet()) for own, reference in pairs]
    else:
        theirs = [100 * single_meteor_score(reference, own) for own, reference in pairs]
    np.testing.assert_allclose(metrics.score_pairs(score, PAIRS), theirs, atol=1e-9)
    assert score("the boats sat", "the boat sat") == pytest.approx(100 * (1 - 0.5 / 27))  # three matches in one chunk
    half = 0.5 * 1.0 / (0.9 * 0.5 + 0.1 * 1.0)  # precision 1/2, recall 1, two chunks of two matches
    assert score("boat x y tree", "tree boat") == pytest.approx(100 * half * (1 - 0.5))


def make_wordnet(folder: Path) -> None:
    """WordNet's files, with one synset of two words that are their own stems: nltk looks up what the stem stage left."""
    folder.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        for name in (f"data.{part}", f"index.{part}", f"{part}.exc"):
            (folder / name).write_text("")
    for name in ("cntlist.rev", "index.sense"):
        (folder / name).write_text("")
    (folder / "lexnames").write_text("00\tadj.all\t3\n01\tnoun.artifact\t1\n")
    notice = "  1 made for a test\n"
    offset = f"{len(notice):08d}"
    (folder / "data.noun").write_text(f"{notice}{offset} 01 n 02 car 0 auto 0 000 | a motor vehicle\n")
    index = "".join(f"{word} n 1 0 1 0 {offset}\n" for word in ("auto", "car"))
    (folder / "index.noun").write_text(notice + index)


def test_meteor_uses_wordnet_where_it_is_installed(tmp_path):
    make_wordnet(tmp_path / "corpora" / "wordnet")
    code = "from lexperts.recipes.lexicon import scores; score, facts = scores.meteor(); print(score('a car', 'an auto'), facts['settings'], sep='|')"
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, env={**os.environ, "NLTK_DATA": str(tmp_path)}, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr
    value, stages = found.stdout.strip().split("|")
    assert stages == "exact, stem and WordNet stages"
    assert float(value) == pytest.approx(25.0)  # one match of two words, in one chunk: 0.5 (1 - 0.5)


def test_bertscore_is_that_of_its_package(bert):
    from bert_score import score

    ours = BertScore(bert, layer=1)(PAIRS[:40])
    predictions, references = map(list, zip(*PAIRS[:40], strict=True))
    theirs = score(predictions, references, model_type=bert, num_layers=1)[2].numpy()
    np.testing.assert_allclose(ours, 100 * theirs, atol=1e-3)
    scorer = BertScore(bert)
    assert scorer.facts["settings"].startswith(f"F1, {bert}, layer 2")
    assert scorer([("", "a boat"), ("a boat", "a boat")]) == pytest.approx([0, 100], abs=1e-3)
    assert np.ptp(ours) > 1
    with pytest.raises(ValueError, match="--bertscore-layer 3 .*0 and 2"):
        BertScore(bert, layer=3)


def test_roberta_reads_the_first_word_with_its_space(tmp_path):
    """As bert-score asks for; transformers 5 does not listen, so that `a` was another token at the start than inside."""
    alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    RobertaTokenizer(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    RobertaModel(RobertaConfig(vocab_size=len(alphabet), max_position_embeddings=66, **sizes)).save_pretrained(tmp_path)
    scorer = BertScore(str(tmp_path))
    tokenizer = scorer.scorer._tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a a")) == ["<s>", "\u0120", "a", "\u0120", "a", "</s>"]
    assert tokenizer.model_max_length == 66  # the tokenizer itself names none
    assert scorer([("a boat", "a boat"), ("a", "boats")])[0] == pytest.approx(100, abs=1e-3)


def test_mauve_is_that_of_its_package(gpt2):
    from mauve import compute_mauve

    mauve = Mauve(gpt2, batch_size=16)
    ours, gold, other = some_texts(120, 3), some_texts(120, 4), [" ".join([WORDS[0]] * (i % 5 + 1)) for i in range(120)]
    theirs = compute_mauve(p_text=gold, q_text=ours, featurize_model_name=gpt2, batch_size=16)
    assert mauve(ours, gold) == pytest.approx(100 * theirs.mauve, abs=1e-3)
    assert mauve(other, gold) < mauve(ours, gold) and mauve(gold, gold) == pytest.approx(100, abs=1e-3)
    empty, alone = mauve.features(["", "a"])[0], mauve.features(["<|endoftext|>"])[0]
    np.testing.assert_allclose(empty, alone, rtol=1e-5, atol=1e-6)


ROWS = [
    {"term": "bank", "context": "the bank of a river", "definition": "land beside water ."},
    {"term": "Bank", "context": "The  bank of a river", "definition": "a slope of earth"},
    {"term": "bank", "context": "the bank failed", "definition": "a firm that lends"},
    {"term": "oak", "context": "under the oak", "definition": "a tree"},
]


def files_of(folder: Path, **generated) -> list[str]:
    rows = {
        name: [{**row, "generated": text} for row, text in zip(ROWS, own, strict=True)]
        for name, own in generated.items()
    }
    return [f"{name.split('_')[0]}={write_rows(folder / f'{name}.jsonl', own)}" for name, own in rows.items()]


def test_a_row_has_its_best_reference_under_both_protocols(tmp_path, capsys):
    files = files_of(tmp_path, one=("a slope of earth.", "a firm that lends", "a firm that lends", "a bush"))
    more = write_rows(tmp_path / "more.jsonl", [{"term": "oak", "context": "an oak", "definition": "A bush."}])
    run("--files", *files, "--metrics", *LEXICAL, "--output_dir", tmp_path)
    found = [json.loads(line) for line in (tmp_path / "one.rows.jsonl").read_text().splitlines()]
    rouge = [[row["scores"][protocol]["rouge"] for row in found] for protocol in ("context", "term")]
    assert rouge == [[100, 25, 100, 50], [100, 100, 100, 50]]
    assert [row["generated"] for row in found][0] == "a slope of earth." and found[3]["definition"] == "a tree"
    scores = results(tmp_path)
    assert scores["references_per_row"] == {"context": 6 / 4, "term": 10 / 4} and scores["rows"] == 4
    assert scores["systems"]["one"]["context"]["rouge"]["mean"] == 275 / 4
    assert set(scores["metrics"]) == set(LEXICAL) and scores["missing"] == {}
    printed = capsys.readouterr().out
    assert "(1.50 per row); 4 rows" in printed
    assert f"BLEU: sacrebleu {scores['metrics']['bleu']['version']}, sentence BLEU" in printed
    run("--files", *files, "--references", more, "--metrics", "rouge", "--output_dir", tmp_path)
    rouge = {protocol: one["rouge"]["mean"] for protocol, one in results(tmp_path)["systems"]["one"].items()}
    assert rouge == {"context": 275 / 4, "term": 100}


def test_seeds_are_averaged_before_rows_are_tested(tmp_path, capsys):
    texts = {"base": ("land", "a slope", "a firm", "a bush"), "new_0": ("land beside water", "a slope of", "a firm", "a tree"),
             "new_1": ("land beside", "a hill", "a firm that lends", "")}  # fmt: skip
    given = ["--files", *files_of(tmp_path, **texts), "--baseline", "base"]
    given += ["--metrics", "rouge", "--output_dir", tmp_path]
    run(*given)
    printed = capsys.readouterr().out
    scores = results(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.rows.jsonl").read_text().splitlines()]
        for name in ("base", "new")
    }
    ours, theirs = ([row["scores"]["context"]["rouge"] for row in rows[name]] for name in ("new", "base"))
    each = [np.mean(values) for values in ([100, 6 / 7 * 100, 2 / 3 * 100, 100], [80, 100 / 3, 100, 0])]
    found = scores["systems"]["new"]["context"]["rouge"]
    assert found["seeds"] == pytest.approx(each, abs=1e-3) and found["sd"] == pytest.approx(
        np.std(each, ddof=1), abs=1e-3
    )
    assert found["mean"] == pytest.approx(np.mean(ours), abs=1e-3)
    test = scores["tests"]["new"]["context"]["rouge"]
    assert test["difference"] == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-3)
    assert test["p"] == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, abs=1e-5)
    assert test["low"] <= test["difference"] <= test["high"] and test["low"] < test["high"]
    assert "new: 1 generated definitions are empty" in printed and "mean ± sd (seeds)" in printed
    assert f"{found['mean']:.2f} ± {found['sd']:.2f} (2)" in printed and f"p={test['p']:.2g}" in printed
    assert rows["new"][0]["generated"] == ["land beside water", "land beside"]
    before = (tmp_path / "scores.json").read_bytes()
    run(*given)
    assert (tmp_path / "scores.json").read_bytes() == before
    assert f"holds scores of '{given.pop(3)}', which this run would replace" in fails(evaluate.main, *given)
    (tmp_path / "scores.json").write_text('{"mine": 1}')
    assert "was not written by this command. Pass another --output-dir" in fails(evaluate.main, *given)


def test_equal_systems_do_not_differ():
    same = np.arange(9.0)
    assert metrics.paired_p(same, same) == 1 and metrics.paired_p(same[:1], same[:1]) is None


def test_all_metrics_and_what_a_missing_one_needs(bert, gpt2, tmp_path, monkeypatch, capsys):
    files = files_of(tmp_path, one=("a slope", "a firm", "a firm", "a tree"), two=("land", "earth", "a firm", "a bush"))
    given = ("--files", *files, "--baseline", "one", "--output_dir", tmp_path)
    run(*given, "--bertscore_model", bert, "--mauve_model", gpt2)
    whole = results(tmp_path)
    assert list(whole["metrics"]) == list(METRICS) and whole["missing"] == {}
    assert {name: facts["package"] for name, facts in whole["metrics"].items()} == {
        "bleu": "sacrebleu", "rouge": "rouge-score", "meteor": "nltk", "bertscore": "bert-score",
        "mauve": "mauve-text",
    }  # fmt: skip
    assert set(whole["systems"]["two"]["mauve"]) == {"mean", "seeds"} and "mauve" not in whole["tests"]["two"]["term"]
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "mauve", None)  # as where it is not installed
    run(*given, "--mauve_model", gpt2)
    some, printed = results(tmp_path), capsys.readouterr().out
    assert list(some["metrics"]) == list(LEXICAL)
    for name in LEXICAL:
        assert some["systems"]["two"]["term"][name] == whole["systems"]["two"]["term"][name]
    for missing, fix in (
        ("BERTScore", "--bertscore-model"),
        ("MAUVE", r"lexperts\[definitions\]"),
    ):
        assert re.search(f"{missing} was not computed.*{fix}", printed)


def test_errors_are_reported_in_one_line(tmp_path):
    texts = ("a", "b", "c", "d")
    (good,) = files_of(tmp_path, one=texts)
    other = write_rows(tmp_path / "other.jsonl", [{**row, "generated": "a"} for row in reversed(ROWS)])
    short = write_rows(tmp_path / "short.jsonl", [{**row, "generated": "a"} for row in ROWS[:3]])
    gold = write_rows(tmp_path / "gold.jsonl", ROWS)
    (tmp_path / "broken.jsonl").write_text("{\n")
    cases = (
        ((f"a/b={gold}",), "'a/b' cannot become the name of a file"),
        ((f"x={tmp_path / 'broken.jsonl'}",), "broken.jsonl, line 1: it is not valid JSON"),
        ((f"x={gold}",), "gold.jsonl, row 1: "),
        ((good, f"x={other}"), "other.jsonl, row 1: "),
        ((good, f"x={short}"), "short.jsonl has 3 rows"),
        ((good, "--baseline", "x"), "--baseline 'x' is not one of the systems one."),
    )
    for given, message in cases:
        assert message in fails(evaluate.main, "--output_dir", tmp_path / "out", "--files", *given)
    assert not (tmp_path / "out").exists()
