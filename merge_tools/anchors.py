"""Gates that experts have learned beside a frozen copy of their base, `lexperts train expert --anchor` (FlexOlmo, arXiv 2507.07024).

The two rows of such a gate choose between base and expert, so that the row of the expert beside others is their difference, and that of the
base is zero.
"""

import numpy as np
from safetensors import safe_open

from .averaging import to_float32
from .checkpoints import Source, sampled_digest
from .errors import MergeError
from .layout import RoutedPart
from .plan import Gates
from .tensor_files import TensorEntry, read_all, read_header

FILE = "anchor_gates.tensors"  # beside the expert, in the safetensors format; engines read every *.safetensors of a folder as weights
TENSOR = "model.layers.{layer}.mlp.anchor_gate.weight"  # (2, d): the base's row, and the expert's
BASE = "base"  # field of the file's metadata: the digest of the base's tensors


def digest_of_base(base: Source) -> str:
    """What an expert's file of gates says about its base."""
    return sampled_digest(base.checkpoint.entries.values())


def anchored_gates(parts: list[RoutedPart], base: Source, experts: list[Source], names: list[str]) -> Gates:
    """The gates from the rows of these experts."""
    opened = [open_anchor(expert, base) for expert in experts]
    values = {part.gate: np.stack([learned_row(tensors, part, base) for tensors in opened]) for part in parts}
    return Gates(values, {"mode": "anchor", "experts": names})


def learned_row(tensors: dict[str, TensorEntry], part: RoutedPart, base: Source) -> np.ndarray:
    """The row of an expert at a router, (d,)."""
    if not tensors:  # the base
        return np.zeros(part.input_size(base.shape), np.float32)
    entry = tensors[TENSOR.format(layer=part.layer)]
    rows = to_float32(read_all(entry), entry.dtype).reshape(entry.shape)
    return rows[1] - rows[0]


def open_anchor(expert: Source, base: Source) -> dict[str, TensorEntry]:
    """The tensors of an expert's gates by name; none for the base itself.

    Raises:
        MergeError: if the expert has none, or was trained beside another base.
    """
    path, again = expert.folder / FILE, "Train it with lexperts train expert --anchor, or use another gate_mode."
    if not path.is_file():
        if expert.checkpoint.folder == base.checkpoint.folder and expert.adapter is None:
            return {}
        raise MergeError(f"gate_mode: anchor needs {path}, which does not exist. {again}")
    tensors = {entry.name: entry for entry in read_header(path)}
    with safe_open(path, "np") as file:
        trained_beside = (file.metadata() or {}).get(BASE)
    if trained_beside != digest_of_base(base):
        raise MergeError(f"{path} was learned beside another base than {base.origin}. {again}")
    shape = (2, base.shape.hidden_size)
    for layer in range(base.shape.num_hidden_layers):
        name = TENSOR.format(layer=layer)
        if name not in tensors or tensors[name].shape != shape:
            raise MergeError(f"{path} has no {name} of shape {list(shape)}. {again}")
    return tensors
