"""Every number of the reference ExHiRD on two documents: states, attention, losses, gradients, greedy decodes.

`tests/vectors/exhird_model.json` holds the reference's own modules' weights and outputs in float64.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdForKeyphraseGeneration,
    ExhirdTokenizer,
)
from modeling_exhird.data_exhird import make_labels
from modeling_exhird.decoder_exhird import HierarchicalDecoder

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "exhird_model.json").read_text())
EXPECTED = VECTORS["expected"]
V = len(VECTORS["vocab"])
MODULES = {
    "encoder.embeddings.make_embedding.emb_luts.0.": "encoder.embeddings.",
    "encoder.rnn.": "encoder.word_encoder.rnn.",
    "decoder.sent_attn.linear_in.": "decoder.phrase_attention.",
    "decoder.word_attn.linear_in.": "decoder.word_attention.",
    "decoder.word_attn.linear_out.": "decoder.output.",
    "generator.linear.": "generator.vocabulary.",
    "generator.linear_copy.": "generator.copy.",
}
CELLS = {"decoder.sent_dec_rnn.layers.0.": "phrase", "decoder.word_dec_rnn.layers.0.": "word"}
WORD_SIZE = VECTORS["dims"]["emb"]


def ours(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The reference's name of a weight, and a tensor of its shape -> ours; none for a weight that it never uses."""
    for theirs, module in MODULES.items():
        if name.startswith(theirs):
            return {module + name.removeprefix(theirs): value}
    for theirs, module in CELLS.items():
        if name.startswith(theirs):
            kind, gates = name.removeprefix(theirs).split("_")
            if (module, kind, gates) == ("word", "weight", "ih"):  # [word; feedback]: two of ours
                parts = value[:, :WORD_SIZE], value[:, WORD_SIZE:]
                return {"decoder.word_input.weight": parts[0], "decoder.word_feedback.weight": parts[1]}
            return {f"decoder.{module}_{'input' if gates == 'ih' else 'state'}.{kind}": value}
    return {}


def tensor(name):
    return torch.tensor(EXPECTED[name], dtype=torch.float64)


def make(**options):
    tokens = {"end_phrase_token_id": 4, "present_token_id": 5, "absent_token_id": 6}
    sizes = {"encoder_type": "bigru", "num_hidden_layers": 2, "hidden_size": 6, "embedding_size": 4}
    model = ExhirdForKeyphraseGeneration(ExhirdConfig(vocab_size=V, **tokens, **sizes, **options)).double()
    weights = {}
    for name, p in VECTORS["params"].items():
        weights |= ours(name, torch.tensor(p, dtype=torch.float64))
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def batch():
    """The documents by our tokenizer, labels and collator; the vocabulary has two more words than the reference's."""
    tokenizer = ExhirdTokenizer.from_words([*VECTORS["vocab"], "<digit>", "<eot>"])
    sources = [tokenizer.encode_source(" ".join(words)) for words in VECTORS["src"]]
    labels = torch.full((2, 7, 6), -100)
    for b, (source, phrases) in enumerate(zip(sources, VECTORS["targets"], strict=True)):
        kinds = ([words for start, *words in phrases if start == mark] for mark in ("<p_start>", "<a_start>"))
        for i, row in enumerate(make_labels(*kinds, source, tokenizer)):
            labels[b, i, : len(row)] = torch.tensor(row)
    found = DataCollatorForKeyphraseGeneration(tokenizer)([source._asdict() for source in sources])
    found["labels"] = labels
    return {name: x - 2 * (x >= len(tokenizer)) for name, x in found.items()}


def test_the_layout_is_the_references(batch):
    """Its rows are ours between <s> and a blank; its words out of the vocabulary are 0 there."""
    rows = torch.tensor(VECTORS["rows_tensor"])
    ours = batch["labels"].masked_fill(batch["labels"] >= V, 0).masked_fill(batch["labels"] == -100, 1)
    assert torch.equal(rows[:, :, 1:], ours)


def test_the_memory_and_the_first_phrase_state(batch):
    encoded = make().encoder(batch["input_ids"], batch["attention_mask"])
    assert_close(encoded.last_hidden_state, tensor("memory_bank_L_B_H").transpose(0, 1), rtol=0, atol=1e-9)
    assert_close(encoded.decoder_initial_state, tensor("phrase_init"), rtol=0, atol=1e-9)


def test_vectors_and_attention_of_every_step(batch, monkeypatch):
    model, kept = make(), {}
    forward = HierarchicalDecoder.forward

    def watched(self, *args):
        kept["a"], kept["alpha"] = forward(self, *args)
        return kept["a"], kept["alpha"]

    monkeypatch.setattr(HierarchicalDecoder, "forward", watched)
    outputs = model(**batch)
    scored = batch["labels"] != -100
    a = tensor("decoder_out_steps_B_H").view(7, 6, 2, 6).permute(2, 0, 1, 3)
    alpha = tensor("word_attention_steps_B_L").view(7, 6, 2, 8).permute(2, 0, 1, 3)
    assert_close(kept["a"][scored], a[scored], rtol=0, atol=1e-9)
    assert_close(kept["alpha"][scored], alpha[scored], rtol=0, atol=1e-9)
    nll = tensor("token_nll_S_T_B").permute(2, 0, 1)
    assert_close(-outputs.log_probs[scored], nll[scored], rtol=0, atol=1e-9)
    assert (outputs.log_probs[~scored] == 0).all()


@pytest.mark.parametrize("window", [1, 2, 4, -1])
def test_losses_of_every_window(window, batch):
    model = make(exclusive_loss_coef=1.0, exclusive_loss_window=window).train()
    expected, outputs = EXPECTED["losses_by_window"][str(window)], model(**batch)
    assert 2 * outputs.generation_loss.item() == pytest.approx(expected["gen_sum"], abs=1e-9)
    assert 2 * outputs.exclusive_loss.item() == pytest.approx(expected["exclusive_sum"], abs=1e-9)
    assert outputs.loss.item() == pytest.approx(expected["total_over_batch"], abs=1e-9)
    assert model.eval()(**batch).loss.item() == pytest.approx(expected["gen_sum"] / 2, abs=1e-9)


def test_norms_of_all_gradients(batch):
    model = make(exclusive_loss_coef=1.0, exclusive_loss_window=4).train()
    model(**batch).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, norm in EXPECTED["grad_norms_exhird_s_window4"].items():
        parts = [gradients.pop(part) for part in ours(name, torch.tensor(VECTORS["params"][name]))]
        if parts:
            assert float(torch.cat(parts, -1).norm()) == pytest.approx(norm, abs=1e-9), name
    assert not gradients


@pytest.mark.parametrize("window", [0, 1, 2, 4, -1])
def test_greedy_decodes_token_for_token(window, batch):
    model, given = make().eval(), {name: batch[name] for name in ("input_ids", "attention_mask", "copy_ids")}
    rows = model.generate_phrases(**given, max_phrases=8, max_words_per_phrase=5, exclusion_window=window)
    expected = EXPECTED["greedy"][f"window={window}"]
    for b, words in enumerate(VECTORS["src"]):
        oov = list(dict.fromkeys(word for word in words if word not in VECTORS["vocab"]))
        names = VECTORS["vocab"] + [f"COPY:{word}" for word in oov]
        assert [[names[i] for i in row] for row in rows.ids[b].tolist()] == expected[b]
    if window == -1:
        firsts = [[row[1] for row in document.tolist() if row[1] != 1] for document in rows.ids]
        assert all(len(set(first)) == len(first) for first in firsts)
