"""run_all.py: what a changed setting runs again, what ablations share, a run killed and gone on with."""

import contextlib
import fcntl
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from merge_tools.cli import app
from modeling_lexicon.data_lexicon import prompt
from tests.examples.scripts import scripts_of

ROOT = Path(__file__).resolve().parents[2]
LEXICON = ROOT / "examples" / "lexicon"
KINDS = ("cat", "dog", "saw", "axe")
SCRATCH = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
SCRIPTS = ("train_expert", "tune_router", "train_reward", "generate", "evaluate")


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


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def scripts():
    with scripts_of("lexicon", "execution", "run_all", "run_steps", *SCRIPTS) as found:
        yield found


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

    words = sorted({word for row in some_rows(0, 68) for word in prompt(row["term"], row["context"]).split()})
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


def plan_of(scripts, path, *changes):
    return {step.name: step for step in scripts.run_steps.Planner(scripts.run_steps.read_config(path, *changes)).steps}


def changed(before, after):
    return {
        name
        for name in {*before, *after}
        if name not in before or name not in after or before[name].key != after[name].key
    }


def command(config, *options):
    return ["run_all.py", "--config", str(config), *map(str, options)]


class Ended:
    """A process that has ended, as far as the runner can see."""

    pid = 1

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


def start_here(monkeypatch):
    """Runs a step's command in this process, which has imported all that it needs; -> as `start_process`."""

    def start(words, log, environment, lock):
        with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            if words[1] == "-m":
                done = CliRunner().invoke(app, words[3:])
                file.write(done.output)
                return Ended(done.exit_code)
            monkeypatch.setattr(sys, "argv", words[1:])
            try:
                importlib.import_module(Path(words[1]).stem).main()
            except SystemExit as end:
                return Ended(end.code)
        return Ended(0)

    return start


def run(scripts, monkeypatch, capsys, path, *options, jobs=1):
    """The recipe in this process -> what was said, and the names of the steps that were run."""
    monkeypatch.setattr(sys, "argv", command(path, *options))
    args = scripts.run_all.parse()
    runner = scripts.execution.Runner(jobs, start_here(monkeypatch))
    scripts.run_all.run(args, runner)
    return capsys.readouterr().out, runner.ran


# --- the plan ---


def test_a_changed_setting_changes_what_depends_on_it_and_nothing_else(scripts, config, tmp_path):
    before = plan_of(scripts, config())
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
        assert changed(before, plan_of(scripts, config(), change)) == expected, change
    other = config("other.yml")
    assert not changed(before, plan_of(scripts, other))
    settings = tmp_path / "training.yml"  # of base, experts, router, reward
    settings.write_text(settings.read_text() + "weight_decay: 0.1\n")
    assert changed(before, plan_of(scripts, other)) == set(names) - {"cluster"}


def test_changed_rows_change_what_reads_them(scripts, config, data, tmp_path):
    before = plan_of(scripts, config())
    copy = tmp_path / "data"
    copy.mkdir()
    for path in data.glob("*.jsonl"):
        (copy / path.name).write_bytes(path.read_bytes())
    assert not changed(before, plan_of(scripts, config(data=str(copy))))
    write_rows(copy / "test.jsonl", some_rows(56, 11))
    assert changed(before, plan_of(scripts, config(data=str(copy)))) == {"plain", "best", "evaluate"}
    (copy / "validation.jsonl").unlink()
    without = plan_of(scripts, config(data=str(copy)))
    assert changed(before, without) == set(before) - {"cluster"}
    content = without["base"].written["settings.yml"]
    assert content["eval_strategy"] == "no" and "validation_files" not in content


