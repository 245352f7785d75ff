"""Compares the speed of two revisions.

    python benchmarks/revisions.py --before 95093b2                  # MoeSumm and Lexicon, about 15 minutes on two cores
    python benchmarks/revisions.py --before HEAD~1 --cases lexicon   # only cases whose name starts with this

Both revisions are taken from git, so uncommitted changes are not measured. Each runs in a separate process, and the processes
take turns (A B A B ...), with one warm-up each. Both have the same weights and inputs, and the script first checks that their
outputs agree. A ratio is the median of the rounds' ratios, after over before: below 1 is faster.
"""

import argparse
import inspect
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


def accepted(cls, **options) -> dict:
    """The options that a class of this revision accepts, for names that changed between revisions."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: value for name, value in options.items() if name in parameters}


# The models: the same weights in every revision


def moesumm_model():
    """A small MoeSumm."""
    from transformers import BartConfig

    from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration

    sizes = {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "dropout": 0.0, "vocab_size": 8000}
    sizes |= {
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    }
    names = {"text_config": BartConfig(**sizes), "backbone_config": BartConfig(**sizes)}
    config = MoeSummConfig(datasets=["news", "letters", "papers"], num_deputies=3, **accepted(MoeSummConfig, **names))
    return fill(MoeSummForConditionalGeneration(config))


def lexicon_model(policy: str):
    """A small Lexicon model with a routing policy."""
    from modeling_lexicon import LexiconConfig, LexiconForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    config = LexiconConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, routing_policy=policy, pad_token_id=None
    )
    return fill(LexiconForCausalLM(config))


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


# The cases: name -> (call, output to compare)


def moesumm_cases() -> dict:
    """Calls of MoeSumm by name."""
    model = moesumm_model()
    batch = {
        "input_ids": random_ids(4, 192, 8000),
        "labels": random_ids(4, 48, 8000),
        "dataset_ids": torch.arange(4) % 3,
    }

    def forward():
        model.eval()
        with torch.inference_mode():
            return model(**batch, use_cache=False).logits

    def training(coef: float):
        model.train().zero_grad(set_to_none=True)
        model.config.margin_loss_coef = coef
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    def beams():
        model.eval()
        inputs = {"input_ids": batch["input_ids"][:2], "dataset_ids": batch["dataset_ids"][:2]}
        return model.generate(**inputs, num_beams=4, do_sample=False, max_new_tokens=24, min_new_tokens=24)

    return {
        "moesumm forward": forward,
        "moesumm training": lambda: training(0.0),
        "moesumm training, margin loss": lambda: training(1.0),
        "moesumm four beams": beams,
    }


def lexicon_cases() -> dict:
    """Calls of Lexicon models by name."""

    def of(policy: str) -> dict:
        model = lexicon_model(policy)
        ids = random_ids(4, 128, 2048)
        more = {"domain_ids": torch.arange(4)} if policy == "domain" else {}

        def forward():
            model.eval()
            with torch.inference_mode():
                return model(input_ids=ids, **more, use_cache=False).logits

        def training():
            model.train().zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids, **more).loss
            loss.backward()
            return loss.detach()

        def generate():
            model.eval()
            return model.generate(input_ids=ids[:, :32], **more, do_sample=False, max_new_tokens=32, pad_token_id=0)

        ways = {"forward": forward, "training": training, "generate": generate}
        return {f"lexicon {policy} {name}": call for name, call in ways.items()}

    return {name: call for policy in ("token", "sequence_soft", "domain") for name, call in of(policy).items()}


# One process per revision


def serve(folder: str) -> None:
    """Runs one case per line of JSON on stdin; prints its seconds and, if `check` is set, a sample of its output."""
    from transformers.utils import logging

    import modeling_lexicon

    if Path(folder).resolve() not in Path(modeling_lexicon.__file__).resolve().parents:
        raise RuntimeError(
            f"{modeling_lexicon.__file__} was imported instead of the code in {folder}. Uninstall the other copy."
        )
    logging.set_verbosity_error()
    torch.set_num_threads(max(1, (os.cpu_count() or 2)))
    cases = moesumm_cases() | lexicon_cases()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        output = cases[request["case"]]()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds}
        if request["check"]:
            answer["output"] = output.double().flatten()[:: max(1, output.numel() // 500)].tolist()
        print(json.dumps(answer), flush=True)


class Worker:
    """A process with the code of one revision."""

    def __init__(self, revision: str, folder: Path):
        checkout(revision, folder)
        environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--serve", str(folder)]
        self.process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.cases = json.loads(self.process.stdout.readline())

    def ask(self, case: str, check: bool = False) -> dict:
        """Runs a case; with `check`, its output is included."""
        self.process.stdin.write(json.dumps({"case": case, "check": check}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def checkout(revision: str, folder: Path) -> None:
    """Writes the files of a revision into a new folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def short_hash(revision: str) -> str:
    """The abbreviated commit of a revision."""
    command = ["git", "rev-parse", "--short", revision]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def compare(before: Worker, after: Worker, case: str, rounds: int) -> dict:
    """Checks that the outputs of a case agree, then times it in turns."""
    outputs = [torch.tensor(worker.ask(case, check=True)["output"]) for worker in (before, after)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4, msg=lambda text: f"{case}: {text}")
    seconds = {"before": [], "after": []}
    for number in range(rounds):
        order = [("before", before), ("after", after)]
        for name, worker in order if number % 2 == 0 else reversed(order):
            seconds[name].append(worker.ask(case)["seconds"])
    ratios = [b / a for a, b in zip(seconds["before"], seconds["after"], strict=True)]
    return {"case": case, "ratio": statistics.median(ratios), "ratios": ratios, "seconds": seconds}


def main():
    """Compares all cases and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", default="HEAD~1", help="the earlier revision")
    parser.add_argument("--after", default="HEAD", help="the later revision")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--cases", default="", help="only cases whose name starts with this")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    from common import write

    revisions = {"before": short_hash(args.before), "after": short_hash(args.after)}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Worker(revision, Path(folder) / name) for name, revision in revisions.items())
        for case in after.cases:
            if case.startswith(args.cases):
                results.append(compare(before, after, case, args.rounds))
                low, high = statistics.quantiles(results[-1]["ratios"], n=4)[::2]
                print(f"{case:32} {results[-1]['ratio']:.3f}   quartiles {low:.3f} to {high:.3f}", flush=True)
        before.close()
        after.close()
    write("revisions", results, **revisions, rounds=args.rounds)


if __name__ == "__main__":
    main()
