"""Writes the definitions of test rows, by any model of this recipe: a dense Llama, an expert, a mixture.

    python examples/lexicon/generate.py --model_name_or_path runs/mixture --test_files test.jsonl --output runs/greedy.jsonl
    python examples/lexicon/generate.py --model_name_or_path runs/mixture --test_files test.jsonl --output runs/best.jsonl \
        --best_of 8 --curve 1 2 4 8 --reward_model runs/reward

A line of the output is its row with `generated`, `score`, and where the clusters are known `domain` and `distance`. With
--best_of 8 eight definitions are drawn for each row, and the one with the highest score is taken; --curve 1 2 4 8 writes
the best of the first 1, 2, 4 and 8 of the same draw to runs/best.best1.jsonl and so on. The oracle scorer reads the gold
definitions: it says what a perfect choice would give, and is for analysis alone. Start the same command again after an
interruption: it ends in the same file. What was counted on the way stands in runs/best.settings.json.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
import transformers
from cli_args import parse_arguments
from resumable import Note, digest, write_lines
from run_folder import fingerprint, package_version, replace_file
from scores import bleu, references_of, without_full_stops
from train_expert import load_split, refuse, say
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from keyphrase_tools.opening import opening
from merge_tools.embedding import embed_texts
from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_lexicon.data_lexicon import prompt
from modeling_lexicon.defining_lexicon import ON_LONG, SAMPLING, Definer
from modeling_lexicon.domains_lexicon import nearest_centroids

SCORERS = ("likelihood", "reward", "oracle")
ELSEWHERE = ("output", "device", "embedding_cache", "traceback")  # settings that change no definition


@dataclass
class WritingArguments:
    """What generate.py and in_context.py have in common."""

    model_name_or_path: str = field(metadata={"help": "Hub id or folder of the model that writes"})
    test_files: list[str] = field(metadata={"help": "JSON Lines with term, context, definition"})
    output: str = field(metadata={"help": "file to write, .jsonl"})
    max_rows: int | None = field(default=None, metadata={"help": "rows of the test files, the first ones"})
    batch_size: int = field(default=16, metadata={"help": "rows that are read at once; seeds go by batches"})
    max_new_tokens: int = field(default=64, metadata={"help": "of a definition"})
    sample: bool = field(default=False, metadata={"help": "draw a definition instead of the likeliest token each step"})
    temperature: float = field(default=SAMPLING["temperature"], metadata={"help": "of drawing"})
    top_k: int = field(default=SAMPLING["top_k"], metadata={"help": "of drawing"})
    top_p: float = field(default=SAMPLING["top_p"], metadata={"help": "of drawing"})
    repetition_penalty: float = field(default=SAMPLING["repetition_penalty"], metadata={"help": "of drawing"})
    on_long: str = field(
        default="cut", metadata={"help": "contexts without room: cut around the term, counted, or error"}
    )
    seed: int = field(default=42, metadata={"help": "of drawing"})
    dtype: str = field(default="float32", metadata={"help": "of the loaded weights: float32, bfloat16, auto"})
    device: str | None = field(default=None, metadata={"help": "cuda where there is one, else cpu"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        if not self.output.endswith(".jsonl"):
            raise ValueError(f"output={self.output!r} is written as JSON Lines. Give it a name that ends in .jsonl.")
        if self.on_long not in ON_LONG:
            raise ValueError(f"on_long={self.on_long!r} is not known. Use {' or '.join(ON_LONG)}.")
        for name in ("batch_size", "max_new_tokens", "max_rows"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be 1 or more.")

    def drawing(self) -> dict:
        """For `Definer`: how definitions are drawn; nothing where the likeliest tokens are taken."""
        if not self.sample:
            return {"max_new_tokens": self.max_new_tokens}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True} | {
            name: getattr(self, name) for name in SAMPLING
        }


@dataclass
class GenerateArguments(WritingArguments):
    best_of: int = field(default=1, metadata={"help": "definitions drawn for a row, of which the best is taken"})
    scorer: str | None = field(
        default=None,
        metadata={
            "help": "what is best: reward, likelihood, or oracle (the nearest to a gold definition, for analysis only); "
            "default reward where there is a reward model"
        },
    )
    reward_model: str | None = field(default=None, metadata={"help": "Hub id or folder, of train_reward.py"})
    curve: list[int] | None = field(
        default=None, metadata={"help": "write the best of the first 1, 2, ... samples too, each to a file"}
    )
    keep_samples: bool = field(default=False, metadata={"help": "write all samples with their scores, as drawn"})
    routing_policy: str | None = field(default=None, metadata={"help": "instead of the mixture's own"})
    experts_per_token: int | None = field(default=None, metadata={"help": "likewise, of the token policy"})
    embedder: str | None = field(default=None, metadata={"help": "of the centroids; default the mixture's own"})
    embedding_cache: str | None = field(default=None, metadata={"help": "a folder that keeps embeddings"})

    def __post_init__(self):
        super().__post_init__()
        self.scorer = self.scorer or ("reward" if self.reward_model else "likelihood")
        if self.scorer not in SCORERS:
            raise ValueError(f"scorer={self.scorer!r} is not known. Use {', '.join(SCORERS[:-1])} or {SCORERS[-1]}.")
        if (self.scorer == "reward") != (self.reward_model is not None):
            raise ValueError(
                f"scorer={self.scorer!r} and reward_model={self.reward_model!r}: the one goes with the other. Pass both, or "
                "neither."
            )
        if self.best_of < 1:
            raise ValueError(f"best_of={self.best_of}: it must be 1 or more.")
        wrong = [n for n in self.curve or () if not 1 <= n <= self.best_of]
        if wrong:
            raise ValueError(f"curve has {wrong[0]}, and best_of={self.best_of} samples are drawn. Name 1 to that.")
        self.sample = self.sample or self.best_of > 1


def count_rows(rows: list[dict]) -> int:
    """-> how many rows lack their term in their context; said."""
    absent = sum(row["term"].lower() not in row["context"].lower() for row in rows)
    if absent:
        say(f"test: the term is absent from its context in {absent:,} of {len(rows):,} rows")
    return absent


def open_model(args: WritingArguments, changes: dict | None = None):
    """The model and its tokenizer; `changes` of its routing.

    Raises:
        ValueError: for a model that has no experts, or none of the gates that the changed routing needs.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with opening("--model_name_or_path", args.model_name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        model = None if changes else AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
    if model is not None:
        return model.to(device).eval(), tokenizer
    kind, told = AutoConfig.from_pretrained(args.model_name_or_path).model_type, ", ".join(changes)
    if kind not in LexiconConfig.readable_model_types:
        raise ValueError(f"{args.model_name_or_path} is a {kind!r} model, without experts to route. Leave out {told}.")
    model, info = LexiconForCausalLM.from_pretrained(
        args.model_name_or_path, dtype=args.dtype, output_loading_info=True, **changes
    )
    if info["missing_keys"]:
        raise ValueError(
            f"{args.model_name_or_path} cannot be routed by {changes}: it has no {sorted(info['missing_keys'])[0]}. Compose a "
            "mixture with gates (gate_mode), or leave that out."
        )
    return model.to(device).eval(), tokenizer


def domains_of(model, rows: list[dict], args: GenerateArguments) -> tuple[list[int] | None, list[dict]]:
    """-> the rows' experts, where they are chosen beforehand, and what the output says of each row's domain.

    Raises:
        ValueError: where the model routes by domain and nothing says which.
    """
    config, by_domain = model.config, getattr(model.config, "routing_policy", None) == "domain"
    centroids = getattr(model, "domain_centroids", None)
    nothing = [{} for _ in rows]
    if centroids is not None and centroids.any():
        embedder = args.embedder or (config.embedder if by_domain else None)
        if embedder is None and not by_domain:
            return None, nothing
        if embedder is None:
            raise ValueError(
                "The model has centroids, but names no embedder. Pass --embedder, the one of its clusters."
            )
        texts = [prompt(row["term"], row["context"]) for row in rows]
        vectors = torch.from_numpy(embed_texts(texts, embedder, cache=args.embedding_cache))
        ids, distances = nearest_centroids(vectors, centroids)
        near = distances.gather(1, ids[:, None])[:, 0].tolist()
        known = [{"domain": i, "distance": round(d, 6)} for i, d in zip(ids.tolist(), near, strict=True)]
        return (ids.tolist() if by_domain else None), known
    if args.embedder:
        raise ValueError(f"{args.model_name_or_path} has no centroids that --embedder could be for. Leave it out.")
    if not by_domain:
        return None, nothing
    given, experts = [row.get("domain") for row in rows], range(config.num_local_experts)
    if all(type(domain) is int and domain in experts for domain in given):
        return given, nothing
    if config.domain_gate:
        return None, nothing
    raise ValueError(
        "The model routes by domain, and has neither centroids nor a gate. Give each row a 'domain', the index of its expert, "
        f"0 to {len(experts) - 1}, or compose with centroids."
    )


def check_room(definer: Definer, rows: list[dict]) -> int:
    """-> how many contexts have no room and are cut; said.

    Raises:
        ValueError: under `on_long="error"`, or where not even the term has room.
    """
    room, cut = definer.limit - definer.max_new_tokens, 0
    for row in rows:
        if len(definer.encode(row["term"], row["context"])) > room:
            definer.prompt_ids(row["term"], row["context"])
            cut += 1
    if cut:
        say(f"test: {cut:,} of {len(rows):,} contexts are longer than the model and are cut around their terms")
    return cut


def oracle_of(rows: list[dict]) -> Callable[[int, str], float]:
    """-> a row's number and a definition to its BLEU in per cent, against the nearest of the row's references."""
    score, _ = bleu()
    references = references_of(rows)["context"]
    return lambda i, text: round(max(score(without_full_stops(text), one) for one in references[i]), 6)


def settings_of(args: WritingArguments, rows: list[dict]) -> dict:
    """All that the definitions depend on."""
    kept = {name: value for name, value in asdict(args).items() if name not in (*ELSEWHERE, "test_files")}
    kept["model_name_or_path"] = fingerprint(args.model_name_or_path)
    if getattr(args, "reward_model", None):
        kept["reward_model"] = fingerprint(args.reward_model)
    if embedder := embedder_of(args):
        kept["embedder"] = fingerprint(embedder)
    return {**kept, "rows": len(rows), "rows_sha256": digest(rows), "lexperts": package_version()}


def embedder_of(args: WritingArguments) -> str | None:
    """What finds the domains of rows: the option, or what a mixture on this machine names."""
    config = Path(args.model_name_or_path) / "config.json"
    if getattr(args, "embedder", None) or not config.is_file():
        return getattr(args, "embedder", None)
    return json.loads(config.read_text(encoding="utf-8")).get("embedder")


def line_of(row: dict, samples: list[dict], more: dict, keep: bool) -> str:
    """The output's line of a row: its best sample, the first of equals."""
    best = max(samples, key=lambda sample: sample["score"])
    line = {**row, "generated": best["definition"], "score": best["score"], **more}
    return json.dumps({**line, "samples": samples} if keep else line, ensure_ascii=False) + "\n"


def draw(definer: Definer, rows: list[dict], path: Path, args: WritingArguments, oracle=None) -> int:
    """Samples of each row, as drawn, in a file -> how many rows were new. With an oracle the scores are its."""

    def answer(own: list[dict], start: int) -> list[dict]:
        lines = []
        for i, drawn in enumerate(definer.draw(own, first=start, batch_size=args.batch_size), start=start):
            samples = [{"definition": one["definition"], "score": one["score"]} for one in drawn]
            for sample in samples if oracle else ():
                sample["score"] = oracle(i, sample["definition"])
            lines.append({"samples": samples})
        return lines

    return write_lines(path, rows, answer, batch_size=args.batch_size, seed=args.seed, desc="definitions")


def choose(drawn: list[list[dict]], rows: list[dict], known: list[dict], n: int, path: Path, keep: bool) -> int:
    """Writes the best of the first n samples of each row -> how many of these definitions are empty."""
    lines = [line_of(row, own[:n], more, keep) for row, own, more in zip(rows, drawn, known, strict=True)]
    replace_file(path, "".join(lines))
    return sum(not json.loads(line)["generated"] for line in lines)


def write_definitions(
    definer: Definer,
    rows: list[dict],
    args: WritingArguments,
    settings: dict,
    known: list[dict],
    report: dict,
    oracle=None,
) -> None:
    """Draws what is missing, then writes the files of the curve and the output."""
    output = Path(args.output)
    part, note, started = output.with_suffix(".part"), Note(output), time.perf_counter()
    note.begin(settings)
    new = draw(definer, rows, part, args, oracle)
    seconds = time.perf_counter() - started
    drawn = [json.loads(line)["samples"] for line in part.read_text(encoding="utf-8").split("\n")[: len(rows)]]
    keep, empty = getattr(args, "keep_samples", False), 0
    paths = [(n, output.with_suffix(f".best{n}.jsonl")) for n in getattr(args, "curve", None) or ()]
    paths.append((definer.best_of, output))  # the last: where it stands, all do
    for n, path in paths:
        empty = choose(drawn, rows, known, n, path, keep)
    speed = {"new": new, "seconds": round(seconds, 2), "rows_per_second": round(new / seconds, 3)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    note.add({"model": args.model_name_or_path, "rows": len(rows), **report, "empty": empty, **speed, **versions})
    part.unlink()
    say(f"{new:,} rows in {seconds:,.1f} s, {new / seconds:,.2f} a second; {empty:,} definitions are empty")
    for _, path in paths:
        say(f"wrote {path}")


def stands(output: Path, settings: dict) -> bool:
    """Whether the output is there, made with these settings.

    Raises:
        ValueError: where it was made, or begun, with others.
    """
    part = output.with_suffix(".part")
    if output.exists() or part.exists():
        Note(output).compare(settings)
    if output.exists():
        part.unlink(missing_ok=True)
        say(f"{output} stands already")
    return output.exists()


def run(args: GenerateArguments) -> None:
    rows = load_split("test", args.test_files)[: args.max_rows]
    settings = settings_of(args, rows)
    if stands(Path(args.output), settings):
        return
    absent = count_rows(rows)
    wanted = {"routing_policy": args.routing_policy, "num_experts_per_tok": args.experts_per_token}
    model, tokenizer = open_model(args, {name: value for name, value in wanted.items() if value is not None})
    ids, known = domains_of(model, rows, args)
    options = {"best_of": args.best_of, "reward_model": args.reward_model, "domain_ids": ids, "on_long": args.on_long}
    definer = Definer(model, tokenizer, num_definitions=args.best_of, **options, **args.drawing())
    logging.getLogger("modeling_lexicon").setLevel(logging.ERROR)  # what is cut is counted here
    report = {"absent": absent, "cut": check_room(definer, rows), "scorer": args.scorer}
    oracle = None
    if args.scorer == "oracle":
        say("scorer: oracle, which reads the gold definitions: for analysis only, no result of a system")
        oracle, known = oracle_of(rows), [{**more, "oracle": True} for more in known]
    write_definitions(definer, rows, args, settings, known, report, oracle)


def main():
    try:
        (args,) = parse_arguments((GenerateArguments,), __doc__)
        run(args)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)


if __name__ == "__main__":
    sys.exit(main())
