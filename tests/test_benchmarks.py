# needs: summaries, definitions, spacy, test-all
"""One short run of each benchmark, and the algorithms that they compare with."""

import doctest
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tools import write_rows

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("expert_roles", "forty_texts", "keyphrase_peers", "modular_experts", "smollm2", "speed", "tables")


@pytest.fixture(name="results")
def fixture_results(benchmark_module, tmp_path, monkeypatch):
    """results("speed") -> the rows that a benchmark has written, in a folder of its own."""
    monkeypatch.setattr(benchmark_module("common"), "RESULTS", tmp_path / "results")
    monkeypatch.setenv("LEXPERTS_COMMIT", "abc1234")
    return lambda name: json.loads((tmp_path / "results" / f"{name}.json").read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_shows_its_options(script, benchmark_module, capsys):
    with pytest.raises(SystemExit) as end:
        benchmark_module(script).main(["--help"])
    assert end.value.code == 0 and "--help" in capsys.readouterr().out


def test_results_are_of_clean_commits_and_a_row_replaces_that_of_its_key(benchmark_module, results):
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    assert len(records) > 50
    assert not [name for name, record in records.items() if "changes" in str(record["commit"])]
    write = benchmark_module("common").write
    write("some", [{"what": "a", "value": 1}, {"what": "b", "value": 1}], key=("what",))
    write("some", [{"what": "a", "value": 2}], key=("what",))
    found = [(row["what"], row["value"], row["commit"]) for row in results("some")]
    assert found == [("b", 1, "abc1234"), ("a", 2, "abc1234")]


# --- speed ----------------------------------------------------------------------------------------------------------


def test_calls_take_turns(benchmark_module):
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in ("slow", "fast")}
    row = benchmark_module("speed").measure("some", calls, 2)
    assert called == ["slow", "fast"] * 4 and len(row["times"]["slow"]["rounds_ms"]) == 2


@pytest.mark.nightly
def test_composing_is_timed(benchmark_module, results):
    benchmark_module("speed").main(["--only", "compose", "--shape", "tiny", "--rounds", "1"])
    (row,) = results("speed")
    assert row["what"] == "compose" and row["memory_mib"]["lexperts"] > 0


@pytest.mark.nightly
def test_a_training_step_has_the_loss_of_the_stock_model(benchmark_module):
    torch = benchmark_module("torch")
    torch.manual_seed(0)
    first, second = (call() for call in benchmark_module("speed").ROWS["lexicon"]().values())
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


# --- keyphrases -----------------------------------------------------------------------------------------------------

TAGS = {"A": ("ADJ", "JJ"), "N": ("NOUN", "NN"), "V": ("VERB", "VB"), ".": ("PUNCT", "."), "D": ("DET", "DT")}
TEXT = "graph/N cuts/N solve/V large/A energy/N problems/N ./. the/D graph/N cut/N of/D an/D energy/N problem/N ./. slow/A cuts/N"


def read(algorithms, text: str) -> list:
    """The tokens of "word/KIND ..."."""
    pairs = [part.rsplit("/", 1) for part in text.split()]
    stem = algorithms.stem
    return [algorithms.Token(word, stem(word), *TAGS[kind], content=kind not in (".", "D")) for word, kind in pairs]


def test_position_rank_is_the_papers_graph_pair_by_pair(benchmark_module):
    networkx = pytest.importorskip("networkx")
    algorithms = benchmark_module("keyphrase_algorithms")
    tokens, graph, bias = read(algorithms, TEXT), networkx.Graph(), Counter()
    for i, one in enumerate(tokens):
        if one.pos in algorithms.UNIVERSAL:
            bias[one.stem] += 1 / (i + 1)
        for other in tokens[i + 1 : i + 10]:
            if {one.pos, other.pos} <= algorithms.UNIVERSAL.keys() and one.stem != other.stem:
                weight = graph.get_edge_data(one.stem, other.stem, {"weight": 0})["weight"]
                graph.add_edge(one.stem, other.stem, weight=weight + 1)
    scores = networkx.pagerank(graph, personalization=bias, tol=1e-10)
    phrases = ["graph cuts", "large energy problems", "energy problem", "slow cuts"]
    expected = sorted(phrases, key=lambda phrase: -sum(scores[algorithms.stem(word)] for word in phrase.split()))
    assert algorithms.position_rank(tokens) == expected


def test_peers_are_scored_by_document(benchmark_module, results, tmp_path, folder):
    pytest.importorskip("yake")
    rows = [{"text": "Graph cuts solve energy problems.", "keyphrases": ["graph cuts", "absent phrase"]}] * 3
    write_rows(tmp_path / "keyphrases" / "inspec" / "test.jsonl", rows)
    arguments = ["--data", str(tmp_path), "--sets", "inspec", "--documents", "2", "--systems", "YAKE", folder]
    benchmark_module("keyphrase_peers").main(arguments)
    yake, model = results("keyphrase_peers")
    assert yake["documents"] == 2 and yake["by_document"]["num_targets"] == "1 1" and yake["seke"]["f1@10"] > 0
    assert model["system"] == folder


