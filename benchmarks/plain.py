"""Plain versions of what the models compute, as loops over the formulas: what `speed.py` compares them with."""

import numpy as np
import torch
import torch.nn.functional as F

from lexperts_lite.ranking import rank_phrases
from lexperts_lite.words import split_words
from modeling_exhird.decoder_exhird import EPS, gru_cell

PADDED = 256  # sub-tokens of a document


def loop_experts(experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The formula of a mixture as a loop over experts, with the tokens of each."""
    y = torch.zeros_like(x)
    for e, expert_weights in enumerate(experts.unbind_experts()):
        token, slot = (index == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, experts.expert_forward(x[token], expert_weights) * weights[token, slot, None])
    return y


def seke_head(model, states: torch.Tensor) -> torch.Tensor:
    """SEKE's head over (B, S, d), including padding -> logits (B, S, C)."""
    y = model.dropout(states).flatten(0, 1)
    _, weights, index = model.moe.router(y)
    y = loop_experts(model.moe.experts, y, index, weights).unflatten(0, states.shape[:2])
    h, _ = model.rnn.recurrent(model.rnn.dropout(y).transpose(0, 1))
    return model.classifier(y + h.transpose(0, 1).unflatten(-1, (2, -1)).sum(-2))


def generated_lstm(x: torch.Tensor, lengths: torch.Tensor, weights) -> torch.Tensor:
    """Eq. 7-8 of Duan et al. (2021), text by text: x (B, L, N_x), lengths (B,), weights -> states (B, L, N_h), 0 at padding.

    (f, i, c~, o) = W_Ih h_{t-1} + W_Ix v_t + W_Ib;   c_t = s(f) c_{t-1} + s(i) tanh(c~);   h_t = s(o) tanh(c_t)
    """
    rows = []
    for v, length, A, X, b in zip(x, lengths.tolist(), *weights, strict=True):
        h = c = b.new_zeros(b.shape[-1])
        states = [v.new_zeros(0, b.shape[-1])]
        for t in range(length):
            f, i, new, o = A @ h + X @ v[t] + b
            c = f.sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h[None])
        rows.append(F.pad(torch.cat(states), (0, 0, 0, x.shape[1] - length)))
    return torch.stack(rows)


@torch.no_grad()
def keyphrases(model, tokenizer, texts: list[str], size: int) -> list[list[dict]]:
    """Keyphrases of texts in batches, in order, each padded to and cut at 256 sub-tokens."""
    options = {"padding": "max_length", "truncation": True, "max_length": PADDED, "return_tensors": "pt"}
    found = []
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        encoded = tokenizer(batch, return_offsets_mapping=True, **options)
        offsets = encoded.pop("offset_mapping").tolist()
        states = model.backbone(**encoded).last_hidden_state
        p = seke_head(model, states).softmax(-1).numpy()
        for text, spans, row in zip(batch, offsets, p, strict=True):
            words = split_words(text)
            first = {start: i for i, (start, end) in reversed(list(enumerate(spans))) if end > start}
            of_words = [row[first[word[1]]] if word[1] in first else (1, 0, 0) for word in words]
            probabilities = np.array(of_words).reshape(-1, 3)
            found.append(rank_phrases(text, words, probabilities, model.config.keyphrase_threshold)[:10])
    return found


def exhird_loss(model, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The loss of ExHiRD: phrases and steps in loops, two softmaxes, their product rescaled, the distribution over all words."""
    decoder, config = model.decoder, model.config
    encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
    memory, h = encoded.last_hidden_state, encoded.decoder_initial_state
    extra = int(batch["copy_ids"].max()) + 1 - config.vocab_size
    end_vectors, loss = torch.zeros_like(h), torch.zeros(())
    for i in range(labels.shape[1]):
        h = decoder.next_phrase(end_vectors, h)
        s, a = h, torch.zeros_like(h)
        word = labels.new_full((len(labels),), config.bos_token_id)
        phrase_alpha = (memory @ decoder.phrase_attention.weight @ h[..., None]).squeeze(-1).softmax(-1)
        for j in range(labels.shape[2]):
            s = gru_cell(decoder.word_input(model.embed(word)) + decoder.word_feedback(a), decoder.word_state(s), s)
            word_alpha = (memory @ decoder.word_attention.weight @ s[..., None]).squeeze(-1).softmax(-1)
            alpha = phrase_alpha * word_alpha
            alpha = alpha / alpha.sum(-1, keepdim=True)
            a = decoder.output(torch.cat([(alpha[..., None] * memory).sum(1), s], 1)).tanh()
            p = model.generator.probabilities(a, alpha, batch["copy_ids"], extra)
            gold = labels[:, i, j]
            log_p = (p.gather(1, gold.clamp(min=0)[:, None]).squeeze(1) + EPS).log()
            loss = loss - torch.where(gold == -100, 0.0, log_p).sum()
            ended = (gold == config.end_phrase_token_id) | (gold == config.eos_token_id)
            end_vectors = torch.where(ended[:, None], a, end_vectors)
            word = gold.clamp(min=0)
    return loss / len(labels)
