"""`lexperts define prepare`: formats that are read, rows that are dropped, splits, and reports."""

import csv
import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest

from lexperts.recipes.lexicon import prepare
from run_tools.definition_rows import load_definition_rows
from tests.loopback_hub import LoopbackHub, Repo
from tests.recipes.helpers import fails, run_main, write_rows

SPLITS = ("train", "validation", "test")
HEAD = ["WORD", "DEFINITION", "EXAMPLE", "DATASET_NAME", "SPLIT_TYPE"]


def run(*arguments):
    prepare.main([*map(str, arguments)])


def some_rows(terms: int, senses: int = 2) -> list[dict]:
    return [
        {"term": f"thing{i}", "context": f"see the thing{i} {s}", "definition": f"a thing of kind {i} {s}"}
        for i in range(terms)
        for s in range(senses)
    ]


def write_csv(path: Path, head: list[str], rows: list[list], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, **options).writerows([head, *rows])
    return path


def read(folder: Path) -> dict[str, list[dict]]:
    """split -> rows; every file must be one that training reads whole."""
    found = {}
    for split in SPLITS:
        if (folder / f"{split}.jsonl").exists():
            found[split], dropped = load_definition_rows(folder / f"{split}.jsonl")
            assert dropped == 0
    return found


def everything(folder: Path) -> set[tuple]:
    rows = [row for rows in read(folder).values() for row in rows]
    return {(row["term"], row["context"], row["definition"], row["source"]) for row in rows}


def test_each_data_set_of_3d_ex_is_read_and_filtered(tmp_path, capsys):
    urban = [
        ["fiver", "five dollars", "he slipped me a fiver", "Urban", "train"],
        ["fiver", "five dollars", "he slipped me a fiver", "Urban", "train"],
        ["smock", "a large shirt", 'he printed "nice smock", and left', "Urban", "valid"],
        ["", "not known", "what is it", "Urban", "train"],
        ["cower", "", "he would cower away", "Urban", "train"],
        ["throwed", "messed up", "N/A", "Urban", "train"],
        ["raggler", "one who schemes", "he is a raggler", "", "train"],
    ]
    write_csv(tmp_path / "raw" / "Urban_all.csv", HEAD, urban)
    write_csv(tmp_path / "raw" / "Hei++.csv", [*HEAD[:2], *HEAD[3:]], [["clean air", "air above", "Hei++", "test"]])
    (tmp_path / "raw" / "CHA_train").write_text("https://example.org/download?id=1\n")
    run("--sources", f"3dex={tmp_path / 'raw'}", "--output_dir", tmp_path / "out", "--keep_splits")
    printed = capsys.readouterr().out
    assert "3dex: not read: CHA_train" in printed and "test: no rows, and no file" in printed
    found = read(tmp_path / "out")
    assert [row["term"] for row in found["train"]] == ["fiver"] and "test" not in found
    smock = ("smock", 'he printed "nice smock", and left', "a large shirt", "Urban")
    assert [tuple(row.values()) for row in found["validation"]] == [smock]
    data = json.loads((tmp_path / "out" / "data.json").read_text())
    assert data["read"] == {"3dex": 8} and data["kept"] == {"Urban": 2}
    missing = ("term_missing", "definition_missing", "context_missing", "dataset_missing")
    assert data["dropped"] == dict.fromkeys(("excluded_dataset", "repeated", *missing), 1)
    assert all(f"{count:,} {prepare.REASONS[reason]}" in printed for reason, count in data["dropped"].items())


