"""float64 stays float64 through the hypernetwork's heads; half precisions have float32 losses."""

import pytest
import torch
from torch.testing import assert_close


def test_the_meta_embedding_has_the_precision_of_the_recurrence(tiny_hypernet, batch):
    assert tiny_hypernet().double()(**batch).meta_embedding.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiny_hypernet()(**batch).meta_embedding.dtype == torch.float32


@pytest.mark.parametrize("problem, labels", [("regression", 1), ("multi_label_classification", 3)])
def test_every_loss_of_classes_is_in_float64(problem, labels, tiny_hypernet, batch):
    model = tiny_hypernet("classes", problem_type=problem, num_labels=labels).double()
    target = torch.rand(3, labels, dtype=torch.float64)
    outputs = model(**batch, labels=target.squeeze(-1) if labels == 1 else target)
    loss = torch.nn.MSELoss() if labels == 1 else torch.nn.BCEWithLogitsLoss(reduction="sum")
    expected = loss(outputs.logits, target) / (1 if labels == 1 else target.numel())
    assert outputs.loss.dtype == torch.float64
    assert_close(outputs.loss, expected, rtol=1e-14, atol=0)
