"""Which rows of a batch have deputies, and by which dataset's selector (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, b rows that have deputies.
"""

import warnings

import torch

from .configuration_moesumm import nearest


class Routing:
    """What one pass through the model knows: which rows have deputies, and by which dataset's selector.

    Args:
        active: `False` for the main expert alone.
        dataset_ids (`(B,)` or `None`): each row's dataset, -1 for none.
        rows (`None`, a `slice` from 0, or `(b,)`): the rows that have deputies, where that is known; `None` for all.
        forced: the one deputy that all tokens take.
        recording: whether `found` is wanted.
        main_only_layer: the number of the layer that reads its rows twice, with deputies and without, where the margin
            compares with that layer's main expert alone.

    Attributes:
        found: index and gate, both (B, T), by the number of the layer.
    """

    def __init__(self, active: bool, dataset_ids=None, rows=None, forced=None, recording=False, main_only_layer=None):
        self.active, self.dataset_ids, self.rows, self.forced = active, dataset_ids, rows, forced
        self.recording, self.main_only_layer, self.found = recording, main_only_layer, {}

    def record(self, number: int, gate: torch.Tensor, index: torch.Tensor, shape: torch.Size):
        """gate, index (b, T) of the rows that have deputies; shape (B, T)."""
        if not self.recording:
            return
        if self.dataset_ids is not None:
            ids = self.dataset_ids if self.rows is None else self.dataset_ids[self.rows]
            index = index.masked_fill((ids < 0)[:, None], -1)
        rows = slice(None) if self.rows is None else self.rows
        indices, gates = index.new_full(shape, -1), torch.zeros(shape, device=gate.device)
        indices[rows], gates[rows] = index, gate.detach().float()
        self.found[number] = (indices, gates)

    def choices(self, numbers, shape: tuple[int, int], device) -> tuple[tuple, tuple]:
        """Of these layers and the first B rows: index (B, T), -1 where no deputy was, and gate (B, T), 0 there."""
        nobody = torch.full(shape, -1, device=device), torch.zeros(shape, device=device)
        found = [self.found.get(number, nobody) for number in numbers]
        return tuple(index[: shape[0]] for index, _ in found), tuple(gate[: shape[0]] for _, gate in found)

    def with_main_only_rows(self, batch: int) -> "Routing":
        """For 2B rows: these B, and the same again by the main expert alone."""
        ids = self.dataset_ids
        if ids is not None:
            ids = torch.cat([ids, torch.full_like(ids, -1)])
        rows = slice(0, batch) if self.rows is None else self.rows
        doubled = Routing(True, ids, rows, self.forced, self.recording)
        doubled.found = self.found
        return doubled


def dataset_ids_of(config, dataset, batch: int) -> list[int]:
    """Names, one for all rows or one a row, `None` for no dataset -> B ids.

    Raises:
        ValueError: for an unknown name, or another number of names than rows.
    """
    names = [dataset] * batch if dataset is None or isinstance(dataset, str) else list(dataset)
    if len(names) != batch:
        raise ValueError(
            f"dataset has {len(names)} names for a batch of {batch} rows: {names}. Pass one name a row, or one for all."
        )
    for name in names:
        if name is not None and name not in config.datasets:
            raise ValueError(
                f"dataset={name!r} is not known to this model, which knows {', '.join(map(repr, config.datasets))}. "
                f"{nearest(name, config.datasets)} For a text of no known dataset pass dataset=None: the main expert "
                "alone reads it. A new one is added by model.add_dataset()."
            )
    return [-1 if name is None else config.datasets.index(name) for name in names]


def check_dataset_ids(ids: torch.Tensor, batch: int) -> torch.Tensor:
    if tuple(ids.shape) != (batch,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"dataset_ids has the shape {tuple(ids.shape)} and the type {ids.dtype}: pass one whole number a "
            f"row, ({batch},)."
        )
    return ids.long()


def plan_routing(
    config,
    batch: int,
    device,
    dataset=None,
    dataset_ids=None,
    main_expert_only: bool | None = None,
    force_deputy: int | None = None,
    training: bool = False,
    checked: bool = False,
    recording: bool = False,
) -> Routing:
    """What a pass over a batch of B rows routes by; arguments as in `MoeSummForConditionalGeneration.forward`.

    Args:
        training: whether every parameter has to be part of the graph.
        checked: whether the ids were looked at in an earlier call and are not to be read from the device again.

    Raises:
        ValueError: for names, ids or a deputy that there are not, and for arguments that exclude each other.
    """
    check_one_of(dataset, dataset_ids)
    if force_deputy is not None:
        check_forced(config, force_deputy, main_expert_only)
    if main_expert_only:
        if not config.main_expert:
            raise ValueError("main_expert_only=True, but this model has no main expert. Leave it out.")
        return Routing(False, recording=recording)
    ids = None
    if dataset is not None:
        ids = torch.tensor(dataset_ids_of(config, dataset, batch))
    elif dataset_ids is not None:
        ids = check_dataset_ids(torch.as_tensor(dataset_ids), batch)
    rows = None
    if ids is not None and not torch.compiler.is_compiling() and not (checked and ids.device.type != "cpu"):
        rows = rows_with_dataset(config, ids.tolist())
    if force_deputy is not None or not config.main_expert:
        return Routing(True, None, None, force_deputy, recording)
    if ids is None:
        if training and not torch.compiler.is_compiling():
            warnings.warn(
                "No dataset was given in training: the main expert alone is trained. Pass dataset_ids or dataset, a "
                "column of the batch, or main_expert_only=True where this is meant.",
                stacklevel=3,
            )
        return Routing(False, recording=recording)
    if rows is not None:
        if not rows and not training:
            return Routing(False, recording=recording)
        rows = None if len(rows) == batch else torch.tensor(rows, dtype=torch.long, device=device)
    return Routing(True, ids.to(device), rows, None, recording)


def check_one_of(dataset, dataset_ids):
    if dataset is not None and dataset_ids is not None:
        raise ValueError("Both dataset and dataset_ids were given. Pass names or ids, not both.")


def check_forced(config, deputy: int, main_expert_only: bool | None):
    if main_expert_only:
        raise ValueError(f"force_deputy={deputy} and main_expert_only=True exclude each other. Pass one of them.")
    if not 0 <= deputy < config.num_deputies:
        raise ValueError(
            f"force_deputy={deputy}, but there are {config.num_deputies} deputies, counted from 0 to "
            f"{config.num_deputies - 1}."
        )


def rows_with_dataset(config, ids: list[int]) -> list[int]:
    wrong = [i for i in ids if not -1 <= i < len(config.datasets)]
    if wrong:
        raise ValueError(
            f"dataset_ids has {wrong[0]}, but the model knows {len(config.datasets)} datasets: "
            f"{', '.join(f'{i} is {name!r}' for i, name in enumerate(config.datasets))}, and -1 none of them."
        )
    return [row for row, i in enumerate(ids) if i >= 0]
