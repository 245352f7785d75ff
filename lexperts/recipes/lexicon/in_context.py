"""In-context baselines: definitions of test rows by any causal language model, from k examples in the prompt.

    lexperts define in-context --model-name-or-path MODEL --train-files train.jsonl --test-files test.jsonl \\
        --shots 0 1 2 4 8 --shots-by retrieved --embedder minilm --output runs/retrieved.jsonl

Writes runs/retrieved.shots0.jsonl and so on, in the format of `lexperts define generate`. Examples are training rows: random
ones, different for each row, or the nearest by sentence embeddings, or by TF-IDF without --embedder. All numbers of shots use
one order, so that the examples of 2 are among those of 4. Terms, contexts and definitions of the examples are all different
(LM-Lexicon, Sect. 3), and none is the row itself. Each example is one line: prompt, space, definition; the nearest is the
last. A prompt that is too long loses its furthest examples, which is counted. With --chat the examples are turns of a
conversation, by the tokenizer's chat template.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
from tqdm import tqdm

from merge_tools.clustering.embeddings import embed_texts, model_identity
from modeling_lexicon.data_lexicon import format_prompt
from modeling_lexicon.generation_lexicon import DefinitionGenerator
from modeling_lexicon.terms_lexicon import truncate_context_around
from run_tools.errors import RESUME
from run_tools.fingerprints import digest
from run_tools.resume import ResumableJsonl

from ..common.arguments import command
from ..common.embedders import resolve_embedder
from .arguments import InContextArguments
from .data import normalise_key
from .generate import count_absent_terms, generation_settings, is_complete, load_model, write_definitions
from .training import load_split


def one_line(text: str) -> str:
    """A text with single spaces and no line breaks."""
    return " ".join(text.split())


def question(row: dict) -> str:
    """The prompt of a row on one line."""
    return format_prompt(one_line(row["term"]), one_line(row["context"]))


def plain_prompt(shots: Iterable[dict], row: dict) -> str:
    """One line per example, prompt, space and definition (LM-Lexicon, Sect. 3), then the prompt of the row."""
    return "\n".join([*(f"{question(shot)} {one_line(shot['definition'])}" for shot in shots), question(row)])


def conversation(shots: Iterable[dict], row: dict) -> list[dict]:
    """The same as turns of a user and an assistant."""
    texts = [text for shot in shots for text in (question(shot), one_line(shot["definition"]))]
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, [*texts, question(row)], strict=False)]


class PromptMaker:
    """Examples and a row -> token ids that leave room for a definition; `chat` needs a chat template."""

    def __init__(self, tokenizer, max_length: int, chat: bool, on_long: str):
        if chat and not tokenizer.chat_template:
            raise ValueError("The tokenizer has no chat template. Leave --chat out, or use the model's chat variant.")
        self.tokenizer, self.max_length, self.chat, self.on_long = tokenizer, max_length, chat, on_long
        self.rows_without_shots, self.rows_truncated, self.total_shots = 0, 0, 0

    def encode(self, shots: Iterable[dict], row: dict) -> list[int]:
        """Examples and a row -> token ids, whatever their number."""
        if self.chat:
            turns = conversation(shots, row)
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(plain_prompt(shots, row), split_special_tokens=True, verbose=False)["input_ids"]
        return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids  # the text continues

    def __call__(self, shots: list[dict], row: dict) -> list[int]:
        """Examples, nearest first -> the prompt, nearest last. Raises a `ValueError` for a context or term too long."""
        for count in range(len(shots), -1, -1):
            ids = self.encode(shots[:count][::-1], row)
            if len(ids) <= self.max_length:
                self.rows_without_shots += count < len(shots)
                self.total_shots += count
                return ids
        message = f"The context of {row['term']!r:.60} has {len(ids):,} tokens, and the limit is {self.max_length:,}"
        if self.on_long == "error":
            raise ValueError(f"{message}. Use --on-long truncate, or a smaller --max-new-tokens.")
        window = truncate_context_around(
            row["term"], row["context"], lambda text: len(self.encode([], {**row, "context": text})) <= self.max_length
        )
        if window is None:
            raise ValueError(f"{message}: not even the term fits. Use a smaller --max-new-tokens.")
        self.rows_without_shots += bool(shots)
        self.rows_truncated += 1
        return self.encode([], {**row, "context": window})


class InContextGenerator(DefinitionGenerator):
    """Continues given prompts, each to the end of a line."""

    def __init__(self, model, tokenizer, prompts: list[list[int]], ends: list[int], **options):
        self.prompts, self.line_ends = prompts, ends
        super().__init__(model, tokenizer, **options)

    def end_token_ids(self) -> list[int]:
        """The tokens that end a line."""
        return self.line_ends

    def build_prompts(self, pairs, first: int) -> list[list[int]]:
        """The given prompts of these rows."""
        return self.prompts[first : first + len(pairs)]

    def decode(self, tokens) -> str:
        """The first line of the generated text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).split("\n")[0].strip()


def line_ends(model, tokenizer) -> list[int]:
    """The tokens that end a line, or the text."""
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    ends += [token for token, piece in enumerate(pieces) if "\n" in piece]
    return list(dict.fromkeys(end for end in ends if end is not None))


