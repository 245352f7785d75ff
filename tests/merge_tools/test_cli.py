"""merge-experts, command by command: what a person reads, what a script reads, and how each of them is told no."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from merge_tools import MergeError, inspect
from merge_tools.cli import app
from tests.loopback_hub import LoopbackHub

from .broken import GATE, copied, cut, rope, snapshot, tensors, value
from .conftest import contents, recipe_of

ROOT = Path(__file__).parents[2]
COMMANDS = ("compose", "check", "inspect", "verify", "add", "remove", "extract", "export", "route")


def run(*arguments, code=0):
    """-> the standard output and the standard error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert code == 1 or done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return done.stdout, done.stderr


def run_json(*arguments, code=0):
    """-> what is printed, parsed: one JSON value and nothing beside it."""
    return json.loads(run(*arguments, "--json", code=code)[0])


@pytest.fixture
def folder(tmp_path, experts, monkeypatch):
    """The folder a person works in: experts/birds, ships, tools and recipe.yml."""
    copied(experts(3), tmp_path / "experts")
    names = [{"source_model": f"experts/{name}"} for name in ("birds", "ships", "tools")]
    (tmp_path / "recipe.yml").write_text(json.dumps({"experts": names}))  # JSON is YAML too
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, experts):
    """A mixture that is only read."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "recipe.yml").write_text(json.dumps(recipe_of(experts(3))))
    run("compose", folder / "recipe.yml", folder / "out")
    return folder / "out"


# compose and check


def test_compose(folder):
    out, err = run("compose", "recipe.yml", "out")
    assert out.splitlines()[-1] == "wrote out" and "birds, ships, tools" in out and err == ""
    assert "MixtralForCausalLM" in (folder / "out" / "config.json").read_text()
    told = run_json("compose", "recipe.yml", "two")
    facts = inspect(folder / "two")
    assert (told["parameters"], told["active_parameters"]) == (facts["parameters"], facts["active_parameters"])
    assert told["bytes"] == facts["bytes"] and told["warnings"] == [] and told["out"] == "two"
    assert contents(folder / "out") == contents(folder / "two")


def test_compose_says_its_warnings_where_they_are_not_taken_for_results(folder):
    (folder / "recipe.yml").write_text(
        json.dumps({"experts": ["experts/birds", {"source_model": "experts/birds", "name": "b"}]})
    )
    out, err = run("compose", "recipe.yml", "out")
    assert "warning" not in out
    assert err == (
        "warning: b: has the same weights as birds in every sample of its routed layers: routing between them changes "
        "nothing.\n"
    )
    assert len(run_json("compose", "recipe.yml", "two")["warnings"]) == 1


def test_a_dry_run_tells_everything_and_writes_nothing(folder):
    before = snapshot(folder)
    out, err = run("compose", "recipe.yml", "out", "--dry-run")
    told = run_json("compose", "recipe.yml", "out", "--dry-run")
    assert snapshot(folder) == before and err == ""
    checks = {finding["check"] for finding in told["findings"]}
    assert checks == {"files", "tensors", "configuration", "rope", "tokenizer", "values", "format", "output", "disk"}
    assert all(check in out for check in checks) and "Ready to merge." in out
    made = run_json("compose", "recipe.yml", "out")
    assert {key: made[key] for key in told["plan"]} == told["plan"]
    for key in ("parameters", "active_parameters"):
        assert f"{made[key]:,}" in out
    assert f"{made['bytes'] / 1000:.3g} kB" in out and "of memory for the weights" in out


def test_a_dry_run_of_what_cannot_be_is_refused_alike(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    told = run_json("compose", "recipe.yml", "out", "--dry-run", code=2)
    assert not told["ok"] and "plan" not in told
    assert "1 error: nothing can be merged yet." in run("compose", "recipe.yml", "out", "--dry-run", code=2)[0]


def test_check_folds_what_it_says_of_many(folder):
    out, _ = run("check", "recipe.yml", "out")
    assert len(out.splitlines()) == 11
    assert [line.split() for line in out.splitlines() if "rope" in line] == [
        ["ok", "rope", *["3", "experts", "default,", "base", "10000"]]
    ]
    told = run_json("check", "recipe.yml")
    assert told["ok"] and sum(finding["check"] == "rope" for finding in told["findings"]) == 3  # complete, not folded


def test_check_names_all_that_are_faulty(folder):
    for name in ("ships", "tools"):
        rope(rope_theta=5e5)(folder / "experts" / name)
    cut("model.safetensors", 50)(folder / "experts" / "birds")
    out, _ = run("check", "recipe.yml", code=2)
    assert "birds" in out and "cut short" in out and "1 error: nothing" in out
    told = run_json("check", "recipe.yml", code=2)
    assert [f["subject"] for f in told["findings"] if f["level"] == "error"] == ["birds"]


def test_a_difference_is_allowed_by_its_name(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    out, err = run("compose", "recipe.yml", "out", code=2)
    assert out == "" and err.startswith("error: ships: its rotary embedding is another") and "--allow rope." in err
    out, err = run("compose", "recipe.yml", "out", "--allow", "vocab,rope")
    assert "(allowed: rope)" in err and (folder / "out" / "config.json").is_file()


def test_add_and_remove_show_their_warnings_with_and_without_json(folder, make_expert):
    run("compose", "recipe.yml", "out")
    rope(rope_theta=5e5)(*copied([folder / "experts" / "tools"], folder / "more"))
    added = ("add", "out", "--expert", "more/tools", "--name", "new", "--allow", "rope")
    for number, options in enumerate(((), ("--json",), ("--reaverage",))):
        out, err = run(*added[:2], f"more-{number}", *added[2:], *options)
        assert "warning: new: " in err and "(allowed: rope)" in err and "warning: " not in out
    same = {"experts": ["experts/birds", {"source_model": "experts/birds", "name": "b"}, "experts/ships"]}
    (folder / "same.yml").write_text(json.dumps(same))
    run("compose", "same.yml", "same")
    for options in ((), ("--json",)):
        _, err = run("remove", "same", f"less{len(options)}", "--expert", "ships", "--reaverage", *options)
        assert err.startswith("warning: b: has the same weights as birds")


def test_a_deep_check_sees_what_samples_do_not(folder, make_expert):
    make_expert("experts/wide", 8, intermediate_size=4096)
    make_expert("experts/wider", 9, intermediate_size=4096)
    value(GATE, 4096 * 8 // 2 + 9000, float("nan"))(folder / "experts" / "wide")
    (folder / "recipe.yml").write_text(json.dumps({"experts": ["experts/wide", "experts/wider"]}))
    assert "finite in all samples" in run("check", "recipe.yml")[0]
    assert f"'{GATE}' holds NaN" in run("check", "recipe.yml", "--deep", code=2)[0]
    out, err = run("compose", "recipe.yml", "out", code=2)
    assert err.startswith(f"error: wide: model.safetensors: '{GATE}' holds NaN") and len(err.splitlines()) == 1


def test_every_fault_has_a_line_of_its_own(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    tensors(lambda found: found.pop(GATE))(folder / "experts" / "tools")
    _, err = run("compose", "recipe.yml", "out", code=2)
    assert [line.split(":")[:2] for line in err.splitlines()] == [["error", " tools"], ["error", " ships"]]
    told = run_json("compose", "recipe.yml", "out", code=2)
    assert len(told["error"].splitlines()) == 2 and not (folder / "out").exists()


def test_brackets_in_names_are_no_markup(folder):
    (folder / "experts" / "birds").rename(folder / "experts" / "[red]birds")
    (folder / "recipe.yml").write_text(json.dumps({"experts": ["experts/[red]birds", "experts/ships"]}))
    assert "[red]birds" in run("compose", "recipe.yml", "[bold]out")[0]
    assert "wrote [bold]out" not in run("check", "recipe.yml", "[bold]out", code=2)[0]
    assert "[red]birds" in run("inspect", "[bold]out")[0]
    assert "[bold]out: is occupied already" in run("compose", "recipe.yml", "[bold]out", code=2)[1]


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "0.0001"])
def test_a_shard_of_no_size(size, folder):
    assert "is no size of a file" in run("compose", "recipe.yml", "out", "--shard-size", size, code=2)[1]
    assert not (folder / "out").exists()


def test_debug_shows_the_refusal_as_it_was_raised(folder):
    for command in (["compose", "nothing.yml", "out"], ["inspect", "nothing"]):
        done = CliRunner().invoke(app, [*command, "--debug"])
        assert isinstance(done.exception, MergeError)
        assert run(*command, code=2)[1].startswith("error: ")


def test_errors_of_the_system_are_told_in_words(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", full)
        _, err = run("compose", "recipe.yml", "out", code=2)
    assert err == "error: No space left on device. Make room, then go on with --resume.\n"
    assert (folder / ".out.partial").is_dir()
    run("compose", "recipe.yml", "out", "--resume")
    assert not (folder / ".out.partial").exists()


def test_wrong_arguments_end_with_code_2(folder):
    for arguments in (
        ["compose"],
        ["compose", "recipe.yml"],
        ["nothing"],
        ["compose", "recipe.yml", "out", "--alow", "x"],
    ):
        run(*arguments, code=2)
    assert "Did you mean 'vocab'" in run("compose", "recipe.yml", "out", "--allow", "vocabulary", code=2)[1]


# the other commands


def test_inspect(mixture):
    out, _ = run("inspect", mixture)
    told = run_json("inspect", mixture)
    assert told == json.loads(json.dumps(inspect(mixture)))
    for expert in told["experts"]:
        assert expert["name"] in out and expert["files"][0]["sha256"][:16] in out


def test_verify(mixture, folder):
    out, _ = run("verify", mixture)
    assert out == "18 expert tensors, 15 shared, 2 gates compared: all as they should be.\n"
    assert run_json("verify", mixture)["ok"]
    run("compose", "recipe.yml", "out")
    value("model.norm.weight", 3, 0.5)(folder / "out")
    out, _ = run("verify", "out", code=1)
    assert out.splitlines()[0] == "model.norm.weight: 1 of 32 elements differ, from element 3."
    assert out.endswith("compared: 1 fault.\n")
    assert not run_json("verify", "out", code=1)["ok"]


def test_add_remove_extract_and_export(mixture, folder, experts):
    fourth = str(experts(4)[3])
    assert run("add", mixture, "more", "--expert", fourth)[0] == "wrote more\n"
    assert run_json("add", mixture, "more2", "--expert", fourth, "--name", "other")["out"] == "more2"
    assert [e["name"] for e in inspect("more")["experts"]] == ["birds", "ships", "tools", "plants"]
    assert [e["name"] for e in inspect("more2")["experts"]][-1] == "other"
    assert run("remove", "more", "less", "--expert", "plants")[0] == "wrote less\n"
    assert run_json("remove", "more", "less2", "--expert", "plants")["tensors"] == inspect_tensors("less")
    out, _ = run("extract", mixture, "dense", "--expert", "ships")
    assert out.splitlines()[0] == "wrote dense" and "differ from its own, by at most" in out
    told = run_json("extract", mixture, "dense2", "--expert", "ships")
    assert told["shared"]["compared"] and not told["shared"]["equal"]
    assert run("export", mixture, "lexicon", "--format", "lexicon")[0] == "wrote lexicon\n"
    assert run_json("export", "lexicon", "mixtral", "--format", "mixtral")["out"] == "mixtral"
    assert (folder / "mixtral" / "model.safetensors").read_bytes() == (mixture / "model.safetensors").read_bytes()


def inspect_tensors(folder):
    from .conftest import read_tensors

    return len(read_tensors(folder))


def test_refusals_of_the_other_commands(mixture, folder, experts):
    before = snapshot(folder)
    for arguments, pattern in (
        (["inspect", "nothing"], "There is no folder 'nothing'"),
        (["inspect", "experts/birds"], "holds no merge_record.json: it is no mixture made by merge-experts"),
        (["verify", "experts/birds"], "holds no merge_record.json"),
        (["add", mixture, "out", "--expert", "experts/birds"], "Two experts are called 'birds'"),
        (["add", mixture, "out", "--expert", "experts/nothing"], "There is no folder 'experts/nothing'"),
        (["add", mixture, "experts", "--expert", experts(4)[3]], "is occupied already"),
        (["add", mixture, mixture, "--expert", experts(4)[3]], "which is never written to"),
        (["add", mixture, "out", "--expert", experts(4)[3], "--allow", "x"], "no difference that can be allowed"),
        (["remove", mixture, "out", "--expert", "nobody"], "There is no expert 'nobody'"),
        (["extract", mixture, "out", "--expert", "nobody"], "Its experts: birds, ships, tools"),
        (["export", mixture, "out", "--format", "gguf"], "There is no format 'gguf'"),
        (["route", mixture, "--text", " "], "There is no text to route"),
        (["route", "experts", "--text", "a"], ""),
    ):
        out, err = run(*arguments, code=2)
        assert out == "" and err.startswith("error: ") and pattern in err and len(err.splitlines()) == 1, err
    assert snapshot(folder) == before


def test_route(mixture, folder):
    out, _ = run("route", mixture, "--text", "the birds is a", "--text", "of ships")
    assert "experts: " in out and "layer 0" in out and "layer 1" in out
    told = run_json("route", mixture, "--text", "the birds is a")
    assert told["experts"] == ["birds", "ships", "tools"] and len(told["texts"][0]["experts"]) == 2
    pytest.importorskip("matplotlib")
    assert run("route", mixture, "--text", "the birds", "--plot", "heat.png")[0].endswith("wrote heat.png\n")
    assert (folder / "heat.png").read_bytes().startswith(b"\x89PNG")


# in processes of their own


def process(*arguments, cwd, code=0, **environment):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "merge_tools.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def test_help_names_every_command(tmp_path):
    done = process("--help", cwd=tmp_path, COLUMNS="200")
    assert all(command in done.stdout for command in COMMANDS)


LIGHT = """
import sys
from merge_tools import check, compose
check("recipe.yml", "out", deep=True)
compose("recipe.yml", "out")
print(sorted({"torch", "transformers", "huggingface_hub", "rich", "typer"} & set(sys.modules)))
"""


def test_neither_check_nor_compose_need_a_framework(folder):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


OPEN = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("tester/mixture").eval()
tokenizer = AutoTokenizer.from_pretrained("tester/mixture")
ids = tokenizer("the birds", return_tensors="pt")["input_ids"]
with torch.no_grad():
    print(type(model).__name__, model(ids).logits.sum().item())
"""