def test_counts_of_documents_give_the_f1_of_all_and_paired_intervals(benchmark_module):
    from keyphrase_tools.metrics import keyphrase_f1, keyphrase_f1_by_document

    by_document = benchmark_module("by_document")
    predicted = [["graph cut", "energy"], ["x"], ["a", "b", "c", "d", "e", "f"], []] * 9
    gold = [["graph cut", "tree"], [], ["a", "f", "z"], ["q"]] * 9
    ours = by_document.encode(keyphrase_f1_by_document(predicted, gold, k=by_document.CUTS))
    worse = by_document.encode(keyphrase_f1_by_document([[]] * 36, gold, k=by_document.CUTS))
    for k in by_document.CUTS:
        assert by_document.f1(ours, k) == pytest.approx(keyphrase_f1(predicted, gold, k=k)[f"f1@{k}"], abs=1e-3)
        padded = [[*of, *(f"wrong {i}" for i in range(k - len(of)))] for of in predicted]
        always = keyphrase_f1(padded, gold, k=k)[f"f1@{k}"]
        assert by_document.f1(ours, k, always=True) == pytest.approx(always, abs=1e-3)
    value, low, high = by_document.difference(ours, worse, 5)
    assert value == pytest.approx(by_document.f1(ours, 5)) and 0 < low < value < high
    with pytest.raises(ValueError, match="36"):
        by_document.difference(ours, {**worse, "num_targets": " ".join(["9"] * 36)}, 5)


def test_the_second_of_two_near_duplicates_counts_as_such(benchmark_module):
    forty = benchmark_module("forty_texts")
    assert doctest.testmod(forty).failed == 0 and len(forty.read_texts()[0]) == 40
    verdicts = {("news_1", "trade deals"): "acceptable", ("news_1", "levy"): "fragment", ("news_1", "levies"): "good"}
    row = forty.count("mine", [["new trade deal", "Trade deals", "levy", "levies"]], {"news_1": "..."}, verdicts)
    found = [verdict for _, verdict in row["texts"]["news_1"]]
    assert found == ["unknown", "near-duplicate", "fragment", "good"] and row["all"] == row["kinds"]["news"]


def test_experts_are_compared_with_what_their_words_are(benchmark_module, folder, tmp_path, capsys):
    pytest.importorskip("spacy")
    roles = benchmark_module("expert_roles")
    assert doctest.testmod(roles).failed == 0
    write_rows(tmp_path / "a.jsonl", [{"text": "The graph cut is in the network, and learning is fast."}] * 2)
    roles.main([str(tmp_path / "a.jsonl"), "--model", folder])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines[1:4]] == ["word", "punctuation", "stop word"]
    shares = [float(number) for number in lines[-1].split()[3:]]
    assert sum(shares) == pytest.approx(1, abs=0.02)


# --- other models ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_mixture_of_trained_experts_keeps_a_share_of_each_gain(benchmark_module, tmp_path, tiny_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    modular = benchmark_module("modular_experts")
    tiny_tokenizer = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="[PAD]", eos_token="[SEP]", unk_token="[UNK]")  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tiny_tokenizer))).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    for name, (place, field) in (modular.DOMAINS | modular.UNSEEN).items():
        for split in ("train", "validation"):
            rows = [{field: f"{name} {word} is the network of {word}"} for word in ("graph", "cut", "learning")]
            write_rows(tmp_path / place / f"{split}.jsonl", rows)
    study = modular.Study(tmp_path, tmp_path / "work", seed=1, steps=2, base=tmp_path / "base")
    models = study.models()
    rows = {label: study.row(models[label]()) for label in ("base", "dense, mean of the MLPs", "ridge, top 2")}
    assert rows["base"]["kept"] == 0 and np.isfinite([row["kept"] for row in rows.values()]).all()
    assert set(rows["ridge, top 2"]["domains"]) == set(modular.DOMAINS)


def test_definitions_and_tags_are_scored_by_their_rules(benchmark_module):
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    smollm2 = benchmark_module("smollm2")
    senses = enumerate(("land by a river.", "a firm"))
    rows = [{"term": "bank", "context": str(i), "definition": text} for i, text in senses]
    scores = smollm2.score_definitions(rows, ["a firm", "a firm"])
    assert scores["ROUGE-L, any sense"][0] == 100 and scores["ROUGE-L, same context"][0] < 100
    rows = [{"title": "Log files", "text": "They grow.", "keyphrases": ["log files", "logrotate"]}]
    scores = smollm2.score_tags(rows, [["log files", "disk"]])
    assert scores["present F1@M"][0] == 100 and scores["absent F1@M"][0] == 0
    options = SimpleNamespace(data=ROOT / "missing", rows=None, model={})
    with pytest.raises(Exception, match="missing"):
        list(smollm2.tags(options))
