"""The cost of deputies, relative to a stock BART of the same shape and weights.

    python benchmarks/moesumm_speed.py                   # on a CPU in float32, about an hour on two cores
    python benchmarks/moesumm_speed.py --device cuda     # in bfloat16, larger batches; writes moesumm_speed_cuda.json
    python benchmarks/moesumm_speed.py --ways generation --shapes base --deputies 3 --name moesumm_part

Forward (source and target, no cache), a training step (forward and backward, with and without the margin loss), and beam
search with four beams; BART-base and BART-large with random weights and deputies of 512. Compared with the stock model: the
main expert only, and each implementation of the deputies; `auto` is the model's own choice. Selectors with random weights
spread tokens over the deputies about evenly. First the benchmark checks that the main expert only equals the stock model bit
for bit, and that all implementations agree.
"""

import argparse
import functools
import gc

import torch
from common import interleaved, peak_of, write
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
WAYS = ("forward", "training", "generation")
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
    def run():
        ours.set_experts_implementation(name)
        call()

    return run


def candidates_of(way: str, stock, ours, batch: dict, new: int, implementations) -> dict:
    """The calls to time, by name; the stock model is the first."""
    cuda = batch["input_ids"].is_cuda

    def wait():
        if cuda:
            torch.cuda.synchronize()

    def forward(model, inputs):
        with torch.inference_mode():
            model(**inputs, use_cache=False)
        wait()

    def training(model, inputs, coef=0.0):
        ours.config.margin_loss_coef = coef
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        wait()

    def generation(model, inputs):
        model.generate(**inputs, num_beams=BEAMS, do_sample=False, max_new_tokens=new, min_new_tokens=new)
        wait()

    call = {"forward": forward, "training": training, "generation": generation}[way]
    if way == "forward":  # the same target as in training, and no loss
        batch = {**batch, "decoder_input_ids": stock.prepare_decoder_input_ids_from_labels(batch["labels"])}
    if way != "training":
        batch = {name: value for name, value in batch.items() if name != "labels"}
    candidates = {
        "stock": functools.partial(call, stock, plain(batch)),
        "main only": functools.partial(call, ours, {**batch, "main_expert_only": True}),
    }
    for name in implementations:
        candidates[name] = with_implementation(ours, name, functools.partial(call, ours, batch))
    if way == "training":
        margin = functools.partial(training, ours, batch, 1.0)
        candidates["auto, margin loss"] = with_implementation(ours, "auto", margin)
        two = functools.partial(train_by_two_passes, ours, batch, wait)
        candidates["auto, margin loss, two passes"] = with_implementation(ours, "auto", two)
    return candidates


def train_by_two_passes(ours, batch: dict, wait):
    """The margin loss with two calls of the model, instead of one with twice the rows."""
    ours.config.margin_loss_coef = 0.0
    ours.zero_grad(set_to_none=True)
    labels = batch["labels"].flatten()
    full = token_losses(ours(**batch).logits.flatten(0, 1), labels)
    main = token_losses(ours(**plain(batch), main_expert_only=True).logits.flatten(0, 1), labels)
    ((full + margin_losses(full, main)).sum() / (labels != -100).sum()).backward()
    wait()


def measure_memory(args, results: list):
    """The memory of a call without parameters and their gradients; measured last, because it slows calls down."""
    for shape in args.shapes:
        texts, source, target, written, new = BATCHES[args.device][shape]
        stock, ours = models_of(shape, 3, args.device)
        for way in args.ways:
            size = (written if way == "generation" else texts, source, target)
            batch = batch_of(*size, stock.config.vocab_size, args.device)
            for model in (stock, ours):
                model.train(way == "training")
            peaks = {}
            for name, call in candidates_of(way, stock, ours, batch, new, ["auto"]).items():
                peak = peak_of(call, args.device == "cuda")
                made = [p.grad for model in (stock, ours) for p in model.parameters() if p.grad is not None]
                peaks[name] = round(peak - sum(grad.nbytes for grad in made) / 2**20, 1)
                for model in (stock, ours):
                    model.zero_grad(set_to_none=True)
            results.append({"what": "memory", "way": way, "shape": shape, "deputies": 3, "peak_mib": peaks})
            print(
                f"memory, {way}, shape {shape}   " + "   ".join(f"{n} {m:,.0f} MiB" for n, m in peaks.items()),
                flush=True,
            )
        del stock, ours


def time_group(way: str, candidates: dict, rounds: int, results: list, where: dict):
    """Times one comparison and adds it to the results, with the ratios to the stock model's time."""
    times = interleaved(candidates, rounds)
    stock = times["stock"]["median_ms"]
    ratios = {name: entry["median_ms"] / stock for name, entry in times.items()}
    row = {"what": way, **where, "times": times, "ratios": ratios}
    if "auto, margin loss" in ratios:
        row["margin_ratio"] = ratios["auto, margin loss"] / ratios["auto"]
        row["two_passes_ratio"] = ratios["auto, margin loss, two passes"] / ratios["auto"]
    results.append(row)
    description = ", ".join(f"{name} {value}" for name, value in where.items())
    names = "   ".join(f"{name} {entry['median_ms']:.0f} ms ({ratios[name]:.2f})" for name, entry in times.items())
    print(f"{way}, {description}   {names}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=BATCHES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--deputies", nargs="+", type=int, default=[3, 8, 32])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--name", help="name of the file in results/")
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        texts, source, target, written, new = BATCHES[args.device][shape]
        for deputies in args.deputies if shape == args.shapes[0] else args.deputies[:1]:
            stock, ours = models_of(shape, deputies, args.device)
            check_equal(stock, ours, args.device)
            for way in args.ways:
                size = (written if way == "generation" else texts, source, target)
                batch = batch_of(*size, stock.config.vocab_size, args.device)
                for model in (stock, ours):
                    model.train(way == "training")
                # batched_mm with 32 deputies takes minutes
                implementations = [name for name in args.implementations if deputies <= 8 or name != "batched_mm"]
                candidates = candidates_of(way, stock, ours, batch, new, implementations)
                where = {"shape": shape, "deputies": deputies, "texts": size[0], "source": source}
                where["new" if way == "generation" else "target"] = new if way == "generation" else target
                time_group(way, candidates, args.rounds, results, where)
                for model in (stock, ours):
                    model.zero_grad(set_to_none=True)
            del stock, ours, candidates
            gc.collect()
    measure_memory(args, results)
    settings = {"device": args.device, "rounds": args.rounds, "deputy_intermediate_size": 512, "beams": BEAMS}
    write(args.name or ("moesumm_speed" if args.device == "cpu" else "moesumm_speed_cuda"), results, **settings)


if __name__ == "__main__":
    main()
