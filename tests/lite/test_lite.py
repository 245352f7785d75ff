# needs: onnx
"""lexperts-lite: the answers of the pipeline, where neither PyTorch nor transformers can be imported."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import pipeline

from lexperts_lite import KeyphraseExtractor
from lexperts_lite.__main__ import main
from lexperts_lite.runtime import MODELS

from .processes import ENVIRONMENT, ROOT, run

TEXTS = [
    *(path.read_text(encoding="utf-8")[:900] for path in sorted((ROOT / "benchmarks" / "forty_texts").glob("[es]*_1.txt"))),
    "", "   ", "a", "graph cuts " * 80, "[SEP] of [MASK] networks", "\ud800 alone", "日本語のテキスト", "C++ and .NET in R&D", "x" * 300,
    "naïve café ﬁnancial — “quotes”",
]  # fmt: skip
OPTIONS = [
    {}, {"style": "tags"}, {"top_k": None, "min_score": 0.0}, {"diversity": 0.5}, {"threshold": 0.3}, {"nested": False},
    {"candidates": ["graph cuts", "networks"]}, {"language": None}, {"max_length": 32, "overlap": 4}, {"batch_size": 2},
]  # fmt: skip


def places(phrases):
    return [(p["keyphrase"], p["start"], p["end"], [(m["start"], m["end"]) for m in p["mentions"]]) for p in phrases]


def scores(phrases):
    found = [p["score"] for p in phrases] + [m["score"] for p in phrases for m in p["mentions"]]
    return [score for score in found if score is not None]


def test_answers_are_those_of_the_pipeline_also_where_torch_cannot_be_imported(folder, exported, tmp_path):
    """onnxruntime sends no statistics: it decides when it is imported, from the variable of the environment."""
    code = (
        "import json, os; from lexperts_lite import KeyphraseExtractor\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'onnxruntime':\n"
        "            assert os.environ.get('ORT_DISABLE_TELEMETRY') == '1'\n"
        "sys.meta_path.insert(0, Finder())\n"
        "texts, options = json.load(open(sys.argv[2])); extract = KeyphraseExtractor(sys.argv[1])\n"
        "titled = extract({'title': 'Graph cuts', 'text': 'They segment images.'})\n"
        "print(json.dumps([[extract(texts, **one) for one in options], titled]))"
    )
    file = tmp_path / "given.json"
    file.write_text(json.dumps([TEXTS, OPTIONS]))
    done = run(code, exported, file)
    assert done.returncode == 0, done.stderr[-3000:]
    found, titled = json.loads(done.stdout)
    extract, number = pipeline("keyphrase-extraction", model=str(folder / "model")), 0
    titles = extract({"title": "Graph cuts", "text": "They segment images."})
    assert places(titled) == places(titles) and [p["field"] for p in titled] == [p["field"] for p in titles]
    for options, answers in zip(OPTIONS, found, strict=True):
        for expected, answer in zip(extract(TEXTS, **options), answers, strict=True):
            assert places(answer) == places(expected)
            assert scores(answer) == pytest.approx(scores(expected), abs=1e-4)
            number += len(answer)
    assert number > 300


def test_a_text_has_the_same_answer_in_int8_alone_and_in_a_batch(exported_int8):
    """With ranges of activations for the whole batch it would not: scores differed in the second digit."""
    extract = KeyphraseExtractor(exported_int8, top_k=None, min_score=0.0, threshold=0.01)
    together = extract(TEXTS, batch_size=8)
    assert together == [extract(text) for text in TEXTS] and sum(map(bool, together)) > 7


def test_one_object_serves_threads_and_works_after_a_fork(exported):
    """Of the tokenizer's lock, which another thread may hold when the process forks, the child has a copy that nothing releases."""
    extract = KeyphraseExtractor(exported, num_threads=None)
    texts = ["graph cuts of networks " * n for n in range(1, 20)]
    expected = extract(texts)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(extract, texts)) == expected
    code = (
        "import os; from lexperts_lite import KeyphraseExtractor\n"
        "extract = KeyphraseExtractor(sys.argv[1]); expected = extract('graph cuts of networks')\n"
        "with extract.tokenizer._lock:\n"
        "    child = os.fork()\n"
        "if not child:\n"
        "    import signal; signal.alarm(60)\n"
        "    os._exit(0 if extract('graph cuts of networks') == expected else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and extract('graph cuts of networks') == expected"
    )
    done = run(code, exported)
    assert done.returncode == 0, done.stderr[-3000:]


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DEEP = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"
REFUSALS = {  # what happens to the folder, or the options -> what the error names
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), {}, "has no tokenizer.json"),
    "another tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), {}, "tokenizer in"),
    "tokenizer_config": (lambda f: (f / "tokenizer_config.json").write_text(DEEP), {}, "tokenizer in"),
    "no config": (lambda f: (f / "config.json").unlink(), {}, "has no config.json"),
    "another config": (lambda f: (f / "config.json").write_text("[]"), {}, "config.json is not the configuration"),
    "nested config": (lambda f: (f / "config.json").write_text(DEEP), {}, "config.json is not the configuration"),
    "another format": (lambda f: edit(f, exported={"openvino": {"precision": "int8"}}), {}, "holds no ONNX graph"),
    "no int8": (lambda f: edit(f, exported={"onnx": {"precision": "int8"}}), {}, "model_int8.onnx cannot be opened"),
    "labels": (lambda f: edit(f, id2label={"0": "yes", "1": "no", "2": "x"}), {}, "'yes', 'no', 'x'"),
    "damaged": (lambda f: (f / "onnx" / "model.onnx").write_bytes(b"none"), {}, "model.onnx cannot be opened"),
    "ranker": (lambda f: edit(f, keyphrase_ranker={"bias": 1.0}), {}, "keyphrase_ranker"),
    "no folder": (None, {"model": 3}, "model=3"),
    "threads": (None, {"num_threads": 0}, "num_threads=0"),
    "unknown": (None, {"topk": 3}, "'topk'"),
}


