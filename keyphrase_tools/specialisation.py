"""What experts specialise in: which expert reads which tokens, and what these have in common (Martinc et al. 2025, Sect. 5.1).

    tokens = token_experts(model, tokenizer, documents, nlp)   # one row a token: its expert, and what it is
    specialisation(tokens)                                     # Cramer's V of experts and categories, the paper's Table 3
    expert_usage(tokens)                                       # the share of tokens that each expert reads

Works with any token classifier whose output has `router_logits` (B, S, E). What a token is, a spaCy pipeline says: of a blank
one words, punctuation and stop words are known, and parts of speech and entities are not.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch

from .decoding import word_tags
from .pipeline_keyphrase_extraction import length_limit, read_labels
from .windows import encode_windows

try:
    import pandas as pd
    from scipy.stats import chi2_contingency
except ImportError as error:
    raise ImportError(
        "Specialisation needs pandas and scipy. Install them with: pip install lexperts[analysis]"
    ) from error

# column of token_experts -> the paper's name
CATEGORIES = {
    "word": "Words",
    "is_punctuation": "Punct.",
    "is_stopword": "Stop.",
    "pos": "POS",
    "label": "Labels",
    "is_entity": "bin. NE",
    "entity_type": "NE",
}
TAG_NAMES = ("O", "B", "I")
DOCUMENTS_AT_A_TIME = 16


def load_spacy(name: str):
    """A spaCy pipeline that is installed, or "blank:LANGUAGE".

    Raises:
        ImportError: without spaCy.
        OSError: for a pipeline that is not installed.
    """
    try:
        import spacy
    except ImportError as error:
        raise ImportError("Annotations need spaCy. Install it with: pip install lexperts[analysis]") from error
    try:
        return spacy.blank(name.removeprefix("blank:")) if name.startswith("blank:") else spacy.load(name)
    except (OSError, ImportError) as error:
        raise OSError(
            f"spaCy cannot open {name!r}. Install it with `python -m spacy download {name}`, or use blank:en, with which "
            "words, punctuation, stop words and labels are known."
        ) from error


def cramers_v(a: Sequence, b: Sequence) -> float:
    """Association of two categorical variables, 0 to 1, with Bergsma's (2013) correction of its bias.

    phi2' = max(0, chi2 / n - (r-1)(c-1)/(n-1)),  r' = r - (r-1)^2/(n-1),  c' = c - (c-1)^2/(n-1)
    V = sqrt(phi2' / min(r'-1, c'-1))

    0 where one of them has a single value. Rows where either is missing are left out; nan where none is left.

    >>> round(cramers_v(["x", "x", "y", "y"] * 50, [0, 0, 1, 1] * 50), 3)
    1.0
    """
    a, b = pd.Series(list(a)), pd.Series(list(b))
    there = a.notna() & b.notna()
    n = int(there.sum())
    if n == 0:
        return float("nan")
    table = pd.crosstab(a[there], b[there]).to_numpy()
    r, c = table.shape
    if min(r, c) < 2:
        return 0.0
    chi2 = chi2_contingency(table, correction=False).statistic
    phi2 = max(0.0, chi2 / n - (r - 1) * (c - 1) / (n - 1))
    least = min(r - (r - 1) ** 2 / (n - 1), c - (c - 1) ** 2 / (n - 1)) - 1
    return float(np.sqrt(phi2 / least)) if least > 0 else 0.0


@torch.no_grad()
def token_experts(
    model, tokenizer, documents: Iterable[str], nlp, *, batch_size: int = 8, max_length: int | None = None
) -> "pd.DataFrame":
    """Reads documents and says of each token what it is, and which expert the router prefers for it.

    Args:
        model: a token classifier whose output has `router_logits`, such as SEKE with `use_moe`.
        tokenizer: its fast tokenizer.
        documents: texts; long ones are read in overlapping windows.
        nlp: a spaCy pipeline, such as `spacy.load("en_core_web_sm")`, or `spacy.blank("en")`.
        batch_size: windows that the model reads at once.
        max_length: sub-tokens of a window, by default the model's limit.

    Returns: a row for each spaCy token (spaces apart), by its first sub-token:

        - `document`, `start`, `end`: where it stands;
        - `expert`: of the largest gate weight; `weight`: that weight among all experts; `entropy`: of the gate, in bits;
        - `word` (lower-cased), `is_punctuation`, `is_stopword`, `label` (O, B or I, as the model predicts);
        - `pos`, `is_entity`, `entity_type`: missing in all rows if the pipeline has no component for them.

    Raises:
        TypeError: for documents that are no texts.
        ValueError: for a model without experts.
    """
    if isinstance(documents, str):
        raise TypeError("documents is a text. Pass a list of texts: [text].")
    tag_of_label, limit = read_labels(model.config.id2label), length_limit(tokenizer, model)
    documents, number, rows = iter(documents), 0, []
    was_training = model.training
    model.eval()
    try:
        while texts := list(islice(documents, DOCUMENTS_AT_A_TIME)):
            parsed = [[token for token in doc if not token.is_space] for doc in nlp.pipe(texts)]
            spans = [[(token.idx, token.idx + len(token)) for token in tokens] for tokens in parsed]
            windows = encode_windows(texts, spans, tokenizer, max_length=min(max_length or limit, limit), first=number)
            read = _read(model, tokenizer, windows, [len(tokens) for tokens in parsed], batch_size, tag_of_label)
            for tokens, (gates, tags) in zip(parsed, read, strict=True):
                rows += _rows(number, tokens, gates, tags)
                number += 1
    finally:
        model.train(was_training)
    found = pd.DataFrame(rows, columns=["document", "start", "end", "expert", "weight", "entropy", *CATEGORIES])
    found.attrs["num_experts"] = getattr(model.config, "num_experts", None) or int(found["expert"].max()) + 1
    return found


def _read(model, tokenizer, windows, lengths: list[int], batch_size: int, tag_of_label) -> list[tuple]:
    """-> for each document the gates (tokens, E) and labels (tokens,) of its tokens; nan and -1 where none was read.

    Of two windows a token is taken from the one in which it stands further from a cut.
    """
    threshold = getattr(model.config, "keyphrase_threshold", None)
    gates: list[np.ndarray | None] = [None] * len(lengths)
    tags, depth = [np.full(n, -1) for n in lengths], [np.full(n, -1) for n in lengths]
    order = sorted(windows, key=lambda window: len(window.word_starts), reverse=True)
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        batch = tokenizer.pad([window.inputs for window in some], padding_side="right", return_tensors="pt")
        outputs = model(**{name: values.to(model.device) for name, values in batch.items()})
        if getattr(outputs, "router_logits", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no experts: its output has no router_logits. Take a model with a mixture, such "
                "as SEKE with use_moe=True."
            )
        gate = outputs.router_logits.float().softmax(-1).cpu().numpy()
        p = outputs.logits.float().softmax(-1).cpu().numpy()
        three = np.stack([p[..., np.array(tag_of_label) == tag].sum(-1) for tag in range(3)], axis=-1)
        label = word_tags(three.reshape(-1, 3), threshold).reshape(three.shape[:2])
        for row, window in enumerate(some):
            d = window.document
            if gates[d] is None:
                gates[d] = np.full((lengths[d], gate.shape[-1]), np.nan)
            places = np.flatnonzero(window.word_starts >= 0)
            words = window.word_starts[places]
            better = window.edge_distance[places] > depth[d][words]
            places, words = places[better], words[better]
            gates[d][words], tags[d][words] = gate[row, places], label[row, places]
            depth[d][words] = window.edge_distance[places]
    return [(np.zeros((n, 1)) if g is None else g, t) for g, t, n in zip(gates, tags, lengths, strict=True)]


def _rows(document: int, tokens: list, gates: np.ndarray, tags: np.ndarray) -> list[dict]:
    """A document's rows; tokens that share a sub-token with the one before are left out."""
    doc = tokens[0].doc if tokens else None
    tagged = doc is not None and doc.has_annotation("POS")
    named = doc is not None and doc.has_annotation("ENT_IOB")
    rows = []
    for token, gate, tag in zip(tokens, gates, tags, strict=True):
        if tag < 0:
            continue
        some = gate[gate > 0]
        rows.append(
            {
                "document": document,
                "start": token.idx,
                "end": token.idx + len(token),
                "expert": int(gate.argmax()),
                "weight": float(gate.max()),
                "entropy": float(-(some * np.log2(some)).sum()),
                "word": token.lower_,
                "is_punctuation": bool(token.is_punct),
                "is_stopword": bool(token.is_stop),
                "label": TAG_NAMES[tag],
                "pos": token.pos_ if tagged else None,
                "is_entity": token.ent_type_ != "" if named else None,
                "entity_type": (token.ent_type_ or "none") if named else None,
            }
        )
    return rows


def specialisation(tokens: "pd.DataFrame") -> "pd.DataFrame":
    """Cramer's V between experts and categories, bias-corrected: 0 none, 1 complete   (Table 3)

    Args:
        tokens: of `token_experts`.

    Returns: a row for each category. Column `experts` is that of the preferred expert, of E values, with the category; the
        columns 0 to E - 1 are those of one expert against all others. nan for a category that the spaCy pipeline does
        not know.
    """
    E = tokens.attrs["num_experts"]
    rows = {}
    for column, name in CATEGORIES.items():
        row = {"experts": cramers_v(tokens["expert"], tokens[column])}
        rows[name] = row | {e: cramers_v(tokens["expert"] == e, tokens[column]) for e in range(E)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["experts", *range(E)]).rename_axis("category")


def expert_specialisation(model, tokenizer, documents: Iterable[str], nlp, **options) -> "pd.DataFrame":
    """`specialisation` of `token_experts`, whose arguments these are.

    >>> expert_specialisation(model, tokenizer, texts, spacy.load("en_core_web_sm"))["experts"]
    """
    return specialisation(token_experts(model, tokenizer, documents, nlp, **options))


def expert_usage(tokens: "pd.DataFrame") -> "pd.DataFrame":
    """How much each expert is used, and how sure the router is.

    Returns: a row for each expert: `tokens`, `share`, `weight` (its mean gate weight where it is preferred), and
        `smallest` and `largest` share over documents. `attrs` has `entropy`, the gate's mean over tokens, and
        `entropy_of_shares`, both in bits, with log2 E as the most that they can be.
    """
    E = tokens.attrs["num_experts"]
    counts = tokens["expert"].value_counts().reindex(range(E), fill_value=0)
    each = pd.crosstab(tokens["document"], tokens["expert"], normalize="index").reindex(
        columns=range(E), fill_value=0.0
    )
    share = counts / max(len(tokens), 1)
    usage = pd.DataFrame(
        {
            "tokens": counts,
            "share": share,
            "weight": tokens.groupby("expert")["weight"].mean().reindex(range(E)),
            "smallest": each.min(),
            "largest": each.max(),
        }
    ).rename_axis("expert")
    some = share[share > 0]
    usage.attrs = {
        "entropy": float(tokens["entropy"].mean()),
        "entropy_of_shares": float(-(some * np.log2(some)).sum()),
    }
    return usage
