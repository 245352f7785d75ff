"""Speed of decoding, training and sparse attention of ExHiRD, compared with plain implementations.

    python benchmarks/exhird_speed.py                  # all, about half an hour on two cores
    python benchmarks/exhird_speed.py --only attention

Decoding: documents per second, 32 documents of 180 words, 20 phrases of 6 steps, a vocabulary of 50,004 words. The plain version
decodes one document after the other, computes two softmaxes and rescales their product, and projects the source at each step.
Training: 16 documents of 180 words, 8 phrases. The plain version loops over phrases and steps, with the distribution over all
words at each step. Attention: a layer of 512, 8 heads, g 10, w 50, one document; peak memory above the start, in a separate
process. The dense implementation processes the queries of long texts in chunks; "at once" is its peak without chunks.
"""

import sys
from collections.abc import Iterator

import torch
from timing import both_ways, compare, in_new_process, measure_parts, peak_of, speed_parser

from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, attention_exhird
from modeling_exhird.attention_exhird import SparseRelativeAttention
from modeling_exhird.decoder_exhird import EPS, gru_cell
from modeling_exhird.patterns_exhird import SparsePattern

WORDS, DOCUMENTS, TRAINED, PHRASES = 180, 32, 16, 8
LENGTHS = (128, 512, 2048, 8192)
VOCABULARY = 50_004


def make(documents: int, **options):
    """A model and a batch of random documents, whose last words are not in the vocabulary."""
    torch.manual_seed(0)
    model = ExhirdForKeyphraseGeneration(ExhirdConfig(vocab_size=VOCABULARY, **options)).eval()
    ids = torch.randint(8, VOCABULARY, (documents, WORDS))
    copies = torch.cat([ids[:, :-4], VOCABULARY + torch.arange(4).expand(documents, 4)], 1)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "copy_ids": copies}


ENCODERS = (("bigru", 2), ("transformer", 4))  # with their layers


def plain_step(model, word, s, a, h, memory, copy_ids, extra):
    """A step as in the formulas: two softmaxes, their product rescaled, the distribution over all words."""
    decoder = model.decoder
    s = gru_cell(decoder.word_input(model.embed(word)) + decoder.word_feedback(a), decoder.word_state(s), s)
    phrase_alpha = (memory @ decoder.phrase_attention.weight @ h[..., None]).squeeze(-1).softmax(-1)
    word_alpha = (memory @ decoder.word_attention.weight @ s[..., None]).squeeze(-1).softmax(-1)
    alpha = phrase_alpha * word_alpha
    alpha = alpha / alpha.sum(-1, keepdim=True)
    a = decoder.output(torch.cat([(alpha[..., None] * memory).sum(1), s], 1)).tanh()
    return s, a, model.generator.probabilities(a, alpha, copy_ids, extra)


@torch.no_grad()
def plain_decode(model, batch, phrases: int, steps: int):
    """One document after the other, one phrase after the other, one word after the other; no phrase ends early."""
    out = []
    for row in range(len(batch["input_ids"])):
        one = {name: x[row : row + 1] for name, x in batch.items()}
        encoded = model.encoder(one["input_ids"], one["attention_mask"])
        memory, h = encoded.last_hidden_state, encoded.decoder_initial_state
        a = torch.zeros_like(h)
        for _ in range(phrases):
            h = model.decoder.next_phrase(a, h)
            s, a = h, torch.zeros_like(h)
            word = torch.tensor([model.config.bos_token_id])
            for _ in range(steps):
                s, a, p = plain_step(model, word, s, a, h, memory, one["copy_ids"], 4)
                word = p.argmax(1)
                out.append(word)
    return torch.cat(out)


def plain_loss(model, batch, labels):
    """Phrases and steps in loops over the whole batch, the distribution over all words at each step."""
    encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
    memory, h = encoded.last_hidden_state, encoded.decoder_initial_state
    end_vectors, loss = torch.zeros_like(h), 0.0
    for i in range(labels.shape[1]):
        h = model.decoder.next_phrase(end_vectors, h)
        s, a = h, torch.zeros_like(h)
        word = labels.new_full((len(labels),), model.config.bos_token_id)
        for j in range(labels.shape[2]):
            s, a, p = plain_step(model, word, s, a, h, memory, batch["copy_ids"], 4)
            gold = labels[:, i, j]
            log_p = (p.gather(1, gold.clamp(min=0)[:, None]).squeeze(1) + EPS).log()
            loss = loss - torch.where(gold == -100, 0.0, log_p).sum()
            end_vectors = torch.where(((gold == 4) | (gold == 3))[:, None], a, end_vectors)
            word = gold.clamp(min=0)
    return loss / len(labels)


