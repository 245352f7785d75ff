# needs: onnx, serve
"""lexperts-lite: the answers of the pipeline on the same export, where neither PyTorch nor transformers can be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)

from .processes import ROOT, run

TEXTS = [
    *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks" / "forty_texts").glob("*_1.txt"))),
    "", "   ", "a", "graph cuts " * 300, "[SEP] of [MASK] networks", "\ud800 alone", "日本語のテキスト", "C++ and .NET in R&D", "x" * 3000,
    "naïve café ﬁnancial — “quotes”",
]  # fmt: skip
OPTIONS = [
    {}, {"style": "tags"}, {"top_k": None, "min_score": 0.0}, {"diversity": 0.5}, {"threshold": 0.3}, {"nested": False},
    {"candidates": ["graph cuts", "networks"]}, {"on_long": "truncate"}, {"language": None}, {"max_length": 32, "overlap": 4},
]  # fmt: skip


def places(phrases):
    return [(p["keyphrase"], p["start"], p["end"], [(m["start"], m["end"]) for m in p["mentions"]]) for p in phrases]


def scores(phrases):
    return [p["score"] for p in phrases] + [m["score"] for p in phrases for m in p["mentions"]]


@pytest.mark.parametrize("graph", ["exported", "exported_int8"])
def test_answers_are_those_of_the_pipeline(lite, graph, tmp_path, request):
    exported = request.getfixturevalue(graph)
    code = (
        "import json; from lexperts_lite import KeyphraseExtractor\n"
        "texts, options = json.load(open(sys.argv[2])); extract = KeyphraseExtractor(sys.argv[1])\n"
        "titled = extract({'title': 'Graph cuts', 'text': 'They segment images.'})\n"
        "print(json.dumps([[extract(texts, **one) for one in options], [extract(text) for text in texts], titled]))"
    )
    file = tmp_path / "given.json"
    file.write_text(json.dumps([TEXTS, OPTIONS]))
    done = run(lite, code, exported, file)
    assert done.returncode == 0, done.stderr[-3000:]
    found, alone, titled = json.loads(done.stdout)
    extract = pipeline("keyphrase-extraction", model=str(exported))
    assert titled == extract({"title": "Graph cuts", "text": "They segment images."})
    number = 0
    for options, answers in zip(OPTIONS, found, strict=True):
        for expected, answer in zip(extract(TEXTS, **options), answers, strict=True):
            assert places(answer) == places(expected)
            assert scores(answer) == pytest.approx(scores(expected), abs=2.5e-6)  # two steps of the sixth decimal
            number += len(answer)
    assert number > 500 and all(map(lambda a, b: places(a) == places(b), alone, found[0]))


def test_a_fork_does_not_wait_for_the_threads_of_its_parent(lite, exported):
    """Of the tokenizer's lock, which another thread may hold when the process forks, the child has a copy that nothing releases."""
    code = (
        "import os; from lexperts_lite import KeyphraseExtractor\n"
        "extract = KeyphraseExtractor(sys.argv[1], num_threads=None); expected = extract('graph cuts of networks')\n"
        "with extract.tokenizer._lock:\n"
        "    child = os.fork()\n"
        "if not child:\n"
        "    import signal; signal.alarm(60)\n"
        "    os._exit(0 if extract('graph cuts of networks') == expected else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    done = run(lite, code, exported)
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_object_serves_threads_and_works_after_a_fork(lite, exported):
    code = (
        "import os, json; from concurrent.futures import ThreadPoolExecutor; from lexperts_lite import KeyphraseExtractor\n"
        "extract = KeyphraseExtractor(sys.argv[1]); texts = ['graph cuts of networks ' * n for n in range(1, 40)]\n"
        "expected = extract(texts)\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    assert list(pool.map(extract, texts)) == expected\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if extract(texts) == expected else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and extract(texts) == expected"
    )
    done = run(lite, code, exported)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("(folder / 'tokenizer.json').unlink()", "has no tokenizer.json. Export the model again"),
        ("(folder / 'tokenizer.json').write_text('{}')", "cannot be read"),
        ("(folder / 'tokenizer_config.json').write_text('[]')", "cannot be read"),
        ("(folder / 'config.json').unlink()", "has no config.json. Name a folder"),
        ("(folder / 'config.json').write_text('[]')", "is not the configuration of a keyphrase model"),
        ("edit(exported={})", "holds no exported graph"),
        ("edit(exported={'onnx': {'precision': 'int8', 'opset': 18}})", "cannot be opened"),
        ("edit(id2label={'0': 'yes', '1': 'no', '2': 'x'})", "The model's labels are 'yes', 'no', 'x'"),
        ("(folder / 'onnx' / 'model.onnx').write_bytes(b'none')", "cannot be opened"),
        ("edit(keyphrase_ranker={'bias': 1.0})", "keyphrase_ranker"),
        ("edit(styles=['phrases', 'tags', 'x'])", "cannot be run with 3 styles"),
        ("folder = 3", "model=3 is not a folder"),
        ("options['num_threads'] = 0", "num_threads=0 must be at least 1"),
        ("options['num_threads'] = 'two'", "num_threads='two' is not a whole number"),
        ("options['backend'] = 'openvino'", "backend='openvino' has no graph"),
        ("options['style'] = 'tag'", "style='tag' is not known"),
        ("options['top_k'] = 'ten'", "top_k='ten' is not a whole number"),
        ("options['topk'] = 3", "topk"),
    ],
)
def test_what_cannot_work_is_named(lite, exported, tmp_path, change, message):
    code = (
        "import json, shutil; from pathlib import Path; from lexperts_lite import KeyphraseExtractor\n"
        "folder, options = Path(sys.argv[2]) / 'copy', {}\n"
        "shutil.copytree(sys.argv[1], folder)\n"
        "def edit(**values):\n"
        "    path = folder / 'config.json'\n"
        "    path.write_text(json.dumps(json.loads(path.read_text()) | values))\n"
        f"{change}\n"
        "try:\n"
        "    KeyphraseExtractor(folder, **options)\n"
        "except (OSError, ValueError, TypeError) as error:\n"
        "    print(error)"
    )
    done = run(lite, code, exported, tmp_path)
    assert done.returncode == 0 and message in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("None", "needs a text, {'title': ..., 'text': ...} or an iterable of them, got None"),
        ("3", "got 3 (int)"),
        ("b'bytes'", "got b'bytes' (bytes)"),
        ("[None]", "Document 0 must be a string, got a NoneType"),
        ("[{'body': 'x'}]", "body"),
    ],
)
def test_what_is_not_a_text_is_named(lite, exported, value, message):
    code = (
        "from lexperts_lite import KeyphraseExtractor\n"
        "try:\n"
        f"    KeyphraseExtractor(sys.argv[1])({value})\n"
        "except TypeError as error:\n"
        "    print(error)"
    )
    done = run(lite, code, exported)
    assert done.returncode == 0 and message in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.fixture
