"""The CRF compared with two libraries: likelihood with gradients, marginals, and best paths.

    python benchmarks/hypernet_crf.py      # about a minute; pip install pytorch-crf torch-struct

Sixteen rows of three tags, all of the same length or of 0.3 to 1 times that length. Both libraries require contiguous positions,
so there are no gaps in the mask. pytorch-crf processes one position at a time and has no marginals. torch-struct multiplies pairs
like ours, but materialises the potentials of every step and computes marginals by autograd. The script first checks that all
results agree.
"""

from collections.abc import Iterator

import torch
from timing import compare, measure_parts, speed_parser
from torch_struct import LinearChainCRF
from torchcrf import CRF

from modeling_hypernet.crf_hypernet import LinearChainCrf

LinearChainCRF.set_default_validate_args(False)  # otherwise it warns that there is nothing to validate
ROWS, TAGS = 16, 3
LENGTHS = (32, 128, 512)
QUANTITIES = ("likelihood", "marginals", "best path")


def systems(length: int, shortest: float) -> dict[str, dict]:
    """Calls by quantity and system."""
    torch.manual_seed(0)
    lengths = torch.linspace(shortest * length, length, ROWS).long()
    mask = torch.arange(length) < lengths[:, None]
    emissions, tags = torch.randn(ROWS, length, TAGS, requires_grad=True), torch.randint(TAGS, (ROWS, length))
    ours, theirs = LinearChainCrf(TAGS), CRF(TAGS, batch_first=True)
    for own, other in (
        (ours.start, theirs.start_transitions),
        (ours.end, theirs.end_transitions),
        (ours.transitions, theirs.transitions),
    ):
        own.data.uniform_(-0.1, 0.1)
        other.data.copy_(own.data)

    def chain():
        """Potentials (B, W - 1, next, previous) of torch-struct; the first includes the start's, the last the end's."""
        potentials = emissions[:, 1:, :, None] + ours.transitions.T
        first = (emissions[:, 0] + ours.start)[:, None, None, :] * (torch.arange(length - 1) == 0)[:, None, None]
        last = ours.end[:, None] * (torch.arange(length - 1) == lengths[:, None] - 2)[..., None, None]
        return LinearChainCRF((potentials + first + last).contiguous(), lengths)

    def struct_likelihood():
        events = LinearChainCRF.struct.to_parts(tags, TAGS, lengths)
        return chain().log_prob(events.type_as(emissions))

    def struct_paths():
        with torch.no_grad():
            return LinearChainCRF.struct.from_parts(chain().argmax)[0]

    likelihood = {
        "ours": lambda: ours.log_likelihood(emissions, tags, mask),
        "pytorch-crf": lambda: theirs(emissions, tags, mask, reduction="none"),
        "torch-struct": struct_likelihood,
    }
    marginals = {
        "ours": torch.no_grad()(lambda: ours.log_marginals(emissions, mask)),
        "torch-struct": lambda: chain().marginals,
    }
    paths = {
        "ours": lambda: ours.viterbi(emissions, mask)[0],
        "pytorch-crf": lambda: theirs.decode(emissions, mask),
        "torch-struct": struct_paths,
    }
    check(likelihood, marginals, paths, mask, lengths)
    leaves = [emissions, *ours.parameters(), *theirs.parameters()]
    likelihood = {name: with_gradients(call, leaves) for name, call in likelihood.items()}
    return dict(zip(QUANTITIES, (likelihood, marginals, paths), strict=True))


def check(likelihood: dict, marginals: dict, paths: dict, mask: torch.Tensor, lengths: torch.Tensor):
    """Raises an AssertionError if two systems differ."""
    for name in ("pytorch-crf", "torch-struct"):
        torch.testing.assert_close(likelihood["ours"](), likelihood[name](), rtol=1e-4, atol=1e-3)
    ours, inside = marginals["ours"]().exp()[:, 1:], mask[:, 1:, None]
    torch.testing.assert_close(ours * inside, marginals["torch-struct"]().sum(-1) * inside, rtol=0, atol=1e-4)
    found = [call() for call in paths.values()]
    for i, n in enumerate(lengths.tolist()):
        tags = [list(map(int, path[i][:n])) for path in found]
        assert tags[0] == tags[1] == tags[2], f"row {i}"


def with_gradients(call, leaves):
    """A function that runs the call and its backward pass."""

    def run():
        for leaf in leaves:
            leaf.grad = None
        call().sum().backward()

    return run


def measure(what: str, options) -> Iterator[dict]:
    """The rows of a quantity at all lengths."""
    for longest in LENGTHS:
        for shortest in (1.0, 0.3):
            yield compare(systems(longest, shortest)[what], options.rounds, longest=longest, shortest=shortest)


def main():
    """Times all systems at all lengths."""
    parts = {what: lambda options, what=what: measure(what, options) for what in QUANTITIES}
    options = speed_parser(__doc__, parts, rounds=9).parse_args()
    measure_parts(options, "hypernet_crf", parts, rows=ROWS, tags=TAGS)


if __name__ == "__main__":
    main()
