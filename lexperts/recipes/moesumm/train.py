r"""Fine-tunes one summariser on several data sets, or a trained one on a few rows of a new data set.

    lexperts train moesumm smollm2_cpu --datasets mail=data/mail news=data/news --output-dir runs/moesumm
    lexperts train moesumm --model-name-or-path runs/moesumm --datasets chat=data/chat --few-shot-rows 10 --seed 1 \
        --max-steps 100 --learning-rate 1e-3 --output-dir runs/chat-10-1

All weights are trained; with --train deputies only deputies and selectors, and with --lora-r these and LoRA on the
backbone's attention. A trained MoeSumm gets a selector for each new data set; of it only deputies and selectors are
trained, unless --train all is given. Documents and summaries that are too long are truncated and counted.
"""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from modeling_moesumm import (
    DataCollatorForMoeSumm,
    MoeSummConfig,
    MoeSummForCausalLM,
    MoeSummForConditionalGeneration,
    TemperatureSampler,
)
from run_tools.errors import UserError
from run_tools.loading import open_config, open_model, open_tokenizer

from ..training import RecipeTrainer, fit, save_pipeline, write_results
from .arguments import VARIANTS, DataArguments, GenerationArguments, ModelArguments
from .data import load_rows

# fields of the configuration that a trained model can change, and those that are fixed when it is made
LOSSES = ("margin_loss_coef", "margin_main", "label_smoothing")
STRUCTURE = ("num_deputies", "deputy_intermediate_size", "deputy_init_std", "gate_position", "selector_bias")


class GroupedSampler(LengthGroupedSampler):
    """The Trainer's sampler of rows of similar lengths, whose order depends on seed and epoch alone, as a resumed run needs it."""

    def __init__(self, *args, seed: int, **kwargs):
        super().__init__(*args, generator=torch.Generator(), **kwargs)
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, counted from 0."""
        self.generator.manual_seed(self.seed + epoch)


class BackboneTrainer(RecipeTrainer):
    """For a stock model, whose loss is a mean per batch: all tokens of a step get the same weight, as in MoeSumm."""

    loss_is_scaled_for_ga = True
    label_smoothing = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The sum of the tokens' losses, divided by the labels of the step."""
        outputs, labels = model(**inputs), inputs["labels"]
        logits = outputs.logits
        if not self.model.config.is_encoder_decoder:  # a decoder, whose scores are those of the next token
            labels, logits = labels[:, 1:], logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self.label_smoothing)
        if num_items_in_batch is not None:
            loss = loss * (labels != -100).sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def load_model(args: ModelArguments, config, names: list[str]):
    """A stock model for the variant backbone, else a MoeSumm, new or trained, with selectors for these data sets."""
    path, seq2seq = args.model_name_or_path, config.is_encoder_decoder
    cls = MoeSummForConditionalGeneration if seq2seq else MoeSummForCausalLM
    fields = {field: value for field in (*LOSSES, *STRUCTURE) if (value := getattr(args, field)) is not None}
    if not isinstance(config, MoeSummConfig):
        if args.variant == "backbone":
            return open_model(AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM, path, dtype="float32")
        return cls.from_backbone(path, datasets=names, **fields | VARIANTS[args.variant or "moesumm"])
    model = open_model(cls, path, dtype="float32")
    fields |= VARIANTS.get(args.variant, {})
    if wrong := {f: value for f, value in fields.items() if f not in LOSSES and value != getattr(model.config, f)}:
        raise UserError(f"--model-name-or-path {path} is a trained model, which cannot become one with {wrong}.")
    for field in fields.keys() & {*LOSSES}:
        setattr(model.config, field, fields[field])
    model.config.check()
    for name in [name for name in names if name not in model.config.datasets]:
        model.add_dataset(name)
    return model


