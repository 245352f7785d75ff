"""merge-experts, command by command: text output, JSON output, errors and exit status."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lexperts.cli.merge import app
from lexperts.cli.merge_screen import ProgressBars
from merge_tools import MergeError, inspect
from tests.loopback_hub import LoopbackHub

from .conftest import contents, recipe_of, run_python
from .corruptions import GATE, copied, rope, snapshot, tensors, truncate, value

ROOT = Path(__file__).parents[2]


def run(*arguments, code=0):
    """Returns the standard output and the standard error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert code == 1 or done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return done.stdout, done.stderr


def run_json(*arguments, code=0):
    """Returns the parsed output, which is a single JSON value."""
    return json.loads(run(*arguments, "--json", code=code)[0])


@pytest.fixture
def folder(tmp_path, experts, monkeypatch):
    """A working directory with experts/birds, ships, tools and recipe.yml."""
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
    result = run_json("compose", "recipe.yml", "two")
    facts = inspect(folder / "two")
    assert (result["parameters"], result["active_parameters"]) == (facts["parameters"], facts["active_parameters"])
    assert result["bytes"] == facts["bytes"] and result["warnings"] == [] and result["out"] == "two"
    assert contents(folder / "out") == contents(folder / "two")


@pytest.mark.parametrize("k, policy, is_dense", [(3, "token", True), (2, "token", False), (3, "sequence_soft", False)])
def test_a_mixture_that_uses_all_experts_for_every_token_is_noted(k, policy, is_dense, folder):
    recipe = {**json.loads((folder / "recipe.yml").read_text()), "experts_per_token": k, "routing_policy": policy}
    (folder / "recipe.yml").write_text(json.dumps({**recipe, "format": "lexicon"}))
    err = run("compose", "recipe.yml", "out")[1]
    assert ("note: experts_per_token: every token uses all experts (3)" in err) == is_dense
    report = run_json("check", "recipe.yml")
    noted = [f["level"] for f in report["findings"] if f["subject"] == "experts_per_token"]
    assert report["ok"] and noted == ["note"] * is_dense


def test_compose_prints_warnings_to_the_standard_error(folder):
    (folder / "recipe.yml").write_text(
        json.dumps({"experts": ["experts/birds", {"source_model": "experts/birds", "name": "b"}]})
    )
    out, err = run("compose", "recipe.yml", "out")
    warning, note = err.splitlines()
    assert "warning" not in out and note.startswith("note: experts_per_token: ")
    assert warning.startswith("warning: b: has the same routed weights as birds")
    assert len(run_json("compose", "recipe.yml", "two")["warnings"]) == 1


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder):
    before = snapshot(folder)
    out, err = run("compose", "recipe.yml", "out", "--dry-run")
    result = run_json("compose", "recipe.yml", "out", "--dry-run")
    assert snapshot(folder) == before and err == ""
    checks = {finding["check"] for finding in result["findings"]}
    assert checks == {"files", "tensors", "configuration", "rope", "tokenizer", "values", "format", "output", "disk"}
    assert all(check in out for check in checks) and "Ready to merge." in out
    made = run_json("compose", "recipe.yml", "out")
    assert {key: made[key] for key in result["plan"]} == result["plan"]
    for key in ("parameters", "active_parameters"):
        assert f"{made[key]:,}" in out
    assert f"{made['bytes'] / 1000:.3g} kB" in out and "in memory" in out