def measure_decoding(options) -> Iterator[dict]:
    """Greedy decoding to the full length; the documents per second are computed from the times."""
    for kind, layers in ENCODERS:
        model, batch = make(DOCUMENTS, encoder_type=kind, num_hidden_layers=layers)
        config = model.config
        with torch.no_grad():  # no phrase and no document ends early
            model.generator.vocabulary.bias[[config.eos_token_id, config.end_phrase_token_id]] = -1e4
        ours = model.generate_phrases(**batch, exclusion_window=0).ids.flatten()
        assert torch.equal(ours, plain_decode(model, batch, 20, 6)), "not the same words"
        calls = {
            "ours": lambda m=model, b=batch: m.generate_phrases(**b),
            "plain": lambda m=model, b=batch: plain_decode(m, b, 20, 6),
        }
        yield compare(calls, options.rounds, encoder=kind)


def measure_training(options) -> Iterator[dict]:
    """A training step."""
    for kind, layers in ENCODERS:
        model, batch = make(TRAINED, encoder_type=kind, num_hidden_layers=layers)
        model.train()
        words = torch.randint(8, VOCABULARY, (TRAINED, PHRASES, 2))
        labels = torch.full((TRAINED, PHRASES + 1, 4), -100)
        labels[:, :-1] = torch.cat([torch.full_like(words[..., :1], 5), words, torch.full_like(words[..., :1], 4)], 2)
        labels[:, -1, 0] = 3
        losses = {
            "ours": lambda m=model, b=batch, y=labels: m(**b, labels=y).loss,
            "plain": lambda m=model, b=batch, y=labels: plain_loss(m, b, y),
        }
        torch.testing.assert_close(losses["ours"](), losses["plain"](), rtol=1e-4, atol=1e-3)

        def step(loss, model=model):
            model.zero_grad()
            loss().backward()

        steps = {name: lambda loss=loss, step=step: step(loss) for name, loss in losses.items()}
        yield compare(steps, options.rounds, encoder=kind)


def layer_call(length: int, implementation: str, way: str):
    """A call of an attention layer on a text of random states."""
    torch.manual_seed(0)
    pattern = SparsePattern(lead=10, window=50, use_lead=True, use_window=True, use_top_k=False)
    layer = SparseRelativeAttention(512, 8, pattern, relative="shared", implementation=implementation)
    for p in layer.parameters():
        torch.nn.init.uniform_(p, -0.1, 0.1)
    x, mask = torch.randn(1, length, 512, requires_grad=True), torch.ones(1, length, dtype=torch.bool)
    return both_ways(lambda: layer(x, mask)[0], [x, *layer.parameters()])[way]


def peak(length: int, implementation: str, way: str) -> float:
    """Peak memory of the layer in MiB. Call it in a new process."""
    if implementation == "at once":
        implementation, attention_exhird.MAX_SCORES = "dense", sys.maxsize
    return peak_of(layer_call(length, implementation, way))


def measure_attention(options) -> Iterator[dict]:
    """Time and memory of an attention layer by the number of words."""
    for length in LENGTHS:
        for way in ("forward", "forward and backward"):
            calls = {name: layer_call(length, name, way) for name in ("dense", "block")}
            row = compare(calls, options.rounds, way=way, length=length)
            del calls
            memory = {name: in_new_process(peak, length, name, way) for name in ("at once", "dense", "block")}
            print("   ".join(f"{name} {mib:.0f} MiB" for name, mib in memory.items()), flush=True)
            yield {**row, "peak_MiB": memory}


PARTS = {"decoding": measure_decoding, "training": measure_training, "attention": measure_attention}


def main():
    """Measures the parts and writes their rows."""
    options = speed_parser(__doc__, PARTS, rounds=3).parse_args()
    settings = {"words": WORDS, "documents": DOCUMENTS, "trained": TRAINED, "vocabulary": VOCABULARY}
    measure_parts(options, "exhird_speed", PARTS, **settings)


if __name__ == "__main__":
    main()
