"""Merges the experts of a recipe into one mixture, on disk or in memory."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .card import model_card
from .errors import MergeError
from .gate_statistics import statistics_file
from .gates import make_gates
from .output_config import code_files, to_json_bytes
from .plan import Plan
from .preflight import run_preflight
from .provenance import RECORD
from .recipe import Recipe
from .shard_writer import SHARD_BYTES, NotFiniteError, Progress, SourceChecks, write_checkpoint
from .tensor_files import has_nonfinite
from .tokenizers import mixture_tokenizer
from .value_checks import describe_nonfinite


def check_and_plan(
    recipe: Recipe | dict | str | Path, out: str | Path | None = None, *, progress: Progress | None = None, **changes
) -> Plan:
    """Checks a recipe and plans the mixture without writing it.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder, which is then checked too.
        progress: receives the progress of the gates that are made from texts.
        changes: keys of the recipe to replace.

    Raises:
        MergeError: with all errors of the preflight.
    """
    report, plan = run_preflight(recipe, out, **changes)
    report.raise_for_errors()
    assert plan is not None  # there are no errors
    gates = make_gates(plan.recipe, plan.base, plan.experts, progress)
    plan.set_gates(gates)
    for warning in gates.warnings:
        plan.report.add("warning", "gates", "gates", warning)
    return plan


def compose(
    recipe: Recipe | dict | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    verify: bool = True,
    sha256: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    **changes,
) -> dict[str, Any]:
    """Merges the experts of a recipe into one sparse checkpoint. `out` is complete afterwards, or does not exist. Gates that need the
    states of a model are computed on a GPU if there is one.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder, which must not exist or be empty.
        resume: continues an interrupted run of the same recipe; complete weights files are kept.
        verify: hashes the sources and scans every element for NaN and infinity. Without it only the bytes that the
            mixture needs are read, and `merge_tools.verify` cannot tell later whether a source has changed.
        sha256: also records the SHA-256 of every source file.
        shard_bytes: maximum size of a file.
        progress: receives the progress of each phase.
        changes: keys of the recipe to replace.

    Returns:
        A summary of the mixture (see `Plan.summary`), `out`, `warnings` and `notes`.

    Raises:
        MergeError: if the preflight finds errors. Nothing is written then.
    """
    out = Path(out)
    plan = check_and_plan(recipe, out, progress=progress, **changes)
    sources = [*plan.experts, plan.base]

    def make_files(scans) -> dict[str, bytes]:
        tokenizer = mixture_tokenizer(plan.recipe, plan.base, plan.experts)
        return metadata_files(plan.config, plan.record(scans, out), plan.sizes, tokenizer)

    try:
        write_checkpoint(
            out, plan.tensors, sources, make_files, progress,
            settings=plan.recipe.to_dict(), resume=resume, shard_bytes=shard_bytes, checks=SourceChecks(verify, sha256),
            beside=statistics_file(plan.gates.statistics),
        )  # fmt: skip
    except NotFiniteError as error:
        name = next(source.name for source in sources if error.file in source.files)
        raise MergeError(f"{name}: {error.file.name}: {describe_nonfinite(list(error.names))}") from error
    found = {"warnings": plan.report.warnings, "notes": plan.report.notes}
    messages = {level: [f"{f.subject}: {f.message}" for f in findings] for level, findings in found.items()}
    return {"out": str(out), **plan.summary(), **messages}


def metadata_files(
    config: dict[str, Any], record: dict[str, Any], sizes: dict[str, int], carried: dict[str, bytes]
) -> dict[str, bytes]:
    """The files of a mixture except weights: configuration, record, model card, code if needed, and the carried ones.

    The record lists the hashes of the `carried` files, tokenizer and generation settings.
    """
    record["written"] = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(carried.items())}
    files = {**carried, "config.json": to_json_bytes(config), RECORD: to_json_bytes(record)}
    files["README.md"] = model_card(record, sizes)
    return files | (code_files() if record["format"] == "lexicon" else {})


def load_experts(
    experts: Iterable[str | Path | dict],
    *,
    base_model: str | Path | None = None,
    routing_policy: str = "token",
    gate_mode: str | None = None,
    **options,
):
    """Builds a mixture in memory without writing it, for example to try it before `compose`.

    Args:
        experts: folders, Hub ids, or mappings as in a recipe.
        base_model, routing_policy, gate_mode, options: keys of a recipe, see `Recipe`.

    Returns:
        A `LexiconForCausalLM` that equals `compose` followed by `from_pretrained`.

    Raises:
        MergeError: with all errors of the preflight.
    """
    from modeling_lexicon import LexiconConfig, LexiconForCausalLM

    from .dense_run import to_torch

    recipe = {"base_model": base_model, "routing_policy": routing_policy, "gate_mode": gate_mode, "format": "lexicon"}
    plan = check_and_plan({"experts": list(experts), **recipe, **options})
    state = {}
    for tensor in plan.tensors:
        raw = np.concatenate(list(tensor.blocks()))
        if has_nonfinite(raw, tensor.dtype):
            raise MergeError(
                f"{tensor.name!r} would hold NaN or infinity. Run `merge-experts check --deep` to find the broken expert."
            )
        state[tensor.name] = to_torch(raw, tensor.dtype, tensor.shape)
    other_spellings = ("auto_map", "torch_dtype", "rope_scaling", "rope_theta")
    config = {key: value for key, value in plan.config.items() if key not in other_spellings}
    options = {"config": LexiconConfig.from_dict(config), "dtype": state["model.embed_tokens.weight"].dtype}
    return LexiconForCausalLM.from_pretrained(None, state_dict=state, **options).eval()
