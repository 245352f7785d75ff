"""The fresh processes of `test_hub_contract.py`: `python hub_process.py ROLE FOLDER`, with the cases in FOLDER/cases.json.

The role `push` imports the project, `open` cannot. Each prints its results as JSON.
"""

import hashlib
import importlib
import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

PACKAGES = ("lexperts", "lexperts_lite", "keyphrase_tools", "merge_tools", "run_tools")
PACKAGES += tuple(f"modeling_{name}" for name in ("seke", "hypernet", "exhird", "moesumm", "lexicon"))
BASE = "tester/backbone"
TEXT = "the graph cut of the network is the problem of learning in graph networks"


class NotInstalled(MetaPathFinder):
    """Makes the import of the project fail."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}")


def block_project():
    sys.meta_path.insert(0, NotInstalled())
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        raise SystemExit(f"{name} could be imported")


def digest(model) -> str:
    """A hash of all names and weights."""
    sha = hashlib.sha256()
    for name, p in sorted(model.state_dict().items()):
        sha.update(name.encode() + p.detach().float().contiguous().numpy().tobytes())
    return sha.hexdigest()


def call(run, inputs, options):
    """The results of a pipeline as JSON has them."""
    results = run(**inputs, **options) if "question" in inputs else run(inputs, **options)
    return json.loads(json.dumps(results, default=float))


def auto_class(case):
    import transformers

    return getattr(transformers, case["auto"])


def describe(case, checkpoint, trust=True) -> dict:
    """Opens a checkpoint by its pipelines and its auto class -> results, weights, and the modules of the classes."""
    from transformers import pipeline

    options = {"trust_remote_code": True} if trust else {}
    results, modules = {}, {}
    for task, (inputs, parameters) in case["tasks"].items():
        try:
            opened = pipeline(task, model=str(checkpoint), device="cpu", **options)
        except ImportError as error:  # of a pipeline that does not travel
            results[task] = str(error)
            continue
        run = opened
        results[task] = call(run, inputs, parameters)
        modules.setdefault("pipeline", type(run).__module__)
    model = auto_class(case).from_pretrained(checkpoint, **options)
    parts = {"model": run.model, "tokenizer": run.tokenizer, "config": run.model.config, "auto": model}
    modules |= {part: type(x).__module__ for part, x in parts.items()}
    entry = {"results": results, "digest": digest(model), "modules": modules}
    if hasattr(model, "add_dataset"):
        model.add_dataset("radio")
        entry["datasets"] = model.config.datasets
    return entry


def refuses(case, checkpoint, match) -> bool:
    try:
        auto_class(case).from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        return match in str(error)
    return False


def needs_lexperts(call, *arguments) -> bool:
    try:
        call(*arguments)
    except ImportError as error:
        return "needs Lexperts" in str(error)
    return False


def save_again(case, folder, again) -> dict:
    """Saves an opened model and tokenizer -> what the new checkpoint computes, and its weights."""
    from transformers import pipeline

    task = next(iter(case["tasks"]))  # may be left out where the checkpoint names one task
    run = pipeline(None if task == "moe-summarization" else task, model=str(folder), trust_remote_code=True)
    run.model.save_pretrained(again)
    run.tokenizer.save_pretrained(again)
    entry = {"digest": digest(auto_class(case).from_pretrained(again, trust_remote_code=True))}
    inputs, parameters = next(iter(case["tasks"].values()))
    entry["results"] = call(pipeline(task, model=str(again), trust_remote_code=True), inputs, parameters)
    return entry


def open_checkpoints(folder, cases):
    """Without the project: folders and repositories, with and without `trust_remote_code`, and saved again."""
    block_project()
    results = {}
    for name, case in cases.items():
        results[name] = describe(case, folder / name)
        results[name]["refused"] = refuses(case, folder / name, "trust_remote_code")
        if case["again"]:
            results[name]["again"] = save_again(case, folder / name, Path("again") / name)
        for repository in case["repositories"]:
            results[repository] = describe(case, repository)
        if case["repositories"]:
            model = auto_class(case).from_pretrained(folder / name, trust_remote_code=True)
            results[name]["needs"] = [needs_lexperts(model.lora_config)] if hasattr(model, "lora_config") else []
            if name.startswith("seke"):
                results[name]["needs"].append(needs_lexperts(type(model).from_backbone, "minilm"))
    return results


def push(folder, cases):
    """With the project: opens checkpoints with `trust_remote_code`, and pushes models in every way."""
    from huggingface_hub import HfApi, ModelCard

    import lexperts  # noqa: F401

    results = {name: {"trusted": describe(case, folder / name)} for name, case in cases.items() if case["again"]}
    HfApi().create_repo(BASE)
    ModelCard("---\nlicense: bsd-3-clause\nlanguage: sl\n---\n# Backbone").push_to_hub(BASE)
    for name, case in cases.items():
        if case["repositories"]:
            push_all(name, case, folder / name)
    push_cards(folder)
    return results


def push_all(name, case, folder):
    """A pipeline, and a model with its tokenizer."""
    from transformers import pipeline

    run = pipeline(list(case["tasks"])[-1], model=str(folder))
    if getattr(run.model.config, "text_config", None):
        run.model.config.text_config.name_or_path = BASE
    run.push_to_hub(f"tester/{name}", tags=["mine"])
    for part in (run.model, run.tokenizer):
        part.push_to_hub(f"tester/{name}-model")


def push_cards(folder):
    """A model whose card on the Hub was written by hand."""
    from huggingface_hub import ModelCard
    from transformers import pipeline

    os.chdir(folder)  # the card names the folder as it was given
    extract = pipeline("keyphrase-extraction", model="seke-bert", device="cpu")
    extract.push_to_hub("tester/changed")
    ModelCard("---\nlicense: mit\n---\n# Written by hand").push_to_hub("tester/changed")
    extract.push_to_hub("tester/changed")
    extract.model.push_to_hub("tester/changed")


ROLES = {"push": push, "open": open_checkpoints}

if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    print("RESULTS" + json.dumps(ROLES[role](folder, cases)))
