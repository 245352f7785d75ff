"""On a CUDA device as on a CPU: losses and gradients of all heads. Run by `make cuda`."""

import pytest


@pytest.mark.parametrize("kind", ["tags", "classes", "answers"])
@pytest.mark.parametrize("backbone", ["bert", "modernbert"])
def test_losses_and_gradients_are_the_cpus(kind, backbone, tiny_hypernet, batch, target, same_on_cuda):
    same_on_cuda(tiny_hypernet(kind, backbone), target(kind, batch))
