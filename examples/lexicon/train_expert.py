"""Fine-tunes a dense Llama to define terms in their contexts, with the stock Trainer: one expert, or the base of all.

    python examples/lexicon/train_expert.py examples/lexicon/small_cpu.yml --train_files train.jsonl \
        --validation_files validation.jsonl
    accelerate launch --config_file fsdp2.yaml examples/lexicon/train_expert.py examples/lexicon/llama3_8b.yml ...

Rows are JSON Lines with term, context, definition. A YAML file gives arguments; those on the command line win. Start the
same command again after an interruption: training resumes from the last checkpoint. With other settings, data or another
start model it stops, and names what differs: use another --output_dir, or --overwrite_output_dir true.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments
from datasets import Dataset
from finite import StopAtNaN
from run_folder import RunFolder, RunFolderArguments, open_run, replace_file, what_ran
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from keyphrase_tools.opening import opening
from modeling_lexicon.data_lexicon import (
    DefinitionCollator,
    definition_nll,
    encode_split,
    perplexity_metric,
    prompt,
    read_definitions,
)

TRAINED = {"all": "", "mlp": ".mlp.", "linear": "_proj."}  # what stands in the names of those weights


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder of a dense Llama"})
    from_scratch: str | None = field(
        default=None,
        metadata={"help": "instead of it, a new model: fields of LlamaConfig as JSON; a tokenizer is trained too"},
    )
    dtype: str = field(default="float32", metadata={"help": "of the loaded weights: float32, bfloat16, auto"})
    attention_dropout: float | None = field(default=None, metadata={"help": "the only dropout that a Llama has"})
    train: str = field(
        default="all",
        metadata={
            "help": "all weights, or mlp or linear alone: those of MLPs, or of attention too, which merging can keep"
        },
    )
    learn: str = field(
        default="definition",
        metadata={
            "help": "the definition, given its prompt; or the whole row, from which a new model learns its language"
        },
    )

    def __post_init__(self):
        if self.train not in TRAINED:
            raise ValueError(f"train={self.train!r} is no part of the model. Use {', '.join(TRAINED)}.")
        if self.learn not in ("definition", "row"):
            raise ValueError(f"learn={self.learn!r} is no part of a row to learn. Use definition, or row.")
        if (self.model_name_or_path is None) == (self.from_scratch is None):
            raise ValueError(
                f"model_name_or_path={self.model_name_or_path!r} and from_scratch={self.from_scratch!r}: a model is either "
                "loaded or made anew. Pass one of them."
            )
        if self.from_scratch is not None:
            check_fields(self.from_scratch)


def check_fields(from_scratch: str) -> None:
    """Raises a ValueError for what is no JSON object, or a name that LlamaConfig does not know and would take anyway."""
    try:
        given = json.loads(from_scratch)
    except ValueError as error:
        raise ValueError(
            f"from_scratch={from_scratch!r} is no JSON ({error}). Write it as a mapping in YAML."
        ) from error
    if not isinstance(given, dict):
        raise ValueError(f"from_scratch={from_scratch!r} is no mapping. Give fields such as hidden_size: 192.")
    unknown = sorted(set(given) - set(LlamaConfig().to_dict()))
    if unknown:
        raise ValueError(f"from_scratch has {', '.join(unknown)}, which LlamaConfig does not know. Leave it out.")


@dataclass
class DataArguments:
    train_files: list[str] = field(metadata={"help": "JSON Lines with term, context, definition"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise"})
    max_length: int = field(default=128, metadata={"help": "tokens a row; longer rows are dropped, none is cut"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def say(text: str) -> None:
    """Prints once, however many processes run."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def train_tokenizer(rows: list[dict], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, over the prompts and definitions of the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for row in rows for text in (prompt(row["term"], row["context"]), row["definition"]))
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos, pad = special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)


def new_model(fields: str, attention_dropout: float | None, tokenizer, seed: int) -> LlamaForCausalLM:
    settings = {**json.loads(fields), "vocab_size": len(tokenizer)}
    if attention_dropout is not None:
        settings["attention_dropout"] = attention_dropout
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    set_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings, **special))
    embeddings = model.get_input_embeddings().weight.numel()
    say(f"a new Llama: {model.num_parameters() - embeddings:,} parameters beside {embeddings:,} of the embeddings")
    return model


