"""Speed of decoding, training and sparse attention of ExHiRD, compared with plain implementations.

    python benchmarks/exhird_speed.py                  # all, about half an hour on two cores
    python benchmarks/exhird_speed.py --only attention

Decoding: documents per second, 32 documents of 180 words, 20 phrases of 6 steps, a vocabulary of 50,004 words. The plain version
decodes one document after the other, computes two softmaxes and rescales their product, and projects the source at each step.
Training: 16 documents of 180 words, 8 phrases. The plain version loops over phrases and steps, with the distribution over all
words at each step. Attention: a layer of 512, 8 heads, g 10, w 50, one document; peak memory above the start, in a separate
process. The dense implementation processes the queries of long texts in chunks; "at once" is its peak without chunks.
"""

import argparse
import json
import subprocess
import sys
from functools import partial

import torch
from common import interleaved, peak_of, write

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


def time_decoding(rounds: int) -> list[dict]:
    results = []
    for kind, layers in (("bigru", 2), ("transformer", 4)):
        model, batch = make(DOCUMENTS, encoder_type=kind, num_hidden_layers=layers)
        config = model.config
        with torch.no_grad():  # no phrase and no document ends early
            model.generator.vocabulary.bias[[config.eos_token_id, config.end_phrase_token_id]] = -1e4
        assert torch.equal(
            model.generate_phrases(**batch, exclusion_window=0).ids.flatten(), plain_decode(model, batch, 20, 6)
        ), "not the same words"
        calls = {
            "ours": lambda m=model, b=batch: m.generate_phrases(**b),
            "plain": lambda m=model, b=batch: plain_decode(m, b, 20, 6),
        }
        times = interleaved(calls, rounds)
        rate = {name: 1e3 * DOCUMENTS / entry["median_ms"] for name, entry in times.items()}
        results.append({"what": "decoding", "encoder": kind, "times": times, "documents_per_second": rate})
        results[-1]["ratio"] = rate["ours"] / rate["plain"]
        print(
            f"decoding, {kind}: {rate['ours']:.2f} documents/s, plain {rate['plain']:.2f}: {results[-1]['ratio']:.1f}x",
            flush=True,
        )
    return results


def train_step(model, loss):
    model.zero_grad()
    loss().backward()


def time_training(rounds: int) -> list[dict]:
    results = []
    for kind, layers in (("bigru", 2), ("transformer", 4)):
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
        times = interleaved({name: partial(train_step, model, loss) for name, loss in losses.items()}, rounds)
        ratio = times["plain"]["median_ms"] / times["ours"]["median_ms"]
        results.append({"what": "training", "encoder": kind, "times": times, "ratio": ratio})
        print(f"training step, {kind}: {times['ours']['median_ms']:.0f} ms, {ratio:.1f}x as fast as plain", flush=True)
    return results


def make_layer(length: int, implementation: str):
    torch.manual_seed(0)
    pattern = SparsePattern(lead=10, window=50, use_lead=True, use_window=True, use_top_k=False)
    layer = SparseRelativeAttention(512, 8, pattern, relative="shared", implementation=implementation)
    for p in layer.parameters():
        torch.nn.init.uniform_(p, -0.1, 0.1)
    x = torch.randn(1, length, 512, requires_grad=True)
    return layer, x, torch.ones(1, length, dtype=torch.bool)


def attention_step(layer, x, mask, train: bool):
    with torch.set_grad_enabled(train):
        y, _ = layer(x, mask)
        if train:
            y.square().mean().backward()


def peak(length: int, implementation: str, train: bool) -> float:
    """Peak memory in MiB above the start, in a separate process."""
    if implementation == "at once":
        implementation, attention_exhird.MAX_SCORES = "dense", sys.maxsize
    inputs = make_layer(length, implementation)
    return peak_of(lambda: attention_step(*inputs, train))


def measure_attention(rounds: int) -> list[dict]:
    results = []
    for length in LENGTHS:
        for train in (False, True):
            layers = {name: make_layer(length, name) for name in ("dense", "block")}
            calls = {name: lambda inputs=inputs, t=train: attention_step(*inputs, t) for name, inputs in layers.items()}
            times = interleaved(calls, rounds)
            del layers
            memory = {}
            for name in ("at once", "dense", "block"):
                command = [sys.executable, __file__, "--peak", str(length), name, str(int(train))]
                memory[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row = {
                "what": "attention",
                "way": "forward and backward" if train else "forward",
                "length": length,
                "times": times,
                "peak_MiB": memory,
                "faster": times["dense"]["median_ms"] / times["block"]["median_ms"],
                "smaller": {name: memory[name] / max(memory["block"], 1e-3) for name in ("at once", "dense")},
            }
            results.append(row)
            print(
                f"attention, {length} words, {row['way']}: dense {times['dense']['median_ms']:.0f} ms {memory['dense']:.0f} MiB, "
                f"at once {memory['at once']:.0f} MiB, block {times['block']['median_ms']:.0f} ms {memory['block']:.0f} MiB: "
                f"{row['faster']:.1f}x, {row['smaller']['dense']:.1f}x, {row['smaller']['at once']:.1f}x",
                flush=True,
            )
    return results


MEASURES = {"decoding": time_decoding, "training": time_training, "attention": measure_attention}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(MEASURES))
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        length, name, train = args.peak
        print(json.dumps(peak(int(length), name, bool(int(train)))))
        return
    results = [row for name in MEASURES if args.only in (None, name) for row in MEASURES[name](args.rounds)]
    if args.only is None:
        settings = {"words": WORDS, "documents": DOCUMENTS, "trained": TRAINED, "vocabulary": VOCABULARY}
        write("exhird_speed", results, rounds=args.rounds, **settings)


if __name__ == "__main__":
    main()
