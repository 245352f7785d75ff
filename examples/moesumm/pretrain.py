"""Trains a small BART and its tokenizer from nothing, by denoising documents, where no pretrained one can be had.

    python examples/moesumm/pretrain.py --datasets mail=data/mail news=data/news --output_dir runs/small-bart

Spans of words are hidden behind one <mask> each, and if asked for sentences are put into another order; the model writes the
document as it was (BART: Lewis et al. 2020, Sect. 2.2). It starts with a decoder that looks at the place where it writes
(see `begin_by_copying`). 2,500 steps take a CPU core 10 to 25 minutes; what comes out knows some grammar and hardly any
facts, and is for trying things out. Train splits only. Interrupted, the same command resumes from the last checkpoint.
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from cli_args import parse_arguments, run_or_exit
from run_folder import RunFolderArguments, open_run, replace_file, what_ran
from sources import DataArguments, mixed, read_sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from modeling_moesumm import MoeSummCollator
from modeling_moesumm.texts_moesumm import sentence_spans

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # with BART's ids 0 to 3


@dataclass
class PretrainingArguments:
    vocab_size: int = field(default=8192, metadata={"help": "tokens of the byte-level BPE"})
    d_model: int = field(default=256, metadata={"help": "hidden size"})
    layers: int = field(default=3, metadata={"help": "of the encoder, and of the decoder"})
    heads: int = field(default=4, metadata={"help": "attention heads"})
    ffn_dim: int = field(default=1024, metadata={"help": "inner size of the feed-forward layers"})
    positions: int = field(default=512, metadata={"help": "tokens that the encoder reads, and the decoder writes"})
    piece: int = field(default=128, metadata={"help": "words of the pieces that documents are divided into"})
    masked: float = field(default=0.3, metadata={"help": "share of the words that is hidden"})
    span: float = field(default=3.0, metadata={"help": "words of a hidden span, on average"})
    permute: bool = field(
        default=False, metadata={"help": "put sentences into another order, too: needs longer training"}
    )
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def train_tokenizer(texts: list[str], vocab_size: int, positions: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions, **names)


def pieces_of(document: str, size: int) -> list[str]:
    """Whole sentences, at most `size` words together; a longer sentence is parted."""
    pieces: list[list[str]] = []
    for start, end in sentence_spans(document):
        words = document[start:end].split()
        for place in range(0, len(words), size):
            part = words[place : place + size]
            if not pieces or len(pieces[-1]) + len(part) > size:
                pieces.append([])
            pieces[-1] += part
    return [" ".join(piece) for piece in pieces]


def hide(words: list[str], share: float, span: float, rng: random.Random) -> list[str]:
    """Words with spans of geometric length behind one <mask> each, `share` of them on average."""
    found, place, start = [], 0, share / (span * (1 - share) + share)
    while place < len(words):
        if rng.random() < start:
            found.append("<mask>")
            place += 1
            while place < len(words) and rng.random() > 1 / span:
                place += 1
        else:
            found.append(words[place])
            place += 1
    return found


def noisy(piece: str, args: PretrainingArguments, rng: random.Random) -> str:
    sentences = [piece[start:end] for start, end in sentence_spans(piece)]
    if args.permute:
        rng.shuffle(sentences)
    words = hide(" ".join(sentences).split(), args.masked, args.span, rng)
    return " ".join(words).replace(" <mask>", "<mask>")  # the mask stands for the space as well


class DenoisingCollator(MoeSummCollator):
    """Pieces, with other noise in every epoch -> a batch."""

    def __init__(self, tokenizer, model, args: PretrainingArguments, seed: int):
        super().__init__(tokenizer, model, on_long="truncate")
        self.args, self.rng = args, random.Random(seed)

    def __call__(self, rows: list[dict]) -> dict:
        pieces = [row["piece"] for row in rows]
        return super().__call__([{"document": noisy(p, self.args, self.rng), "summary": p} for p in pieces])


def configuration(args: PretrainingArguments, vocab_size: int) -> BartConfig:
    return BartConfig(
        vocab_size=vocab_size,
        d_model=args.d_model,
        max_position_embeddings=args.positions,
        **{f"{side}_layers": args.layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": args.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": args.ffn_dim for side in ("encoder", "decoder")},
    )


@torch.no_grad()
def begin_by_copying(model: BartForConditionalGeneration) -> BartForConditionalGeneration:
    """Adds multiples of the identity to the cross-attention, and gives encoder and decoder the same positions.

    A position of the decoder then attends to its own place in the source first, and hands on what stands there. From
    random weights alone small models had not found out after hundreds of steps that they may copy (benchmarks/LOG.md).
    """
    encoder, decoder = model.model.encoder, model.model.decoder
    encoder.embed_positions.weight.mul_(2)
    decoder.embed_positions.weight.copy_(encoder.embed_positions.weight)
    identity = torch.eye(model.config.d_model)
    for attention in (layer.encoder_attn for layer in decoder.layers):
        for weight, factor in (
            (attention.q_proj, 1.5),
            (attention.k_proj, 1.5),
            (attention.v_proj, 0.8),
            (attention.out_proj, 0.8),
        ):
            weight.weight.add_(factor * identity)
    return model


def prepare(args: PretrainingArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training -> the run folder and the trainer."""
    overwrite = folder_args.overwrite_output_dir
    folder = open_run("moesumm/pretrain.py", training_args, args, data_args, overwrite=overwrite)
    sources = read_sources(data_args)
    train = mixed(sources, "train")
    if train is None:
        raise ValueError("There is no train split to learn from.")
    documents = train["document"]
    pieces = [{"piece": piece} for document in documents for piece in pieces_of(document, args.piece)]
    tokenizer = train_tokenizer([*documents, *train["summary"]], args.vocab_size, args.positions)
    set_seed(training_args.seed)
    model = begin_by_copying(BartForConditionalGeneration(configuration(args, len(tokenizer))))
    print(f"{len(documents):,} documents in {len(pieces):,} pieces; {len(tokenizer):,} tokens", flush=True)
    training_args.remove_unused_columns = False
    return folder, Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=pieces,
        data_collator=DenoisingCollator(tokenizer, model, args, training_args.seed),
        processing_class=tokenizer,
    )


def main():
    kinds = (PretrainingArguments, DataArguments, RunFolderArguments, Seq2SeqTrainingArguments)
    args, data_args, folder_args, training_args = parse_arguments(kinds, __doc__)
    given = (args, data_args, folder_args, training_args)
    folder, trainer = run_or_exit(prepare, *given, traceback=args.traceback)
    trainer.train(resume_from_checkpoint=folder.start)
    trainer.save_model(training_args.output_dir)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    replace_file(Path(training_args.output_dir, "losses.json"), json.dumps(losses, indent=1))
    folder.mark_finished(ran=what_ran(training_args, trainer.state))
    print(f"\nThe backbone is in {training_args.output_dir}: train.py --model_name_or_path {training_args.output_dir}")


if __name__ == "__main__":
    main()