def select_shots(order: Iterable[int], train: list[dict], row: dict, count: int) -> list[dict]:
    """The first `count` rows of an order with different terms, contexts and definitions, and not the row itself."""
    shots: list[dict] = []
    seen: dict[str, set] = {"term": set(), "context": set(), "definition": set()}
    own = (normalise_key(row["term"]), normalise_key(row["context"]))
    for i in order:
        if len(shots) == count:
            break
        keys = {name: normalise_key(train[i][name]) for name in seen}
        if (keys["term"], keys["context"]) != own and all(keys[name] not in seen[name] for name in seen):
            shots.append(train[i])
            for name, value in keys.items():
                seen[name].add(value)
    return shots


def random_order(count: int, seed: int, row: int) -> Iterator[int]:
    """Indices of training rows in a random order for a row, none twice."""
    rng, seen = np.random.default_rng([seed, row]), set()
    while len(seen) < count:
        for i in rng.integers(count, size=32).tolist():
            if i not in seen:
                seen.add(i)
                yield i


def nearest_first(train: list[dict], rows: list[dict], args: InContextArguments) -> Callable[[int], Iterable[int]]:
    """A row's index -> the indices of training rows, nearest first, by cosine of embeddings or TF-IDF."""
    texts = [[format_prompt(row["term"], row["context"]) for row in some] for some in (train, rows)]
    if args.embedder:
        embedder = resolve_embedder(args.embedder)
        x, y = (embed_texts(some, embedder, cache=args.embedding_cache) for some in texts)
        return lambda i: np.argsort(-(x @ y[i]), kind="stable").tolist()
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ImportError("TF-IDF needs scikit-learn. Install it with: pip install 'lexperts[cluster]'") from error
    vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    x, y = vectorizer.fit_transform(texts[0]), vectorizer.transform(texts[1])
    return lambda i: np.argsort(-(x @ y[i].T).toarray()[:, 0], kind="stable").tolist()


def select_all_shots(rows: list[dict], train: list[dict], args: InContextArguments) -> list[list[dict]]:
    """The examples of each row, as many as the largest of --shots, in the order of preference."""
    if not max(args.shots):
        return [[] for _ in rows]
    if args.shots_by == "random":
        order = lambda i: random_order(len(train), args.seed, i)  # noqa: E731
    else:
        order = nearest_first(train, rows, args)
    bar = tqdm(rows, desc=f"{args.shots_by} examples", unit="row")
    shots = [select_shots(order(i), train, row, max(args.shots)) for i, row in enumerate(bar)]
    fewer = sum(len(own) < max(args.shots) for own in shots)
    if fewer:
        print(f"{fewer:,} rows have fewer than {max(args.shots)} examples: there are too few different training rows")
    return shots


def open_files(args: InContextArguments, rows: list[dict], train: list[dict]) -> dict[int, tuple]:
    """Number of shots -> its arguments and output file, for the files that are not complete."""
    tasks = {}
    settings = {**generation_settings(args, rows), "train_sha256": digest(train)}
    settings["embedder"] = args.embedder and model_identity(resolve_embedder(args.embedder))
    del settings["train_files"]
    for k in dict.fromkeys(args.shots):
        k_args = replace(args, output=str(Path(args.output).with_suffix(f".shots{k}.jsonl")))
        file = ResumableJsonl(k_args.output, {**settings, "shots": k})
        if not is_complete(file):
            tasks[k] = (k_args, file)
    return tasks


def run(args: InContextArguments) -> None:
    """Generates and writes the definitions for all numbers of shots."""
    rows = load_split("test", args.test_files)[: args.max_rows]
    train = load_split("train", args.train_files) if args.train_files else []
    tasks = open_files(args, rows, train)
    if not tasks:
        return
    absent = count_absent_terms(rows)
    shots = select_all_shots(rows, train, args)
    model, tokenizer = load_model(args)
    limit, ends = getattr(model.config, "max_position_embeddings", None) or 10**9, line_ends(model, tokenizer)
    logging.getLogger("modeling_lexicon").setLevel(logging.ERROR)
    for k, (k_args, file) in tasks.items():
        maker = PromptMaker(tokenizer, limit - args.max_new_tokens, args.chat, args.on_long)
        prompts = [maker(own[:k], row) for own, row in zip(shots, rows, strict=True)]
        mean = maker.total_shots / len(rows)
        print(
            f"{k} shots: {mean:.2f} per row; {maker.rows_without_shots:,} of {len(rows):,} rows are too long and lose shots, "
            f"{maker.rows_truncated:,} contexts are truncated",
            flush=True,
        )
        with_own_term = sum(
            any(normalise_key(shot["term"]) == normalise_key(row["term"]) for shot in own[:k])
            for own, row in zip(shots, rows, strict=True)
        )
        report = {"absent": absent, "truncated": maker.rows_truncated, "rows_without_shots": maker.rows_without_shots}
        report |= {"shots_per_row": mean, "with_own_term": with_own_term}
        generator = InContextGenerator(model, tokenizer, prompts, ends, **args.generate_kwargs())
        write_definitions(generator, rows, k_args, file, [{} for _ in rows], report)


main = command("lexicon", "in_context", run, RESUME)
