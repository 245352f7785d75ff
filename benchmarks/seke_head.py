"""Which implementation of SEKE's head is fastest at which size?

    python benchmarks/seke_head.py            # about 5 minutes on two cores

Experts: the loop over experts (the reference), every expert on every token (dense), and tokens sorted by expert (ours).
Recurrent encoder: PyTorch's packed sequences, and padded passes in each direction (ours on a CPU). Complete head: the loop over
padded batches and packed sequences, and the model's own implementation. Each forward, and forward with the backward pass.
"""

import argparse

import torch
from common import interleaved, write

from modeling_seke import SekeConfig
from modeling_seke.layers_seke import PackedTokens, SekeMoe, SekeRnn, reference_experts

SIZES = [(1, 160), (8, 160), (8, 256), (32, 160)]  # documents, longest document


def lengths(documents: int, longest: int, shortest: float) -> torch.Tensor:
    """Lengths of the documents, evenly spaced from `shortest` times the longest to the longest."""
    if documents == 1:
        return torch.tensor([longest])
    return torch.linspace(shortest * longest, longest, documents).long()


def layout_of(documents: int, longest: int, shortest: float) -> PackedTokens:
    """The layout of documents of these lengths."""
    return PackedTokens((torch.arange(longest) < lengths(documents, longest, shortest)[:, None]).long())


def both_ways(call, parameters):
    """Functions that run call() with and without the backward pass."""

    def train():
        for p in parameters:
            p.grad = None
        call().square().mean().backward()

    def infer():
        with torch.no_grad():
            call()

    return {"forward and backward": train, "forward": infer}


def time_candidates(title, candidates, parameters, rounds, results, **size):
    """Times the candidates at one size and appends a row to the results for each direction."""
    for way in ("forward and backward", "forward"):
        times = interleaved({name: both_ways(call, parameters)[way] for name, call in candidates.items()}, rounds)
        plain, *_, ours = (entry["median_ms"] for entry in times.values())
        row = {"what": title, "way": way, **size, "times": times, "ratio": plain / ours}
        results.append(row)
        description = ", ".join(f"{name} {value}" for name, value in size.items())
        names = "   ".join(f"{name} {entry['median_ms']:.1f} ms" for name, entry in times.items())
        print(f"{title}, {way}, {description}   {names}   {row['ratio']:.2f}x", flush=True)


def dense_experts(experts, x, index, weights):
    """Every expert processes every token, in three batched products; experts that were not selected have weight 0."""
    E, U, a, V, b, W, c = experts.num_experts, *experts.stacked_weights()
    gates = x.new_zeros(len(x), E).scatter(1, index, weights)  # (T, E)
    h = torch.baddbmm(a[:, None], x.expand(E, *x.shape), U.mT).relu()  # (E, T, I)
    h = torch.nn.functional.dropout(torch.baddbmm(b[:, None], h, V.mT), experts.dropout, experts.training)
    return (torch.baddbmm(c[:, None], h, W.mT) * gates.T[:, :, None]).sum(0)  # (T, d)


def cases(moe: SekeMoe, rnn: SekeRnn, layout: PackedTokens, padded: torch.Tensor):
    """Yields what is timed at one size: title, candidates, parameters. `padded` are the backbone's states (B, S, d)."""
    x, all_states, d = layout.gather(padded), padded.flatten(0, 1), padded.shape[-1]
    _, weights, index = moe.router(x)
    weights = weights.detach()
    experts = {  # the plain one first, ours last
        "loop": lambda: reference_experts(moe.experts, x, index, weights),
        "dense": lambda: dense_experts(moe.experts, x, index, weights),
        "sorted": lambda: moe.experts(x, index, weights),
    }
    yield "experts", experts, list(moe.experts.parameters())
    recurrent = {"packed": lambda: rnn._rnn_packed(x, layout), "padded passes": lambda: rnn._lstm_padded(x, layout)}
    yield "BiLSTM", recurrent, list(rnn.parameters())

    def plain_head():
        _, w, i = moe.router(all_states)  # padding is routed and processed like text
        y = layout.gather(reference_experts(moe.experts, all_states, i, w).unflatten(0, padded.shape[:2]))
        return y + rnn._rnn_packed(y, layout).unflatten(-1, (2, d)).sum(-2)

    head = {"plain": plain_head, "ours": lambda: rnn(moe(layout.gather(padded))[0], layout)}
    yield "head", head, [*moe.parameters(), *rnn.parameters()]


def main():
    """Times all implementations at all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden_size", type=int, default=384, help="hidden size of the backbone")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    args = parser.parse_args()
    torch.manual_seed(0)
    d, results = args.hidden_size, []
    config = SekeConfig(text_config={"model_type": "bert", "hidden_size": d, "num_attention_heads": 12})
    moe, rnn = SekeMoe(config), SekeRnn(config)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.02)

    for documents, longest in SIZES:
        for shortest in (1.0, 0.3) if documents > 1 else (1.0,):
            layout = layout_of(documents, longest, shortest)
            size = {"d": d, "documents": documents, "longest": longest, "tokens": len(layout.index)}
            for title, candidates, parameters in cases(moe, rnn, layout, torch.randn(documents, longest, d)):
                time_candidates(title, candidates, parameters, args.rounds, results, **size)
    write("seke_head", results, hidden_size=d, rounds=args.rounds)


if __name__ == "__main__":
    main()