def build(args: ModelArguments, rows: list[dict], start: str | None, seed: int):
    """The model and its tokenizer; a run that is resumed takes the tokenizer that its checkpoint was trained with."""
    if args.from_scratch is None:
        dropout = {} if args.attention_dropout is None else {"attention_dropout": args.attention_dropout}
        with opening("--model_name_or_path", args.model_name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype, **dropout), tokenizer
    vocab_size = json.loads(args.from_scratch).get("vocab_size", LlamaConfig().vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(start) if start else train_tokenizer(rows, vocab_size)
    return new_model(args.from_scratch, args.attention_dropout, tokenizer, seed), tokenizer


def load_split(name: str, paths: list[str]) -> list[dict]:
    rows, dropped = read_definitions(paths)
    say(f"{name}: {len(rows):,} rows; {dropped:,} dropped for a field that is empty or no string")
    return rows


def encoded(name: str, rows: list[dict], tokenizer, max_length: int) -> Dataset:
    columns, too_long = encode_split(rows, tokenizer, max_length)
    tokens = sum(map(len, columns["input_ids"]))
    labelled = sum(label >= 0 for labels in columns["labels"] for label in labels)
    say(
        f"{name}: {len(columns['row']):,} rows of {tokens:,} tokens, {labelled:,} of them in definitions; "
        f"{too_long:,} rows longer than {max_length} tokens dropped"
    )
    return Dataset.from_dict({key: value for key, value in columns.items() if key != "row"})


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the trainer and the run folder."""
    overwrite = folder_args.overwrite_output_dir
    folder = open_run("lexicon/train_expert.py", training_args, model_args, data_args, overwrite=overwrite)
    rows = {"train": load_split("train", data_args.train_files)}
    if data_args.validation_files:
        rows["validation"] = load_split("validation", data_args.validation_files)
    model, tokenizer = build(model_args, rows["train"], folder.start, training_args.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = TRAINED[model_args.train] in name
    splits = {name: encoded(name, split, tokenizer, data_args.max_length) for name, split in rows.items()}
    if model_args.learn == "row":
        splits["train"] = splits["train"].map(lambda row: {"labels": row["input_ids"]})
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        data_collator=DefinitionCollator(tokenizer),
        processing_class=tokenizer,
        compute_metrics=perplexity_metric,
        preprocess_logits_for_metrics=definition_nll,
    )
    return trainer, folder


def train(trainer: Trainer, start: str | None) -> None:
    """Trains, from a checkpoint if there is one; weights that become NaN end it with a line that says how to go on."""
    trainer.add_callback(StopAtNaN())
    try:
        trainer.train(resume_from_checkpoint=start)
    except FloatingPointError as error:
        refuse(error)


def finish(trainer: Trainer, folder: RunFolder) -> None:
    """Saves model and tokenizer; scores the validation rows, if there are any, and writes results.json."""
    ran = what_ran(trainer.args, trainer.state)
    trainer.save_model()
    results = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if trainer.is_world_process_zero():
        output = Path(trainer.args.output_dir)
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle, and no part of the model
        results_file = {**results, "ran": ran, "log": trainer.state.log_history}
        replace_file(output / "results.json", json.dumps(results_file, indent=1))
        folder.mark_finished(ran=ran)
        if results:
            print(f"validation: perplexity of the definitions {results['eval_perplexity']:.2f}")
        print(f"The model is in {output}: AutoModelForCausalLM.from_pretrained({str(output)!r})")


def refuse(error: Exception) -> None:
    """One line and exit code 2 for what the caller can mend; with --traceback the error as it is."""
    if "--traceback" in sys.argv:
        raise error
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def main():
    try:
        arguments = parse_arguments((ModelArguments, DataArguments, RunFolderArguments, TrainingArguments), __doc__)
        trainer, folder = prepare(*arguments)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)
    train(trainer, folder.start)
    finish(trainer, folder)


if __name__ == "__main__":
    main()