def test_the_unified_3d_ex_becomes_a_row_for_each_context(tmp_path):
    rows = [
        ["bank", "a slope", "[['by the bank', 'the steep bank'], ['a bank of earth']]", "[\"['WordNet']\", \"['CHA', 'WordNet']\"]"],
        ["tree", "a tall plant", "", "['MultiRD', 'Hei++']"],
        ["leaf", "a blade", "[['a green leaf']]", "[\"['MultiRD', 'Wiktionary']\"]"],
        ["list", "a kind of row", "[see] the list [here]", "['CODWOE']"],
    ]  # fmt: skip
    write_csv(tmp_path / "3D-EX.csv", HEAD[:4], rows)
    given = ("--sources", f"3dex={tmp_path / '3D-EX.csv'}", "--output_dir", tmp_path, "--proportions", 1, 0, 0)
    run(*given)
    assert everything(tmp_path) == {
        ("bank", "by the bank", "a slope", "WordNet"),
        ("bank", "the steep bank", "a slope", "WordNet"),
        ("bank", "a bank of earth", "a slope", "CHA"),
        ("leaf", "a green leaf", "a blade", "Wiktionary"),
        ("list", "[see] the list [here]", "a kind of row", "CODWOE"),
    }
    assert json.loads((tmp_path / "data.json").read_text())["dropped"] == {"excluded_dataset": 1}
    run(*given, "--exclude", "WordNet", "cha")
    assert {source for *_, source in everything(tmp_path)} == {"MultiRD", "CODWOE"}


def test_files_of_ishiwatari_gadetsky_and_simpdefiner(tmp_path):
    wiki, oxford, simple = tmp_path / "wiki", tmp_path / "gadetsky", tmp_path / "simple"
    for folder in (wiki, oxford, simple):
        folder.mkdir()
    entry = "{}%wiki.{}\tpos\twikidata\t{}\t[]\t[]\n"
    (wiki / "train.txt").write_text(entry.format("new_york", 0, "a city") + entry.format("100%", 1, "all of it"))
    (wiki / "train.eg").write_text("new_york%wiki.0\tin <TRG> they met\n100%%wiki.1\the gave <TRG> of it\n")
    (oxford / "valid.json").write_text(json.dumps([[["swan"], ["a", "white", "bird"], ["the", "swan", "swam"]]]))
    (simple / "oxford.test.src").write_text("drift [SEP] an end to the drift\nnow [SEP] now hear this !\n")
    (simple / "oxford.test.tgt").write_text("a state of inaction\nused to preface a command\n")
    out = tmp_path / "out"
    run("--sources", f"wiki={wiki}", f"g={oxford}", f"s={simple}", "--keep_splits", "--output_dir", out)
    found = {split: [tuple(row.values()) for row in rows] for split, rows in read(out).items()}
    assert found == {
        "train": [
            ("new york", "in new york they met", "a city", "wiki"),
            ("100%", "he gave 100% of it", "all of it", "wiki"),
        ],
        "validation": [("swan", "the swan swam", "a white bird", "g")],
        "test": [
            ("drift", "an end to the drift", "a state of inaction", "s"),
            ("now", "now hear this !", "used to preface a command", "s"),
        ],
    }


def test_any_columns_in_json_lines_json_and_tsv(tmp_path):
    row = {"lemma": "ox", "usage": ["an  ox\n ploughs", "the ox", 7], "meaning": "cattle", "id": 3}
    write_rows(tmp_path / "a.jsonl", [row])
    (tmp_path / "b.json").write_text(json.dumps([{**row, "lemma": "cow"}, {**row, "lemma": 5}]))
    write_csv(tmp_path / "c.tsv", ["lemma", "usage", "meaning"], [["hen", "a, hen", "fowl"]], delimiter="\t")
    names = ("--term_column", "lemma", "--context_column", "usage", "--definition_column", "meaning")
    sources = [f"{name}={tmp_path / file}" for name, file in (("a", "a.jsonl"), ("b", "b.json"), ("c", "c.tsv"))]
    run("--sources", *sources, *names, "--output_dir", tmp_path, "--proportions", 1, 0, 0)
    expected = {(term, context, "cattle", name) for term, name in (("ox", "a"), ("cow", "b")) for context in ("an ox ploughs", "the ox")}  # fmt: skip
    assert everything(tmp_path) == expected | {("hen", "a, hen", "fowl", "c")}
    data = json.loads((tmp_path / "data.json").read_text())
    assert data["dropped"] == {"context_missing": 2, "term_missing": 3}
    assert sum(data["read"].values()) == sum(data["dropped"].values()) + sum(data["kept"].values())


