"""Labels and answers of training rows: what the labels' names mean, and checks that collators make on the CPU.

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


def check_positions(positions: torch.Tensor, main: torch.Tensor, real: torch.Tensor):
    """Where answers begin or end (B,); the main text's tokens and all real ones (B, S).

    Raises:
        ValueError: for a position that is neither in the main text nor the row's first token.
    """
    S = real.shape[1]
    allowed = main | (real & (real.cumsum(1) == 1))
    inside = (positions >= 0) & (positions < S)
    fits = inside & allowed.gather(1, positions.clamp(0, S - 1)[:, None]).squeeze(1)
    if not fits.all():
        row = int((~fits).int().argmax())
        raise ValueError(
            f"The answer of row {row} is at token {int(positions[row])}, which is neither in the text nor the first token. "
            "Point to the first token where the answer is cut off or there is none."
        )
