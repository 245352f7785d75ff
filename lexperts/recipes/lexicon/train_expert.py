"""Fine-tunes a dense Llama to define terms in context, with the stock Trainer: one expert, or the base of all experts.

    lexperts train lexicon-expert small_cpu --train-files train.jsonl --validation-files validation.jsonl
    accelerate launch --config-file fsdp2.yaml -m lexperts train lexicon-expert llama3_8b --train-files train.jsonl

The output folder contains the model that `lexperts merge compose` reads, and its perplexity in results.json.
"""

import json

from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from modeling_lexicon.data_lexicon import format_prompt
from run_tools.errors import UserError, one_line, short_repr
from run_tools.loading import open_tokenizer, open_with_tokenizer
from run_tools.yaml_files import check_names

from ..common.arguments import RunFolderArguments
from ..common.causal_training import CheckpointTrainer, add_lora, make_trainer, print_rank0, training_command
from ..common.run_folder import open_run
from ..common.training import train_bpe
from .arguments import TRAINED, DataArguments, ModelArguments
from .training import load_rows, make_dataset


def check_fields(from_scratch: str) -> dict:
    """The JSON of `from_scratch` as fields of LlamaConfig. Raises a `UserError` for anything else."""
    shown = f"from_scratch={short_repr(from_scratch)}"
    try:
        fields = json.loads(from_scratch)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{shown} is not valid JSON ({one_line(error)}). In YAML write it as a mapping.") from error
    check_names(fields, "from_scratch", LlamaConfig().to_dict())
    try:
        LlamaConfig(**fields)
    except Exception as error:  # of the checks of transformers, which have no type of their own
        raise UserError(f"{shown} is not a valid LlamaConfig: {one_line(error)}") from error
    return fields


def train_tokenizer(rows: list[dict], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, over the prompts and definitions of the rows."""
    special = ["<s>", "</s>", "<pad>"]
    texts = (text for row in rows for text in (format_prompt(row["term"], row["context"]), row["definition"]))
    tokenizer = train_bpe(texts, vocab_size, special)
    bos, eos, pad = special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)


def new_model(fields: dict, attention_dropout: float | None, tokenizer, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights for this tokenizer."""
    settings = {**fields, "vocab_size": len(tokenizer)}
    if attention_dropout is not None:
        settings["attention_dropout"] = attention_dropout
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    set_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings, **special))
    embeddings = model.get_input_embeddings().weight.numel()
    print_rank0(f"new Llama: {model.num_parameters() - embeddings:,} parameters, and {embeddings:,} of the embeddings")
    return model


def load_or_create(args: ModelArguments, rows: list[dict], checkpoint: str | None, seed: int):
    """The model and its tokenizer; a resumed run loads the tokenizer of its checkpoint."""
    if args.from_scratch is None:
        dropout = {} if args.attention_dropout is None else {"attention_dropout": args.attention_dropout}
        name = args.model_name_or_path
        return open_with_tokenizer("--model-name-or-path", AutoModelForCausalLM, name, dtype=args.dtype, **dropout)
    fields = check_fields(args.from_scratch)
    vocab_size = fields.get("vocab_size", LlamaConfig().vocab_size)
    tokenizer = open_tokenizer(checkpoint) if checkpoint else train_tokenizer(rows, vocab_size)
    return new_model(fields, args.attention_dropout, tokenizer, seed), tokenizer


class MergingTrainer(CheckpointTrainer):
    """Adds the differences that LoRA has trained to the weights before the model is saved; checkpoints are adapters."""

    def save_model(self, output_dir=None, _internal_call: bool = False):
        """As in the Trainer."""
        if not _internal_call and isinstance(self.model, PeftModel):
            self.model = self.model_wrapped = self.model.merge_and_unload()
        return super().save_model(output_dir, _internal_call)


def prepare(model_args: ModelArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training -> the trainer and the run folder. Raises all errors that the user can fix."""
    if model_args.from_scratch is not None:
        check_fields(model_args.from_scratch)
    rows, overwrite = load_rows(data_args), folder_args.overwrite_output_dir
    folder = open_run("lexicon/train_expert.py", training_args, model_args, data_args, overwrite=overwrite)
    model, tokenizer = load_or_create(model_args, rows["train"], folder.start, training_args.seed)
    if model_args.lora_r is not None:
        part = TRAINED[model_args.train]
        linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        names = [name for name in linears if part in f"{name}."]
        model = add_lora(model, model_args.lora_r, target_modules=names)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = TRAINED[model_args.train] in name
    splits = {name: make_dataset(name, split, tokenizer, data_args.max_length) for name, split in rows.items()}
    if model_args.learn == "row":
        splits["train"] = splits["train"].map(lambda row: {"labels": row["input_ids"]})
    cls = MergingTrainer if model_args.lora_r is not None else None
    return make_trainer(model, tokenizer, splits, training_args, cls), folder


main = training_command("lexicon", "train_expert", prepare, "eval_perplexity", "perplexity of the definitions {:.2f}")
