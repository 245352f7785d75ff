"""Merges the experts of a recipe into one mixture, on disk or in memory."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.versions import package_version

from .card import model_card
from .checkpoints import Source
from .errors import MergeError
from .families import family_of
from .findings import Report
from .gates import Gates, find_equal_rows, make_gates
from .output_config import code_files, mixture_config, output_format, to_json_bytes
from .places import places_beside
from .plan import OutputTensor, centroid_tensor, measure, plan_tensors, read_centroids
from .preflight import Preflight, run_preflight
from .provenance import RECORD, source_record
from .recipe import Recipe
from .shard_writer import SHARD_BYTES, Look, NotFiniteError, Progress, write_checkpoint
from .source_scan import ScanResult
from .tensor_files import has_nonfinite
from .tokenizers import mixture_tokenizer, named_source
from .value_checks import describe_nonfinite


@dataclass
class Plan:
    """Everything about a mixture except its bytes."""

    report: Report
    recipe: Recipe
    base: Source
    experts: list[Source]
    family: str  # model_type of the experts
    format: str  # model_type of the mixture
    tensors: list[OutputTensor]
    gates: Gates
    config: dict[str, Any]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """`bytes`, `parameters` and `active_parameters`, those that are active per token."""
        return measure(self.recipe, self.tensors)

    def summary(self) -> dict[str, Any]:
        """Format, experts, size on disk and in memory, parameters in total and active per token."""
        summary = {"format": self.format, "experts": self.recipe.names, "tensors": len(self.tensors)}
        return {**summary, **self.sizes, "memory_bytes": self.sizes["bytes"]}

    def record(self, scans: dict[Path, ScanResult], out: Path) -> dict[str, Any]:
        """The content of merge_record.json, from which a mixture can be verified, extended and taken apart."""
        record = {"made_by": f"lexperts {package_version()}", "family": self.family, "format": self.format}
        record["recipe"] = self.recipe.to_dict()
        experts = [source_record(expert, scans) for expert in self.experts]
        record |= {"base": source_record(self.base, scans), "experts": experts, "gates": self.gates.info}
        return record | {"beside": places_beside(record, out)}


def check_and_plan(recipe: Recipe | dict | str | Path, out: str | Path | None = None, **changes) -> Plan:
    """Checks a recipe and plans the mixture without writing it.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder, which is then checked too.
        changes: keys of the recipe to replace.

    Raises:
        MergeError: with all errors of the preflight.
    """
    preflight = run_preflight(recipe, out, **changes)
    preflight.report.raise_for_errors()
    gates = make_gates(preflight.recipe, preflight.sources.base)
    if warning := find_equal_rows(gates, preflight.recipe.names):
        preflight.report.add("warning", "gates", "gates", warning)
    return make_plan(preflight, gates)


def make_plan(preflight: Preflight, gates: Gates) -> Plan:
    """The plan of a recipe that passed the preflight, with the given gates."""
    recipe, base, experts = preflight.recipe, preflight.sources.base, preflight.sources.experts
    format = output_format(recipe, base)
    tensors = plan_tensors(recipe, base, experts, gates.values)
    centroids = read_centroids(recipe)
    if centroids is not None:
        tensors.append(centroid_tensor(centroids))
    vocab_size = tensors[0].shape[0]
    size = None if centroids is None else centroids.shape[1]
    config = mixture_config(recipe, base, vocab_size, format, size, named_source(recipe, experts))
    return Plan(
        preflight.report, recipe, base, experts, family_of(base.config).model_type, format, tensors, gates, config
    )


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
    """Merges the experts of a recipe into one sparse checkpoint. `out` is complete afterwards, or does not exist.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder, which must not exist or be empty.
        resume: continues an interrupted run of the same recipe.
        verify: hashes the sources and scans every element for NaN and infinity. Without it only the bytes that the
            mixture needs are read, and `merge_tools.verify` cannot tell later whether a source has changed.
        sha256: also records the SHA-256 of every source file.
        shard_bytes: maximum size of a file.
        progress: receives the progress of each phase.
        changes: keys of the recipe to replace.

    Returns:
        A summary of the mixture (see `Plan.summary`), `out` and `warnings`.

    Raises:
        MergeError: if the preflight finds errors. Nothing is written then.
    """
    out = Path(out)
    plan = check_and_plan(recipe, out, **changes)
    sources = [*plan.experts, plan.base]

    def make_files(scans) -> dict[str, bytes]:
        tokenizer = mixture_tokenizer(plan.recipe, plan.base, plan.experts)
        return metadata_files(plan.config, plan.record(scans, out), plan.sizes, tokenizer)

    try:
        look = Look(verify, sha256)
        write_checkpoint(out, plan.tensors, sources, make_files, progress, resume, shard_bytes, look)
    except NotFiniteError as error:
        name = next(source.name for source in sources if error.file in source.files)
        raise MergeError(f"{name}: {error.file.name}: {describe_nonfinite(list(error.names))}") from error
    return {"out": str(out), **plan.summary(), "warnings": [f"{f.subject}: {f.message}" for f in plan.report.warnings]}


def metadata_files(
    config: dict[str, Any], record: dict[str, Any], sizes: dict[str, int], carried: dict[str, bytes]
) -> dict[str, bytes]:
    """The files of a mixture except weights: configuration, record, model card, code if needed, and the carried ones.

    The record lists the hashes of the `carried` files, tokenizer and generation settings.
    """
    record["written"] = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(carried.items())}
    files = dict(carried)
    files |= {"config.json": to_json_bytes(config), RECORD: to_json_bytes(record)}
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
