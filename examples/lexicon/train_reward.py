"""Trains a reward model that chooses among a model's own definitions (LM-Lexicon, Sect. 3.4): for the best of n samples.

    python examples/lexicon/train_reward.py --model_name_or_path runs/mixture --reward_base runs/lexicon-base \
        --train_files train.jsonl --validation_files validation.jsonl --output_dir runs/reward

For each row definitions are sampled from the model. With --chosen gold, the paper's way, the gold definition is preferred to the
likeliest of them that are not it; with --chosen nearest the sample nearest to the gold definition, by BLEU, to the furthest: a
reward that has to choose among samples learns from samples. They are in pairs_train.jsonl from the moment they are drawn:
start the same command again after an interruption. With other settings, rows or models it stops, and names what differs: use
another --output_dir, or --overwrite_output_dir true, which keeps pairs that were drawn with the same settings.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments
from datasets import Dataset
from resumable import Note, digest
from rewards import PAIRS, PairCollator, RewardTrainer, encode_pairs, preferred, write_pairs
from run_folder import OtherSettings, RunFolderArguments, fingerprint, open_run, package_version, replace_file, what_ran
from train_expert import load_split, refuse, say, train
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
    set_seed,
)

import modeling_lexicon  # noqa: F401  (registers the mixture)
from keyphrase_tools.opening import opening


@dataclass
class RewardArguments:
    model_name_or_path: str = field(metadata={"help": "the model whose definitions are sampled"})
    reward_base: str = field(
        metadata={"help": "the model that becomes the reward: a dense Llama of the same tokenizer"}
    )
    train_files: list[str] = field(metadata={"help": "JSON Lines with term, context, definition"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise"})
    chosen: str = field(
        default="gold",
        metadata={"help": "over samples of the model: the gold definition, or of the samples the one nearest to it"},
    )
    samples: int = field(default=32, metadata={"help": "definitions that are sampled for a row"})
    kept: int = field(
        default=8, metadata={"help": "of these, rejected: the likeliest that are not the gold one, or the furthest"}
    )
    max_rows: int | None = field(default=None, metadata={"help": "rows of each file set, the first ones"})
    max_new_tokens: int = field(default=48, metadata={"help": "of a sampled definition"})
    sampling_batch_size: int = field(default=16, metadata={"help": "rows that are sampled for at once"})
    max_length: int = field(default=160, metadata={"help": "tokens of prompt and definition; longer pairs are dropped"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        if self.chosen not in PAIRS:
            raise ValueError(f"chosen={self.chosen!r} is not known. Use {' or '.join(PAIRS)}.")


def prepare(args: RewardArguments, folder_args: RunFolderArguments, training_args: TrainingArguments):
    """Samples, pairs -> the trainer and the run folder."""
    overwrite = folder_args.overwrite_output_dir
    folder = open_run("lexicon/train_reward.py", training_args, args, overwrite=overwrite)
    with opening("--model_name_or_path", args.model_name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    output, columns, model = Path(training_args.output_dir), {}, None
    output.mkdir(parents=True, exist_ok=True)
    for split, files in (("train", args.train_files), ("validation", args.validation_files)):
        if not files:
            continue
        rows = load_split(split, files)[: args.max_rows]
        path = output / f"pairs_{split}.jsonl"
        given = {"samples": args.samples, "kept": args.kept, "chosen": args.chosen, "seed": training_args.seed}
        given |= {"max_new_tokens": args.max_new_tokens, "batch_size": args.sampling_batch_size}
        settings, note = {**given, "rows": digest(rows), "lexperts": package_version()}, Note(path)
        settings["model"] = fingerprint(args.model_name_or_path)
        if path.exists():
            compare(note, settings, overwrite)
        note.begin(settings)
        if not path.exists() or path.read_bytes().count(b"\n") < len(rows):
            model = (
                model or AutoModelForCausalLM.from_pretrained(args.model_name_or_path).to(training_args.device).eval()
            )
            write_pairs(model, tokenizer, rows, path, **given)
        columns[split], too_long = encode_pairs(path, tokenizer, args.max_length)
        say(f"{split}: {len(columns[split]['chosen']):,} pairs of {len(rows):,} rows; {too_long:,} too long dropped")
    set_seed(training_args.seed)  # of the new head, whether or not anything was sampled before
    with opening("--reward_base", args.reward_base):
        reward = AutoModelForSequenceClassification.from_pretrained(args.reward_base, num_labels=1)
    reward.config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    training_args.remove_unused_columns = False
    trainer = RewardTrainer(
        model=reward,
        args=training_args,
        train_dataset=Dataset.from_dict(columns["train"]),
        eval_dataset=Dataset.from_dict(columns["validation"]) if "validation" in columns else None,
        data_collator=PairCollator(tokenizer),
        processing_class=tokenizer,
        compute_metrics=preferred,
    )
    return trainer, folder


def compare(note: Note, settings: dict, overwrite: bool) -> None:
    """Raises an OtherSettings error for pairs of other settings, or removes them."""
    try:
        note.compare(settings)
    except OtherSettings:
        if not overwrite:
            raise
        note.made.unlink()


def main():
    try:
        args, folder_args, training_args = parse_arguments(
            (RewardArguments, RunFolderArguments, TrainingArguments), __doc__
        )
        trainer, folder = prepare(args, folder_args, training_args)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)
    train(trainer, folder.start)
    trainer.save_model()
    output = Path(training_args.output_dir)
    (output / "training_args.bin").unlink(missing_ok=True)  # a pickle, and no part of the model
    results = trainer.evaluate() if trainer.eval_dataset is not None else {}
    ran = what_ran(training_args, trainer.state)
    replace_file(
        output / "results.json", json.dumps({**results, "ran": ran, "log": trainer.state.log_history}, indent=1)
    )
    folder.mark_finished(ran=ran)
    if results:
        say(f"validation: the chosen definition has the larger reward in {results['eval_accuracy']:.1%} of the pairs")
    say(f"The model is in {output}: pipeline('definition-modeling', ...)(row, best_of=8, reward_model={str(output)!r})")


if __name__ == "__main__":
    sys.exit(main())
