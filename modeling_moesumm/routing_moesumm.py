# SPDX-License-Identifier: Apache-2.0
"""Routing of a forward pass, and the checks of its inputs (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, b rows that use deputies, S source tokens, d hidden size.
"""

import warnings
from dataclasses import dataclass, field, replace

import torch


@dataclass(eq=False)
class RoutingContext:
    """The routing of one forward pass: which rows use deputies, and which dataset's selector chooses them."""

    active: bool  # False to use the main expert only
    dataset_ids: torch.Tensor | None = None  # (B,), each row's dataset, -1 for none
    rows: torch.Tensor | None = None  # (b,), the rows that use deputies, if known; None for all
    recording: bool = False  # whether to collect `recorded`
    main_only_layer: int | None = None  # computes its rows with and without deputies, if the margin compares with it
    recorded: dict = field(default_factory=dict)  # layer index -> expert indices and weights, both (B, T)

    def to(self, device) -> "RoutingContext":
        """The same on the device of a layer, with one record for all."""
        tensors = {"dataset_ids": self.dataset_ids, "rows": self.rows}
        moved = {name: x.to(device) for name, x in tensors.items() if x is not None and x.device != device}
        return replace(self, **moved) if moved else self

    def record(self, layer_idx: int, gate: torch.Tensor, index: torch.Tensor, shape: torch.Size):
        """Stores gate and index `(b, T)` of the rows that use deputies; `shape` is (B, T)."""
        if not self.recording:
            return
        if self.dataset_ids is not None:
            ids = self.dataset_ids if self.rows is None else self.dataset_ids[self.rows]
            index = index.masked_fill((ids < 0)[:, None], -1)
        rows = slice(None) if self.rows is None else self.rows
        indices, weights = index.new_full(shape, -1), torch.zeros(shape, device=gate.device)
        indices[rows], weights[rows] = index, gate.detach().float()
        self.recorded[layer_idx] = (indices, weights)

    def outputs(self, layers, shape: tuple[int, int], device, prefix: str = "") -> dict[str, tuple]:
        """The output fields for `output_router_indices` of some layers and the first B rows, each `(B, T)`; -1 and 0 without a
        deputy.
        """
        if not self.recording:
            return {}
        empty = torch.full(shape, -1, device=device), torch.zeros(shape, device=device)
        indices, weights = zip(*(self.recorded.get(layer_idx, empty) for layer_idx in layers), strict=True)
        B = shape[0]
        return {
            f"{prefix}expert_indices": tuple(index[:B] for index in indices),
            f"{prefix}expert_weights": tuple(weight[:B] for weight in weights),
        }

    def with_main_only_rows(self, batch: int, device) -> "RoutingContext":
        """The routing of 2B rows: these B, then the same rows with the main expert only."""
        ids = self.dataset_ids
        if ids is not None:
            ids = torch.cat([ids, torch.full_like(ids, -1)])
        rows = torch.arange(batch, device=device) if self.rows is None else self.rows
        return replace(self, dataset_ids=ids, rows=rows, main_only_layer=None)


def make_routing_context(
    config,
    batch: int,
    device,
    dataset=None,
    dataset_ids=None,
    main_expert_only: bool | None = None,
    training: bool = False,
    validated: bool = False,
    recording: bool = False,
) -> RoutingContext:
    """The routing of a batch of B rows; arguments as in `MoeSummForConditionalGeneration.forward`.

    With `training` every parameter must be part of the graph. `validated` is whether an earlier call has validated the ids;
    they are then not copied from the device again. Raises a `ValueError` for unknown names or ids, and for
    arguments that exclude each other.
    """
    ids = resolve_datasets(config, dataset, dataset_ids, batch)
    if main_expert_only:
        if not config.main_expert:
            raise ValueError("main_expert_only=True, but the model has no main expert.")
        return RoutingContext(False, recording=recording)
    if not config.main_expert:
        return RoutingContext(True, recording=recording)
    if ids is None:
        if training and not torch.compiler.is_compiling():
            text = "No dataset was given in training: only the main expert is trained. Pass dataset_ids, or main_expert_only=True."
            warnings.warn(text, stacklevel=3)
        return RoutingContext(False, recording=recording)
    rows = None
    if not torch.compiler.is_compiling() and not (validated and ids.device.type != "cpu"):
        listed, last = ids.tolist(), len(config.datasets) - 1
        if wrong := [i for i in listed if not -1 <= i <= last]:
            raise ValueError(f"dataset_ids contains {wrong[0]}. Use -1 for no dataset, or 0 to {last}.")
        found = [row for row, i in enumerate(listed) if i >= 0]
        if not found and not training:
            return RoutingContext(False, recording=recording)
        rows = None if len(found) == batch else torch.tensor(found, dtype=torch.long, device=device)
    return RoutingContext(True, ids.to(device), rows, recording=recording)


def resolve_datasets(config, dataset, dataset_ids, batch: int) -> torch.Tensor | None:
    """Names or ids of the datasets of B rows -> ids `(B,)`, or `None` without either.

    Raises a `ValueError` for unknown names, both arguments, and ids of another shape or type.
    """
    if dataset is not None and dataset_ids is not None:
        raise ValueError(f"Both dataset={dataset!r:.60} and dataset_ids were given. Pass one of them.")
    if dataset is not None:
        return torch.tensor(dataset_names_to_ids(config.datasets, dataset, batch))
    if dataset_ids is None:
        return None
    ids = torch.as_tensor(dataset_ids)
    if tuple(ids.shape) != (batch,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"dataset_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}. Pass {batch} integers.")
    return ids.long()


def dataset_names_to_ids(datasets: list[str], dataset, batch: int) -> list[int]:
    """The ids of one name for all rows, or of one per row; -1 for `None`.

    Raises a `ValueError` for an unknown name, or if the number of names is not B (`batch`).
    """
    names = [dataset] * batch if dataset is None or isinstance(dataset, str) else list(dataset)
    if len(names) != batch:
        raise ValueError(f"dataset has {len(names)} names for {batch} rows. Pass one name per row, or one for all.")
    for name in names:
        if name is not None and name not in datasets:
            raise ValueError(f"dataset={name!r} is not one of {', '.join(map(repr, datasets))}.")
    return [-1 if name is None else datasets.index(name) for name in names]


def given_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The inputs, `(B, S)` or `(B, S, d)`; raises a `ValueError` if there are none."""
    if input_ids is None and inputs_embeds is None:
        raise ValueError("Neither input_ids nor inputs_embeds was given. Pass one of them.")
    return input_ids if input_ids is not None else inputs_embeds


def check_positions(config, kind: str, length: int):
    """Raises a `ValueError` for a text or a summary that is longer than the positions of an encoder or decoder."""
    limit = config.max_position_embeddings
    if limit is not None and length > limit:
        raise ValueError(
            f"The {kind} have {length} tokens, more than {limit} positions. Truncate them, or use "
            "pipeline('moe-summarization'), which splits long texts."
        )


def check_has_labels(config, decoder_input_ids):
    """Raises a `ValueError` for a training step whose labels the Trainer has removed, if they are needed."""
    if config.margin_loss_coef or decoder_input_ids is None:
        raise ValueError(
            f"labels=None in a training step with margin_loss_coef={config.margin_loss_coef}: with label_smoothing_factor or "
            "compute_loss_func the Trainer removes them. Use config.label_smoothing, or margin_loss_coef=0 and decoder_input_ids."
        )


def past_length(cache) -> int:
    """Tokens in the decoder's cache; 0 in compiled graphs, which reading it would break, and in continuous batching."""
    return 0 if torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length") else int(cache.get_seq_length())
