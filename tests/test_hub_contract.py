"""Checkpoints of every class are complete: code, pipelines and card; in folders and on a Hub on loopback; in fresh
processes with and without the project.

The expensive part happens once: `checkpoints` saves them all, and `hub` opens and pushes them in two processes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from transformers import pipeline

import lexperts  # noqa: F401
from modeling_seke import SekeForTokenClassification
from run_tools.cards import is_blank
from tests.hub_process import BASE, TEXT, describe
from tests.loopback_hub import LoopbackHub
from tests.modeling_exhird.conftest import DOCUMENTS, tiny_exhird, word_tokenizer
from tests.modeling_hypernet.conftest import tiny_hypernet  # noqa: F401
from tests.modeling_lexicon.conftest import tiny_lexicon
from tests.modeling_moesumm.conftest import tiny_moesumm
from tests.tiny_models import CASES as CLASSES
from tests.tiny_models import make_model

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]
TAG = {"token-classification": (TEXT, {})}
EXTRACT = TAG | {"keyphrase-extraction": (TEXT, {"top_k": None})}
TITLED = TAG | {"keyphrase-extraction": ({"title": "the graph cut", "text": TEXT}, {"top_k": None})}
CLASSIFY = {"text-classification": ({"text": "the graph cut", "text_pair": TEXT}, {})}
QUESTION = {"question": "is the network", "context": TEXT}
ASK = {"extractive-qa": (QUESTION, {"handle_impossible_answer": True, "top_k": 5})}
GENERATE = {"keyphrase-generation": (PAIRS, {})}
SUMMARIZE = {"moe-summarization": ([TEXT, "the cut"], {"dataset": ["papers", None], "max_length": 8})}
DEFINE = {"definition-modeling": ({"term": "cut", "context": TEXT}, {"max_new_tokens": 4})}
TOKENS, SEQ2SEQ, CAUSAL = (f"AutoModelFor{name}" for name in ("TokenClassification", "Seq2SeqLM", "CausalLM"))
CASES = {
    "seke-bert": (TOKENS, EXTRACT),
    "seke-deberta-v2": (TOKENS, EXTRACT),
    "seke-modernbert": (TOKENS, EXTRACT),
    "hypernet-tags": (TOKENS, TITLED),
    "hypernet-classes": ("AutoModelForSequenceClassification", CLASSIFY),
    "hypernet-answers": ("AutoModelForQuestionAnswering", ASK),
    "exhird-transformer": (SEQ2SEQ, GENERATE),
    "exhird-bigru": (SEQ2SEQ, GENERATE),
    "moesumm-bart": (SEQ2SEQ, SUMMARIZE),
    "moesumm-pegasus": (SEQ2SEQ, SUMMARIZE),
    "moesumm-llama": (CAUSAL, SUMMARIZE),
    "lexicon-token": (CAUSAL, DEFINE),
    "lexicon-sequence_hard": (CAUSAL, DEFINE),
}
PUSHED = (
    "seke-bert",
    "hypernet-tags",
    "hypernet-answers",
    "exhird-bigru",
    "moesumm-bart",
    "moesumm-llama",
    "lexicon-token",
)
AGAIN = (*PUSHED, "hypernet-classes", "exhird-transformer")  # every package and head: the backbone changes no code
each_case = pytest.mark.parametrize("name", CASES)
each_pushed = pytest.mark.parametrize("name", PUSHED)
each_pipeline = pytest.mark.parametrize("name", [name for name, case in CLASSES.items() if case.cls.pipelines()])


@pytest.fixture(scope="module")
def make(tiny_seke, tiny_tokenizer, tiny_hypernet):  # noqa: F811
    """make(name) -> a model whose pipelines return something, and its tokenizer."""

    def build(name):
        package, kind = name.split("-", 1)
        if package == "exhird":
            return tiny_exhird(kind), word_tokenizer()
        tokenizer = type(tiny_tokenizer)(
            tokenizer_object=tiny_tokenizer.backend_tokenizer, **tiny_tokenizer.special_tokens_map, model_max_length=64
        )
        if package == "seke":
            model = tiny_seke(kind)
            model.classifier.bias.data[1:] += 0.2  # an untrained model finds phrases too
            return model, tokenizer
        if package == "hypernet":
            model = tiny_hypernet(kind, freeze_backbone=kind == "classes")
            if kind == "tags":
                model.classifier.bias.data[1:] += 0.3
            return model, tokenizer
        tokenizer.bos_token, tokenizer.eos_token = tokenizer.cls_token, tokenizer.sep_token
        if package == "moesumm":
            return tiny_moesumm(kind, changes={"vocab_size": len(tokenizer)}), tokenizer
        return tiny_lexicon(seed=len(kind), policy=kind, vocab_size=len(tokenizer)), tokenizer

    return build


@pytest.fixture(scope="module")
def checkpoints(make, tmp_path_factory):
    """A folder with all checkpoints and cases.json, and the results of each checkpoint in this process.

    One half is saved by the pipeline, the other half by model and tokenizer.
    """
    folder, cases = tmp_path_factory.mktemp("checkpoints"), {}
    for number, (name, (auto, tasks)) in enumerate(CASES.items()):
        model, tokenizer = make(name)
        by_pipeline = number % 2 == 0
        savers = [pipeline([*tasks][-1], model=model, tokenizer=tokenizer)] if by_pipeline else [model, tokenizer]
        for saver in savers:
            saver.save_pretrained(folder / name)
        repositories = [f"tester/{name}", f"tester/{name}-model"] if name in PUSHED else []
        cases[name] = {"auto": auto, "tasks": tasks, "repositories": repositories, "again": name in AGAIN}
    (folder / "cases.json").write_text(json.dumps(cases))
    expected = {name: describe(case, folder / name, trust=False) for name, case in cases.items()}
    assert all(all(entry["results"].values()) for entry in expected.values())
    return folder, expected


def run_role(role, checkpoints, folder, **environment):
    """Runs `hub_process.py` in a fresh process, in a folder without code -> its results."""
    folder.mkdir(exist_ok=True)
    caches = {"HF_HOME": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1"}
    project = {"PYTHONPATH": str(ROOT)} if role == "push" else {}
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **caches, **project, "TRANSFORMERS_OFFLINE": "0", **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests" / "hub_process.py", role, checkpoints],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.fixture(scope="module")
def hub(checkpoints, tmp_path_factory):
    """The results of both processes, and the Hub's repositories."""
    (folder, _), work = checkpoints, tmp_path_factory.mktemp("hub")
    with LoopbackHub() as server:
        pushed = run_role("push", folder, work / "push", **server.env)
        opened = run_role("open", folder, work / "open", **server.env)
        assert server.unknown == []
        repositories = {name: repository for (_, name), repository in server.repos.items()}
    return SimpleNamespace(pushed=pushed, opened=opened, repositories=repositories)


