"""float64 stays float64 through the hypernetwork's heads; half precisions have float32 losses."""

import copy

import pytest
import torch
from torch.testing import assert_close

from .conftest import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_float64_has_its_loss_in_float64(kind, tiny_hypernet, batch, target):
    exact, labelled = tiny_hypernet(kind).double(), target(kind, batch)
    outputs = exact(**labelled)
    logits = outputs.end_logits if kind == "answers" else outputs.logits
    assert outputs.loss.dtype == logits.dtype == outputs.meta_embedding.dtype == torch.float64
    assert copy.deepcopy(exact).bfloat16()(**labelled).loss.dtype == torch.float32
    head = exact.qa_outputs if kind == "answers" else exact.classifier
    (gradient,) = torch.autograd.grad(outputs.loss, head.weight)
    with torch.no_grad():
        head.weight[0, 0] += 1e-9
        moved = exact(**labelled).loss - outputs.loss
    assert_close(moved / 1e-9, gradient[0, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("problem, labels", [("regression", 1), ("multi_label_classification", 3)])
def test_every_loss_of_classes_is_in_float64(problem, labels, tiny_hypernet, batch):
    model = tiny_hypernet("classes", problem_type=problem, num_labels=labels).double()
    target = torch.rand(3, labels, dtype=torch.float64)
    outputs = model(**batch, labels=target.squeeze(-1) if labels == 1 else target)
    loss = torch.nn.MSELoss() if labels == 1 else torch.nn.BCEWithLogitsLoss(reduction="sum")
    expected = loss(outputs.logits, target) / (1 if labels == 1 else target.numel())
    assert outputs.loss.dtype == torch.float64
    assert_close(outputs.loss, expected, rtol=1e-14, atol=0)
