"""Writes the definitions of test rows by a model of this recipe: a dense Llama, an expert, a mixture.

    lexperts define generate --model-name-or-path runs/mixture --test-files test.jsonl --output runs/greedy.jsonl
    lexperts define generate --model-name-or-path runs/mixture --test-files test.jsonl --output runs/best.jsonl --best-of 8

A line of the output is its row with `generated`, `score`, and for a model with centroids `domain` and `distance`. --best-of 8
samples eight definitions per row and takes the most likely one, or the one that --reward-model prefers. Start the same command
again after an interruption: it ends in the same file.
"""

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from merge_tools.cluster import embed_texts
from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_lexicon.data_lexicon import format_prompt
from modeling_lexicon.generation_lexicon import DefinitionGenerator, nearest_centroids
from modeling_lexicon.terms_lexicon import is_in_context
from run_tools.errors import RESUME
from run_tools.fingerprints import digest, fingerprint
from run_tools.loading import describe_load_errors, open_config, open_model, open_tokenizer, parse_device
from run_tools.packaged import resolve_model
from run_tools.run_over import Output
from run_tools.versions import __version__

from ..common.arguments import command
from ..common.embedders import resolve_embedder
from .arguments import GenerateArguments
from .training import load_split

WITHOUT_EFFECT = ("output", "device")  # settings that do not change definitions


def count_absent_terms(rows: list[dict]) -> None:
    """Prints the number of rows whose context lacks the term."""
    absent = sum(not is_in_context(row["term"], row["context"]) for row in rows)
    if absent:
        print(f"test: the term is absent from its context in {absent:,} of {len(rows):,} rows", flush=True)


def load_model(args: GenerateArguments, changes: dict):
    """The model, with `changes` of its routing, and its tokenizer; a `ValueError` without experts or gates."""
    device, path = parse_device(args.device), resolve_model(args.model_name_or_path)
    with describe_load_errors("--model-name-or-path", path):
        tokenizer = open_tokenizer(path)
        if not changes:
            return open_model(AutoModelForCausalLM, path, dtype=args.dtype).to(device).eval(), tokenizer
    model_type = open_config(path).model_type
    if model_type not in LexiconConfig.readable_model_types:
        raise ValueError(f"{path} is a {model_type!r} model, without experts to route. Leave out {', '.join(changes)}.")
    model, info = LexiconForCausalLM.from_pretrained(path, dtype=args.dtype, output_loading_info=True, **changes)
    if info["missing_keys"]:
        raise ValueError(
            f"{path} cannot be routed by {changes}: it has no {sorted(info['missing_keys'])[0]}. Compose a mixture with gates "
            "(gate_mode), or leave that out."
        )
    return model.to(device).eval(), tokenizer


def select_domains(model, rows: list[dict], args: GenerateArguments) -> tuple[list[int] | None, list[dict]]:
    """The index of each row's expert, or None if the model routes by itself, and each row's `domain` and `distance`.
    Raises a `ValueError` if the model routes by domain and the domains are unknown.
    """
    config, by_domain = model.config, getattr(model.config, "routing_policy", None) == "domain"
    centroids = getattr(model, "domain_centroids", None)
    has_centroids = centroids is not None and bool(centroids.any())
    if args.embedder and not has_centroids:
        raise ValueError(f"{args.model_name_or_path} has no centroids, so that --embedder has no effect. Leave it out.")
    embedder = args.embedder or (config.embedder if by_domain else None)
    if has_centroids and embedder:
        texts = [format_prompt(row["term"], row["context"]) for row in rows]
        vectors = torch.from_numpy(embed_texts(texts, resolve_embedder(embedder)))
        nearest, distances = nearest_centroids(vectors, centroids)
        distances, ids = distances.gather(1, nearest[:, None])[:, 0].tolist(), nearest.tolist()
        info = [{"domain": i, "distance": round(d, 6)} for i, d in zip(ids, distances, strict=True)]
        return (ids if by_domain else None), info
    if has_centroids and by_domain:
        raise ValueError("The model has centroids, but no embedder. Pass --embedder, the one of its clusters.")
    if by_domain:
        domains, experts = [row.get("domain") for row in rows], range(config.num_local_experts)
        if all(type(domain) is int and domain in experts for domain in domains):
            return domains, [{} for _ in rows]
        if not config.domain_gate:
            raise ValueError(
                "The model routes by domain, but has neither centroids nor a gate. Add a 'domain' to each row, the index of "
                f"its expert, 0 to {len(experts) - 1}, or compose with centroids."
            )
    return None, [{} for _ in rows]


