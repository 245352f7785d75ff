"""Fine-tunes an expert of a mixture, or any dense model, on texts, chats or definitions, by trl's SFTTrainer.

    lexperts train language smollm2 --train-files radiology.jsonl --output-dir experts/radiology
    lexperts train language smollm2 --train-files radiology.jsonl --lora-r 16 --keep-adapter --output-dir adapter
    lexperts train language definitions_smollm2 --train-files train.jsonl --validation-files validation.jsonl

By default only the MLPs are trained: what all experts share stays the base's, so merging changes nothing that is not
routed. The output is a dense model that `lexperts merge compose` reads; with --keep-adapter an adapter of it.
results.json has the perplexity of the validation rows.
"""

import math
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from merge_tools.families import FAMILIES
from merge_tools.record import read_license
from run_tools.cards import join_card
from run_tools.errors import UserError
from run_tools.files import write_file
from run_tools.loading import open_config, open_model, open_tokenizer
from run_tools.packaged import is_hub_id, locate_model, published_name

from ..training import SaveByTime, StopAtNaN, fit, write_results
from .arguments import PARTS, DataArguments, ModelArguments
from .rows import load_rows

CARD = """# {title}

An expert made from {base}: {trained} trained on texts of one domain.

`lexperts merge compose recipe.yml mixture` merges it, with this recipe.yml:

```yaml
base_model: {base}
average: base
gate_mode: ridge
experts:
  - {{source_model: {title}, samples: TEXTS.jsonl}}
  - {{source_model: OTHER_EXPERT, samples: OTHER.jsonl}}
```"""


def open_base(args: ModelArguments):
    """The model and its tokenizer. Raises a `UserError` for a family that cannot be merged."""
    name = args.model_name_or_path
    if (kind := open_config(name).model_type) not in FAMILIES:
        raise UserError(f"--model-name-or-path {name}: {kind!r} is not one of {', '.join(sorted(FAMILIES))}.")
    options = {"dtype": args.dtype}
    if args.attention_dropout is not None:
        options["attention_dropout"] = args.attention_dropout
    model, tokenizer = open_model(AutoModelForCausalLM, name, **options), open_tokenizer(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def choose_weights(model: nn.Module, args: ModelArguments) -> LoraConfig | None:
    """Freezes what `--train` does not name; with `--lora-r` the adapter of the linear layers that it names."""
    parts = tuple(PARTS[name] for name in args.train.split(","))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    if args.lora_r is None:
        return None
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    names = [name for name in linear if any(part in f"{name}." for part in parts)]
    return LoraConfig(task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules=names)


@torch.no_grad()
def perplexity(trainer: SFTTrainer) -> float:
    """exp of the mean nats per token with a loss, over all tokens of the validation rows together."""
    nats = tokens = 0.0
    trainer.model.eval()
    for batch in trainer.get_eval_dataloader():
        batch = {name: tensor.to(trainer.model.device) for name, tensor in batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        nats, tokens = nats + count * float(trainer.model(**batch).loss), tokens + count
    return math.exp(nats / tokens)


def write_card(args: ModelArguments, folder: Path) -> None:
    """Writes the card of an expert, in place of trl's or peft's: its base, its licence, and how to merge it."""
    base, title = published_name(args.model_name_or_path), folder.resolve().name
    trained = "a LoRA adapter of the MLPs was" if args.keep_adapter else f"the weights of {args.train} were"
    metadata = {
        "license": read_license(Path(locate_model(args.model_name_or_path))), "tags": ["lexperts", "merge"],
        "library_name": "peft" if args.keep_adapter else "transformers", "pipeline_tag": "text-generation",
        "base_model": base if is_hub_id(base) else None,
    }  # fmt: skip
    write_file(folder / "README.md", join_card(metadata, CARD.format(title=title, base=base, trained=trained)))


def train(model_args: ModelArguments, data_args: DataArguments, training_args, checkpoint: str | None) -> None:
    """Trains, scores and saves a model."""
    model, tokenizer = open_base(model_args)
    files = {"train": data_args.train_files, "validation": data_args.validation_files}
    splits, length = {}, training_args.max_length
    for split, paths in files.items():
        if paths:
            splits[split], is_text = load_rows(split, paths, tokenizer, length)
            if split == "train" and is_text:  # windows of joined texts
                training_args.packing, training_args.packing_strategy = True, "wrapped"
            elif is_text and not training_args.packing:
                raise UserError(f"--validation-files {paths[0]} has texts, but the training rows are of another kind.")
    trainer = SFTTrainer(
        model, training_args, train_dataset=splits["train"], eval_dataset=splits.get("validation"),
        processing_class=tokenizer, peft_config=choose_weights(model, model_args), callbacks=[SaveByTime(), StopAtNaN()],
    )  # fmt: skip
    rows = trainer.train_dataset["input_ids"]
    full = 0 if training_args.packing else sum(len(ids) == length for ids in rows)
    lost = 0 if training_args.packing else len(splits["train"]) - len(rows)
    print(f"train: {len(rows):,} windows, {full:,} of which are as long as --max-length {length} or cut there", end="")
    print(f"; {lost:,} left out, whose answer begins after it" if lost else "")
    fit(trainer, checkpoint)
    results = {"perplexity": perplexity(trainer)} if "validation" in splits else {}
    if isinstance(trainer.model, PeftModel) and not model_args.keep_adapter:
        trainer.model = trainer.model.merge_and_unload()
    trainer.save_model()
    if trainer.is_world_process_zero():
        folder = Path(training_args.output_dir)
        write_card(model_args, folder)
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, and not part of the model
    if results:
        print(f"validation: perplexity {results['perplexity']:.2f}")
    print(f"The model is in {training_args.output_dir}.")
    write_results(trainer, **results)