def test_a_dry_run_of_an_invalid_recipe_fails(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    result = run_json("compose", "recipe.yml", "out", "--dry-run", code=2)
    assert not result["ok"] and "plan" not in result
    assert "1 error." in run("compose", "recipe.yml", "out", "--dry-run", code=2)[0]


def test_check_groups_equal_findings(folder):
    out, _ = run("check", "recipe.yml", "out")
    assert len(out.splitlines()) == 11
    assert [line.split() for line in out.splitlines() if "rope" in line] == [
        ["ok", "rope", *["3", "experts", "default,", "base", "10000"]]
    ]
    result = run_json("check", "recipe.yml")  # complete, not grouped
    assert result["ok"] and sum(finding["check"] == "rope" for finding in result["findings"]) == 3
    assert "finite in all samples" in out and "finite in all samples" not in run("check", "recipe.yml", "--deep")[0]


def test_check_names_all_broken_experts(folder):
    for name in ("ships", "tools"):
        rope(rope_theta=5e5)(folder / "experts" / name)
    truncate("model.safetensors", 50)(folder / "experts" / "birds")
    out, _ = run("check", "recipe.yml", code=2)
    assert "birds" in out and "truncated" in out and "1 error." in out
    result = run_json("check", "recipe.yml", code=2)
    assert [f["subject"] for f in result["findings"] if f["level"] == "error"] == ["birds"]


def test_a_difference_is_allowed_by_its_name(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    out, err = run("compose", "recipe.yml", "out", code=2)
    assert out == "" and err.startswith("error: ships: its RoPE settings differ") and "--allow rope." in err
    out, err = run("compose", "recipe.yml", "out", "--allow", "vocab,rope")
    assert "(allowed: rope)" in err and (folder / "out" / "config.json").is_file()


def test_add_and_remove_show_their_warnings_with_and_without_json(folder, make_expert):
    run("compose", "recipe.yml", "out")
    rope(rope_theta=5e5)(*copied([folder / "experts" / "tools"], folder / "more"))
    added = ("add", "out", "--source", "more/tools", "--name", "new", "--allow", "rope")
    for number, options in enumerate(((), ("--json",), ("--recompose",))):
        out, err = run(*added[:2], f"more-{number}", *added[2:], *options)
        assert "warning: new: " in err and "(allowed: rope)" in err and "warning: " not in out
    same = {"experts": ["experts/birds", {"source_model": "experts/birds", "name": "b"}, "experts/ships"]}
    (folder / "same.yml").write_text(json.dumps(same))
    run("compose", "same.yml", "same")
    for options in ((), ("--json",)):
        _, err = run("remove", "same", f"less{len(options)}", "--expert", "ships", "--recompose", *options)
        assert err.startswith("warning: b: has the same routed weights as birds")


def test_every_error_is_on_its_own_line(folder):
    rope(rope_theta=5e5)(folder / "experts" / "ships")
    tensors(lambda state: state.pop(GATE))(folder / "experts" / "tools")
    _, err = run("compose", "recipe.yml", "out", code=2)
    assert [line.split(":")[:2] for line in err.splitlines()] == [["error", " tools"], ["error", " ships"]]
    result = run_json("compose", "recipe.yml", "out", code=2)
    assert len(result["error"].splitlines()) == 2 and not (folder / "out").exists()


def test_brackets_in_names_are_not_markup(folder):
    (folder / "experts" / "birds").rename(folder / "experts" / "[red]birds")
    (folder / "recipe.yml").write_text(json.dumps({"experts": ["experts/[red]birds", "experts/ships"]}))
    assert "[red]birds" in run("compose", "recipe.yml", "[bold]out")[0]
    assert "wrote [bold]out" not in run("check", "recipe.yml", "[bold]out", code=2)[0]
    assert "[red]birds" in run("inspect", "[bold]out")[0]
    assert "[bold]out: exists" in run("compose", "recipe.yml", "[bold]out", code=2)[1]


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "0.0001"])
def test_an_invalid_shard_size(size, folder):
    assert "--shard-size" in run("compose", "recipe.yml", "out", "--shard-size", size, code=2)[1]
    assert not (folder / "out").exists()


