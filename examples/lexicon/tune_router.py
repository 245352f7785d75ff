"""Trains the gates of a merged mixture, gates and experts, or all of it with the stock Trainer, and reports how tokens are routed.

    python examples/lexicon/tune_router.py --model_name_or_path MIXTURE --train gates --train_files train.jsonl \
        --validation_files validation.jsonl --output_dir runs/tuned --router_aux_loss_coef 0.01 --eval_strategy epoch
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/lexicon/tune_router.py ...

The mixture is a stock Mixtral checkpoint or a Lexicon model; one that routes by domains reads each row's expert from a
column `domain`. A YAML file before the options gives arguments; start the same command again after an interruption:
training resumes from the last checkpoint. With other settings, data or another mixture it stops, and names what differs:
use another --output_dir, or --overwrite_output_dir true. With --lora the output is an adapter: LoRA on attention, and what --train names
saved in full.
"""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from cli_args import parse_arguments
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from routing_report import flat, places, routing_of, routing_sums, summarise, table
from run_folder import RunFolderArguments, open_run
from torch import nn
from train_expert import (
    DataArguments,
    encoded,
    finish,
    load_split,
    refuse,
    say,
    train,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments, set_seed

from keyphrase_tools.opening import opening
from modeling_lexicon.data_lexicon import DefinitionCollator, definition_nll, perplexity_metric

if importlib.util.find_spec("modeling_lexicon"):
    import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

PARTS = ("gates", "experts", "all")


@dataclass
class RouterArguments:
    model_name_or_path: str = field(metadata={"help": "folder or Hub id of the mixture"})
    train: str = field(default="gates", metadata={"help": "what is trained: gates, experts, gates,experts, or all"})
    router_aux_loss_coef: float | None = field(
        default=None, metadata={"help": "weight of the load-balancing loss; without it, a Mixtral's is off"}
    )
    lora: bool = field(default=False, metadata={"help": "LoRA on attention, and what is trained saved in full"})
    lora_r: int = field(default=16, metadata={"help": "rank of LoRA"})
    dtype: str = field(default="float32", metadata={"help": "of the loaded weights: float32, bfloat16, auto"})

    def __post_init__(self):
        self.parts = tuple(part.strip() for part in self.train.split(","))
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ValueError(
                f"train={self.train!r}: there is no part {unknown[0]!r}. Use gates, or gates,experts, or all."
            )
        if self.lora and "all" in self.parts:
            raise ValueError("train='all' with lora: an adapter holds a part of the weights. Leave one of them out.")


class RoutingReport(TrainerCallback):
    """After each evaluation, reads the validation rows once more for their routing; logs and prints it."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    @torch.no_grad()
    def on_evaluate(self, args, state, control, model, eval_dataloader, **kwargs):
        gather, sums = self.trainer.accelerator.gather_for_metrics, 0
        training = model.training
        model.eval()
        for batch in eval_dataloader:
            outputs = model(**batch, output_router_logits=True)
            logits, top_k, index = routing_of(outputs, model.config)
            rows = routing_sums(logits, top_k, batch["attention_mask"], index)
            sums = sums + gather(rows).sum(0).double().cpu()  # (L, 2 E + 3); rows that fill the last batch are left out
        model.train(training)
        layers, where = summarise(sums), places(model.config)
        self.trainer.log(flat(layers, where))
        if state.is_world_process_zero:
            print(table(layers, where, getattr(model.config, "expert_names", None)))


def freeze(model, parts: tuple[str, ...]) -> None:
    """Leaves only the named parts to be trained.

    Raises:
        ValueError: for a model without routers, or whose gates would get no gradient.
    """
    kind = model.config.model_type
    if hasattr(model, "train_only"):
        if "all" not in parts:
            model.train_only(*parts)
    elif kind == "mixtral":
        if "gates" in parts and model.config.num_experts_per_tok == 1:
            raise ValueError(
                "num_experts_per_tok=1: a Mixtral's one chosen expert has weight 1 whatever its gate says, so that gates "
                "get no gradient. Compose with experts_per_token: 2, or as a Lexicon model, whose top-1 lets it through."
            )
        wanted = tuple({"gates": ".gate.", "experts": ".experts.", "all": ""}[part] for part in parts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in wanted))
    else:
        raise ValueError(
            f"model_type={kind!r} has no routers that this script knows. Compose a mixture of your experts first, with "
            "merge_tools.compose."
        )


def add_lora(model, parts: tuple[str, ...], r: int):
    """An adapter: LoRA on the attention's linears, and the trained parts' own modules saved whole."""
    whole = {"gates": "gate", "experts": "experts"}
    attention = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=r,
        lora_alpha=2 * r,
        target_modules=attention,
        modules_to_save=[whole[part] for part in parts],
    )
    return get_peft_model(model, config)


def balance(model, coefficient: float) -> None:
    """Turns the load-balancing loss on, with this weight."""
    model.config.router_aux_loss_coef = coefficient
    if model.config.model_type == "mixtral":
        model.router_aux_loss_coef = coefficient  # read once, when the model is built
        model.config.output_router_logits = True  # or the loss is not even computed
        # The Trainer would count the balance once a micro-batch; with this it takes the mean of whole losses.
        model.accepts_loss_kwargs = False


def with_domains(rows: Dataset, config) -> Dataset:
    """Rows with their domains where the mixture routes by them, and without where it does not.

    Raises:
        ValueError: for rows without, where the mixture has no other way to know.
    """
    if getattr(config, "routing_policy", "token") != "domain":
        return rows.remove_columns([name for name in ("domain_ids",) if name in rows.column_names])
    if "domain_ids" not in rows.column_names and not config.domain_gate:
        raise ValueError(
            "routing_policy='domain', but the rows name no domain. Give each a column 'domain', the index of its expert, "
            f"0 to {config.num_local_experts - 1}."
        )
    return rows


def prepare(args: RouterArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args):
    """Everything before training, and so every error that the user can fix -> the trainer and the run folder."""
    overwrite = folder_args.overwrite_output_dir
    folder = open_run("lexicon/tune_router.py", training_args, args, data_args, overwrite=overwrite)
    set_seed(training_args.seed)
    with opening("--model_name_or_path", args.model_name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
    freeze(model, args.parts)
    if args.router_aux_loss_coef is not None:
        balance(model, args.router_aux_loss_coef)
    if args.lora:
        model = add_lora(model, args.parts, args.lora_r)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    say(f"{trained:,} of {everything:,} parameters are trained: {args.train}" + ", LoRA on attention" * args.lora)
    files = {"train": data_args.train_files, "validation": data_args.validation_files}
    splits = {
        name: with_domains(encoded(name, load_split(name, paths), tokenizer, data_args.max_length), model.config)
        for name, paths in files.items()
        if paths
    }
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
    trainer.add_callback(RoutingReport(trainer))
    return trainer, folder


def main():
    try:
        arguments = parse_arguments((RouterArguments, DataArguments, RunFolderArguments, TrainingArguments), __doc__)
        trainer, folder = prepare(*arguments)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)
    train(trainer, folder.start)
    trainer.model.config.output_router_logits = False  # who uses the saved mixture wants no balance computed
    finish(trainer, folder)


if __name__ == "__main__":
    main()
