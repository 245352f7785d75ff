"""The cost of deputies, relative to a stock BART of the same shape and weights.

    python benchmarks/moesumm_speed.py                   # on a CPU in float32, half an hour to an hour on two cores
    python benchmarks/moesumm_speed.py --device cuda     # in bfloat16, larger batches; writes moesumm_speed_cuda.json
    python benchmarks/moesumm_speed.py --only generation --shapes base --deputies 3 --name moesumm_part

Forward (source and target, no cache), a training step (forward and backward, with and without the margin loss), and beam
search with four beams; BART-base and BART-large with random weights and deputies of 512. Compared with the stock model: the
main expert only, and each implementation of the deputies; `auto` is the model's own choice. Selectors with random weights
spread tokens over the deputies about evenly. First the benchmark checks that the main expert only equals the stock model bit
for bit, and that all implementations agree.
"""

import functools
import gc
from collections.abc import Iterator

import torch
from timing import compare, describe, measure_parts, peak_of, speed_parser
from transformers import BartConfig, BartForConditionalGeneration

from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
from modeling_moesumm.layers_moesumm import margin_losses, token_losses

SHAPES = {"base": (768, 6, 12), "large": (1024, 12, 16)}  # d, layers of encoder and of decoder, heads
# device: shape: texts, source tokens, target tokens, texts and new tokens of a generation
BATCHES = {
    "cpu": {"base": (4, 256, 48, 1, 32), "large": (2, 256, 48, 1, 24)},
    "cuda": {"base": (16, 1024, 128, 8, 128), "large": (8, 1024, 128, 8, 128)},
}
IMPLEMENTATIONS = ("auto", "batched_mm", "grouped_mm", "eager")
DATASETS = ["news", "letters", "papers"]
WAYS = ("forward", "generation", "training")
BEAMS = 4


def models_of(shape: str, deputies: int, device: str):
    """A stock model, and a MoeSumm whose main expert has the same weights."""
    torch.manual_seed(0)
    d, layers, heads = SHAPES[shape]
    sizes = {"d_model": d, "encoder_layers": layers, "decoder_layers": layers, "dropout": 0.0}
    sizes |= {"encoder_ffn_dim": 4 * d, "decoder_ffn_dim": 4 * d}
    sizes |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    stock = BartForConditionalGeneration(BartConfig(**sizes))
    config = MoeSummConfig(
        text_config=BartConfig(**sizes), datasets=DATASETS, num_deputies=deputies, deputy_init_std=0.02
    )
    ours = MoeSummForConditionalGeneration(config)
    missing = ours.backbone.load_state_dict(stock.state_dict(), strict=False).missing_keys
    if any(".deputies." not in name for name in missing):
        raise RuntimeError(f"The stock weights do not fit: {missing}")
    return stock.to(device, dtype).eval(), ours.to(device, dtype).eval()


