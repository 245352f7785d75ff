"""In-context baselines: the definitions of test rows by any causal model that was never trained for it, from k examples.

    python examples/lexicon/in_context.py --model_name_or_path MODEL --train_files train.jsonl --test_files test.jsonl \
        --shots 0 1 2 4 8 --shots_by retrieved --embedder sentence-transformers/all-MiniLM-L6-v2 --output runs/retrieved.jsonl

It writes runs/retrieved.shots0.jsonl and so on, in the form of generate.py's output. Examples are training rows: drawn at
random, other ones for each row, or the nearest by their embeddings, or without --embedder by TF-IDF. Of k examples the
first k of one order are taken, so that those of 2 are among those of 4; terms, contexts and definitions are all different
(LM-Lexicon, Sect. 3), and none has the row's own term and context. Each stands on a line, prompt, blank, definition, and
the nearest stands last. Prompts without room lose their furthest examples, counted. With --chat examples are the turns of
a conversation, by the tokenizer's template.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
from cli_args import parse_arguments
from corpora import key
from generate import WritingArguments, count_rows, open_model, settings_of, stands, write_definitions
from resumable import digest
from tqdm import tqdm
from train_expert import load_split, refuse, say

from merge_tools.embedding import embed_texts, identity
from modeling_lexicon.data_lexicon import prompt
from modeling_lexicon.defining_lexicon import Definer, cut_around

ORDERS = ("random", "retrieved")


@dataclass
class InContextArguments(WritingArguments):
    train_files: list[str] = field(default_factory=list, metadata={"help": "JSON Lines that examples are taken from"})
    shots: list[int] = field(default_factory=lambda: [0, 1, 2, 4, 8], metadata={"help": "examples; a file for each"})
    shots_by: str = field(default="random", metadata={"help": "random, or retrieved: the nearest rows"})
    embedder: str | None = field(
        default=None,
        metadata={"help": "sentence-transformers name or folder that nearness is measured by; else TF-IDF"},
    )
    embedding_cache: str | None = field(default=None, metadata={"help": "a folder that keeps embeddings"})
    chat: bool = field(default=False, metadata={"help": "prompt by the tokenizer's chat template"})

    def __post_init__(self):
        super().__post_init__()
        if self.shots_by not in ORDERS:
            raise ValueError(f"shots_by={self.shots_by!r} is not known. Use {' or '.join(ORDERS)}.")
        if not self.shots or min(self.shots) < 0:
            raise ValueError(f"shots={self.shots}: name one or more numbers of examples, from 0 on.")
        if max(self.shots) and not self.train_files:
            raise ValueError(f"shots={self.shots}, but there are no train_files to take examples from. Pass some.")


def one_line(text: str) -> str:
    return " ".join(text.split())


def question(row: dict) -> str:
    return prompt(one_line(row["term"]), one_line(row["context"]))


def plain_prompt(shots: Iterable[dict], row: dict) -> str:
    """A line for each example, its prompt and definition with a blank between them (the paper's Sect. 3), then the row's prompt."""
    return "\n".join([*(f"{question(shot)} {one_line(shot['definition'])}" for shot in shots), question(row)])


def conversation(shots: Iterable[dict], row: dict) -> list[dict]:
    """The same as turns of a user and an assistant."""
    turns = []
    for shot in shots:
        turns.append({"role": "user", "content": question(shot)})
        turns.append({"role": "assistant", "content": one_line(shot["definition"])})
    return [*turns, {"role": "user", "content": question(row)}]


class PromptMaker:
    """Examples and a row -> token ids that leave room for a definition.

    Raises:
        ValueError: for `chat` and a tokenizer without a template.
    """

    def __init__(self, tokenizer, room: int, chat: bool, on_long: str):
        if chat and not tokenizer.chat_template:
            raise ValueError("The tokenizer has no chat template. Leave --chat out, or take the model's chat variant.")
        self.tokenizer, self.room, self.chat, self.on_long = tokenizer, room, chat, on_long
        self.short, self.cut, self.used = 0, 0, 0  # rows with dropped shots, rows with cut contexts, shots in all

    def encode(self, shots: Iterable[dict], row: dict) -> list[int]:
        if self.chat:
            text = self.tokenizer.apply_chat_template(
                conversation(shots, row), tokenize=False, add_generation_prompt=True
            )
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(plain_prompt(shots, row), split_special_tokens=True, verbose=False)["input_ids"]
        return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids  # the text goes on

    def __call__(self, shots: list[dict], row: dict) -> list[int]:
        """Shots, the nearest first -> the prompt, where the nearest stands last.

        Raises:
            ValueError: for a context without room under `on_long="error"`, or a term without.
        """
        for count in range(len(shots), -1, -1):
            ids = self.encode(shots[:count][::-1], row)
            if len(ids) <= self.room:
                self.short += count < len(shots)
                self.used += count
                return ids
        said = f"The context of {row['term']!r:.60} has {len(ids):,} tokens, and there is room for {self.room:,}"
        if self.on_long == "error":
            raise ValueError(f"{said}. Use --on_long cut, or a smaller --max_new_tokens.")
        piece = cut_around(
            row["term"], row["context"], lambda piece: len(self.encode([], {**row, "context": piece})) <= self.room
        )
        if piece is None:
            raise ValueError(f"{said}, not even for the term. Use a smaller --max_new_tokens.")
        self.short += bool(shots)
        self.cut += 1
        return self.encode([], {**row, "context": piece})


class InContextDefiner(Definer):
    """Goes on with prompts that were made beforehand, each to the end of a line."""

    def __init__(self, model, tokenizer, prepared: list[list[int]], ends: list[int], **options):
        self.prepared, self.given_ends = prepared, ends
        super().__init__(model, tokenizer, **options)

    def end_tokens(self) -> list[int]:
        return self.given_ends

    def prompts(self, rows, first: int) -> list[list[int]]:
        return self.prepared[first : first + len(rows)]

    def text_of(self, written) -> str:
        return self.tokenizer.decode(written, skip_special_tokens=True).split("\n")[0].strip()


def line_ends(model, tokenizer) -> list[int]:
    """Tokens that end a line, or the text."""
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    ends += [token for token, piece in enumerate(pieces) if "\n" in piece]
    return list(dict.fromkeys(end for end in ends if end is not None))


def pick(order: Iterable[int], train: list[dict], row: dict, count: int) -> list[dict]:
    """The first rows of an order with terms, contexts and definitions that are all different; not the row's own."""
    shots: list[dict] = []
    seen: dict[str, set] = {"term": set(), "context": set(), "definition": set()}
    own = (key(row["term"]), key(row["context"]))
    for i in order:
        if len(shots) == count:
            break
        keys = {name: key(train[i][name]) for name in seen}
        if (keys["term"], keys["context"]) != own and all(keys[name] not in seen[name] for name in seen):
            shots.append(train[i])
            for name, value in keys.items():
                seen[name].add(value)
    return shots


def random_order(count: int, seed: int, row: int) -> Iterator[int]:
    """Training rows as they are drawn for a row, none twice."""
    drawn, seen = np.random.default_rng([seed, row]), set()
    while len(seen) < count:
        for i in drawn.integers(count, size=32).tolist():
            if i not in seen:
                seen.add(i)
                yield i


def nearest_first(train: list[dict], rows: list[dict], args: InContextArguments) -> Callable[[int], Iterable[int]]:
    """-> a row's number to the training rows, those nearest in the angle of embeddings or TF-IDF first.

    Raises:
        ImportError: without the libraries.
    """
    texts = [[prompt(row["term"], row["context"]) for row in some] for some in (train, rows)]
    if args.embedder:
        x, y = (embed_texts(some, args.embedder, cache=args.embedding_cache) for some in texts)
        return lambda i: np.argsort(-(x @ y[i]), kind="stable").tolist()
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ImportError("TF-IDF needs scikit-learn. Install it with: pip install lexperts[cluster]") from error
    counter = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    x, y = counter.fit_transform(texts[0]), counter.transform(texts[1])
    return lambda i: np.argsort(-(x @ y[i].T).toarray()[:, 0], kind="stable").tolist()


def shots_of(rows: list[dict], train: list[dict], args: InContextArguments) -> list[list[dict]]:
    """For each row as many examples as the largest of --shots, the nearest, or first drawn, first."""
    if not max(args.shots):
        return [[] for _ in rows]
    if args.shots_by == "random":
        order = lambda i: random_order(len(train), args.seed, i)  # noqa: E731
    else:
        order = nearest_first(train, rows, args)
    bar = tqdm(rows, desc=f"{args.shots_by} examples", unit="row")
    shots = [pick(order(i), train, row, max(args.shots)) for i, row in enumerate(bar)]
    fewer = sum(len(own) < max(args.shots) for own in shots)
    if fewer:
        say(
            f"{fewer:,} rows have fewer than {max(args.shots)} examples: the training rows are too few or too much alike"
        )
    return shots


def open_tasks(args: InContextArguments, rows: list[dict], train: list[dict]) -> dict[int, tuple]:
    """Number of shots -> its arguments and settings, where its file does not stand yet."""
    found = {}
    settings = {**settings_of(args, rows), "train_sha256": digest(train)}
    settings["embedder"] = args.embedder and identity(args.embedder)
    del settings["train_files"]
    for k in dict.fromkeys(args.shots):
        own = replace(args, output=str(Path(args.output).with_suffix(f".shots{k}.jsonl")))
        if not stands(Path(own.output), {**settings, "shots": k}):
            found[k] = (own, {**settings, "shots": k})
    return found


def run(args: InContextArguments) -> None:
    rows = load_split("test", args.test_files)[: args.max_rows]
    train = load_split("train", args.train_files) if args.train_files else []
    tasks = open_tasks(args, rows, train)
    if not tasks:
        return
    absent = count_rows(rows)
    shots = shots_of(rows, train, args)
    model, tokenizer = open_model(args)
    limit, ends = getattr(model.config, "max_position_embeddings", None) or 10**9, line_ends(model, tokenizer)
    logging.getLogger("modeling_lexicon").setLevel(logging.ERROR)
    for k, (own, settings) in tasks.items():
        maker = PromptMaker(tokenizer, limit - args.max_new_tokens, args.chat, args.on_long)
        prepared = [maker(some[:k], row) for some, row in zip(shots, rows, strict=True)]
        say(
            f"{k} shots: {maker.used / len(rows):.2f} a row; in {maker.short:,} of {len(rows):,} rows some have no room and "
            f"are dropped, in {maker.cut:,} the context is cut"
        )
        known = sum(
            any(key(shot["term"]) == key(row["term"]) for shot in some[:k])
            for some, row in zip(shots, rows, strict=True)
        )
        report = {"absent": absent, "cut": maker.cut, "short": maker.short, "shots_a_row": maker.used / len(rows)}
        definer = InContextDefiner(model, tokenizer, prepared, ends, **args.drawing())
        write_definitions(definer, rows, own, settings, [{} for _ in rows], {**report, "with_own_term": known})


def main():
    try:
        (args,) = parse_arguments((InContextArguments,), __doc__)
        run(args)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)


if __name__ == "__main__":
    sys.exit(main())