def command(lite, exported):
    """Runs `lexperts-lite extract`, where the encoding of the output is not UTF-8."""
    environment = {**os.environ, "PYTHONPATH": str(lite), "PYTHONIOENCODING": "ascii"}

    def run_command(*words, **options):
        words = [sys.executable, "-m", "lexperts_lite", "extract", *map(str, words), "--model", str(exported)]
        return subprocess.run(words, env=environment, capture_output=True, timeout=100, **options)

    return run_command


def rows_of(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.decode().split("\n") if line]


def test_the_command_reads_texts_and_rows(command, tmp_path):
    (tmp_path / "one.txt").write_text("graph cuts of networks")
    (tmp_path / "rows.jsonl").write_text(
        '{"id": 7, "title": "Graphs", "text": "graph cuts of networks"}\n\n{"text": ""}\n'
    )
    lines = command(tmp_path / "one.txt", "--top-k", 2)
    assert lines.returncode == 0 and len(lines.stdout.splitlines()) == 2
    assert 0 <= float(lines.stdout.split()[0]) <= 1
    assert command("-", "--top-k", 2, input=b"\xef\xbb\xbfgraph cuts of networks").stdout == lines.stdout
    rows = rows_of(command(tmp_path / "rows.jsonl", "--min-score", 0))
    assert rows[0]["id"] == 7 and rows[0]["keyphrases"][0]["field"] in ("title", "text") and rows[1]["keyphrases"] == []