def batch_of(texts: int, source: int, target: int, vocabulary: int, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(4, vocabulary, (texts, source), device=device)
    labels = torch.randint(4, vocabulary, (texts, target), device=device)
    for row in range(texts):  # summaries of different lengths, at least half of the longest
        labels[row, target - (row % 4) * target // 8 :] = -100
    return {"input_ids": ids, "labels": labels, "dataset_ids": torch.arange(texts, device=device) % len(DATASETS)}


def plain(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "dataset_ids"}


def check_equal(stock, ours, device: str):
    """Main-only equals the stock model, all implementations agree, and deputies change the output."""
    batch = batch_of(3, 24, 8, 1000, device)
    model_inputs = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"][:, :8]}
    with torch.no_grad():
        expected = stock(**model_inputs).logits
        if not torch.equal(ours(**model_inputs).logits, expected):
            raise RuntimeError("The main expert alone is not the stock model.")
        logits = {}
        for name in IMPLEMENTATIONS:
            ours.set_experts_implementation(name)
            logits[name] = ours(**model_inputs, dataset_ids=batch["dataset_ids"]).logits.float()
        tolerance = 1e-3 if device == "cpu" else 0.1
        for name in IMPLEMENTATIONS:
            torch.testing.assert_close(logits[name], logits["eager"], atol=tolerance, rtol=tolerance)
        if torch.allclose(logits["eager"], expected.float(), atol=tolerance):
            raise RuntimeError("The deputies do not change the output, so this check is void.")


def with_implementation(ours, name: str, call):
    """The call with an implementation of the deputies."""

    def run():
        ours.set_experts_implementation(name)
        call()

    return run


def forward(model, inputs: dict) -> None:
    """Source and target, without a cache."""
    with torch.inference_mode():
        model(**inputs, use_cache=False)


def train(model, inputs: dict, coef: float = 0.0) -> None:
    """A training step; `coef` is that of the margin loss."""
    model.config.margin_loss_coef = coef
    model.zero_grad(set_to_none=True)
    model(**inputs).loss.backward()


def train_by_two_passes(model, inputs: dict) -> None:
    """The margin loss with two calls of the model, instead of one with twice the rows."""
    model.config.margin_loss_coef = 0.0
    model.zero_grad(set_to_none=True)
    labels = inputs["labels"].flatten()
    full = token_losses(model(**inputs).logits.flatten(0, 1), labels)
    main = token_losses(model(**plain(inputs), main_expert_only=True).logits.flatten(0, 1), labels)
    ((full + margin_losses(full, main)).sum() / (labels != -100).sum()).backward()


def candidates_of(way: str, stock, ours, batch: dict, new: int, implementations) -> dict:
    """The calls to time, by name; the stock model is the first."""
    generation = {"num_beams": BEAMS, "do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    call = {"forward": forward, "training": train, "generation": lambda model, x: model.generate(**x, **generation)}[
        way
    ]
    if way == "forward":  # the same target as in training, and no loss
        batch = {**batch, "decoder_input_ids": stock.prepare_decoder_input_ids_from_labels(batch["labels"])}
    if way != "training":
        batch = {name: value for name, value in batch.items() if name != "labels"}
    candidates = {
        "stock": functools.partial(call, stock, plain(batch)),
        "main only": functools.partial(call, ours, {**batch, "main_expert_only": True}),
    }
    calls = {name: (name, functools.partial(call, ours, batch)) for name in implementations}
    if way == "training":
        calls["auto, margin loss"] = "auto", functools.partial(train, ours, batch, 1.0)
        calls["auto, margin loss, two passes"] = "auto", functools.partial(train_by_two_passes, ours, batch)
    return candidates | {name: with_implementation(ours, *pair) for name, pair in calls.items()}


def cases(way: str, options, deputies_of: dict[str, list[int]], implementations) -> Iterator[tuple]:
    """Yields the models, the candidates of a way of running, and where they run, for each shape and number of deputies."""
    for shape, counts in deputies_of.items():
        texts, source, target, generated, new = BATCHES[options.device][shape]
        for deputies in counts:
            stock, ours = models_of(shape, deputies, options.device)
            check_equal(stock, ours, options.device)
            size = (generated if way == "generation" else texts, source, target)
            batch = batch_of(*size, stock.config.vocab_size, options.device)
            for model in (stock, ours):
                model.train(way == "training")
            # batched_mm with 32 deputies takes minutes
            chosen = [name for name in implementations if deputies <= 8 or name != "batched_mm"]
            where = {"shape": shape, "deputies": deputies, "texts": size[0], "source": source}
            where |= {"new": new} if way == "generation" else {"target": target}
            yield (stock, ours), candidates_of(way, stock, ours, batch, new, chosen), where
            del stock, ours
            gc.collect()


def measure_times(way: str, options) -> Iterator[dict]:
    """Times of a way of running: the first shape with all numbers of deputies, the others with the first of them."""
    first, *others = options.shapes
    deputies_of = {first: options.deputies} | dict.fromkeys(others, options.deputies[:1])
    for _, candidates, where in cases(way, options, deputies_of, options.implementations):
        yield compare(candidates, options.rounds, **where)


def measure_memory(options) -> Iterator[dict]:
    """The memory of a call without parameters and their gradients; measured last, because it slows calls down."""
    for shape in options.shapes:
        for way in WAYS:
            for models, candidates, where in cases(way, options, {shape: [3]}, ["auto"]):
                peaks = {}
                for name, call in candidates.items():
                    peak = peak_of(call, options.device == "cuda")
                    made = [p.grad for model in models for p in model.parameters() if p.grad is not None]
                    peaks[name] = round(peak - sum(grad.nbytes for grad in made) / 2**20, 1)
                    for model in models:
                        model.zero_grad(set_to_none=True)
                print(f"memory, {way}, {describe(peaks)}", flush=True)
                yield {"way": way, **where, "peak_mib": peaks}


def main():
    """Measures the ways of running, and their memory."""
    parts = {way: lambda options, way=way: measure_times(way, options) for way in WAYS} | {"memory": measure_memory}
    parser = speed_parser(__doc__, parts, devices=tuple(BATCHES))
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--deputies", nargs="+", type=int, default=[3, 8, 32])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    options = parser.parse_args()
    measure_parts(options, "moesumm_speed", parts, deputy_intermediate_size=512, beams=BEAMS)


if __name__ == "__main__":
    main()