def test_a_term_is_in_one_split_by_a_hash_of_its_own(tmp_path):
    few, many = some_rows(300), some_rows(600) + [{"term": "THING7", "context": "a THING7", "definition": "loud"}]
    folders = []
    for rows, seed in ((few, 42), (many, 42), (few, 7)):
        folders.append(tmp_path / f"{len(rows)}-{seed}")
        source = write_rows(folders[-1] / "raw.jsonl", rows)
        run("--sources", f"x={source}", "--seed", seed, "--output_dir", folders[-1])
    places = [
        {(row["term"], row["definition"]): split for split, rows in read(folder).items() for row in rows}
        for folder in folders
    ]
    for found in places:
        of_terms = {}
        for (term, _), split in found.items():
            assert of_terms.setdefault(term.casefold(), split) == split
    assert all(places[1][row] == split for row, split in places[0].items())  # more rows move none
    assert sum(places[2][row] != split for row, split in places[0].items()) > 50  # another seed moves many
    shares = [list(places[1].values()).count(split) / len(many) for split in SPLITS]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.05)
    digest = int.from_bytes(blake2b(b"42 thing3", digest_size=7).digest(), "big") / 2**56
    expected = "train" if digest < 0.8 else "validation" if digest < 0.9 else "test"
    assert places[0]["thing3", "a thing of kind 3 0"] == expected
    for name in (*(f"{split}.jsonl" for split in SPLITS), "data.json", "divergent.jsonl"):
        before = (folders[0] / name).read_bytes()
        run("--sources", f"x={folders[0] / 'raw.jsonl'}", "--output_dir", folders[0])
        assert (folders[0] / name).read_bytes() == before


def test_overlaps_and_divergent_rows_are_those_of_tables_1_and_5(tmp_path, capsys):
    def row(term, context, definition):
        return {"term": term, "context": context, "definition": definition}

    train = [
        row("Bank", "by the bank", "a slope"),
        row("bank", "By the  bank", "a firm"),
        row("oak", "an oak", "a tree"),
    ]
    test = [row("bank", "the bank failed", "A firm"), row("oak", "two trees", "a wood"), row("elm", "an elm", "a tree"),
            row("ash", "an ash", "a tree")]  # fmt: skip
    write_rows(tmp_path / "raw" / "train.jsonl", train)
    write_rows(tmp_path / "raw" / "test.jsonl", test)
    run("--sources", f"x={tmp_path / 'raw'}", "--keep_splits", "--output_dir", tmp_path / "out")
    data = json.loads((tmp_path / "out" / "data.json").read_text())
    assert data["overlap_with_train"] == {"test": {"terms": 50.0, "terms_with_definitions": 25.0, "definitions": 66.67}}
    printed = (
        "test: 50.00% of its terms in train, 25.00% of its terms with definitions in train, 66.67% of its definitions"
    )
    assert printed in capsys.readouterr().out
    splits = data["splits"]
    assert (splits["train"]["rows"], splits["train"]["terms"], splits["train"]["divergent_rows"]) == (3, 2, 2)
    assert splits["test"]["divergent_rows"] == 0 and splits["test"]["term_absent_from_context"] == 1
    assert splits["train"]["definitions_per_term"] == {"mean": 1.5, "std": 0.5}
    assert splits["train"]["tokens_per_context"] == {"mean": round(8 / 3, 2), "std": round((2 / 9) ** 0.5, 2)}
    groups = [json.loads(line) for line in (tmp_path / "out" / "divergent.jsonl").read_text().splitlines()]
    assert groups == [{"split": "train", "term": "Bank", "context": "by the bank", "definitions": ["a slope", "a firm"], "sources": ["x"]}]  # fmt: skip


