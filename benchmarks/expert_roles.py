"""Which expert of a keyphrase model reads which words? (Martinc et al. 2025, Sect. 5.1 and Table 3)

    python benchmarks/expert_roles.py test.jsonl --spacy en_core_web_sm      # pip install spacy; blank:en has no parts of speech

For each word, by its first sub-token, the expert that the router prefers, beside what spaCy says about the word, the predicted label
and the place in the text. Prints Cramer's V of experts and categories, for all experts and for each one against the others, and the
share of the words of each expert. Texts are cut at the model's length.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2_contingency
from transformers import AutoModelForTokenClassification, AutoTokenizer

import lexperts  # noqa: F401  (registers the models)
from run_tools.packaged import locate_model
from run_tools.rows import read_jsonl

PLACES = 4  # parts of a text, of equal length


def cramers_v(a: Sequence, b: Sequence) -> float:
    """Cramer's V from 0 to 1, with the bias correction of Bergsma (2013); nan if b has missing values.

    phi2' = max(0, chi2 / n - (r-1)(c-1)/(n-1)),  r' = r - (r-1)^2/(n-1),  c' = c - (c-1)^2/(n-1)
    V = sqrt(phi2' / min(r'-1, c'-1))

    >>> round(cramers_v([0, 0, 1, 1] * 50, ["x", "x", "y", "y"] * 50), 3)
    1.0
    """
    if any(value is None for value in b):
        return float("nan")
    (rows, i), (columns, j) = (np.unique(values, return_inverse=True) for values in (a, b))
    table = np.zeros((len(rows), len(columns)))
    np.add.at(table, (i, j), 1)
    n, (r, c) = table.sum(), table.shape
    if min(r, c) < 2:
        return 0.0
    phi2 = max(0.0, chi2_contingency(table, correction=False).statistic / n - (r - 1) * (c - 1) / (n - 1))
    denominator = min(r - (r - 1) ** 2 / (n - 1), c - (c - 1) ** 2 / (n - 1)) - 1
    return float(np.sqrt(phi2 / denominator)) if denominator > 0 else 0.0


@torch.no_grad()
def read_words(model, tokenizer, nlp, text: str) -> list[dict]:
    """The words of a text, each with its expert and its categories.

    Raises:
        ValueError: if the model has no experts.
    """
    batch = tokenizer(text, truncation=True, return_offsets_mapping=True, return_tensors="pt")
    first = {start: i for i, (start, end) in reversed(list(enumerate(batch.pop("offset_mapping")[0].tolist()))) if end}
    outputs = model(**batch)
    if getattr(outputs, "router_logits", None) is None:
        raise ValueError(f"{type(model).__name__} has no experts: its output has no router_logits.")
    experts, labels = outputs.router_logits[0].argmax(-1), outputs.logits[0].argmax(-1)
    doc, words = nlp(text), []
    for token in doc:
        if not token.is_space and (i := first.get(token.idx)) is not None:
            word = {"expert": int(experts[i]), "word": token.lower_, "punctuation": token.is_punct}
            word |= {"stop word": token.is_stop, "label": int(labels[i]), "place": PLACES * token.idx // len(text)}
            word["part of speech"] = token.pos_ if doc.has_annotation("POS") else None
            word["entity"] = (token.ent_type_ or "none") if doc.has_annotation("ENT_IOB") else None
            words.append(word)
    return words


def associations(words: list[dict], experts: int) -> dict[str, list[float]]:
    """For each category Cramer's V of all experts, and of each expert against the others."""
    chosen = np.array([word["expert"] for word in words])
    found = {}
    for category in (name for name in words[0] if name != "expert"):
        values = [word[category] for word in words]
        found[category] = [cramers_v(chosen, values), *(cramers_v(chosen == e, values) for e in range(experts))]
    return found


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="JSON Lines with text")
    parser.add_argument("--model", help="a checkpoint; the default model by default")
    parser.add_argument("--spacy", default="blank:en", help="an installed spaCy pipeline, or blank:LANGUAGE")
    parser.add_argument("--documents", type=int, help="use only the first ones")
    options = parser.parse_args(argv)
    import spacy

    name = options.spacy
    nlp = spacy.blank(name.removeprefix("blank:")) if name.startswith("blank:") else spacy.load(name)
    folder = locate_model(options.model)
    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = [row["text"] for row in read_jsonl(options.file)[: options.documents]]
    words = [word for text in texts for word in read_words(model, tokenizer, nlp, text)]
    experts = model.config.num_experts
    print(f"{'':16}{'all':>8}" + "".join(f"{f'expert {e}':>10}" for e in range(experts)))
    for category, values in associations(words, experts).items():
        print(f"{category:16}{values[0]:8.2f}" + "".join(f"{value:10.2f}" for value in values[1:]))
    shares = np.bincount([word["expert"] for word in words], minlength=experts) / len(words)
    print(f"{'share of words':24}" + "".join(f"{share:10.2f}" for share in shares))


if __name__ == "__main__":
    main()