def count_truncated(generator: DefinitionGenerator, rows: list[dict]) -> None:
    """Prints the number of truncated contexts. Raises a `ValueError` under `on_long="error"`, or if not even the term fits."""
    max_length, count = generator.limit - generator.max_new_tokens, 0
    for row in rows:
        if len(generator.encode_prompt(row["term"], row["context"])) > max_length:
            generator.build_prompt(row["term"], row["context"])
            count += 1
    if count:
        print(f"test: {count:,} of {len(rows):,} contexts exceed the model's length and are truncated", flush=True)


def generation_settings(args: GenerateArguments, rows: list[dict]) -> dict:
    """Everything that the definitions depend on."""
    settings = {name: value for name, value in asdict(args).items() if name not in (*WITHOUT_EFFECT, "test_files")}
    model = resolve_model(args.model_name_or_path)
    settings["model_name_or_path"] = fingerprint(model)
    if args.reward_model:
        settings["reward_model"] = fingerprint(args.reward_model)
    embedder, config = args.embedder, Path(model) / "config.json"
    if embedder is None and config.is_file():
        embedder = json.loads(config.read_text(encoding="utf-8")).get("embedder")  # of the rows' domains
    if embedder:
        settings["embedder"] = fingerprint(resolve_embedder(embedder))
    return {**settings, "rows": len(rows), "rows_sha256": digest(rows), "lexperts": __version__}


def write_definitions(generator, rows: list[dict], args: GenerateArguments, output: Output, info: list[dict]) -> None:
    """Writes the rows that are missing, each with its definition, its score and its `info`. Batches have seeds of their own."""
    size, started = args.batch_size, time.perf_counter()
    output.cut(output.rows - output.rows % size)
    done = output.rows
    for start in tqdm(range(done, len(rows), size), desc="definitions"):
        batch = rows[start : start + size]
        torch.manual_seed(args.seed + start)
        found = generator(batch, first=start, batch_size=size)
        own = zip(batch, found, info[start:], strict=False)
        output.write({**row, "generated": one["definition"], "score": one["score"], **more} for row, one, more in own)
    output.finish()
    new, seconds = len(rows) - done, time.perf_counter() - started
    print(f"{new:,} rows in {seconds:,.1f} s, {new / seconds:,.2f} per second")
    print(f"wrote {output.path}", flush=True)


def run(args: GenerateArguments) -> None:
    """Generates and writes the definitions."""
    rows = load_split("test", args.test_files)[: args.max_rows]
    output = Output(args.output, generation_settings(args, rows))
    if output.is_finished:
        print(f"{output.path} is complete already", flush=True)
        return
    count_absent_terms(rows)
    changes = {"routing_policy": args.routing_policy, "num_experts_per_tok": args.experts_per_token}
    model, tokenizer = load_model(args, {name: value for name, value in changes.items() if value is not None})
    ids, domain_info = select_domains(model, rows, args)
    options = {"best_of": args.best_of, "reward_model": args.reward_model, "domain_ids": ids, "on_long": args.on_long}
    options |= args.generate_kwargs()
    generator = DefinitionGenerator(model, tokenizer, **options)
    logging.getLogger("modeling_lexicon").setLevel(logging.ERROR)  # truncated contexts are counted here
    count_truncated(generator, rows)
    with output:
        write_definitions(generator, rows, args, output, domain_info)


main = command("lexicon", "generate", run, RESUME)
