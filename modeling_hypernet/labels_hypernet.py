"""What the names of labels say: which one stands outside, and which may follow which.

Letters: B rows, S tokens of a padded row, C labels.
"""

import torch


def outside_label(id2label: dict[int, str]) -> int:
    """The id of O; the first label's where none is called so."""
    names = {name.upper(): i for i, name in id2label.items()}
    return names.get("O", names.get("OUTSIDE", 0))


def allowed_steps(id2label: dict[int, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels may stand first (C,), and which may follow which (C, C): an I only a B or an I of its type."""
    names = [id2label[i].upper().replace("_", "-") for i in sorted(id2label)]
    goes_on = [name == "I" or name.startswith("I-") for name in names]
    kinds = [name.partition("-")[2] for name in names]
    inside = [on or name == "B" or name.startswith("B-") for on, name in zip(goes_on, names, strict=True)]
    follows = [
        [not on or (inside[i] and kinds[i] == kinds[j]) for j, on in enumerate(goes_on)] for i in range(len(names))
    ]
    return ~torch.tensor(goes_on), torch.tensor(follows)


def check_labels(labels: torch.Tensor, labelled: torch.Tensor, id2label: dict[int, str]):
    """labels (B, S), and where they count (B, S). A row may begin with an I: windows cut keyphrases in two.

    Raises:
        ValueError: for an id that is no label's, and for an I after an O or after another type.
    """
    if torch.compiler.is_compiling():
        return
    wrong = labelled & ((labels < 0) | (labels >= len(id2label)))
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has the label {int(labels[row, token])} at token {token}, and there are {len(id2label)}: "
            f"{', '.join(f'{i} {name}' for i, name in sorted(id2label.items()))}. Pass -100 where there is nothing to learn."
        )
    follows = allowed_steps(id2label)[1].to(labels.device)
    row, token = labelled.nonzero(as_tuple=True)
    if not len(row):
        return
    label = labels[row, token]
    forbidden = (row[1:] == row[:-1]) & ~follows[label[:-1], label[1:]]
    if forbidden.any():
        i = int(forbidden.int().argmax())
        before, after = (id2label[int(label[j])] for j in (i, i + 1))
        raise ValueError(
            f"Row {int(row[i + 1])} has {after!r} at token {int(token[i + 1])} after {before!r}, and BIO forbids it: an I goes "
            "on with a B or I of its type. Begin each phrase with its B."
        )