def test_pushed_to_a_hub_it_opens_from_there(folder):
    """A private repository that held an earlier push of more shards, which readers would still find."""
    with LoopbackHub() as hub:
        from tests.loopback_hub import Repo

        hub.repos["model", "tester/mixture"] = repository = Repo("tester/mixture", "model", private=True)
        old = dict.fromkeys(
            ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.md"), (b"old", None)
        )
        repository.commit("main", "earlier", old)
        done = process(
            "compose", "recipe.yml", "out", "--push-to-hub", "tester/mixture", "--private", cwd=folder, **hub.env
        )
        assert done.stdout.endswith(f"wrote out\npushed to {hub.url}/tester/mixture\n")
        tree = repository.commits[repository.branches["main"]]["tree"]
        kept = {name: content for name, (content, _) in tree.items() if name != ".gitattributes"}
        assert kept == {**contents(folder / "out"), "notes.md": b"old"}
        environment = {**os.environ, **hub.env, "TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(folder / "other cache")}
        opened = subprocess.run(
            [sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, cwd=folder
        )
        assert opened.returncode == 0, opened.stderr[-3000:]
        assert hub.unknown == []
        told = json.loads(
            process(
                "compose", "recipe.yml", "two", "--push-to-hub", "new", "--private", "--json", cwd=folder, **hub.env
            ).stdout
        )
        assert told["pushed_to"] == f"{hub.url}/tester/new" and hub.repos["model", "tester/new"].private

        refused = process(
            "compose", "recipe.yml", "three", "--push-to-hub", "a/b", cwd=folder, code=2, **hub.env | {"HF_TOKEN": "x"}
        )
    name, total = opened.stdout.split()
    from .conftest import logits_of, open_model

    model = open_model(folder / "out")
    ids = torch.tensor([[1, *model_ids(folder / "out", "the birds")]])
    assert name == "MixtralForCausalLM" and float(total) == pytest.approx(logits_of(model, ids).sum().item(), abs=1e-3)
    assert refused.stderr.startswith("error: three is written and whole, but could not be pushed to 'a/b' (")
    assert len(refused.stderr.splitlines()) == 1 and "hf auth login" in refused.stderr
    assert contents(folder / "three") == contents(folder / "out")


def model_ids(folder, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"][1:]
