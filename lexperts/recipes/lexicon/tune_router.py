"""Trains the gates of a merged mixture, gates and experts, or all of it with the stock Trainer.

    lexperts train lexicon-router --model-name-or-path MIXTURE --train gates --train-files train.jsonl \\
        --validation-files validation.jsonl --output-dir runs/tuned --router-aux-loss-coef 0.01 --eval-strategy epoch
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m lexperts train lexicon-router ...

The mixture is a stock Mixtral checkpoint or a Lexicon model. A model with the domain policy reads the expert of each row from
a column `domain`.
With --lora the output is an adapter: LoRA on the attention, and the parts of --train in full.
"""

from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from merge_tools.families import MIXTURES
from run_tools.loading import open_with_tokenizer

from ..common.arguments import RunFolderArguments
from ..common.causal_training import add_lora, make_trainer, print_rank0, training_command
from ..common.run_folder import open_run
from .arguments import DataArguments, RouterArguments
from .training import load_rows, make_dataset


def freeze(model, parts: tuple[str, ...]) -> None:
    """Freezes everything except these parts. Raises a `ValueError` if there are no routers, or gates without a gradient."""
    model_type = model.config.model_type
    if hasattr(model, "freeze_all_but"):
        if "all" not in parts:
            model.freeze_all_but(*parts)
    elif model_type == "mixtral":
        if "gates" in parts and model.config.num_experts_per_tok == 1:
            raise ValueError(
                "num_experts_per_tok=1: the weight of a Mixtral's only chosen expert is always 1, so that gates get no "
                "gradient. Compose with experts_per_token: 2, or as a Lexicon model, whose top-1 gates get one."
            )
        patterns = tuple({"gates": ".gate.", "experts": ".experts.", "all": ""}[part] for part in parts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(pattern in name for pattern in patterns))
    elif model_type in MIXTURES:
        raise ValueError(
            f"model_type={model_type!r} is not supported by lexicon-router. Train its gates with: lexperts merge tune, or export it with: "
            "lexperts merge export --format lexicon"
        )
    else:
        raise ValueError(
            f"model_type={model_type!r} has no routers. Compose a mixture of your experts first: lexperts merge compose."
        )


def lora_options(model, parts: tuple[str, ...]) -> dict[str, list[str]]:
    """LoRA is on the attention's linear layers; the modules of the trained parts are saved in full."""
    modules = {"gates": "gate", "experts": "experts"}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    attention = [name for name in linears if name.rsplit(".", 1)[-1] in projections]
    return {"target_modules": attention, "modules_to_save": [modules[part] for part in parts]}


def check_domains(rows: Dataset, config) -> Dataset:
    """Rows with their domains if the mixture routes by them. Raises a `ValueError` if it needs them and there are none."""
    if getattr(config, "routing_policy", "token") != "domain":
        return rows.remove_columns([name for name in ("domain_ids",) if name in rows.column_names])
    if "domain_ids" not in rows.column_names and not config.domain_gate:
        raise ValueError(
            "routing_policy='domain', but the rows have no domain. Add a column 'domain' with the index of each row's expert, "
            f"0 to {config.num_local_experts - 1}."
        )
    return rows


def prepare(
    args: RouterArguments, data_args: DataArguments, folder_args: RunFolderArguments, training_args: TrainingArguments
):
    """Everything before training -> the trainer and the run folder. Raises all errors that the user can fix."""
    rows_by_split, overwrite = load_rows(data_args), folder_args.overwrite_output_dir
    folder = open_run("lexicon/tune_router.py", training_args, args, data_args, overwrite=overwrite)
    set_seed(training_args.seed)
    name = args.model_name_or_path
    model, tokenizer = open_with_tokenizer("--model-name-or-path", AutoModelForCausalLM, name, dtype=args.dtype)
    freeze(model, args.parts)
    if args.router_aux_loss_coef is not None:
        model.config.router_aux_loss_coef = args.router_aux_loss_coef
        if model.config.model_type == "mixtral":
            model.router_aux_loss_coef = args.router_aux_loss_coef  # read once, when the model is built
            model.config.output_router_logits = True  # otherwise the loss is not computed
            # The Trainer would count the auxiliary loss once per micro-batch; with this it averages whole losses.
            model.accepts_loss_kwargs = False
    if args.lora:
        model = add_lora(model, args.lora_r, **lora_options(model, args.parts))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print_rank0(f"{trainable:,} of {total:,} parameters are trained: {args.train}" + ", LoRA on attention" * args.lora)
    splits = {}
    for name, rows in rows_by_split.items():
        splits[name] = check_domains(make_dataset(name, rows, tokenizer, data_args.max_length), model.config)
    return make_trainer(model, tokenizer, splits, training_args), folder


main = training_command("lexicon", "tune_router", prepare, "eval_perplexity", "perplexity of the definitions {:.2f}")