def choose_weights(model, args: ModelArguments, trained: bool):
    """The model with the weights to train: all, or deputies and selectors, or LoRA beside these or in a stock model."""
    if args.lora_r is None:
        if (args.train or ("deputies" if trained else "all")) == "deputies":
            model.freeze_all_but_deputies()
        return model
    lora = {"r": args.lora_r, "lora_alpha": 2 * args.lora_r}
    if args.variant == "backbone":
        return get_peft_model(model, LoraConfig(target_modules="all-linear", **lora))
    with warnings.catch_warnings():  # the adapter is merged at the end
        warnings.filterwarnings("ignore", message="An adapter over")
        return get_peft_model(model, model.lora_config(**lora))


def make_trainer(model, tokenizer, args: ModelArguments, data: DataArguments, training_args, rows: dict):
    """A Trainer of a MoeSumm or a stock model, on rows of texts, which the collator truncates and counts."""
    if data.max_length:
        tokenizer.model_max_length = data.max_length  # is saved: inference truncates as training does
    collator = DataCollatorForMoeSumm(tokenizer, model, data.max_length, data.max_target_length, "truncate")
    train = rows["train"]
    sampler = TemperatureSampler(train["dataset"], data.mixing, data.temperature, training_args.seed)
    if training_args.train_sampling_strategy == "group_by_length":
        lengths = [len(row["document"]) + len(row["summary"]) for row in train]
        sampler = GroupedSampler(training_args.per_device_train_batch_size, lengths=lengths, seed=training_args.seed)
    training_args.remove_unused_columns = False  # the collator tokenises the texts
    trainer = (BackboneTrainer if args.variant == "backbone" else RecipeTrainer)(
        model, training_args, collator, train, rows.get("validation"), processing_class=tokenizer, sampler=sampler
    )
    if isinstance(trainer, BackboneTrainer):
        trainer.model_accepts_loss_kwargs = True  # so that the Trainer counts the labels of the step
        trainer.label_smoothing = args.label_smoothing or 0.0
    return trainer


def set_generation(model, args: GenerationArguments) -> None:
    """Sets the generation settings that are saved with a model."""
    settings = {name: value for name, value in vars(args).items() if name != "summary_length" and value is not None}
    settings |= dict.fromkeys(("temperature", "top_k", "top_p")) | {"do_sample": False}  # as chat models do not
    if length := args.summary_length:  # a decoder's max_length counts the document
        settings |= {"max_length": length} if model.config.is_encoder_decoder else {"max_new_tokens": length - 1}
    model.generation_config.update(**settings)


def train(args: ModelArguments, data: DataArguments, generation: GenerationArguments, training, checkpoint) -> None:
    """Trains and saves a model."""
    if training.label_smoothing_factor:
        raise UserError("--label-smoothing-factor does not reach the model's loss. Use --label-smoothing.")
    if training.train_sampling_strategy == "group_by_length" and data.mixing != "size":
        raise UserError(f"--mixing {data.mixing} has an order of its own. Use --train-sampling-strategy random.")
    rows, config = load_rows(data, training.seed), open_config(args.model_name_or_path)
    set_seed(training.seed)
    model = load_model(args, config, list(dict.fromkeys(rows["train"]["dataset"])))
    model = choose_weights(model, args, isinstance(config, MoeSummConfig))
    tokenizer = open_tokenizer(args.model_name_or_path)
    trainer = make_trainer(model, tokenizer, args, data, training, rows)
    fit(trainer, checkpoint)
    seen = trainer.data_collator.truncated_rows
    for kind, limit in trainer.data_collator.limits.items():
        if seen[kind]:
            print(f"{seen[kind]:,} of {seen['rows']:,} {kind} were truncated to {limit:,} tokens.")
    if trainer.is_world_process_zero():
        model = trainer.model if args.lora_r is None else trainer.model.merge_and_unload()
        set_generation(model, generation)
        save_pipeline("moe-summarization", model, tokenizer, training.output_dir)
    write_results(trainer, truncated=dict(seen))
