"""Analysis of experts: which tokens each expert processes, and what they have in common (Martinc et al. 2025, Sect. 5.1).

    tokens = token_experts(model, tokenizer, documents, nlp)   # one row per token: its expert and its annotations
    specialisation(tokens)                                     # Cramer's V of experts and categories, the paper's Table 3
    expert_usage(tokens)                                       # the share of tokens of each expert

Works with any token classifier whose output has `router_logits` `(B, S, E)`. A spaCy pipeline annotates the tokens: a blank
one gives words, punctuation and stop words, but no parts of speech and no entities.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from .clean_text import CleanText
from .decoding import word_tags
from .input_documents import InputDocument
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline

try:
    import pandas as pd
    from scipy.stats import chi2_contingency
except ImportError as error:
    raise ImportError(
        "Specialisation needs pandas and scipy. Install them with: pip install 'lexperts[analysis]'"
    ) from error

# column of token_experts -> the paper's name
CATEGORIES = {
    "word": "Words", "is_punctuation": "Punct.", "is_stopword": "Stop.", "pos": "POS", "label": "Labels",
    "is_entity": "bin. NE", "entity_type": "NE",
}  # fmt: skip
TAG_NAMES = ("O", "B", "I")
DOCUMENTS_PER_CHUNK = 16


def load_spacy(name: str):
    """Loads an installed spaCy pipeline, or a blank one for "blank:LANGUAGE".

    Raises:
        ImportError: if spaCy is not installed.
        OSError: if the pipeline is not installed.
    """
    try:
        import spacy
    except ImportError as error:
        raise ImportError("Annotations need spaCy. Install it with: pip install 'lexperts[analysis]'") from error
    try:
        return spacy.blank(name.removeprefix("blank:")) if name.startswith("blank:") else spacy.load(name)
    except (OSError, ImportError) as error:
        raise OSError(
            f"spaCy cannot open {name!r}. Install it with `python -m spacy download {name}`, or use blank:en, which only "
            "annotates words, punctuation and stop words."
        ) from error


def cramers_v(a: Sequence, b: Sequence) -> float:
    """Cramer's V, the association of two categorical variables from 0 to 1, with the bias correction of Bergsma (2013).

    phi2' = max(0, chi2 / n - (r-1)(c-1)/(n-1)),  r' = r - (r-1)^2/(n-1),  c' = c - (c-1)^2/(n-1)
    V = sqrt(phi2' / min(r'-1, c'-1))

    0 if one variable has a single value. Rows with a missing value are left out; nan if none remains.

    >>> round(cramers_v(["x", "x", "y", "y"] * 50, [0, 0, 1, 1] * 50), 3)
    1.0
    """
    a, b = pd.Series(list(a)), pd.Series(list(b))
    valid = a.notna() & b.notna()
    if not valid.any():
        return float("nan")
    return cramers_v_of_table(pd.crosstab(a[valid], b[valid]).to_numpy())


def cramers_v_of_table(table: np.ndarray) -> float:
    """`cramers_v` of a contingency table `(R, C)` of counts; rows and columns without counts are ignored."""
    table = table[table.any(1)][:, table.any(0)]
    n, (r, c) = table.sum(), table.shape
    if min(r, c) < 2:
        return 0.0
    chi2 = chi2_contingency(table, correction=False).statistic
    phi2 = max(0.0, chi2 / n - (r - 1) * (c - 1) / (n - 1))
    denominator = min(r - (r - 1) ** 2 / (n - 1), c - (c - 1) ** 2 / (n - 1)) - 1
    return float(np.sqrt(phi2 / denominator)) if denominator > 0 else 0.0


def token_experts(
    model, tokenizer, documents: Iterable[str], nlp, *, batch_size: int = 8, max_length: int | None = None
) -> "pd.DataFrame":
    """Runs a model on documents; returns the annotations and the preferred expert of each token.

    Args:
        model: a token classifier whose output has `router_logits`, such as SEKE with `use_moe`.
        tokenizer: its fast tokenizer.
        documents: texts; long ones are read in overlapping windows.
        nlp: a spaCy pipeline, such as `spacy.load("en_core_web_sm")`, or `spacy.blank("en")`.
        batch_size: windows per batch.
        max_length: sub-tokens per window, by default the model's limit.

    Returns:
        One row for each spaCy token (except spaces), from its first sub-token:

        - `document`, `start`, `end`: its position;
        - `expert`: the one that the router prefers;
        - `weight`: its probability, by the router's softmax over all E experts;
        - `entropy`: of these probabilities, in bits;
        - `word` (lower-cased), `is_punctuation`, `is_stopword`, `label` (the predicted one: O, B or I);
        - `pos`, `is_entity`, `entity_type`: missing in all rows if the pipeline has no component for them.

    Raises:
        TypeError: if `documents` is a string.
        ValueError: if the model has no experts.
    """
    if isinstance(documents, str):
        raise TypeError("documents is a string. Pass a list of texts: [text].")
    extract = KeyphraseExtractionPipeline(model, tokenizer, device=model.device)
    threshold = getattr(model.config, "keyphrase_threshold", None)
    documents, number, rows = iter(documents), 0, []
    was_training = model.training
    try:
        while texts := list(islice(documents, DOCUMENTS_PER_CHUNK)):
            parsed = [[token for token in doc if not token.is_space] for doc in nlp.pipe(texts)]
            read = [
                InputDocument(None, CleanText(text, end=0), [(t.text, t.idx, t.idx + len(t)) for t in tokens])
                for text, tokens in zip(texts, parsed, strict=True)
            ]
            block = extract.read(read, batch_size=batch_size, max_length=max_length, gates=True)
            if block.windows and not block.gates:
                raise ValueError(
                    f"{type(model).__name__} has no experts: its output has no router_logits. Use a model with experts, such as "
                    "SEKE with use_moe=True."
                )
            for i, gates in sorted(block.gates.items()):
                rows += _rows(number + i, parsed[i], gates, word_tags(block.probabilities.document(i), threshold))
            number += len(texts)
    finally:
        model.train(was_training)
    tokens = pd.DataFrame(rows, columns=["document", "start", "end", "expert", "weight", "entropy", *CATEGORIES])
    tokens.attrs["num_experts"] = getattr(model.config, "num_experts", None) or int(tokens["expert"].max()) + 1
    return tokens


def _rows(document: int, tokens: list, gates: np.ndarray, tags: np.ndarray) -> list[dict]:
    """A document's rows; tokens that share a sub-token with the previous token are left out."""
    doc = tokens[0].doc if tokens else None
    has_pos = doc is not None and doc.has_annotation("POS")
    has_entities = doc is not None and doc.has_annotation("ENT_IOB")
    rows = []
    for token, gate, tag in zip(tokens, gates, tags, strict=True):
        if np.isnan(gate[0]):
            continue
        positive = gate[gate > 0]
        rows.append(
            {
                "document": document,
                "start": token.idx,
                "end": token.idx + len(token),
                "expert": int(gate.argmax()),
                "weight": float(gate.max()),
                "entropy": float(-(positive * np.log2(positive)).sum()),
                "word": token.lower_,
                "is_punctuation": bool(token.is_punct),
                "is_stopword": bool(token.is_stop),
                "label": TAG_NAMES[tag],
                "pos": token.pos_ if has_pos else None,
                "is_entity": token.ent_type_ != "" if has_entities else None,
                "entity_type": (token.ent_type_ or "none") if has_entities else None,
            }
        )
    return rows


def specialisation(tokens: "pd.DataFrame") -> "pd.DataFrame":
    """Bias-corrected Cramer's V between experts and categories   (Table 3)

    Args:
        tokens: the result of `token_experts`.

    Returns:
        One row for each category. The column `experts` is the V of the preferred expert, with E values, and the category;
        the columns 0 to E - 1 are those of one expert against all others. nan for a category that the spaCy pipeline does
        not annotate.
    """
    E = tokens.attrs["num_experts"]
    rows = {}
    for column, name in CATEGORIES.items():
        row = {"experts": cramers_v(tokens["expert"], tokens[column])}
        rows[name] = row | {e: cramers_v(tokens["expert"] == e, tokens[column]) for e in range(E)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["experts", *range(E)]).rename_axis("category")


def expert_specialisation(model, tokenizer, documents: Iterable[str], nlp, **options) -> "pd.DataFrame":
    """`specialisation` of the result of `token_experts`, whose arguments these are.

    >>> expert_specialisation(model, tokenizer, texts, spacy.load("en_core_web_sm"))["experts"]
    """
    return specialisation(token_experts(model, tokenizer, documents, nlp, **options))


def expert_usage(tokens: "pd.DataFrame") -> "pd.DataFrame":
    """How often each expert is preferred, and how confident the router is.

    Args:
        tokens: the result of `token_experts`.

    Returns:
        One row for each expert: `tokens` and `share` for which it is preferred, `weight` (its mean probability on them), and
        the `smallest` and `largest` share in a document. `attrs` has `entropy`, the mean entropy of the router, and
        `entropy_of_shares`, both in bits and at most log2 E.
    """
    E = tokens.attrs["num_experts"]
    counts = tokens["expert"].value_counts().reindex(range(E), fill_value=0)
    document_shares = pd.crosstab(tokens["document"], tokens["expert"], normalize="index").reindex(
        columns=range(E), fill_value=0.0
    )
    share = counts / max(len(tokens), 1)
    usage = pd.DataFrame(
        {
            "tokens": counts,
            "share": share,
            "weight": tokens.groupby("expert")["weight"].mean().reindex(range(E)),
            "smallest": document_shares.min(),
            "largest": document_shares.max(),
        }
    ).rename_axis("expert")
    positive = share[share > 0]
    usage.attrs = {
        "entropy": float(tokens["entropy"].mean()),
        "entropy_of_shares": float(-(positive * np.log2(positive)).sum()),
    }
    return usage