def test_what_shares_a_definition_with_a_training_row_can_be_left_out(tmp_path, capsys):
    rows = {
        "train": [("oak", "a tree"), ("firm", "a company")],
        "test": [("ash", "A  tree"), ("wood", "many trees")],
        "validation": [("elm", "a tall tree")],
    }
    for split, found in rows.items():
        lines = [{"term": term, "context": f"the {term}", "definition": definition} for term, definition in found]
        write_rows(tmp_path / "raw" / f"{split}.jsonl", lines)
    options = ("--sources", f"x={tmp_path / 'raw'}", "--keep_splits", "--output_dir", tmp_path / "out")
    run(*options, "--unseen_definitions")
    assert "1 test rows with a training definition" in capsys.readouterr().out
    found = {split: [row["term"] for row in lines] for split, lines in read(tmp_path / "out").items()}
    assert found == {"train": ["oak", "firm"], "validation": ["elm"], "test": ["wood"]}
    data = json.loads((tmp_path / "out" / "data.json").read_text())
    assert data["kept"] == {"x": 4} and data["overlap_with_train"]["test"]["definitions"] == 0
    run(*options)
    assert len(read(tmp_path / "out")["test"]) == 2


def test_rows_of_no_split_go_by_their_term(tmp_path, capsys):
    rows = [{**row, "split": "dev" if i < 10 else None} for i, row in enumerate(some_rows(30))]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    run("--sources", f"x={source}", "--keep_splits", "--output_dir", tmp_path)
    assert "50 rows had no split" in capsys.readouterr().out
    found = read(tmp_path)
    assert {f"thing{i}" for i in range(5)} <= {row["term"] for row in found["validation"]}
    for split, own in found.items():
        assert all(int(row["term"][5:]) < 5 or prepare.split_by_term(row["term"], [0.8, 0.1, 0.1], 42) == split for row in own)  # fmt: skip


def test_a_drawn_split_has_whole_terms_and_its_order(tmp_path):
    rows = some_rows(100, senses=3)
    source = write_rows(tmp_path / "raw" / "train.jsonl", rows)
    run("--sources", f"x={source}", "--keep_splits", "--max_rows", 50, "--output_dir", tmp_path)
    sampled = read(tmp_path)["train"]
    assert len(sampled) == 48  # sixteen terms: a seventeenth has no room
    terms = {row["term"] for row in sampled}
    assert [{**row, "source": "x"} for row in rows if row["term"] in terms] == sampled
    run("--sources", f"x={source}", "--keep_splits", "--max_rows", 60, "--output_dir", tmp_path)
    assert terms < {row["term"] for row in read(tmp_path)["train"]}  # more of the same


def test_a_split_of_an_earlier_run_does_not_stay(tmp_path):
    many = write_rows(tmp_path / "raw" / "many.jsonl", some_rows(60))
    run("--sources", f"x={many}", "--output_dir", tmp_path)
    assert set(read(tmp_path)) == set(SPLITS)
    source = write_rows(tmp_path / "raw" / "train.jsonl", some_rows(3))
    run("--sources", f"x={source}", "--keep_splits", "--output_dir", tmp_path)
    assert set(read(tmp_path)) == {"train"}


