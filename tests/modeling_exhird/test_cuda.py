"""On a CUDA device as on a CPU: losses and gradients. Run by `make cuda`."""

from .conftest import each_kind, make_batch, tiny_exhird


@each_kind
def test_losses_and_gradients_are_the_cpus(kind, same_on_cuda):
    same_on_cuda(tiny_exhird(kind), make_batch())
