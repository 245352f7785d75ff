"""On a CUDA device as on a CPU: losses, gradients, keyphrases. Run by `make cuda`."""

import pytest
import torch
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)

TEXTS = ["the graph cuts of a network", "learning", "graph networks and the learning of cuts in a graph " * 20]
each_head = pytest.mark.parametrize("head", [{}, {"use_moe": False}, {"use_rnn": False}, {"rnn_type": "gru"}])


@each_head
@pytest.mark.parametrize("backbone", ["bert", "deberta-v2", "modernbert"])
def test_losses_and_gradients_are_the_cpus(backbone, head, tiny_seke, tiny_tokenizer, same_on_cuda):
    batch = dict(tiny_tokenizer([text[:60] for text in TEXTS], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    torch.manual_seed(0)
    labels = torch.randint(0, 3, batch["input_ids"].shape).masked_fill(batch["attention_mask"] == 0, -100)
    same_on_cuda(tiny_seke(backbone, **head), {**batch, "labels": labels})


def test_keyphrases_are_the_cpus_in_any_batch(tiny_seke, tiny_tokenizer, same_on_cuda):
    actual = {}
    for device in ("cpu", "cuda"):
        extract = pipeline(
            "keyphrase-extraction", model=tiny_seke(), tokenizer=tiny_tokenizer, device=device, threshold=0.01
        )
        actual[device] = extract(TEXTS, batch_size=3)
        assert [phrase["keyphrase"] for phrase in extract(TEXTS[2])] == [p["keyphrase"] for p in actual[device][2]]
    for on_cpu, on_cuda in zip(actual["cpu"], actual["cuda"], strict=True):
        assert [p["keyphrase"] for p in on_cpu] == [p["keyphrase"] for p in on_cuda]
        assert [p["score"] for p in on_cpu] == pytest.approx([p["score"] for p in on_cuda], abs=1e-3)
    assert any(actual["cpu"])
