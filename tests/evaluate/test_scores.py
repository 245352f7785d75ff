"""Metrics: the numbers of their reference implementations, of hand counting, and of both conventions of keyphrases."""

import json
import os
import random
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

from keyphrase_tools.metrics import keyphrase_f1
from lexperts.evaluate import compare, score_answers, score_definitions, score_keyphrases, score_summaries
from lexperts.evaluate.models import mauve, open_bertscore
from lexperts.evaluate.scores import Score, lexical_metrics, without_full_stops

WORDS = ["a", "the", "of", "in", "small", "large", "running", "runs", "boats", "boat", "tree", "trees", "3.5", "water,"]
VECTORS = json.loads((Path(__file__).parents[1] / "vectors/keyphrase_eval.json").read_text())["vectors"]


def some_texts(number: int, seed: int, longest: int = 12) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest))) for _ in range(number)]


PAIRS = list(zip(some_texts(150, 0), some_texts(150, 1), strict=True))
PAIRS += [(text, text) for text in some_texts(5, 2)]
PAIRS += [("", "a tree"), ("boat", "a tree"), ("Boats run", "a boat runs")]


def test_bleu_rouge_and_meteor_are_those_of_their_packages():
    from nltk import word_tokenize
    from nltk.translate.meteor_score import single_meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    scores = lexical_metrics()
    ours = {name: [metric(*pair) for pair in PAIRS] for name, (metric, _) in scores.items()}
    bleu, rouge = BLEU(effective_order=True), RougeScorer(["rougeL"])
    np.testing.assert_allclose(ours["BLEU"], [bleu.sentence_score(own, [gold]).score for own, gold in PAIRS])
    theirs = [100 * rouge.score(gold, own)["rougeL"].fmeasure for own, gold in PAIRS]
    np.testing.assert_allclose(ours["ROUGE-L"], theirs)
    options = {}
    if "without the WordNet stage" in scores["METEOR"][1]:
        options["wordnet"] = type("NoWordNet", (), {"synsets": lambda self, word: []})()
    words = [[word_tokenize(text, preserve_line=True) for text in pair] for pair in PAIRS]
    theirs = [100 * single_meteor_score(gold, own, **options) for own, gold in words]
    np.testing.assert_allclose(ours["METEOR"], theirs)
    meteor = scores["METEOR"][0]
    assert meteor("the boats sat", "the boat sat") == pytest.approx(100 * (1 - 0.5 / 27))  # three matches in one chunk
    half = 0.5 * 1.0 / (0.9 * 0.5 + 0.1 * 1.0)  # precision 1/2, recall 1, two chunks of two matches
    assert meteor("boat x y tree", "tree boat") == pytest.approx(100 * half * (1 - 0.5))


