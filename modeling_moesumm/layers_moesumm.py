"""How a backbone's layers get their deputies, and how each batch's datasets reach them (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, d hidden size, N deputies, L layers of encoder and decoder together.

The layers of BART and its relatives call fc1, an activation and fc2. Both matrices stay what and where they are, under
their names, as the main expert: fc1 keeps the layer's A while deputies are on, and fc2 adds what they make of it. The
main expert alone is the backbone's own computation, bit for bit.
"""

import functools
import threading
import warnings

import torch
from torch import nn

from .configuration_moesumm import nearest
from .experts_moesumm import Deputies


class Routing:
    """What one pass through the model knows: which rows have deputies, and by which dataset's selector.

    Args:
        active: `False` for the main expert alone.
        dataset_ids (`(B,)` or `None`): each row's dataset, -1 for none.
        rows (`None`, a `slice` from 0, or `(b,)`): the rows that have deputies, where that is known; `None` for all.
        forced: the one deputy that all tokens take.
        recording: whether `found` is wanted.

    Attributes:
        found: index and gate, both (B, T), by the number of the layer.
    """

    def __init__(self, active: bool, dataset_ids=None, rows=None, forced=None, recording=False):
        self.active, self.dataset_ids, self.rows, self.forced = active, dataset_ids, rows, forced
        self.recording, self.found = recording, {}

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
        return Routing(True, ids, rows, self.forced, self.recording)


class FeedForward:
    """One layer's A and deputies, from fc1 to fc2 of one call. Made anew for each, so that gradient checkpointing,
    which calls the layer again in the backward pass, and a second pass before it, find their own.
    """

    def __init__(self, deputies: Deputies, routing: Routing, number: int):
        self.deputies, self.routing, self.number = deputies, routing, number
        self.x = None


def caller() -> int:
    """Who runs a layer now: threads that share a model must not get each other's batches. A compiled graph has one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class MainFirst(nn.Linear):
    """A W1_m + b1_m, the backbone's fc1; nothing of it is left without a main expert."""

    here: dict[int, FeedForward | None]  # by caller

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, d) -> (B, T, d_ff), or (B, T, 0)."""
        here = self.here.get(caller())
        if here is not None:
            here.x = x
        return x[..., :0] if self.weight is None else super().forward(x)


class MainSecond(nn.Linear):
    """W2_m H_m + b2_m, the backbone's fc2, and what the deputies add   (MoeSumm, Eq. 7)"""

    here: dict[int, FeedForward | None]  # by caller

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """h (B, T, d_ff), or (B, T, 0) without a main expert -> (B, T, d)."""
        here = self.here.get(caller())
        y = self.bias.expand(*h.shape[:-1], -1) if self.weight is None else super().forward(h)
        return y if here is None else here.deputies(here.x, y, here.routing, here.number)


class DeputyLayer:
    """What a backbone's layer class becomes a subclass of: it hands the pass's routing to its fc1 and fc2."""

    def forward(self, hidden_states: torch.Tensor, *args, routing: Routing | None = None, **kwargs):
        """hidden_states (B, T, d) -> as the backbone's layer."""
        if routing is None:
            raise RuntimeError(
                f"{type(self).__name__} was called without routing: it does not know which datasets the rows are from. "
                "Call the MoeSumm model, or what its get_encoder() returns, and not its backbone."
            )
        places, me = self.main_matrices(), caller()
        here = FeedForward(self.deputies, routing, self.number) if routing.active else None
        for place in places:
            place.here[me] = here
        outputs = super().forward(hidden_states, *args, **kwargs)
        for place in places:
            del place.here[me]
        return outputs

    def main_matrices(self) -> tuple[MainFirst, MainSecond]:
        """They are looked for each time: an adapter may have wrapped them."""
        first = [m for m in self.fc1.modules() if isinstance(m, MainFirst)]
        second = [m for m in self.fc2.modules() if isinstance(m, MainSecond)]
        if len(first) != 1 or len(second) != 1:
            raise RuntimeError(
                f"fc1 and fc2 of {type(self).__name__} have been replaced ({type(self.fc1).__name__}, "
                f"{type(self.fc2).__name__}), so that the deputies would be left out. Leave fc1 and fc2 as they are; "
                "where a quantizer put others there, exclude them from it."
            )
        return first[0], second[0]


@functools.cache
def layer_with_deputies(kind: type) -> type:
    # The same name: device maps and sharding policies know layers by it.
    return type(kind.__name__, (DeputyLayer, kind), {"__module__": kind.__module__})


def layers_of(base: nn.Module) -> list[nn.Module]:
    """The L layers, the encoder's first.

    Raises:
        ValueError: for a backbone that has other layers than fc1, activation, fc2.
    """
    found = [getattr(getattr(base, part, None), "layers", None) for part in ("encoder", "decoder")]
    layers = [layer for part in found for layer in part or ()]
    fits = all(found) and all(
        isinstance(getattr(layer, "fc1", None), nn.Linear)
        and isinstance(getattr(layer, "fc2", None), nn.Linear)
        and hasattr(layer, "activation_fn")
        for layer in layers
    )
    if not fits:
        raise ValueError(
            f"{type(base).__name__} has no fc1 and fc2 in the layers of an encoder and a decoder, beside which "
            "deputies could stand. Use a backbone that has: BART, PEGASUS or mBART."
        )
    return layers


def attach_deputies(base: nn.Module, config):
    """Gives every layer its deputies, in place; the backbone's parameters keep their names and places.

    Raises:
        ValueError: for a backbone that has other layers, or an activation that is not 0 at 0.
    """
    for number, layer in enumerate(layers_of(base)):
        if layer.activation_fn(torch.zeros(1, device="cpu")).item() != 0:
            raise ValueError(
                f"The activation {type(layer.activation_fn).__name__} is not 0 at 0: a deputy that was not chosen "
                "would still speak. Use a backbone with gelu, relu or silu."
            )
        d, inner = layer.fc1.in_features, config.deputy_size or layer.fc1.out_features
        layer.fc1.__class__, layer.fc2.__class__ = MainFirst, MainSecond
        layer.fc1.here, layer.fc2.here = {}, {}
        if not config.main_expert:
            layer.fc1.weight = layer.fc1.bias = layer.fc2.weight = None
        layer.deputies = Deputies(config, d, inner, layer.activation_fn, layer.activation_dropout)
        layer.number = number
        layer.__class__ = layer_with_deputies(type(layer))


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