@pytest.mark.parametrize("change, options, shown", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_work_is_named(exported, tmp_path, change, options, shown):
    folder = shutil.copytree(exported, tmp_path / "copy")
    if change:
        change(folder)
    with pytest.raises((OSError, ValueError, TypeError)) as error:
        KeyphraseExtractor(**{"model": folder, **options})
    assert shown in str(error.value) and "\n" not in str(error.value)


def test_the_command_reads_texts_and_rows_also_of_other_systems(exported, tmp_path):
    def command(*words, **options):  # the encoding of the output is not UTF-8
        command = [sys.executable, "-m", "lexperts_lite", "extract", *map(str, words), "--model", str(exported)]
        environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, env=environment, capture_output=True, timeout=100, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().split("\n")[:-1]

    (tmp_path / "one.txt").write_text("graph cuts of networks")
    lines = command(tmp_path / "one.txt", "--top-k", 2)
    assert len(lines) == 2 and 0 <= float(lines[0].split()[0]) <= 1
    assert command("-", "--top-k", 2, input=b"\xef\xbb\xbfgraph cuts of networks") == lines
    texts = ["graph\u2028cuts of naïve\x85networks\x0b", "lone \ud800 surrogate", "nul \0", ""]
    rows = [json.dumps({"text": text}, ensure_ascii=text.startswith("lone")) for text in texts]
    titled = '{"id": 7, "title": "Graphs", "text": "graph cuts of networks"}'
    (tmp_path / "rows.JSONL").write_bytes("\r\n".join([*rows, "", titled]).encode("utf-8-sig"))
    (tmp_path / "array.json").write_text(f"[{', '.join([*rows, titled])}]", encoding="utf-16")
    found, again = (
        list(map(json.loads, command(tmp_path / n, "--min-score", 0))) for n in ("rows.JSONL", "array.json")
    )
    assert found == again and found[3]["keyphrases"] == []
    assert [row["text"] for row in found[:-1]] == [text.replace("\ud800", "?") for text in texts]
    assert found[4]["id"] == 7 and found[4]["keyphrases"][0]["field"] in ("title", "text")


ROW = b'{"text": "a"}'


@pytest.mark.parametrize("name, content, options, shown", [
    ("rows.jsonl", b'{"text": "a"}\n{"body": "b"}', (), "line 2"), ("rows.jsonl", b'{"text": "a", "title": 3}', (), "title=3"),
    ("rows.jsonl", b'{"text": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", (), "line 1"), ("one.txt", b"caf\xe9", (), "0xe9"),
    ("none.jsonl", None, (), "none.jsonl"), ("rows.jsonl", b"", (), "rows.jsonl"), ("rows.jsonl", ROW, ("--style", "tag"), "'tag'"),
    ("rows.jsonl", ROW, ("--top-k", "0"), "top_k=0"), ("rows.jsonl", ROW, ("--threads", "0"), "num_threads=0"),
    ("rows.csv", b"text\ngraph cuts\n", (), "rows.csv"),
])  # fmt: skip
def test_the_command_names_what_it_cannot_read(exported, tmp_path, capsys, name, content, options, shown):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["extract", str(tmp_path / name), "--model", str(exported), *options]) == 2
    error = capsys.readouterr().err
    assert shown in error and error.count("\n") == 1, error


def test_an_output_that_is_closed_and_ctrl_c_end_the_command_without_a_traceback(monkeypatch, capfd):
    for error, status, shown in ((KeyboardInterrupt, 130, "interrupted"), (BrokenPipeError, 1, "")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("lexperts_lite.__main__.KeyphraseExtractor", fail)
        monkeypatch.setattr(os, "dup2", lambda *_: None)
        assert main(["extract", "a.txt"]) == status and shown in capfd.readouterr().err


@pytest.mark.parametrize(("name", "size", "in_float16"), [("default", 33e6, 64e6), ("tiny", 7e6, 12e6)])
def test_the_models_of_the_package_are_those_in_float32(name, size, in_float16):
    """The graph, and what it says of the README's paragraph."""
    from run_tools.files import fingerprint
    from run_tools.packaged import find_packaged

    weights, graph = find_packaged(name), MODELS[name]
    assert sum(file.stat().st_size for file in graph.rglob("*") if file.is_file()) < size
    assert sum(file.stat().st_size for file in Path(weights).glob("*.safetensors")) < in_float16
    exported = json.loads((graph / "config.json").read_text())
    assert exported["exported"]["onnx"]["weights"] == fingerprint(weights)
    text = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")
    answer = KeyphraseExtractor(name)(text, top_k=5)
    assert any("tidal" in phrase["keyphrase"].lower() for phrase in answer)
    in_float32 = {phrase["keyphrase"] for phrase in pipeline("keyphrase-extraction", model=weights, device="cpu")(text)}
    assert len({phrase["keyphrase"] for phrase in answer} & in_float32) >= 3


def test_a_forked_process_reads_and_lets_go_of_a_model_with_threads():
    code = (
        "import os, signal; from lexperts_lite import KeyphraseExtractor\n"
        "extract = KeyphraseExtractor('tiny', num_threads=2); found = extract('Graph cuts segment images.')\n"
        "if not (child := os.fork()):\n"
        "    signal.alarm(20); same = extract('Graph cuts segment images.') == found; del extract; os._exit(not same)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    done = run(code)
    assert done.stdout == "0\n", done