def test_meteor_uses_wordnet_where_it_is_installed(tmp_path):
    """A WordNet with one synset of two words that are their own stems."""
    folder = tmp_path / "corpora" / "wordnet"
    folder.mkdir(parents=True)
    parts = [f"{kind}.{part}" for kind in ("data", "index") for part in ("noun", "verb", "adj", "adv")]
    for name in (*parts, "noun.exc", "verb.exc", "adj.exc", "adv.exc", "cntlist.rev", "index.sense"):
        (folder / name).write_text("")
    (folder / "lexnames").write_text("00\tadj.all\t3\n01\tnoun.artifact\t1\n")
    notice = "  1 made for a test\n"
    offset = f"{len(notice):08d}"
    (folder / "data.noun").write_text(f"{notice}{offset} 01 n 02 car 0 auto 0 000 | a motor vehicle\n")
    index = "".join(f"{word} n 1 0 1 0 {offset}\n" for word in ("auto", "car"))
    (folder / "index.noun").write_text(notice + index)
    code = "from lexperts.evaluate.scores import lexical_metrics as all\n"
    code += "score, facts = all()['METEOR']; print(score('a car', 'an auto'), facts, sep='|')"
    environment = {**os.environ, "NLTK_DATA": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    value, stages = done.stdout.strip().split("|")
    assert stages.endswith("exact, stem and WordNet stages")
    assert float(value) == pytest.approx(25.0)  # one match of two words, in one chunk: 0.5 (1 - 0.5)


def test_a_definition_has_its_best_reference_under_both_protocols():
    rows = [("bank", "the bank of a river", "land beside water ."), ("Bank", "The  bank of a river", "a slope of earth"),
            ("bank", "the bank failed", "a firm that lends"), ("oak", "under the oak", "a tree")]  # fmt: skip
    sources = [{"term": term, "context": context} for term, context, _ in rows]
    found = ["a slope of earth.", "a firm that lends", "a firm that lends", "a bush"]
    scores = score_definitions(found, [gold for *_, gold in rows], sources)
    assert scores["ROUGE-L"].rows.tolist() == [100, 25, 100, 50]
    assert scores["ROUGE-L, any sense"].rows.tolist() == [100, 100, 100, 50]
    assert without_full_stops("e.g. 3.5 m, or .5 m. a five-dollar  bill .") == "eg 3.5 m, or .5 m a five-dollar bill"


def test_rouge_of_summaries_is_that_of_hand_counting():
    found = score_summaries(["the cat sat down. a dog ran."], ["A dog ran. The cats sat up."])
    # 7 words each, 6 of them common once "cats" is stemmed; the longest common sequence is "the cat sat" of 3 words
    assert found["ROUGE-1"].value == pytest.approx(100 * 6 / 7) and found["ROUGE-L"].value == pytest.approx(100 * 3 / 7)
    assert found["ROUGE-Lsum"].value == pytest.approx(100 * 6 / 7)  # a sentence at a time, order does not matter
    assert found["mean R"].value == pytest.approx(np.mean([found[f"ROUGE-{n}"].value for n in ("1", "2", "L")]))


def test_bertscore_is_that_of_its_package(backbone_config, tiny_tokenizer, tmp_path):
    from bert_score import score

    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert", initializer_range=0.5)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    metric, settings = open_bertscore(str(tmp_path), 1)
    theirs = score(*map(list, zip(*PAIRS[:40], strict=True)), model_type=str(tmp_path), num_layers=1)[2].numpy()
    np.testing.assert_allclose(metric(PAIRS[:40]), 100 * theirs, atol=1e-3)
    assert np.ptp(theirs) > 0.01 and "layer 1" in settings and "layer 2" in open_bertscore(str(tmp_path))[1]
    assert metric([("", "a boat"), ("a boat", "a boat"), ("a", " \n")]) == pytest.approx([0, 100, 0], abs=1e-3)
    found = score_summaries(["a boat"], ["a boat"], bertscore_model=str(tmp_path))
    assert found["BERTScore"].value == pytest.approx(100, abs=1e-3)
    with pytest.raises(ValueError, match="--bertscore-layer 3"):
        open_bertscore(str(tmp_path), 3)


def test_roberta_reads_the_first_word_with_its_space(tmp_path):
    """As bert-score asks for; transformers 5 does not listen, so that `a` was another token at the start than inside."""
    alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    RobertaTokenizer(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    RobertaModel(RobertaConfig(vocab_size=len(alphabet), max_position_embeddings=66, **sizes)).save_pretrained(tmp_path)
    metric, _ = open_bertscore(str(tmp_path))
    tokenizer = metric.args[0]._tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a a")) == ["<s>", "\u0120", "a", "\u0120", "a", "</s>"]
    assert tokenizer.model_max_length == 66  # the tokenizer itself names none
    assert metric([("a boat", "a boat"), ("a", "boats")])[0] == pytest.approx(100, abs=1e-3)


def test_mauve_is_near_100_for_the_same_texts(tmp_path):
    folder = tmp_path / "gpt2"
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<|end|>", ".", *WORDS))}, "<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS) + 2, **sizes)).save_pretrained(folder)
    gold, other = ["", *some_texts(120, 4)], ["a " * (i % 5 + 1) for i in range(120)]
    assert mauve(str(folder), gold, gold) == pytest.approx(100, abs=1e-3)
    assert mauve(str(folder), other, gold) < mauve(str(folder), some_texts(120, 3), gold) < 100


