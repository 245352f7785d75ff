"""Experts in, one mixture out: on disk, or in memory to try it first."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .card import model_card
from .checks import Report, check, not_finite, output_format, read_centroids
from .errors import MergeError
from .gates import Gates, make_gates
from .planning import OutputTensor, parameters, plan
from .recipe import Recipe
from .records import code_files, dump, merge_record, mixture_config, tokenizer_contents
from .sources import Source
from .tensor_files import TensorEntry, nonfinite, read_header
from .writing import SHARD_BYTES, NotFinite, Progress, Writer, finish, growing_folder, lay_out


@dataclass
class Plan:
    """What a compose would write."""

    report: Report
    recipe: Recipe
    base: Source
    experts: list[Source]
    kind: str  # "mixtral" or "lexicon"
    tensors: list[OutputTensor]
    gates: Gates
    counts: dict[str, int]  # parameters: total, active
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def summary(self) -> dict[str, Any]:
        """In numbers: bytes to be written, parameters in all and at work on a token, bytes to hold it in memory."""
        return {
            "format": self.kind,
            "experts": self.recipe.names,
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
            "parameters": self.counts["total"],
            "active_parameters": self.counts["active"],
            "memory_bytes": self.nbytes,
        }


def prepare(
    recipe: Recipe | dict | str | Path,
    out: str | Path | None = None,
    *,
    low_memory: bool = False,
    **changes,
) -> Plan:
    """Everything about a mixture but its bytes.

    Raises:
        MergeError: with all that stands against the merge.
    """
    report = check(recipe, out, **changes)
    report.raise_for_errors()
    return planned(report, make_gates(report.recipe, report.base, low_memory=low_memory))


def planned(report: Report, gates: Gates) -> Plan:
    """The plan of a recipe that was checked, with these gates."""
    recipe, base, experts = report.recipe, report.base, report.experts
    kind = output_format(recipe, base)
    tensors = plan(recipe, base, experts, gates.values)
    centroids = read_centroids(recipe)
    if centroids is not None:
        tensors.append(OutputTensor("domain_centroids", "F32", centroids.shape, given=centroids.view("<u4")))
    vocab_size = tensors[0].shape[0]
    config = mixture_config(recipe, base, vocab_size, kind, None if centroids is None else centroids.shape[1])
    return Plan(report, recipe, base, experts, kind, tensors, gates, parameters(recipe, tensors), config)


def compose(
    recipe: Recipe | dict | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    low_memory: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    **changes,
) -> dict[str, Any]:
    """Composes the experts of a recipe into one sparse checkpoint at `out`, which is then whole, or not there.

    Args:
        recipe: YAML file, dict or `Recipe`; `changes` replace its keys.
        resume: goes on with what an interrupted run of the same recipe left.
        low_memory: gates from texts are measured with one layer of the base model in memory at a time.
        shard_bytes: largest file.

    Returns:
        What was written, in numbers, and the warnings.

    Raises:
        MergeError: when the merge is refused; nothing is left behind then.
    """
    progress = progress or Progress()
    out = Path(out)
    made = prepare(recipe, out, low_memory=low_memory, **changes)
    write(made, out, resume=resume, shard_bytes=shard_bytes, progress=progress)
    return {"out": str(out), **made.summary(), "warnings": [f"{f.subject}: {f.message}" for f in made.report.warnings]}


def write(made: Plan, out: Path, *, resume: bool, shard_bytes: int, progress: Progress):
    shards = lay_out(made.tensors, shard_bytes)
    files = source_files([made.base, *made.experts])
    with growing_folder(out, resume) as folder:
        try:
            audits = Writer(folder, shards, files, resume, progress).run()
        except NotFinite as error:
            raise MergeError(name_expert(error, [*made.experts, made.base])) from error
        record = merge_record(made.recipe, made.kind, made.base, made.experts, audits, made.gates.info)
        small = small_files(made, record)
        finish(folder, out, shards, small, progress)


def small_files(made: Plan, record: dict[str, Any]) -> dict[str, bytes]:
    files = tokenizer_contents(made.base, made.experts)
    files |= {
        "config.json": dump(made.config),
        "merge_record.json": dump(record),
        "README.md": model_card(record, made.counts, made.nbytes),
    }
    return files | (code_files() if made.kind == "lexicon" else {})


def source_files(sources: list[Source]) -> dict[Path, list[TensorEntry]]:
    """Every file of the sources, once, with all the tensors in it."""
    return {file: read_header(file) for source in sources for file in source.files}


def name_expert(error: NotFinite, sources: list[Source]) -> str:
    for source in sources:
        if error.file in source.files:
            return f"{source.name}: {error.file.name}: {not_finite(list(error.names))}"
    return str(error)


def load_experts(
    experts: Iterable[str | Path | dict],
    *,
    base_model: str | Path | None = None,
    routing_policy: str = "token",
    gate_mode: str | None = None,
    low_memory: bool = False,
    **options,
):
    """The mixture of a recipe put together in memory, nothing written: to try it before it is made.

    Args:
        experts: folders, Hub ids, or mappings as in a recipe.
        options: any other key of a recipe, such as `experts_per_token`, `average`, `dtype`.

    Returns:
        A `LexiconForCausalLM`, equal to `compose` and `from_pretrained`.

    Raises:
        MergeError: with all that stands against the merge.
    """
    from modeling_lexicon import LexiconConfig, LexiconForCausalLM

    from .dense import load_state, to_torch

    given = {
        "experts": [e if isinstance(e, dict) else str(e) for e in experts],
        "base_model": None if base_model is None else str(base_model),
        "routing_policy": routing_policy,
        "gate_mode": gate_mode,
        "format": "lexicon",
        **options,
    }
    made = prepare({key: value for key, value in given.items() if value is not None}, low_memory=low_memory)
    state = {}
    for tensor in made.tensors:
        raw = np.concatenate(list(tensor.blocks()))
        if nonfinite(raw, tensor.dtype):
            raise MergeError(
                f"{tensor.name!r} would hold NaN or infinite values: an expert is broken. See merge-experts check."
            )
        state[tensor.name] = to_torch(raw, tensor.dtype, tensor.shape)
    config = {
        key: value
        for key, value in made.config.items()
        if key not in ("auto_map", "torch_dtype", "rope_scaling", "rope_theta")
    }
    return load_state(LexiconForCausalLM, LexiconConfig.from_dict(config), state)
