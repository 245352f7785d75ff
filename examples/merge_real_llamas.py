"""Three experts of a real Llama, trained apart and merged, with nothing trained after it; on a CPU and without the Hub.

SmolLM2-135M comes from a package, the texts from Python: the sources of its standard library, the reference of the language, and the
licences of the packages that are installed. Each expert learns one of the three in two minutes (its MLPs only). The gates of the mixture are computed in closed form
from samples of each. At the end the mixture shows what it keeps of what each expert has learned, and which expert reads which token.

    pip install ./models/smollm2 -e '.[merge,train]'
    python examples/merge_real_llamas.py
    python examples/merge_real_llamas.py --base LLAMA --steps 20
"""

import argparse
import json
import random
import shutil
import sysconfig
import time
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lexperts.cli import build_app
from merge_tools import route
from run_tools.packaged import locate_model

PIECE = 1500  # characters of a text
TEXTS = {"test": 16, "train": 200}
PROMPTS = {
    "code": "def read_lines(path):\n",
    "reference": "The try statement specifies exception handlers and/or",
    "licences": "Redistribution and use in source and binary forms, with or without",
}


def domain_texts() -> dict[str, list[str]]:
    """Name of a domain -> its texts."""
    library = Path(sysconfig.get_paths()["stdlib"])
    licences = {
        str(file.locate())
        for package in distributions()
        for file in package.files or ()
        if "LICENSE" in file.name.upper()
    }
    return {
        "code": [file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py"))[:60]],
        "reference": [topics[name] for name in sorted(topics)],
        "licences": [
            Path(path).read_text(encoding="utf-8", errors="ignore") for path in sorted(licences) if Path(path).is_file()
        ],
    }


def write_files(folder: Path) -> dict[str, dict[str, Path]]:
    """A file of pieces of texts for each domain and split; no piece is in both."""
    files: dict[str, dict[str, Path]] = {}
    for name, texts in domain_texts().items():
        pieces = [text[start : start + PIECE] for text in texts for start in range(0, len(text) - PIECE // 2, PIECE)]
        pieces = list(dict.fromkeys(pieces))  # many packages have the same licence
        random.Random(0).shuffle(pieces)
        files[name] = {}
        for split, count in TEXTS.items():
            chosen, pieces = pieces[:count], pieces[count:]
            files[name][split] = folder / f"{name}_{split}.jsonl"
            files[name][split].write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8"
            )
    return files


def run(*words) -> None:
    """Runs a command of lexperts in this process, and says what it was and how long it took."""
    print(f"\n$ lexperts {' '.join(map(str, words))}", flush=True)
    start = time.perf_counter()
    try:
        build_app()([*map(str, words)])
    except SystemExit as end:
        if end.code:
            raise
    print(f"[{time.perf_counter() - start:.0f} s]", flush=True)


def generate(folder: Path) -> None:
    """Prints how the mixture continues a beginning of each domain."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for name, prompt in PROMPTS.items():
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        print(f"\n[{name}] {tokenizer.decode(tokens[0])}")


def main(argv: list[str] | None = None) -> None:
    """Trains, merges, evaluates and routes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="smollm2", help="a Llama, as a folder or Hub id; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("real_llamas"), help="folder; default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="of each training; default: %(default)s")
    args = parser.parse_args(argv)
    start, out = time.perf_counter(), args.output
    out.mkdir(parents=True, exist_ok=True)
    files = write_files(out)
    for name, splits in files.items():
        options = ("--model-name-or-path", args.base, "--max-steps", args.steps, "--output-dir", out / name)
        run("train", "language", "smollm2", "--train-files", splits["train"], *options)
    experts = [{"source_model": name, "samples": splits["train"].name} for name, splits in files.items()]
    recipe = {"base_model": locate_model(args.base), "average": "base", "experts": experts, "gate_mode": "ridge"}
    (out / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    shutil.rmtree(out / "mixture", ignore_errors=True)  # of an earlier run
    run("merge", "compose", out / "recipe.yml", out / "mixture")
    run("merge", "inspect", out / "mixture")
    domains = [word for name, splits in files.items() for word in ("--domain", f"{name}={splits['test']}")]
    run("merge", "evaluate", out / "mixture", *domains)
    for routing in route(out / "mixture", [*PROMPTS.values()]):
        first = [routing.names[expert] for expert in routing.experts[..., 0].ravel()]
        shares = ", ".join(f"{name} {first.count(name) / len(first):.0%}" for name in routing.names)
        print(f"{routing.text!r} is read by {shares}")
    generate(out / "mixture")
    print(f"\nAll of it took {(time.perf_counter() - start) / 60:.1f} minutes.")


if __name__ == "__main__":
    main()