def tree_of(repository):
    return repository.commits[repository.branches["main"]]["tree"]


def card_of(hub, name):
    return ModelCard(tree_of(hub.repositories[name])["README.md"][0].decode())


def rounded(value):
    """Nested results with scores of three digits."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def check_same(entry, expected):
    """Without the project, a pipeline that does not travel says what it needs."""
    found = {task: value for task, value in entry["results"].items() if "needs Lexperts" not in str(value)}
    assert rounded(found) == rounded({task: expected["results"][task] for task in found}) and found
    assert entry["digest"] == expected["digest"]
    assert entry.get("datasets") == expected.get("datasets")


# --- folders ---


@each_case
def test_a_checkpoint_is_flat_and_complete(name, checkpoints):
    folder, (package, kind) = checkpoints[0] / name, name.split("-", 1)
    config = json.loads((folder / "config.json").read_text())
    names = {path.name for path in folder.iterdir()}
    own = {path.name for path in (ROOT / f"modeling_{package}").glob("*.py")}
    code = {file for file in names if file.endswith(".py")}
    parts = ("modeling", "configuration", "shared")
    files = {entry["impl"].split(".")[0] + ".py" for entry in config.get("custom_pipelines", {}).values()}
    required = {*files, *(f"{part}_{package}.py" for part in parts)}
    assert required | {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert code <= own | files
    for file in code:  # what is imported is there
        imported = re.findall(r"^\s*from \.(\w+) import", (folder / file).read_text(encoding="utf-8"), re.M)
        assert {f"{module}.py" for module in imported} <= names, file
    assert not any(file.endswith((".bin", ".pkl", ".pt")) for file in names)
    assert not any(path.is_dir() for path in folder.iterdir())
    auto, tasks = CASES[name]
    assert set(config["auto_map"]) == {"AutoConfig", auto}
    assert list(config.get("custom_pipelines", {})) == [task for task in tasks if not task.endswith("-classification")]
    for file in ("config.json", "tokenizer_config.json"):
        assert str(folder.parent) not in (folder / file).read_text()
    if package == "moesumm":
        assert config["text_config"]["model_type"] == kind and "generation_config.json" in names
    if package == "exhird":
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer["auto_map"]["AutoTokenizer"][0] == "tokenization_exhird.ExhirdTokenizer"


@each_pipeline
def test_the_pipeline_survives_loading_with_the_package_and_saving_again(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "first")
    again = CLASSES[name].cls.from_pretrained(tmp_path / "first")
    assert not hasattr(again.config, "custom_pipelines")  # with the package, the registered pipeline is used
    again.save_pretrained(tmp_path / "second")
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("first", "second")]
    assert all(configs[0][field] == configs[1][field] for field in ("auto_map", "custom_pipelines"))
    for entry in configs[1]["custom_pipelines"].values():
        assert (tmp_path / "second" / f"{entry['impl'].split('.')[0]}.py").exists()


def test_a_subclass_that_no_auto_class_opens_names_no_pipeline(tmp_path):
    kind = type("Mine", (SekeForTokenClassification,), {"_auto_class": None})
    kind(make_model("SekeForTokenClassification").config).save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text()).get("custom_pipelines")


# --- fresh processes ---


@pytest.mark.parametrize("name", AGAIN)
def test_with_the_project_imported_its_own_classes_run(name, checkpoints, hub):
    check_same(hub.pushed[name]["trusted"], checkpoints[1][name])
    for trust, entry in ((False, checkpoints[1][name]), (True, hub.pushed[name]["trusted"])):
        package, modules = name.split("-")[0], entry["modules"]
        assert modules["model"] == modules["auto"] == f"modeling_{package}.modeling_{package}"
        assert modules["config"] == f"modeling_{package}.configuration_{package}"
        if not trust or package in ("seke", "hypernet"):  # the others' own pipelines and tokenizers need the flag
            assert modules["pipeline"] == checkpoints[1][name]["modules"]["pipeline"]
            assert modules["tokenizer"] == checkpoints[1][name]["modules"]["tokenizer"]


@each_case
def test_without_the_project_the_checkpoints_own_code_runs(name, checkpoints, hub):
    entry, expected = hub.opened[name], checkpoints[1][name]
    check_same(entry, expected)
    assert entry["refused"]  # without trust_remote_code
    needs = {task for task, value in entry["results"].items() if "needs Lexperts" in str(value)}
    assert needs == {"keyphrase-extraction"} & set(CASES[name][1])
    for part in ("model", "auto", "config", "pipeline", "tokenizer"):
        stock = expected["modules"][part].startswith("transformers.")
        assert stock or entry["modules"][part].startswith("transformers_modules."), part


@pytest.mark.parametrize("name", AGAIN)
def test_a_stranger_saves_it_again(name, checkpoints, hub):
    again, expected = hub.opened[name]["again"], checkpoints[1][name]
    assert again["digest"] == expected["digest"]
    assert rounded(again["results"]) == rounded(next(iter(expected["results"].values())))


@each_pushed
def test_what_pipelines_and_models_push_opens_without_the_project(name, checkpoints, hub):
    for repository in (f"tester/{name}", f"tester/{name}-model"):
        check_same(hub.opened[repository], checkpoints[1][name])
        assert hub.opened[repository]["modules"]["model"].startswith("transformers_modules.tester")


@each_pushed
def test_what_a_saved_model_does_not_need_names_the_package(name, hub):
    """`lora_config`, which ExHiRD does not have, and, of SEKE, `from_backbone`."""
    needs = hub.opened[name]["needs"]
    assert all(needs) and len(needs) == 1 + name.startswith("seke") - name.startswith("exhird")


def test_checkpoints_are_different(checkpoints):
    """The negative control of all comparisons."""
    digests = [entry["digest"] for entry in checkpoints[1].values()]
    assert len(set(digests)) == len(digests)
    results = [rounded(checkpoints[1][f"exhird-{kind}"]["results"]) for kind in ("transformer", "bigru")]
    assert results[0] != results[1]


# --- model cards on the Hub ---


@each_pushed
def test_a_pushed_pipeline_and_a_pushed_model_bring_a_card(name, hub):
    for repository in (f"tester/{name}", f"tester/{name}-model"):
        card = card_of(hub, repository)
        assert not is_blank(card.content) and f'model="{repository}"' in card.text
        base = {"base_model": BASE}
        base = {} if name.startswith(("exhird", "lexicon")) else base  # their cards name none
        assert {key: card.data.get(key) for key in base} == base
        assert card.data.pipeline_tag and ("mine" in card.data.tags) == (not repository.endswith("model"))
        assert len(hub.repositories[repository].commits) <= 3  # the card comes in the same commit
    assert json.loads(tree_of(hub.repositories[f"tester/{name}"])["config.json"][0])["architectures"]


def test_a_card_on_the_hub_stays(hub):
    card = card_of(hub, "tester/changed")
    assert card.text.strip() == "# Written by hand" and card.data.license == "mit"
