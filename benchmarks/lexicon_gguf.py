"""Definitions by llama.cpp: a mixture over a real Llama as a stock Mixtral in GGUF, beside transformers on the same rows.

    pip install xllamacpp lexperts[gguf]
    python benchmarks/lexicon_gguf.py --data PATH --work FOLDER --mixture MIXTURE    # of lexperts define run smollm2; minutes

Greedy definitions of the first test rows of WordNet. llama.cpp reads the file of `lexperts merge export --format gguf`, as stored and
with `--quantize q8_0`, and answers several requests at a time; transformers runs the mixture in batches. `equal` is the share of definitions that
are those of transformers in float32. A second counts from the first request to the last answer, without the start.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import make_parser, run_lexperts, write

NEW_TOKENS, BATCH = 32, 64


def by_transformers(options, dtype: str, rows: list[dict]) -> tuple[list[str], float]:
    """Definitions in batches, and the seconds for all."""
    import torch
    from transformers import AutoTokenizer

    from modeling_lexicon import LexiconForCausalLM
    from modeling_lexicon.pipeline_definition_modeling import DefinitionModelingPipeline

    torch.set_num_threads(options.threads)
    model = LexiconForCausalLM.from_pretrained(options.mixture, dtype=dtype).eval()
    define = DefinitionModelingPipeline(model, tokenizer=AutoTokenizer.from_pretrained(options.mixture))
    given = [{"term": row["term"], "context": row["context"]} for row in rows]
    define(given[:BATCH], batch_size=BATCH, max_new_tokens=NEW_TOKENS)  # warm
    start = time.perf_counter()
    found = define(given, batch_size=BATCH, max_new_tokens=NEW_TOKENS)
    return [answer["definition"] for answer in found], time.perf_counter() - start


def by_llama_cpp(options, path: Path, rows: list[dict]) -> tuple[list[str], float]:
    """Definitions by requests at the same time, and the seconds for all."""
    import xllamacpp
    from transformers import AutoTokenizer

    from modeling_lexicon.data_lexicon import PLAIN, format_prompt

    tokenizer = AutoTokenizer.from_pretrained(options.mixture)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    questions = tokenizer([format_prompt(row["term"], row["context"]) for row in rows], **PLAIN)["input_ids"]
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx, params.n_gpu_layers = options.parallel, 256 * options.parallel, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.warmup, params.cache_prompt = True, False
    server = xllamacpp.Server(params)

    def ask(ids: list[int]) -> str:
        request = {"prompt": [bos, *ids, eos], "n_predict": NEW_TOKENS, "temperature": 0, "cache_prompt": False}
        return server.handle_completions(request)["choices"][0]["text"].strip()

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(ask, questions[: options.parallel]))
        start = time.perf_counter()
        return list(pool.map(ask, questions)), time.perf_counter() - start


def main():
    """Measures all, and writes the results."""
    parser = make_parser(__doc__, "lexicon_gguf", "definitions/", work=True)
    parser.add_argument("--mixture", type=Path, required=True, help="folder of a mixture in the format lexicon")
    parser.add_argument("--rows", type=int, default=300, help="test rows")
    parser.add_argument("--threads", type=int, default=2, help="threads of both engines")
    parser.add_argument("--parallel", type=int, default=16, help="requests at the same time")
    options = parser.parse_args()
    test = options.data / "definitions" / "wordnet" / "test.jsonl"
    rows = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()[: options.rows]]
    options.work.mkdir(parents=True, exist_ok=True)
    stock, files = options.work / "mixtral", {"GGUF, as stored": "stored.gguf", "GGUF, q8_0": "q8_0.gguf"}
    run, log = {"log": options.work / "export.log"}, []
    if not stock.exists():
        run_lexperts("merge", "export", str(options.mixture), str(stock), **run, format="mixtral")
    for name, file in files.items():
        if not (options.work / file).exists():
            more = {"quantize": "q8_0"} if "q8_0" in name else {}
            run_lexperts("merge", "export", str(stock), str(options.work / file), **run, format="gguf", **more)
    answers = {f"transformers, {dtype}": by_transformers(options, dtype, rows) for dtype in ("float32", "bfloat16")}
    reference, _ = answers["transformers, float32"]
    answers |= {name: by_llama_cpp(options, options.work / file, rows) for name, file in files.items()}
    for name, (found, seconds) in answers.items():
        output = options.work / f"{name.replace(', ', '-').replace(' ', '_')}.jsonl"
        lines = (json.dumps({**row, "prediction": one}) + "\n" for row, one in zip(rows, found, strict=True))
        output.write_text("".join(lines), encoding="utf-8")
        equal = sum(one == other for one, other in zip(found, reference, strict=True)) / len(rows)
        size = (options.work / files[name]).stat().st_size if name in files else None
        log.append({"engine": name, "per_second": len(rows) / seconds, "equal": equal, "bytes": size})
        print(log[-1], flush=True)
    settings = {name: getattr(options, name) for name in ("rows", "threads", "parallel")}
    write(options.name, log, **settings, new_tokens=NEW_TOKENS, batch_size=BATCH)


if __name__ == "__main__":
    main()
