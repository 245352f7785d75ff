# needs: summaries, definitions
"""Metrics: the numbers of their reference implementations, of hand counting, and of both conventions of keyphrases."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import pre_tokenizers
from transformers import AutoModel, RobertaConfig, RobertaModel, RobertaTokenizer

from keyphrase_tools.metrics import keyphrase_f1
from lexperts.evaluate import Score, compare, score_answers, score_definitions, score_keyphrases, score_summaries
from lexperts.evaluate.models import bertscore, open_bertscore
from lexperts.evaluate.scores import f1_of_means

PARTS = ("present", "absent")
WORDS = ["a", "the", "of", "in", "small", "large", "running", "runs", "boats", "boat", "tree", "trees", "3.5", "water,"]


def some_texts(number: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))) for _ in range(number)]


FOUND = [*some_texts(150, 0), "a tree", "", "boat", "Boats run"]
GOLD = [*some_texts(150, 1), "a tree", "a tree", "a tree", "a boat runs"]


@pytest.fixture(scope="module")
def bert(backbone_config, tiny_tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert", initializer_range=0.5)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def score_pairs(found, gold, **models) -> dict:
    """The scores of definitions with one reference each."""
    return score_definitions(found, gold, [{"term": str(i), "context": ""} for i in range(len(gold))], **models)


def test_bleu_rouge_and_meteor_are_those_of_their_packages():
    from nltk import word_tokenize
    from nltk.translate.meteor_score import single_meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    scores, pairs = score_pairs(FOUND, GOLD), list(zip(FOUND, GOLD, strict=True))
    bleu, rouge = BLEU(effective_order=True), RougeScorer(["rougeL"])
    np.testing.assert_allclose(scores["BLEU"].rows, [bleu.sentence_score(own, [gold]).score for own, gold in pairs])
    theirs = [100 * rouge.score(gold, own)["rougeL"].fmeasure for own, gold in pairs]
    np.testing.assert_allclose(scores["ROUGE-L"].rows, theirs)
    no_wordnet = SimpleNamespace(synsets=lambda word: [])
    options = {"wordnet": no_wordnet} if "without the WordNet stage" in scores["METEOR"].facts else {}
    words = [[word_tokenize(text, preserve_line=True) for text in pair] for pair in pairs]
    theirs = [100 * single_meteor_score(gold, own, **options) for own, gold in words]
    np.testing.assert_allclose(scores["METEOR"].rows, theirs)


def test_meteor_uses_wordnet_where_it_is_installed(monkeypatch):
    auto = SimpleNamespace(lemmas=lambda: [SimpleNamespace(name=lambda: "auto")])
    corpus = SimpleNamespace(ensure_loaded=lambda: None, synsets=lambda word: [auto] * (word == "car"))
    monkeypatch.setattr("nltk.corpus.wordnet", corpus)
    found = score_pairs(["a car"], ["an auto"])["METEOR"]
    assert found.facts.endswith("exact, stem and WordNet stages")
    assert found.value == pytest.approx(25)  # one match of two words, in one chunk: 0.5 (1 - 0.5)


def test_a_definition_has_the_best_reference_of_its_term_and_context(bert):
    rows = [("bank", "the bank of a river", "land beside water ."), ("Bank", "The  bank of a river", "a slope of earth"),
            ("bank", "the bank failed", "a firm that lends"), ("oak", "under the oak", "e.g. 3.5 m, or .5 m.")]  # fmt: skip
    sources = [{"term": term, "context": context} for term, context, _ in rows]
    found = ["a slope of earth.", "a firm that lends", "a firm that lends", "eg 3.5 m, or .5 m"]
    scores = score_definitions(found, [gold for *_, gold in rows], sources, bertscore_model=bert)
    assert scores["ROUGE-L"].rows.tolist() == [100, 25, 100, 100]
    assert scores["BLEU"].rows[3] == pytest.approx(100)  # full stops are left out, except before digits
    assert (scores["BERTScore"].rows > 99.9).tolist() == [True, False, True, True]


def test_rouge_of_summaries_is_that_of_hand_counting():
    found = score_summaries(["the cat sat down. a dog ran."], ["A dog ran. The cats sat up."])
    # 7 words each, 6 of them common once "cats" is stemmed; the longest common sequence is "the cat sat" of 3 words
    assert found["ROUGE-1"].value == pytest.approx(100 * 6 / 7) and found["ROUGE-L"].value == pytest.approx(100 * 3 / 7)
    assert found["ROUGE-Lsum"].value == pytest.approx(100 * 6 / 7)  # a sentence at a time, order does not matter


def test_bertscore_is_that_of_its_package(bert):
    from bert_score import score

    theirs = score(FOUND[:40], GOLD[:40], model_type=bert, num_layers=2)[2].numpy()
    ours = score_summaries(FOUND[:40], GOLD[:40], bertscore_model=bert)["BERTScore"]
    np.testing.assert_allclose(ours.rows, 100 * theirs, atol=1e-3)
    assert np.ptp(theirs) > 0.01 and "layer 2" in ours.facts
    blank = score_summaries(["", " \n"], ["a boat", "a"], bertscore_model=bert)["BERTScore"]
    assert blank.rows.tolist() == [0, 0]


def test_roberta_reads_the_first_word_with_its_space_and_safetensors(tmp_path):
    """As bert-score asks for; transformers 5 does not listen, so that `a` was another token at the start than inside."""
    alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    RobertaTokenizer(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = RobertaModel(RobertaConfig(vocab_size=len(alphabet), max_position_embeddings=66, **sizes))
    model.save_pretrained(tmp_path)
    tokenizer = open_bertscore(str(tmp_path))._tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a a")) == ["<s>", "\u0120", "a", "\u0120", "a", "</s>"]
    assert tokenizer.model_max_length == 66  # the tokenizer itself names none
    open_bertscore.cache_clear()
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        bertscore(str(tmp_path), ["a"], [["a"]])


def test_mauve_is_near_100_for_the_same_texts(bert):
    gold, other = ["", *some_texts(119, 4)], ["a " * (i % 5 + 1) for i in range(120)]
    same, near, far = (score_pairs(t, gold, mauve_model=bert)["MAUVE"].value for t in (gold, some_texts(120, 3), other))
    assert same == pytest.approx(100, abs=1e-3) and far < near < 100


@pytest.mark.parametrize("vector", [
    v for v in json.loads((Path(__file__).parents[1] / "vectors/keyphrase_eval.json").read_text())["vectors"]
    if v["convention"] == "exhird" and not v["options"] and not v.get("pred_lines") and any(v["golds"])
    # whose texts have the words of our own tokens, which have no hyphens and slashes
    and not set("-/") & set("".join(v["src"]))
], ids=lambda vector: vector["id"])  # fmt: skip
def test_keyphrases_of_exhird_are_those_of_the_public_scorer(vector):
    sources = [{"text": text} for text in vector["src"]]
    found = score_keyphrases(vector["preds"], vector["golds"], sources, "exhird")
    expected = {f"{part} F1@{k}": 100 * vector["expected"][part][f"std_f1@{k}"] for part in PARTS for k in "5M"}
    assert {name: score.value for name, score in found.items()} == pytest.approx(expected)


def test_keyphrases_of_exhird_have_titles_and_words_and_both_kinds():
    source = {"title": "Graph cuts", "text": ["segment", "10", "images"]}
    predictions, gold = [["graph-cut", "Graph cuts", "tree", "<unk> cuts"]], [["graph cuts (GC)", "tree"]]
    found = score_keyphrases(predictions, gold, [source], "exhird")
    expected = {f"{part} F1@{k}": value for part in PARTS for k, value in (("5", 200 / 6), ("M", 100))}
    assert {name: score.value for name, score in found.items()} == pytest.approx(expected)


def test_keyphrases_of_seke_are_those_in_the_text_and_its_rules():
    sources = [{"title": "Graph cuts.", "text": "They segment images"}, {"text": "nothing"}, {"text": "two graphs"}]
    gold = [["graph cut", "absent"], ["absent"], ["graph"]]
    predictions = [["Graph-Cuts", "image"], ["nothing"], ["two graphs"]]
    found = score_keyphrases(predictions, gold, sources)
    expected = keyphrase_f1([["graph cuts", "image"], ["two graphs"]], [["graph cuts"], ["graph"]], k=(5, 10))
    assert [found[f"F1@{k}"].value for k in (5, 10)] == pytest.approx(
        [100 * expected[f"f1@{k}"] for k in (5, 10)], abs=0.01
    )
    assert len(found["F1@5"].rows) == 2  # a document without gold keyphrases is left out
    with pytest.raises(ValueError, match="None of the 1 documents"):
        score_keyphrases([["x"]], [["absent"]], [{"text": "nothing"}])


@pytest.mark.parametrize(
    "predicted, gold, exact, f1",
    [
        ("The cat!", ["a cat"], 1, 1), ("cat dog", ["the cat", "fish"], 0, 2 / 3), ("", [], 1, 1), ("cat", [], 0, 0),
        ("", ["cat"], 0, 0), ("cat cat", ["cat dog"], 0, 1 / 2), ("a", ["the", "U.S."], 0, 0), ("us", ["the", "U.S."], 1, 1),
    ],
)  # fmt: skip
def test_answers_are_scored_as_by_the_script_of_squad(predicted, gold, exact, f1):
    found = {name: score.value for name, score in score_answers([predicted, "cat"], [gold, ["cat"]]).items()}
    assert (found["exact"], found["F1"]) == pytest.approx((50 * (exact + 1), 50 * (f1 + 1)))
    more = {"HasAns exact": 100, "HasAns F1": 100, "NoAns exact": 100 * exact, "NoAns F1": 100 * f1}
    assert {name: found[name] for name in found if "Ans" in name} == pytest.approx({} if gold else more)


def test_a_difference_is_one_only_where_it_is_more_than_chance():
    rng = np.random.default_rng(0)
    base = rng.normal(30, 10, 200)
    better, tie, ratios = base + 1 + rng.normal(0, 2, 200), base + rng.normal(0, 2, 200), rng.uniform(10, 90, (200, 2))
    other = base + (np.arange(200) == 0)  # in a single row, which a third of the samples lack

    def of(rows, two=ratios):
        return [{"mean": Score(rows, ""), "F1": Score(two, "", f1_of_means), "all": Score(rows[:1], "")}]

    systems = {"base": of(base), "better": of(better, ratios + 1), "tie": of(tie, ratios[::-1]), "same": of(base)}
    results = compare(systems | {"other": of(other), "seeds": of(better) + of(tie)}, "base")
    found, seeds = results["differences"], results["systems"]["seeds"]["mean"]
    for metric in ("mean", "F1"):
        assert found["better"][metric]["p"] == pytest.approx(2 / 2001)
        assert 0 < found["better"][metric]["low"] < found["better"][metric]["value"]
        assert found["tie"][metric]["low"] < 0 < found["tie"][metric]["high"] and found["tie"][metric]["p"] > 0.05
        assert found["same"][metric] == dict.fromkeys(("value", "low", "high"), 0) | {"p": 1}
    assert found["tie"]["mean"]["p"] == pytest.approx(stats.ttest_rel(tie, base).pvalue, abs=0.03)
    assert found["other"]["mean"]["p"] == pytest.approx(np.exp(-1), abs=0.05)  # ties count half
    assert found["better"]["all"].keys() == {"value"}  # a single value has neither interval nor test
    interval = stats.bootstrap((base,), np.mean, n_resamples=2000, method="percentile", rng=0).confidence_interval
    assert [results["systems"]["base"]["mean"][name] for name in ("low", "high")] == pytest.approx(list(interval))
    assert seeds["runs"] == pytest.approx([better.mean(), tie.mean()])
    assert (seeds["value"], seeds["sd"]) == pytest.approx((np.mean(seeds["runs"]), np.std(seeds["runs"], ddof=1)))
