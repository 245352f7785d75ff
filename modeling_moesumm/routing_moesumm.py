# SPDX-License-Identifier: Apache-2.0
"""Routing of a forward pass, and the checks of its inputs (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, b rows that use deputies, S source tokens, d hidden size.
"""

import warnings
from dataclasses import dataclass, field, replace

import torch

from .validation_moesumm import did_you_mean


@dataclass(eq=False)
class RoutingContext:
    """The routing of one forward pass: which rows use deputies, and which dataset's selector chooses them."""

    active: bool  # False to use the main expert only
    dataset_ids: torch.Tensor | None = None  # (B,), each row's dataset, -1 for none
    rows: torch.Tensor | None = None  # (b,), the rows that use deputies, if known; None for all
    deputy_id: int | None = None  # the deputy that all tokens use
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

    def experts_of(self, layers, shape: tuple[int, int], device) -> tuple[tuple, tuple]:
        """Expert indices and weights of some layers for the first B rows, each `(B, T)`; -1 and 0 without a deputy."""
        empty = torch.full(shape, -1, device=device), torch.zeros(shape, device=device)
        recorded = [self.recorded.get(layer_idx, empty) for layer_idx in layers]
        return tuple(index[: shape[0]] for index, _ in recorded), tuple(weight[: shape[0]] for _, weight in recorded)

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
    deputy_id: int | None = None,
    training: bool = False,
    validated: bool = False,
    recording: bool = False,
) -> RoutingContext:
    """The routing of a batch of B rows; arguments as in `MoeSummForConditionalGeneration.forward`.

    With `training` every parameter must be part of the graph. `validated` is whether an earlier call has validated the ids;
    they are then not copied from the device again. Raises a `ValueError` for unknown names, ids or deputies, and for
    arguments that exclude each other.
    """
    check_exclusive(dataset, dataset_ids)
    if deputy_id is not None and main_expert_only:
        raise ValueError(f"deputy_id={deputy_id} and main_expert_only=True exclude each other. Pass one of them.")
    if deputy_id is not None and not 0 <= deputy_id < config.num_deputies:
        raise ValueError(f"deputy_id={deputy_id} is out of range. Use 0 to {config.num_deputies - 1}.")
    if main_expert_only:
        if not config.main_expert:
            raise ValueError("main_expert_only=True, but this model has no main expert. Leave it out.")
        return RoutingContext(False, recording=recording)
    ids = None
    if dataset is not None:
        ids = torch.tensor(dataset_names_to_ids(config.datasets, dataset, batch))
    elif dataset_ids is not None:
        ids = validate_dataset_ids(torch.as_tensor(dataset_ids), batch)
    rows = None
    if ids is not None and not torch.compiler.is_compiling() and not (validated and ids.device.type != "cpu"):
        rows = rows_with_dataset(config, ids.tolist())
    if deputy_id is not None or not config.main_expert:
        return RoutingContext(True, None, None, deputy_id, recording)
    if ids is None:
        if training and not torch.compiler.is_compiling():
            warnings.warn(
                "No dataset was given in training, so only the main expert is trained. Pass dataset_ids or dataset, or "
                "main_expert_only=True if this is intended.",
                stacklevel=3,
            )
        return RoutingContext(False, recording=recording)
    if rows is not None:
        if not rows and not training:
            return RoutingContext(False, recording=recording)
        rows = None if len(rows) == batch else torch.tensor(rows, dtype=torch.long, device=device)
    return RoutingContext(True, ids.to(device), rows, None, recording)


def dataset_names_to_ids(datasets: list[str], dataset, batch: int) -> list[int]:
    """The ids of one name for all rows, or of one per row; -1 for `None`.

    Raises a `ValueError` for an unknown name, or if the number of names is not B (`batch`).
    """
    names = [dataset] * batch if dataset is None or isinstance(dataset, str) else list(dataset)
    if len(names) != batch:
        raise ValueError(
            f"dataset has {len(names)} names for a batch of {batch} rows: {names}. Pass one name per row, or one for all."
        )
    for name in names:
        if name is not None and name not in datasets:
            raise ValueError(
                f"dataset={name!r} is not one of the model's datasets {', '.join(map(repr, datasets))}. "
                f"{did_you_mean(name, datasets)} To use only the main expert, pass dataset=None. To add a dataset, call "
                "model.add_dataset()."
            )
    return [-1 if name is None else datasets.index(name) for name in names]