@pytest.mark.parametrize(
    "vector",
    [
        v
        for v in VECTORS
        if v["convention"] == "exhird"
        and not v["options"]
        and not v.get("pred_lines")
        and any(v["golds"])
        # whose texts have the words of our own tokens, which have no hyphens and slashes
        and not set("-/") & set("".join(v["src"]))
    ],
    ids=lambda vector: vector["id"],
)
def test_keyphrases_of_exhird_are_those_of_the_public_scorer(vector):
    sources = [{"text": text} for text in vector["src"]]
    found = score_keyphrases(vector["preds"], vector["golds"], sources, "exhird")
    for part in ("present", "absent"):
        for k in ("5", "M"):
            expected = 100 * vector["expected"][part][f"std_f1@{k}"]
            assert found[f"{part} F1@{k}"].value == pytest.approx(expected), (part, k)


def test_keyphrases_count_repeats_and_titles_and_words_and_both_kinds():
    source = {"title": "Graph cuts", "text": ["segment", "10", "images"]}
    found = score_keyphrases(
        [["graph-cut", "Graph cuts", "tree", "<unk> cuts"]], [["graph cuts (GC)", "tree"]], [source], "exhird"
    )
    assert {name: score.value for name, score in found.items()} == pytest.approx(
        {
            "present F1@5": 200 / 6,
            "present F1@M": 100,
            "absent F1@5": 200 / 6,
            "absent F1@M": 100,
            "phrases": 4,
            "repeats": 25,
        }
    )


def test_keyphrases_of_seke_are_those_in_the_text_and_its_rules():
    sources = [{"title": "Graph cuts.", "text": "They segment images"}, {"text": "nothing"}, {"text": "two graphs"}]
    gold = [["graph cut", "absent"], ["absent"], ["graph"]]
    predictions = [["Graph-Cuts", "image"], ["nothing"], ["two graphs"]]
    found = score_keyphrases(predictions, gold, sources)
    expected = keyphrase_f1([["graph cuts", "image"], ["two graphs"]], [["graph cuts"], ["graph"]], k=(5, 10))
    for k in (5, 10):
        assert found[f"F1@{k}"].value == pytest.approx(100 * expected[f"f1@{k}"], abs=0.01)
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
    better, tie = base + 1 + rng.normal(0, 2, 200), base + rng.normal(0, 2, 200)
    ratios = rng.uniform(10, 90, (200, 2))
    f1 = lambda means: 2 * means.prod(axis=-1) / means.sum(axis=-1)  # noqa: E731
    of = lambda rows, two: [{"mean": Score(rows, ""), "F1": Score(two, "", f1), "all": Score(rows[:1], "")}]  # noqa: E731
    systems = {
        "base": of(base, ratios),
        "better": of(better, ratios + 1),
        "tie": of(tie, ratios[::-1]),
        "same": of(base, ratios),
    }
    systems["seeds"] = of(better, ratios) + of(tie, ratios)
    found = compare(systems, "base")
    for metric, p in (("mean", stats.ttest_rel(better, base).pvalue), ("F1", 2 / 2001)):
        assert found["differences"]["better"][metric]["p"] == pytest.approx(p)
        assert 0 < found["differences"]["better"][metric]["low"] < found["differences"]["better"][metric]["value"]
        low, high, p = (found["differences"]["tie"][metric][name] for name in ("low", "high", "p"))
        assert low < 0 < high and p > 0.05
        same = dict.fromkeys(("value", "low", "high"), 0) | {"p": 1}
        assert found["differences"]["same"][metric] == same
    assert found["differences"]["better"]["all"].keys() == {"value"}  # a single value has neither interval nor test
    assert found["systems"]["better"]["F1"]["value"] == pytest.approx(f1(ratios.mean(0) + 1))
    seeds = found["systems"]["seeds"]["mean"]
    assert seeds["runs"] == pytest.approx([better.mean(), tie.mean()]) and seeds["value"] == pytest.approx(
        np.mean(seeds["runs"])
    )
    assert seeds["sd"] == pytest.approx(np.std(seeds["runs"], ddof=1))
    averaged = stats.ttest_rel((better + tie) / 2, base).pvalue
    assert found["differences"]["seeds"]["mean"]["p"] == pytest.approx(averaged)
