"""Compares the speed of two revisions.

    python benchmarks/revisions.py --before 95093b2                  # about 15 minutes on two cores
    python benchmarks/revisions.py --before HEAD~1 --cases lexicon   # only cases whose name starts with this

Both revisions are taken from git, so uncommitted changes are not measured. Each runs in a separate process, and the processes
take turns (A B A B ...), with one warm-up each. Both have the same weights and inputs, and the script first checks that their
outputs agree. A ratio is the median of the rounds' ratios, after over before: below 1 is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights that depend only on a parameter's shape and position, not on its name."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.ndim > 1 and "norm" not in name:
            generator = torch.Generator().manual_seed(number)
            weight.data = 0.03 * torch.randn(weight.shape, generator=generator)
    return model


def random_ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """The same random token ids in every revision."""
    return torch.randint(4, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def calls_of(model: torch.nn.Module, inputs: dict, labels: torch.Tensor, generation: dict) -> dict:
    """A forward pass, a training step and `generate`, each of which returns a tensor to compare."""

    def forward():
        with torch.inference_mode():
            return model.eval()(**inputs, labels=labels, use_cache=False).logits

    def training():
        model.train().zero_grad(set_to_none=True)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return loss.detach()

    def generate():
        return model.eval().generate(**inputs, do_sample=False, **generation)

    return {"forward": forward, "training": training, "generate": generate}


def moesumm_cases() -> dict:
    """Calls of a small MoeSumm by name, with the margin loss and without."""
    from transformers import BartConfig

    from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration

    sizes = {"encoder_layers": 4, "encoder_ffn_dim": 2048, "encoder_attention_heads": 8}
    sizes |= {name.replace("encoder", "decoder"): size for name, size in sizes.items()}
    backbone = BartConfig(d_model=512, dropout=0.0, vocab_size=8000, **sizes)
    config = MoeSummConfig(text_config=backbone, datasets=["news", "letters", "papers"], num_deputies=3)
    model, labels = fill(MoeSummForConditionalGeneration(config)), random_ids(4, 48, 8000)
    inputs = {"input_ids": random_ids(4, 192, 8000), "dataset_ids": torch.arange(4) % 3}
    calls = calls_of(model, inputs, labels, {"num_beams": 4, "max_new_tokens": 24, "min_new_tokens": 24})

    def with_coef(coef: float):
        model.config.margin_loss_coef = coef
        return calls["training"]()

    return {
        "moesumm forward": calls["forward"],
        "moesumm training": lambda: with_coef(0.0),
        "moesumm training, margin loss": lambda: with_coef(1.0),
        "moesumm four beams": calls["generate"],
    }


def lexicon_cases() -> dict:
    """Calls of small Lexicon models by name, one model for each policy."""
    from modeling_lexicon import LexiconConfig, LexiconForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    cases, ids = {}, random_ids(4, 128, 2048)
    for policy in ("token", "sequence_soft", "domain"):
        model = fill(LexiconForCausalLM(LexiconConfig(**sizes, **tokens, routing_policy=policy)))
        inputs = {"input_ids": ids} | ({"domain_ids": torch.arange(4)} if policy == "domain" else {})
        calls = calls_of(model, inputs, ids, {"max_new_tokens": 32, "pad_token_id": 0})
        cases |= {f"lexicon {policy} {name}": call for name, call in calls.items()}
    return cases


def measure_cases(start: str) -> None:
    """Prints for each case whose name starts with `start` the seconds of a call after a warm-up, and a sample of its output."""
    found = {}
    for name, call in (moesumm_cases() | lexicon_cases()).items():
        if name.startswith(start):
            output = call().double().flatten()
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            found[name] = {"seconds": seconds, "output": output[:: max(1, output.numel() // 500)].tolist()}
    print(json.dumps(found))


def run_revision(folder: Path, start: str) -> dict[str, dict]:
    """Measures the cases with the code of a folder, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--cases", start, "--measure"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{folder}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Compares all cases and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", default="HEAD~1", help="the earlier revision")
    parser.add_argument("--after", default="HEAD", help="the later revision")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--cases", default="", help="only cases whose name starts with this")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure_cases(options.cases)
    from common import git, write  # not at the top: the measured process has the packages of another revision

    rounds, results = {"before": [], "after": []}, []
    hashes = {name: git("rev-parse", "--short", getattr(options, name)) for name in rounds}
    with tempfile.TemporaryDirectory() as root:
        for name, revision in hashes.items():
            archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
            Path(root, name).mkdir()
            subprocess.run(["tar", "-x", "-C", str(Path(root, name))], input=archive, check=True)
        for number in range(options.rounds):
            for name in list(rounds)[:: 1 if number % 2 == 0 else -1]:
                rounds[name].append(run_revision(Path(root, name), options.cases))
    for case in rounds["after"][0]:
        before, after = (torch.tensor(rounds[name][0][case]["output"]) for name in rounds)
        torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4, msg=lambda text, case=case: f"{case}: {text}")
        seconds = {name: [row[case]["seconds"] for row in found] for name, found in rounds.items()}
        ratios = [b / a for a, b in zip(seconds["before"], seconds["after"], strict=True)]
        print(f"{case:32} {statistics.median(ratios):.3f}   {min(ratios):.3f} to {max(ratios):.3f}", flush=True)
        results.append({"case": case, "ratio": statistics.median(ratios), "ratios": ratios, "seconds": seconds})
    write("revisions", results, **hashes, rounds=options.rounds)


if __name__ == "__main__":
    main()