def validate_dataset_ids(ids: torch.Tensor, batch: int) -> torch.Tensor:
    """Ids as integers `(B,)`; raises a `ValueError` for another shape or type."""
    if tuple(ids.shape) != (batch,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"dataset_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}. Pass one integer per row, shape ({batch},)."
        )
    return ids.long()


def check_exclusive(dataset, dataset_ids):
    """Raises a `ValueError` if both are given."""
    if dataset is not None and dataset_ids is not None:
        raise ValueError("Both dataset and dataset_ids were given. Pass names or ids, not both.")


def rows_with_dataset(config, ids: list[int]) -> list[int]:
    """Indices of the rows that have a dataset; raises a `ValueError` for an id out of range."""
    if wrong := [i for i in ids if not -1 <= i < len(config.datasets)]:
        known = ", ".join(f"{i} for {name!r}" for i, name in enumerate(config.datasets))
        raise ValueError(f"dataset_ids contains {wrong[0]}. Use -1 for no dataset, or {known}.")
    return [row for row, i in enumerate(ids) if i >= 0]


def validate_source(config, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The texts, `(B, S)` or `(B, S, d)`; raises a `ValueError` if they are empty or too long for the encoder."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError("None of input_ids, inputs_embeds and encoder_outputs was given. Pass one of them.")
    length, limit = tokens.shape[1], config.max_position_embeddings
    if not length:
        raise ValueError("The texts have no tokens. Leave out empty texts, or keep the tokenizer's special tokens.")
    if limit is not None and length > limit:
        raise ValueError(
            f"The texts have {length} tokens, and the encoder has {limit} positions. Truncate them (in the tokenizer: "
            f"truncation=True, max_length={limit}), or use pipeline('moe-summarization'), which splits long texts."
        )
    return tokens


def check_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The inputs, `(B, T)` or `(B, T, d)`; raises a `ValueError` if there are none, or if they are empty."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError("Neither input_ids nor inputs_embeds was given. Pass one of them.")
    if not tokens.shape[1]:
        raise ValueError("The rows have no tokens. Leave out empty texts.")
    return tokens


def refuse_encoder_inputs(config, given: dict):
    """Raises a `ValueError` if one of these inputs of an encoder-decoder model is given to a decoder."""
    for name, value in given.items():
        if value is not None:
            model_type = config.text_config.model_type
            raise ValueError(f"{name} was given, but a {model_type!r} has no encoder. Pass its tokens as input_ids.")


def validate_target(config, tokens: torch.Tensor | None, past: int):
    """Raises a `ValueError` if the summaries, after `past` cached tokens, are too long for the decoder."""
    limit = config.max_position_embeddings
    if tokens is not None and limit is not None and past + tokens.shape[1] > limit:
        raise ValueError(
            f"The summaries have {past + tokens.shape[1]} tokens, and the decoder has {limit} positions. Truncate them "
            f"(in the tokenizer: truncation=True, max_length={limit})."
        )


def check_has_source(encoder_outputs, cache):
    """Raises a `ValueError` if the margin loss cannot run the model without deputies."""
    for name, value in (("encoder_outputs", encoder_outputs), ("cache", cache)):
        if value is not None:
            raise ValueError(
                f"labels with {name}: the margin loss also needs the states without deputies. Pass input_ids instead, or "
                "set config.margin_loss_coef = 0 or config.margin_main = 'last_layer'."
            )


def check_has_labels(config, decoder_input_ids):
    """Raises a `ValueError` for a training step whose labels the Trainer has removed, if they are needed."""
    if config.margin_loss_coef or decoder_input_ids is None:
        raise ValueError(
            f"labels=None in a training step with margin_loss_coef={config.margin_loss_coef}. With "
            "label_smoothing_factor or compute_loss_func the Trainer does not pass labels to the model, so the margin loss "
            "cannot be computed. Set label_smoothing_factor=0 and model.config.label_smoothing=0.1; for your own loss set "
            "model.config.margin_loss_coef=0 and pass decoder_input_ids."
        )


def past_length(cache) -> int:
    """Tokens in the decoder's cache; 0 in compiled graphs, which reading it would break."""
    return 0 if cache is None or torch.compiler.is_compiling() else int(cache.get_seq_length())
