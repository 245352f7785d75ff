"""Trains a small BART and its tokenizer from scratch, by denoising documents, for tests without a pretrained model.

    lexperts train moesumm-backbone --datasets mail=data/mail news=data/news --output-dir runs/small-bart --max-steps 2500

Spans of words are replaced by one <mask> each, and with --permute sentences are permuted; the model reconstructs the document
(BART: Lewis et al. 2020, Sect. 2.2). The decoder is initialised so that it attends to the position it writes (see
`initialize_copying`). 2,500 steps take 10 to 25 minutes on a CPU core; the result has learned some grammar and hardly any
facts. Only train splits are used.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast, Trainer, set_seed

from modeling_moesumm import DataCollatorForMoeSumm
from modeling_moesumm.sentences_moesumm import sentence_spans
from run_tools.errors import RESUME
from run_tools.files import write_file

from ..common.arguments import command
from ..common.run_folder import open_run, training_summary
from ..common.training import train_bpe, train_or_resume, trainer_options
from .arguments import DataArguments, PretrainingArguments
from .data import concatenate, load_sources

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # the first four with BART's ids


def train_tokenizer(texts: list[str], vocab_size: int, positions: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with BART's special tokens."""
    tokenizer = train_bpe(texts, vocab_size, SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")}
    names |= {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions, **names)


def split_document(document: str, size: int) -> list[str]:
    """Segments of whole sentences with at most `size` words together; a longer sentence is split."""
    segments: list[list[str]] = []
    for start, end in sentence_spans(document):
        words = document[start:end].split()
        for index in range(0, len(words), size):
            part = words[index : index + size]
            if not segments or len(segments[-1]) + len(part) > size:
                segments.append([])
            segments[-1] += part
    return [" ".join(segment) for segment in segments]


def mask_spans(words: list[str], ratio: float, length: float, rng: random.Random) -> list[str]:
    """Replaces spans of geometric length by one <mask> each, on average `ratio` of the words."""
    masked, index, start = [], 0, ratio / (length * (1 - ratio) + ratio)
    while index < len(words):
        if rng.random() < start:
            masked.append("<mask>")
            index += 1
            while index < len(words) and rng.random() > 1 / length:
                index += 1
        else:
            masked.append(words[index])
            index += 1
    return masked


def add_noise(segment: str, args: PretrainingArguments, rng: random.Random) -> str:
    """A segment with masked spans and, if requested, permuted sentences."""
    sentences = [segment[start:end] for start, end in sentence_spans(segment)]
    if args.permute:
        rng.shuffle(sentences)
    words = mask_spans(" ".join(sentences).split(), args.mask_ratio, args.span_length, rng)
    return " ".join(words).replace(" <mask>", "<mask>")  # the mask includes the space


class DenoisingCollator(DataCollatorForMoeSumm):
    """Makes batches of segments, with different noise in every epoch."""

    def __init__(self, tokenizer, model, args: PretrainingArguments, seed: int):
        super().__init__(tokenizer, model, on_long="truncate")
        self.args, self.rng = args, random.Random(seed)

    def __call__(self, rows: list[dict]) -> dict:
        """Makes a batch of rows with a `segment`."""
        segments = [row["segment"] for row in rows]
        return super().__call__([{"document": add_noise(s, self.args, self.rng), "summary": s} for s in segments])


def make_config(args: PretrainingArguments, vocab_size: int) -> BartConfig:
    """The configuration of a small BART."""
    return BartConfig(
        vocab_size=vocab_size,
        d_model=args.d_model,
        max_position_embeddings=args.positions,
        **{f"{side}_layers": args.layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": args.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": args.ffn_dim for side in ("encoder", "decoder")},
    )


@torch.no_grad()
def initialize_copying(model: BartForConditionalGeneration) -> BartForConditionalGeneration:
    """Adds multiples of the identity to the cross-attention, and uses the same positions in encoder and decoder.

    Initially each position of the decoder then attends to the same position of the source and copies its token. With random
    weights only, small models had not learned to copy after hundreds of steps (benchmarks/log/summaries.md).
    """
    encoder, decoder = model.model.encoder, model.model.decoder
    encoder.embed_positions.weight.mul_(2)
    decoder.embed_positions.weight.copy_(encoder.embed_positions.weight)
    identity = torch.eye(model.config.d_model)
    for attention in (layer.encoder_attn for layer in decoder.layers):
        for name, factor in (("q_proj", 1.5), ("k_proj", 1.5), ("v_proj", 0.8), ("out_proj", 0.8)):
            getattr(attention, name).weight.add_(factor * identity)
    return model


def train(args: PretrainingArguments, data_args: DataArguments, folder_args, training_args) -> None:
    """The command `lexperts train moesumm-backbone`."""
    rows = concatenate(load_sources(data_args), "train")
    if rows is None:
        raise ValueError(f"--datasets {' '.join(data_args.datasets)} has no train split.")
    overwrite, output = folder_args.overwrite_output_dir, Path(training_args.output_dir)
    folder = open_run("moesumm/pretrain.py", training_args, args, data_args, overwrite=overwrite)
    documents = rows["document"]
    segments = [{"segment": s} for document in documents for s in split_document(document, args.segment_words)]
    tokenizer = train_tokenizer([*documents, *rows["summary"]], args.vocab_size, args.positions)
    set_seed(training_args.seed)
    model = initialize_copying(BartForConditionalGeneration(make_config(args, len(tokenizer))))
    print(f"{len(documents):,} documents in {len(segments):,} segments; {len(tokenizer):,} tokens", flush=True)
    training_args.remove_unused_columns = False
    collator = DenoisingCollator(tokenizer, model, args, training_args.seed)
    trainer = Trainer(**trainer_options(model, training_args, {"train": segments}, collator, tokenizer))
    train_or_resume(trainer, folder)
    trainer.save_model(output)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_file(output / "losses.json", json.dumps(losses, indent=1))
    folder.mark_finished(ran=training_summary(training_args, trainer.state))
    print(f"\nThe backbone is in {output}: lexperts train moesumm --model-name-or-path {output}")


main = command("moesumm", "pretrain", train, RESUME)