@pytest.mark.parametrize("columns", ["wide", "0", "-5"])
def test_columns_that_are_no_width(columns, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert "Ready to merge" in run("check", "recipe.yml")[0]
    assert run("inspect", "nothing", code=2)[1].startswith("error: ")


def test_debug_raises_the_error(folder):
    for command in (["compose", "nothing.yml", "out"], ["inspect", "nothing"]):
        done = CliRunner().invoke(app, [*command, "--debug"])
        assert isinstance(done.exception, MergeError)
        assert run(*command, code=2)[1].startswith("error: ")


def test_errors_of_the_system_are_readable(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        _, err = run("compose", "recipe.yml", "out", code=2)
    assert err.startswith("error: No space left on device.") and "--resume" in err and err.count("\n") == 1
    assert (folder / ".out.partial").is_dir()
    shutil.copytree(folder / ".out.partial", folder / ".again.partial")
    assert "note: the unfinished mixture in " in run("compose", "recipe.yml", "again")[1]
    assert "note:" not in run("compose", "recipe.yml", "out", "--resume")[1]
    assert not (folder / ".out.partial").exists()


def test_invalid_arguments_exit_with_status_2(folder):
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
    result = run_json("inspect", mixture)
    assert result == json.loads(json.dumps(inspect(mixture)))
    for expert in result["experts"]:
        assert expert["name"] in out and expert["files"][0]["xxh3"][:16] in out


def test_verify(mixture, folder):
    out, _ = run("verify", mixture)
    assert "18 expert tensors, 15 shared tensors and 2 gates: no differences" in out
    assert run_json("verify", mixture)["ok"]
    run("compose", "recipe.yml", "out")
    value("model.norm.weight", 3, 0.5)(folder / "out")
    out, _ = run("verify", "out", code=1)
    assert out.startswith("model.norm.weight: 1 of 32 elements differ, starting at element 3")
    assert out.endswith("gates: 1 difference.\n")
    assert not run_json("verify", "out", code=1)["ok"]


def test_add_remove_extract_and_export(mixture, folder, experts):
    fourth = str(experts(4)[3])
    assert run("add", mixture, "more", "--source", fourth)[0] == "wrote more\n"
    assert run_json("add", mixture, "more2", "--source", fourth, "--name", "other")["out"] == "more2"
    assert [e["name"] for e in inspect("more")["experts"]] == ["birds", "ships", "tools", "plants"]
    assert [e["name"] for e in inspect("more2")["experts"]][-1] == "other"
    assert run("remove", "more", "less", "--expert", "plants")[0] == "wrote less\n"
    assert run_json("remove", "more", "less2", "--expert", "plants")["tensors"] == inspect_tensors("less")
    out, _ = run("extract", mixture, "dense", "--expert", "ships")
    assert out.splitlines()[0] == "wrote dense" and "shared tensors differ, by at most" in out
    result = run_json("extract", mixture, "dense2", "--expert", "ships")
    assert result["shared"]["compared"] and not result["shared"]["equal"]
    assert run("export", mixture, "lexicon", "--format", "lexicon")[0] == "wrote lexicon\n"
    assert run_json("export", "lexicon", "mixtral", "--format", "mixtral")["out"] == "mixtral"
    assert (folder / "mixtral" / "model.safetensors").read_bytes() == (mixture / "model.safetensors").read_bytes()


def inspect_tensors(folder):
    from .conftest import read_tensors

    return len(read_tensors(folder))


def test_errors_of_the_other_commands(mixture, folder, experts):
    before = snapshot(folder)
    for arguments, pattern in (
        (["inspect", "nothing"], "'nothing' does not exist"),
        (["verify", "experts/birds"], "has no merge_record.json"),
        (["add", mixture, "out", "--source", "experts/birds"], "has an expert 'birds' already"),
        (["add", mixture, "out", "--source", experts(4)[3], "--allow", "x"], "allow: 'x'"),
        (["remove", mixture, "out", "--expert", "horses"], "has no expert 'horses'"),
        (["extract", mixture, "out", "--expert", "horses"], "Its experts: birds, ships, tools"),
        (["export", mixture, "out", "--format", "onnx"], "'onnx'. Use "),
        (["route", mixture, "--text", " "], "--text"),
        (["route", "experts", "--text", "a"], ""),
    ):
        out, err = run(*arguments, code=2)
        assert out == "" and err.startswith("error: ") and pattern in err and len(err.splitlines()) == 1, err
    assert snapshot(folder) == before


def test_a_mixture_with_gates_from_samples_and_thin_experts(folder):
    """`check`, `inspect` and `evaluate` say what its gates and ranks are worth."""
    specs = []
    for name, text in (("birds", "an owl in a nest"), ("ships", "the sail of a mast")):
        (folder / f"{name}.txt").write_text("\n".join(f"{text} {'and ' * (i % 7)}{text}" for i in range(30)))
        specs.append({"source_model": f"experts/{name}", "samples": f"{name}.txt"})
    options = {"base_model": "experts/tools", "average": "base", "gate_mode": "ridge", "rank": 4}
    (folder / "thin.yml").write_text(json.dumps({"experts": specs, **options}))
    findings = run_json("check", "thin.yml")["findings"]
    (routing,) = [finding["message"] for finding in findings if finding["check"] == "routing"]
    assert "birds " in routing and "; ships " in routing
    run("compose", "thin.yml", "thin")
    shown = " ".join(run("inspect", "thin")[0].split())
    assert (
        "rank 4 over the base's MLPs; energy kept: birds " in shown and "held-out tokens of to birds to ships" in shown
    )
    found = run_json("inspect", "thin")
    assert found["rank"] == 4 and len(found["energies"]) == 2 and len(found["confusion"]) == 2
    card = (folder / "thin" / "README.md").read_text()
    assert "| tokens of | birds | ships |" in card and "owl" not in card
    domains = ("--domain", "birds=birds.txt", "--domain", "ships=ships.txt")
    shown = run("evaluate", "thin", *domains, "--plot", "kept.png")[0]
    assert "against base" in shown and "wrote kept.png" in shown and (folder / "kept.png").is_file()
    few = run_json("evaluate", "thin", *domains, "--max-texts", 3)["domains"]
    assert {name: row["texts"] for name, row in few.items()} == {"birds": 3, "ships": 3}
    shown = " ".join(run("evaluate", "thin", "--domain", "sea=ships.txt", "--max-texts", 3)[0].split())
    assert "No expert is called 'sea'" in shown and "The experts are birds, ships." in shown


def test_route(mixture, folder):
    out, _ = run("route", mixture, "--text", "the birds is a", "--text", "of ships")
    assert "experts: " in out and "layer 0" in out and "layer 1" in out
    result = run_json("route", mixture, "--text", "the birds is a")
    assert result["experts"] == ["birds", "ships", "tools"] and len(result["texts"][0]["experts"]) == 2
    pytest.importorskip("matplotlib")
    assert run("route", mixture, "--text", "the birds", "--plot", "heat.png")[0].endswith("wrote heat.png\n")
    assert (folder / "heat.png").read_bytes().startswith(b"\x89PNG")


# in processes of their own


def process(*arguments, cwd, code=0, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "cache"), **environment}
    done = run_python("-P", "-m", "lexperts", "merge", *arguments, cwd=cwd, env=env, code=code)
    assert "Traceback" not in done.stderr
    return done


LIGHT = """
import sys
from merge_tools import check, compose
check("recipe.yml", "out", deep=True)
compose("recipe.yml", "out")
print(sorted({"torch", "transformers", "huggingface_hub.hf_api", "httpx", "rich", "typer"} & set(sys.modules)))
"""


def test_check_and_compose_import_no_framework(folder):
    assert run_python("-c", LIGHT, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout == "[]\n"


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


def test_a_pushed_mixture_opens_from_the_hub(folder):
    """Pushes to a private repository with the shards of an earlier push, which readers would otherwise prefer."""
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
        opened = run_python("-c", OPEN, env=environment, cwd=folder)
        assert hub.unknown == []
        arguments = ("compose", "recipe.yml", "two", "--push-to-hub", "new", "--private", "--json")
        result = json.loads(process(*arguments, cwd=folder, **hub.env).stdout)
        assert result["pushed_to"] == f"{hub.url}/tester/new" and hub.repos["model", "tester/new"].private

        refused = process(
            "compose", "recipe.yml", "three", "--push-to-hub", "a/b", cwd=folder, code=2, **hub.env | {"HF_TOKEN": "x"}
        )
    name, total = opened.stdout.split()
    from .conftest import logits_of, open_model

    model = open_model(folder / "out")
    ids = torch.tensor([[1, *model_ids(folder / "out", "the birds")]])
    assert name == "MixtralForCausalLM" and float(total) == pytest.approx(logits_of(model, ids).sum().item(), abs=1e-3)
    assert refused.stderr.startswith("error: three is complete, but could not be pushed to 'a/b' (")
    assert len(refused.stderr.splitlines()) == 1 and "hf auth login" in refused.stderr
    assert contents(folder / "three") == contents(folder / "out")


def model_ids(folder, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"][1:]


def test_the_bar_of_the_gates_has_a_percentage_and_the_others_have_bytes():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ProgressBars(console) as bars:
        bars.start("gates", 200)
        bars.advance("gates", 50)
        bars.start("read", 4_000_000)
        bars.bars.refresh()
    shown = console.file.getvalue()
    assert "running texts" in shown and "25%" in shown and "0.0/4.0 MB" in shown and "50/200" not in shown
