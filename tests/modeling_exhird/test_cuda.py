"""On a CUDA device as on a CPU: losses, gradients, keyphrases. Run by `make cuda`."""

import pytest
from transformers import pipeline

from .conftest import DOCUMENTS, each_kind, make_batch, tiny_exhird, word_tokenizer


@each_kind
def test_losses_and_gradients_are_the_cpus(kind, same_on_cuda):
    same_on_cuda(tiny_exhird(kind), make_batch())


@each_kind
def test_keyphrases_are_the_cpus_in_any_batch(kind, same_on_cuda):
    documents, found = DOCUMENTS["text"], {}
    for device in ("cpu", "cuda"):
        generate = pipeline("keyphrase-generation", model=tiny_exhird(kind), tokenizer=word_tokenizer(), device=device)
        found[device] = generate(documents, batch_size=4)
        alone = [phrase["keyphrase"] for phrase in generate(documents[0])]
        assert alone == [phrase["keyphrase"] for phrase in found[device][0]]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert [p["keyphrase"] for p in here] == [p["keyphrase"] for p in there]
        assert [p["score"] for p in here] == pytest.approx([p["score"] for p in there], rel=1e-2)
