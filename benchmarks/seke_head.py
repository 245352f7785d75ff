"""Which implementation of SEKE's head is fastest at which size?

    python benchmarks/seke_head.py            # about 5 minutes on two cores

Experts: the loop over experts (the reference), every expert on every token (dense), and tokens sorted by expert (ours).
Recurrent encoder: PyTorch's packed sequences, and padded passes in each direction (ours on a CPU). Complete head: the loop over
padded batches and packed sequences, and the model's own implementation. Each forward, and forward with the backward pass.
"""

from collections.abc import Iterator

import torch
from timing import both_ways, compare, measure_parts, speed_parser

from modeling_seke import SekeConfig
from modeling_seke.layers_seke import PackedTokens, SekeMoe, SekeRnn

SIZES = [(1, 160), (8, 160), (8, 256), (32, 160)]  # documents, longest document


def loop_experts(experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The formula as a loop over experts, with the tokens of each."""
    y = torch.zeros_like(x)
    for e, expert_weights in enumerate(experts.unbind_experts()):
        token, slot = (index == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, experts.expert_forward(x[token], expert_weights) * weights[token, slot, None])
    return y


def dense_experts(experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert on every token."""
    E, (U, a, V, b, W, c) = experts.num_experts, experts.stacked_weights()
    gates = x.new_zeros(len(x), E).scatter(1, index, weights)  # (T, E)
    h = torch.baddbmm(a[:, None], x.expand(E, *x.shape), U.mT).relu()  # (E, T, I)
    h = torch.nn.functional.dropout(torch.baddbmm(b[:, None], h, V.mT), experts.dropout, experts.training)
    return (torch.baddbmm(c[:, None], h, W.mT) * gates.T[:, :, None]).sum(0)  # (T, d)


def candidates_of(what: str, moe: SekeMoe, rnn: SekeRnn, layout: PackedTokens, padded: torch.Tensor) -> dict:
    """The implementations of a part of the head, the plain one first. `padded` are the backbone's states (B, S, d)."""
    x, all_states, d = layout.gather(padded), padded.flatten(0, 1), padded.shape[-1]
    _, weights, index = moe.router(x)
    weights = weights.detach()

    def plain_head():
        _, w, i = moe.router(all_states)  # padding is routed and processed like text
        y = layout.gather(loop_experts(moe.experts, all_states, i, w).unflatten(0, padded.shape[:2]))
        return y + rnn._rnn_packed(y, layout).unflatten(-1, (2, d)).sum(-2)

    return {
        "experts": {
            "loop": lambda: loop_experts(moe.experts, x, index, weights),
            "dense": lambda: dense_experts(moe.experts, x, index, weights),
            "sorted": lambda: moe.experts(x, index, weights),
        },
        "BiLSTM": {"packed": lambda: rnn._rnn_packed(x, layout), "padded passes": lambda: rnn._lstm_padded(x, layout)},
        "head": {"plain": plain_head, "ours": lambda: rnn(moe(layout.gather(padded))[0], layout)},
    }[what]


def measure(what: str, options) -> Iterator[dict]:
    """The rows of a part at all sizes: documents of equal lengths, and of lengths from 0.3 times the longest."""
    torch.manual_seed(0)
    d = options.hidden_size
    config = SekeConfig(text_config={"model_type": "bert", "hidden_size": d, "num_attention_heads": 12})
    moe, rnn = SekeMoe(config), SekeRnn(config)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.02)
    parameters = {"experts": moe.experts.parameters(), "BiLSTM": rnn.parameters()}
    leaves = list(parameters.get(what, [*moe.parameters(), *rnn.parameters()]))
    for documents, longest in SIZES:
        for shortest in (1.0, 0.3) if documents > 1 else (1.0,):
            lengths = torch.linspace(shortest * longest, longest, documents).long()
            layout = PackedTokens((torch.arange(longest) < lengths[:, None]).long())
            candidates = candidates_of(what, moe, rnn, layout, torch.randn(documents, longest, d))
            size = {"d": d, "documents": documents, "longest": longest, "tokens": len(layout.index)}
            for way in ("forward and backward", "forward"):
                calls = {name: both_ways(call, leaves)[way] for name, call in candidates.items()}
                yield compare(calls, options.rounds, way=way, **size)


def main():
    """Times all implementations at all sizes."""
    names = ("experts", "BiLSTM", "head")
    parser = speed_parser(__doc__, names, rounds=7)
    parser.add_argument("--hidden_size", type=int, default=384, help="hidden size of the backbone")
    options = parser.parse_args()
    parts = {what: lambda options, what=what: measure(what, options) for what in names}
    measure_parts(options, "seke_head", parts, hidden_size=options.hidden_size)


if __name__ == "__main__":
    main()