def test_repeats_stay_where_they_are_asked_for(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", some_rows(3) * 2)
    given = ("--sources", f"x={source}", "--proportions", 1, 0, 0, "--output_dir", tmp_path)
    for more, count in (((), 6), (("--keep_duplicates",), 12)):
        run(*given, *more)
        assert len(read(tmp_path)["train"]) == count


def test_errors_are_reported_in_one_line(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", some_rows(3))
    odd = write_csv(tmp_path / "odd.csv", ["a", "b"], [["x", "y"]])
    long = write_csv(tmp_path / "long.csv", HEAD, [["x", "y", "z", "w", "train", "?"]])
    none = write_rows(tmp_path / "none.jsonl", [{"term": "", "context": "c", "definition": "d"}])
    (tmp_path / "latin.csv").write_bytes("term,context,definition\né,é,é\n".encode("latin-1"))
    (tmp_path / "number.json").write_text("[{}, 5]")
    (tmp_path / "link.csv").write_text("https://example.org/3D-EX.csv\n")
    (tmp_path / "alone.txt").write_text("a%0\tn\tx\td\n")
    (tmp_path / "short.src").write_text("a [SEP] b\nc [SEP] d\n")
    (tmp_path / "short.tgt").write_text("e\n")
    (tmp_path / "pair.txt").write_text("a%0\tn\tx\td\n")
    (tmp_path / "pair.eg").write_text("b%0\tthe <TRG>\n")
    (tmp_path / "empty").mkdir()
    cases = (
        ([f"x={tmp_path / 'empty'}"], "empty has no file"),
        ([f"x={odd}"], "has no column 'term or word or headword or phrase'; its columns are 'a', 'b'. "),
        ([f"x={good}", "--term_column", "lemma"], "has no column 'lemma'"),
        ([f"x={long}"], "long.csv, line 2: it has more fields than the header"),
        ([f"x={tmp_path / 'latin.csv'}"], "latin.csv, 'utf-8' codec can't decode"),
        ([f"x={tmp_path / 'number.json'}"], "number.json, element 2: 5 is not a row"),
        ([f"x={none}"], "of 1 (1 without a term; 0 in other splits)"),
        ([f"x={tmp_path / 'link.csv'}"], "Download https://example.org/3D-EX.csv"),
        ([f"x={tmp_path / 'alone.txt'}"], "needs alone.eg"),
        ([f"x={tmp_path / 'short.src'}"], "short.tgt ends before line 2"),
        ([f"x={tmp_path / 'pair.txt'}"], "line 1: 'a%0"),
        ([f"x={good}", "--keep_splits"], "--keep-splits: none of the 6 rows"),
        ([f"x={good}", "--proportions", "0.5", "0.5"], "--proportions 0.5 0.5"),
        ([f"x={good}", "--max_rows", "1"], "--max-rows 1"),
    )
    for given, message in cases:
        assert message in fails(prepare.main, "--output_dir", tmp_path / "out", "--sources", *given)
    assert not (tmp_path / "out" / "train.jsonl").exists()


def test_a_data_set_of_the_hub_is_read_with_its_splits(tmp_path):
    rows = {split: [{"word": f"{split} {i}", "gloss": "a thing", "example": f"see {split} {i}"} for i in range(3)] for split in SPLITS}  # fmt: skip
    files = {f"{split}.jsonl": "".join(json.dumps(row) + "\n" for row in own).encode() for split, own in rows.items()}
    given = ("--sources", "hub=tester/words", "--keep_splits", "--output_dir", tmp_path / "out")
    with LoopbackHub() as hub:
        hub.repos["dataset", "tester/words"] = Repo("tester/words", "dataset")
        hub.repos["dataset", "tester/words"].commit(
            "main", "rows", {name: (data, None) for name, data in files.items()}
        )
        online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "lexperts", "define", "prepare", *map(str, given)]
        found = subprocess.run(
            command, env={**os.environ, **hub.env, **online}, capture_output=True, text=True, timeout=240
        )
    assert found.returncode == 0, found.stderr
    for split, own in read(tmp_path / "out").items():
        assert [row["term"] for row in own] == [row["word"] for row in rows[split]] and own[0]["source"] == "hub"


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl", "divergent.jsonl", "data.json"])
def test_files_of_the_user_are_neither_written_nor_removed(name, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('{"mine": 1}\n')
    write_rows(tmp_path / "rows.jsonl", some_rows(30))
    with pytest.raises(ValueError, match=f"holds {name}, which no earlier preparation"):
        prepare.find_earlier_splits(out)
    with pytest.raises(SystemExit):
        run("--sources", f"a={tmp_path / 'rows.jsonl'}", "--output_dir", out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: '{"mine": 1}\n'}


def test_a_killed_preparation_is_repeated(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", some_rows(30))
    given = ("--sources", f"a={tmp_path / 'rows.jsonl'}", "--output_dir", tmp_path / "out", "--proportions", 1, 0, 0)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "divergent_groups", killed)
        done = run_main(prepare.main, *given)
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "interrupted: Repeat the command."
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"data.json", "train.jsonl"}
    run(*given)
    assert "unfinished" not in json.loads((tmp_path / "out" / "data.json").read_text())