def test_models_trained_again_in_their_place_change_what_reads_them(scripts, config, tmp_path, monkeypatch):
    for name in ("base", "reward"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_text("{}")
    change = {"base": str(tmp_path / "base"), "reward": None, "best": {"scorer": "reward", "best_of": 2}}
    change["best"]["reward_model"] = str(tmp_path / "reward")
    before = plan_of(scripts, config(), change)
    (tmp_path / "base" / "model.safetensors").write_text("{}")  # the same content, written later
    assert not changed(before, plan_of(scripts, config(), change))
    (tmp_path / "reward" / "model.safetensors").write_text("[]")
    assert changed(before, plan_of(scripts, config(), change)) == {"best", "evaluate"}
    (tmp_path / "base" / "model.safetensors").write_text("[]")
    assert changed(before, plan_of(scripts, config(), change)) == set(before) - {"cluster"}
    monkeypatch.setattr(scripts.run_steps, "package_version", lambda: "9.9")
    assert changed(before, plan_of(scripts, config(), change)) == set(before)


def test_settings_reach_the_commands(scripts, config):
    steps = plan_of(scripts, config())
    expert = steps["expert-1"].written["settings.yml"]
    assert expert["model_name_or_path"] == str(steps["base"].out) and expert["seed"] == 2
    assert expert["train_files"] == [str(steps["cluster"].out / "1.jsonl")] and "from_scratch" not in expert
    mixture = steps["mixture"].written["mixture.yml"]
    assert mixture["centroids"] == str(steps["cluster"].out / "centroids.safetensors")
    assert [one["samples"] for one in mixture["experts"]] == [str(steps["cluster"].out / f"{k}.jsonl") for k in (0, 1)]
    best = steps["best"].written["settings.yml"]
    assert best["reward_model"] == str(steps["reward"].out) and best["model_name_or_path"] == str(steps["router"].out)
    evaluate = steps["evaluate"].written["settings.yml"]
    assert [file.split("=")[0] for file in evaluate["files"]] == ["plain", "best_of_1", "best_of_4"]
    assert evaluate["files"][2].endswith("out/definitions.jsonl") and evaluate["baseline"] == "plain"
    by_domain = {"compose": {"routing_policy": "domain", "gate_mode": "none"}, "router": {"train": "experts"}}
    router = plan_of(scripts, config(), by_domain)["router"].written["settings.yml"]
    assert len(router["train_files"]) == 2 and "validation_files" not in router
    given = plan_of(scripts, config(base="some/model"))
    assert "base" not in given and given["expert-0"].written["settings.yml"]["model_name_or_path"] == "some/model"
    assert changed(given, plan_of(scripts, config(base="other/model"))) == set(given) - {"cluster"}


def test_experts_branch_from_a_trunk_that_has_read_all_rows(scripts, config, data):
    without, steps = plan_of(scripts, config()), plan_of(scripts, config(), {"trunk": {"learning_rate": 0.02}})
    assert changed(without, steps) == set(steps) - {"base", "cluster"} and list(steps)[:2] == ["base", "trunk"]
    trunk, expert = (steps[name].written["settings.yml"] for name in ("trunk", "expert-0"))
    assert trunk["train_files"] == [str(data / "train.jsonl")] and trunk["model_name_or_path"] == str(steps["base"].out)
    assert trunk["train"] == "all" and trunk["learning_rate"] == 0.02 and expert["learning_rate"] == 0.01
    assert trunk["num_train_epochs"] == expert["num_train_epochs"] == 2
    assert expert["model_name_or_path"] == str(steps["trunk"].out)
    assert steps["mixture"].written["mixture.yml"]["base_model"] == str(steps["trunk"].out)
    given = plan_of(scripts, config(base="some/model"), {"trunk": {}})
    assert given["trunk"].written["settings.yml"]["model_name_or_path"] == "some/model"


def test_ablations_share_what_they_have_in_common(scripts, data):
    """Those of the folder, over its small recipe."""
    ablations = yaml.safe_load((LEXICON / "ablations.yml").read_text())
    plans = {
        name: plan_of(scripts, LEXICON / "small.yml", ablations.get(name, {}), {"data": str(data)})
        for name in ("main", *ablations)
    }
    main, experts = plans["main"], {f"expert-{k}" for k in range(4)}
    behind = {"mixture", "router", "reward", "plain", "best", "evaluate"}
    for name, steps in plans.items():
        assert steps["base"].key == main["base"].key, name  # trained once
        scripts.execution.check_options(list(steps.values()))
    for name in ("semantic", "token_top2", "experts_4"):
        assert not changed(main, plans[name]), name
    for name in ("token_top1", "sequence_soft", "sequence_hard", "domain"):
        assert changed(main, plans[name]) == behind, name
    for name in ("token_linear", "domain_linear"):
        assert changed(main, plans[name]) == behind | experts, name
        trained = plans[name]["expert-0"].written["settings.yml"]["train"]
        assert trained == "linear" and "q_proj" in plans[name]["mixture"].written["mixture.yml"]["router_layers"]
        whole = plans[name.replace("linear", "all")]
        assert changed(plans[name], whole) == behind - {"mixture"}
        assert whole["router"].written["settings.yml"]["train"] == "all"
    branched = [plans[f"{name}_branched"] for name in ("domain", "token", "dense")]
    assert len({steps["trunk"].key for steps in branched}) == 1 and not any("router" in steps for steps in branched)
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


def test_equal_rows_whatever_the_split(scripts, config, data):
    """All experts together, each alone without a split, and the dense model read as many rows."""
    epochs = lambda step: step.written["settings.yml"]["num_train_epochs"]  # noqa: E731
    split, none = (
        plan_of(scripts, config()),
        plan_of(scripts, config(), {"cluster": {"method": "none"}, "compose": {"gate_mode": "random"}}),
    )
    dense = plan_of(scripts, config(), {"experts": 1, "expert": {"train": "mlp"}})
    assert [epochs(step[name]) for step, name in ((split, "expert-0"), (none, "expert-0"), (dense, "expert-0"))] == [
        2,
        1,
        2,
    ]
    assert none["expert-0"].written["settings.yml"]["train_files"] == [str(data / "train.jsonl")]
    seeds = [none[f"expert-{k}"].written["settings.yml"]["seed"] for k in (0, 1)]
    assert seeds == [1, 2] and epochs(dense["dense"]) == epochs(split["router"])
    content = dense["dense"].written["settings.yml"]
    assert content["train"] == "mlp" and content["model_name_or_path"] == str(dense["expert-0"].out)
    assert dense["plain"].written["settings.yml"]["model_name_or_path"] == str(dense["dense"].out)


# --- running ---


def wait_for_lock(path):
    """Until the killed step's process, which is nobody's child here, has ended."""
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


def test_a_killed_run_goes_on_to_the_same_result(scripts, config, tmp_path, monkeypatch, capsys):
    """Killed while the base is trained; and again, by what a kill leaves behind, in clusters and mixture."""
    path = config()
    killed = subprocess.Popen(
        [sys.executable, *map(str, (LEXICON / "run_all.py", "--config", path, "--work_dir", tmp_path / "killed"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    steps = plan_of(scripts, path, {"work_dir": str(tmp_path / "killed")})
    with ThreadPoolExecutor(1) as pool:  # beside this process's own run, which may take longer than the base there
        ended = pool.submit(kill_at_a_checkpoint, killed, steps["base"].out)
        said, _ = run(scripts, monkeypatch, capsys, path)
        ended.result()
    whole = outputs(plan_of(scripts, path))
    assert killed.wait() == -signal.SIGKILL, killed.stdout.read()
    wait_for_lock(steps["base"].folder / "lock")
    assert not (steps["base"].folder / "done.json").exists() and len(list(tmp_path.glob("killed/steps/*"))) == 1
    for name in ("cluster", "mixture"):  # written whole, but not stamped
        steps[name].out.mkdir(parents=True)
        (steps[name].out / "left").write_text("from before")
    _, ran = run(scripts, monkeypatch, capsys, path, "--work_dir", tmp_path / "killed")
    assert ran == {step.key for step in steps.values()}
    files, scores, weights = outputs(steps)
    assert files == whole[0] and scores == whole[1]
    assert all(torch.equal(weights[name], whole[2][name]) for name in whole[2])
    assert not list(tmp_path.glob("killed/steps/*/out/checkpoint-*"))
    check_conclusion(scripts, said, plan_of(scripts, path), tmp_path)


def check_conclusion(scripts, said, steps, tmp_path):
    """What a run prints at its end, and writes."""
    rows = [json.loads(line) for line in (steps["best"].out / "definitions.jsonl").read_text().splitlines()]
    assert [row["term"] for row in rows] == [row["term"] for row in some_rows(56, 12)]
    domains = {row["term"][:3]: row["domain"] for row in rows}
    assert domains["cat"] == domains["dog"] != domains["saw"] == domains["axe"]
    assert (
        said.count("\n  wrote  ") == 10
        and said.count("\n  gold   ") == 10
        and f"{rows[0]['term']}  [{rows[0]['domain']}: " in said
    )
    assert "bleu (context)" in said and "best_of_4" in said and "$" not in said
    found = json.loads((tmp_path / "work" / "run.json").read_text())
    assert [step["name"] for step in found["steps"]] == list(steps) and all(step["run_now"] for step in found["steps"])
    assert (
        found["seconds"] == pytest.approx(sum(step["seconds"] for step in found["steps"]), abs=0.1)
        and found["seconds"] > 0
    )
    scores = json.loads((steps["evaluate"].out / "scores.json").read_text())["systems"]
    assert found["scores"]["plain"]["bleu (context)"] == scores["plain"]["context"]["bleu"]["mean"]
    model = AutoModelForCausalLM.from_pretrained(steps["router"].out)
    assert model.config.num_local_experts == 2 and model.domain_centroids.any()


def test_what_stands_is_not_run_again(scripts, config, monkeypatch, capsys, data):
    """Without a reward, samples and scores, to be short; the dense ablation shares the base."""
    path = config(
        reward=None, best=None, evaluate=None, router=None, cluster={"method": "random"}, compose={"gate_mode": "zeros"}
    )
    _, ran = run(scripts, monkeypatch, capsys, path)
    steps = plan_of(scripts, path)
    assert ran == {step.key for step in steps.values()}
    said, ran = run(scripts, monkeypatch, capsys, path)
    assert not ran and said.count(" stands: ") == len(steps) and said.count("\n  wrote  ") == 10
    _, ran = run(scripts, monkeypatch, capsys, path, "--set", "plain.max_new_tokens=5")
    assert len(ran) == 1
    dense = plan_of(scripts, path, {"experts": 1})
    names = Path(path).parent / "mine.yml"
    names.write_text("dense: {experts: 1}\n")
    said, ran = run(scripts, monkeypatch, capsys, path, "--ablations", names, "--ablation", "main", "dense")
    assert ran == {dense["expert-0"].key, dense["plain"].key}
    assert (Path(path).parent / "work" / "run.dense.json").exists()
    _, ran = run(scripts, monkeypatch, capsys, path, "--from", "mixture")
    assert ran == {steps["mixture"].key, steps["plain"].key}
    monkeypatch.setattr(sys, "argv", command(path, "--dry_run", "--set", "expert.num_train_epochs=3"))
    scripts.run_all.main()
    said = capsys.readouterr().out
    assert said.count(" done ") == 2 and said.count(" to do ") == 4 and "train_expert.py" in said


def test_a_mixture_of_branches_keeps_what_its_trunk_learnt(scripts, config, monkeypatch, capsys):
    path = config(
        trunk={}, expert={"recipe": "training.yml", "train": "mlp"}, reward=None, best=None, evaluate=None, router=None,
        compose={"format": "lexicon", "routing_policy": "domain", "gate_mode": "none"},
    )  # fmt: skip
    said, ran = run(scripts, monkeypatch, capsys, path)
    steps = plan_of(scripts, path)
    assert ran == {step.key for step in steps.values()} and "trunk" in said
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    weights = {
        name: load_file(steps[name].out / "model.safetensors") for name in ("base", "trunk", "expert-0", "mixture")
    }
    for name in names:
        assert not torch.equal(weights["base"][name], weights["trunk"][name])
        assert torch.equal(weights["trunk"][name], weights["expert-0"][name])
        assert torch.equal(weights["trunk"][name], weights["mixture"][name])
    written = [json.loads(line) for line in (steps["plain"].out / "definitions.jsonl").read_text().splitlines()]
    assert len(written) == 12 and {row["domain"] for row in written} == {0, 1}


def test_a_step_that_fails_says_why_and_is_gone_on_with(scripts, config, monkeypatch, capsys, tmp_path):
    path = config(reward=None, best=None, evaluate=None, cluster={"method": "tfidf"}, compose={"gate_mode": "hidden"})
    with pytest.raises(
        scripts.execution.StepFailed, match="the step mixture failed .exit code 2.: .*positive_prompts"
    ) as found:
        run(scripts, monkeypatch, capsys, path)
    assert found.value.code == 2 and "log.txt" in str(found.value)
    steps = plan_of(scripts, path)
    assert "$ python -m merge_tools.cli compose" in (steps["mixture"].folder / "log.txt").read_text()
    stands = {step.name for step in steps.values() if scripts.execution.stamp_of(step)}
    assert stands == {"base", "cluster", "expert-0", "expert-1"}
    rows = tmp_path / "sources.jsonl"
    write_rows(rows, [{**row, "source": "abc"[i % 3]} for i, row in enumerate(some_rows(0, 12))])
    sources = config(train_files=[str(rows)], cluster={"method": "source"}, compose={"gate_mode": "zeros"})
    with pytest.raises(
        scripts.execution.StepFailed, match="the rows have 3 clusters, and there are 2 experts. Use experts: 3"
    ):
        run(scripts, monkeypatch, capsys, sources)


class Slow(Ended):
    """A process that ends when it is told to."""

    def __init__(self):
        super().__init__(None)
        self.terminated = False

    def terminate(self):
        self.terminated, self.code = True, -15

    def wait(self, timeout=None):
        return self.code


def test_experts_run_beside_one_another_with_a_thread_each_and_nothing_else_does(scripts, tmp_path, monkeypatch):
    def step(name, kind, inputs=(), parallel=False):
        return scripts.run_steps.Step(name, kind, name, tmp_path / name, ["python", "x"], list(inputs), {}, parallel)

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
    monkeypatch.setattr(scripts.execution.time, "sleep", sleep)
    scripts.execution.Runner(2, start).run([base, *experts, mixture])
    assert {"expert-0", "expert-1"} in most and max(map(len, most)) == 2
    assert all(len(names) == 1 for names in most if not all(name.startswith("expert") for name in names))
    assert [threads for _, _, threads in started] == ["7", "1", "1", "1", "7"]
    # one that fails ends those beside it
    started.clear()
    other = [step(f"expert-{k}", "expert", [base], True) for k in (3, 4)]
    monkeypatch.setattr(scripts.execution.time, "sleep", lambda _: setattr(started[0][1], "code", 1))
    with pytest.raises(scripts.execution.StepFailed, match="expert-3 failed"):
        scripts.execution.Runner(2, start).run([base, *other])
    assert started[1][1].terminated


def test_a_step_that_another_process_runs_is_waited_for_and_not_made_again(scripts, config, monkeypatch, capsys):
    path = config()
    run(scripts, monkeypatch, capsys, path)
    base = plan_of(scripts, path)["base"]
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

        monkeypatch.setattr(scripts.execution.time, "sleep", sleep)
        with pytest.raises(ValueError, match="The step base is being run already, by process 4711. Wait for it"):
            run(scripts, monkeypatch, capsys, path, "--from", "base")
        said, ran = run(scripts, monkeypatch, capsys, path)
    assert looks == [True] * 3 and said.count("base       waits: process 4711 of another run is at it") == 1
    assert not ran and said.count(" stands: ") == len(plan_of(scripts, path))


@pytest.mark.parametrize(
    "changes, options, said",
    [
        ({"cluster": {"metod": "random"}}, (), "cluster.metod in .* is not known. Did you mean 'method'?"),
        ({"bases": {}}, (), "has 'bases', which is not known. Did you mean 'base'?"),
        (
            {"plain": {"max_new_token": 3}},
            (),
            "generate.max_new_token is not known to generate.py. Did you mean 'max_new_tokens'?",
        ),
        ({"experts": 0}, (), "experts=0 in .*: give a whole number"),
        ({"expert": None}, (), "has no settings of 'expert'"),
        ({"data": None}, (), "names no train_files. Give data: FOLDER"),
        ({"data": "/none"}, (), "/none/train.jsonl"),
        ({"router": {"output_dir": "x"}}, (), "router.output_dir is given by the recipe itself"),
        (
            {"best": {"scorer": "reward"}, "reward": None},
            (),
            "best.scorer is reward, and there are no settings of 'reward'",
        ),
        ({"cluster": {"method": "none"}}, (), "no clusters that gates could be of"),
        ({}, ("--ablation", "lexica"), "--ablation 'lexica' is not in .*: main, no_split"),
        ({}, ("--from", "merge"), "--from 'merge' is no step of this recipe: base, best"),
        ({}, ("--set", "seed"), "write KEY=VALUE"),
        ({}, ("--jobs", 0), "--jobs 0: it must be 1 or more"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(changes, options, said, scripts, config, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", command(config(**changes), *options))
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        scripts.run_all.main()
    assert ended.value.code == 2 and error.getvalue().count("\n") == 1
    assert re.search(said, error.getvalue()), error.getvalue()
    assert not (tmp_path / "work").exists()