def test_rows_of_other_systems_and_with_odd_characters_are_read(command, tmp_path):
    texts = ["graph\u2028cuts of naïve\x85networks\x0b", "lone \ud800 surrogate", "nul \0"]
    rows = [json.dumps({"text": text}, ensure_ascii=text.startswith("lone")) for text in texts]
    (tmp_path / "rows.JSONL").write_bytes("\r\n".join(rows).encode("utf-8-sig"))
    (tmp_path / "array.json").write_text(f"[{', '.join(rows)}]", encoding="utf-16")
    found = rows_of(command(tmp_path / "rows.JSONL"))
    assert [row["text"] for row in found] == texts and rows_of(command(tmp_path / "array.json")) == found


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}', (), "line 2: it has no text"),
        (b'{"text": null}', (), "line 1: it has no text"),
        (b'{"text": "a", "title": 3}', (), "line 1: title=3"),
        (b'{"text": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", (), "line 1: it is not valid JSON"),
        (b"caf\xe9", ("-",), "byte 0xe9 in position 3"),
        (None, (), "rows.jsonl"),
        (b"", (), "rows.jsonl"),
        (b'{"text": "a"}', ("--style", "tag"), "style='tag' is not known"),
        (b'{"text": "a"}', ("--top-k", 0), "top_k=0 must be at least 1"),
        (b'{"text": "a"}', ("--threads", 0), "num_threads=0 must be at least 1"),
    ],
)
def test_the_command_names_what_it_cannot_read(command, tmp_path, content, options, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = command(*(options if "-" in options else (path, *options)), input=content)
    error = done.stderr.decode()
    assert done.returncode == 2 and message in error and error.count("\n") == 1, error


def test_a_table_is_not_read_as_one_text(command, tmp_path):
    for name in ("rows.csv", "rows.TSV"):
        (tmp_path / name).write_text("text\ngraph cuts of networks\n")
        done = command(tmp_path / name)
        assert done.returncode == 2 and b"`lexperts keyphrases extract` reads tables" in done.stderr, done.stderr


def test_the_model_of_the_package_is_that_of_the_small_model(lite):
    """The graph in the wheel, and what it says of the README's paragraph."""
    from run_tools.files import fingerprint
    from run_tools.packaged import find_packaged

    graph, tiny = ROOT / "lexperts_lite" / "model", find_packaged("tiny")
    assert sum(file.stat().st_size for file in graph.rglob("*") if file.is_file()) < 12e6
    assert sum(file.stat().st_size for file in Path(tiny).glob("*.safetensors")) < 12e6
    extract = pipeline("keyphrase-extraction", model=tiny, device="cpu")
    exported = json.loads((graph / "config.json").read_text())
    assert exported["exported"]["onnx"]["weights"] == fingerprint(tiny)
    text = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")
    code = "import json; from lexperts_lite import extract_keyphrases; print(json.dumps(extract_keyphrases(sys.argv[1], top_k=5)))"
    done = run(lite, code, text)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert places(answer) == places(pipeline("keyphrase-extraction", model=str(graph))(text, top_k=5))
    assert any("tidal" in phrase["keyphrase"].lower() for phrase in answer)
    in_float32 = {phrase["keyphrase"] for phrase in extract(text)}
    assert len({phrase["keyphrase"] for phrase in answer} & in_float32) >= 3


def test_onnxruntime_sends_no_statistics(lite, exported):
    """It decides when it is imported, from the variable of the environment."""
    code = (
        "import os\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'onnxruntime':\n"
        "            print(os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from lexperts_lite import KeyphraseExtractor; KeyphraseExtractor(sys.argv[1])"
    )
    done = run(lite, code, exported)
    assert done.stdout == "1\n", done.stdout + done.stderr[-2000:]
