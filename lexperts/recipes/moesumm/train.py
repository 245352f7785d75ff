r"""Fine-tunes a summariser on several data sets, or adapts one to a new data set with few examples.

    lexperts train moesumm bart_large_paper --output-dir runs/moesumm
    lexperts train moesumm small_cpu --datasets mail=data/mail news=data/news --model-name-or-path runs/small-bart \
        --output-dir runs/moesumm
    lexperts train moesumm smollm2_cpu --datasets mail=data/mail news=data/news --output-dir runs/moesumm-smollm2
    lexperts train moesumm --setting few_shot --few-shot-rows 10 100 --draws 10 --max-steps 100 \
        --model-name-or-path runs/moesumm --datasets chat=data/chat --output-dir runs/few-shot

The backbone is an encoder with a decoder (BART, PEGASUS, mBART) or a decoder (Llama, Mistral, Qwen2, Qwen3); its configuration says
which. A decoder reads a document and the prompt for a summary as one sequence, of at most --max-length tokens with the summary.

--setting in_domain (the default) trains all weights on the concatenated data sets; with --train deputies only deputies and
selectors, and with --lora-r also LoRA on the backbone's attention. The paper's baselines and ablations are
--variant backbone (on all data sets, or on a single one), flat_moe, no_dataset and no_margin.

--setting few_shot starts from such a model, samples rows of each data set's train split, trains deputies and selectors on
them (all weights for a backbone), and writes summaries of the test split for `lexperts evaluate summaries`. Zero-shot needs no
training: `lexperts summarize` without --dataset.

Documents and summaries that are too long are truncated and counted.
"""

import copy
import itertools
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, TrainingArguments, pipeline, set_seed

from modeling_moesumm import (
    DataCollatorForCausalMoeSumm,
    DataCollatorForMoeSumm,
    MoeSummForCausalLM,
    MoeSummForConditionalGeneration,
    TemperatureSampler,
)
from run_tools.errors import RESUME, SettingsMismatchError, UserError
from run_tools.files import write_file
from run_tools.fingerprints import fingerprint
from run_tools.loading import describe_load_errors, open_config, open_model, open_tokenizer

from ..common.arguments import RunFolderArguments, command
from ..common.run_folder import open_run, training_summary
from ..common.settings import collect_settings
from ..common.training import RecipeTrainer, train_or_resume, trainer_options
from .arguments import VARIANTS, DataArguments, FewShotArguments, GenerationArguments, ModelArguments
from .data import concatenate, fingerprint_splits, load_sources, require_split, sample_rows
from .models import auto_class, is_decoder
from .resumable_summaries import SummaryFile, hash_rows

# Fields of the configuration that a trained model can change, and those that are fixed when it is made.
LOSSES = ("margin_loss_coef", "margin_main", "label_smoothing")
STRUCTURE = ("num_deputies", "deputy_intermediate_size", "deputy_init_std", "gate_position", "selector_bias")


class BackboneTrainer(RecipeTrainer):
    """For a stock model, whose loss is a mean per batch: all tokens of a step get the same weight, as in MoeSumm."""

    loss_is_scaled_for_ga = True

    def __init__(self, *args, label_smoothing: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.label_smoothing = label_smoothing
        self.model_accepts_loss_kwargs = True  # so that the Trainer counts the labels of the step

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The sum of the tokens' losses, divided by the labels of the step."""
        outputs = model(**inputs)
        loss, labels, logits = outputs.loss, inputs["labels"], outputs.logits
        if is_decoder(self.accelerator.unwrap_model(model).config):  # whose scores are those of the next token
            labels, logits = labels[:, 1:], logits[:, :-1]
        if self.label_smoothing:
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self.label_smoothing)
        if num_items_in_batch is not None:
            loss = loss * (labels != -100).sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def load_model(args: ModelArguments, names: list[str]):
    """A new model of the variant with selectors for these data sets, and its tokenizer."""
    with describe_load_errors("--model-name-or-path", args.model_name_or_path):
        tokenizer = open_tokenizer(args.model_name_or_path)
    auto = auto_class("--model-name-or-path", args.model_name_or_path)
    if args.variant == "backbone":
        model = open_model(auto, args.model_name_or_path, dtype="float32")
    else:
        options = {name: getattr(args, name) for name in (*LOSSES, *STRUCTURE)}
        if args.variant == "flat_moe":
            del options["margin_loss_coef"]
        options |= VARIANTS[args.variant]
        cls = MoeSummForCausalLM if auto is AutoModelForCausalLM else MoeSummForConditionalGeneration
        model = cls.from_backbone(args.model_name_or_path, datasets=names, **options)
    return model, tokenizer


def choose_weights(model, args: ModelArguments):
    """The model with the weights to train: all; deputies and selectors, by LoRA also queries and values; of a backbone by LoRA
    differences of all linear layers.
    """
    if args.lora_r is not None and args.variant == "backbone":
        return get_peft_model(model, LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear"))
    if args.lora_r is not None:
        with warnings.catch_warnings():  # the adapter is merged at the end
            warnings.filterwarnings("ignore", message="An adapter over")
            return get_peft_model(model, model.lora_config(r=args.lora_r, lora_alpha=2 * args.lora_r))
    if args.train == "deputies":
        model.freeze_all_but_deputies()
    return model


def make_collator(model, tokenizer, args: ModelArguments, data_args: DataArguments):
    """The data collator of an encoder-decoder model or a decoder, which truncates and counts. Raises a `UserError` for the length
    of the other.
    """
    decoder, target = is_decoder(model.config), data_args.max_target_length
    used, unused = ("max_length", "max_source_length") if decoder else ("max_source_length", "max_length")
    length, other = (getattr(args if name == "max_length" else data_args, name) for name in (used, unused))
    if other is not None:
        option, right = (f"--{name.replace('_', '-')}" for name in (unused, used))
        kind = "a decoder" if decoder else "an encoder with a decoder"
        raise UserError(f"{option} {other} is not for {args.model_name_or_path}, which is {kind}. Use {right}.")
    if length:
        tokenizer.model_max_length = length  # is saved: inference truncates as training does
    if decoder:
        return DataCollatorForCausalMoeSumm(tokenizer, model, length, target, on_long="truncate", answers_only=True)
    return DataCollatorForMoeSumm(tokenizer, model, length, target, on_long="truncate")


def make_trainer(
    model, tokenizer, args: ModelArguments, data_args: DataArguments, training_args, train, validation=None
) -> RecipeTrainer:
    """A trainer of a MoeSumm or a stock model, on rows of texts."""
    collator = make_collator(model, tokenizer, args, data_args)
    training_args.remove_unused_columns = False  # the collator tokenises the texts
    is_moesumm = hasattr(model.config, "datasets")
    options = trainer_options(model, training_args, {"train": train, "validation": validation}, collator, tokenizer)
    sampling = {"seed": training_args.seed}
    if training_args.train_sampling_strategy == "group_by_length":
        texts = zip(train["document"], train["summary"], strict=True)
        lengths = [len(document) + len(summary) for document, summary in texts]
        sampling |= {"lengths": lengths, "batch_size": training_args.per_device_train_batch_size}
    options["train_sampler"] = TemperatureSampler(train["dataset"], args.mixing, args.temperature, **sampling)
    if not is_moesumm:
        return BackboneTrainer(**options, label_smoothing=args.label_smoothing)
    if args.deputy_lr_factor != 1.0:
        options["part"] = [p for name, p in model.named_parameters() if ".deputies." in name]
        options["part_rate"] = training_args.learning_rate * args.deputy_lr_factor
    return RecipeTrainer(**options)


def train_in_domain(args: ModelArguments, data_args: DataArguments, generation_args, training_args, folder_args):
    """Trains all weights or the chosen ones, and saves the model with its pipeline."""
    sources, output, length = load_sources(data_args), Path(training_args.output_dir), generation_args.summary_length
    require_split(sources, "train", data_args)
    saved = {"num_beams": generation_args.num_beams, "summary_length": length}
    saved["datasets"] = fingerprint_splits(data_args, ("train", "validation"))
    overwrite = folder_args.overwrite_output_dir
    folder = open_run("moesumm/train.py", training_args, args, data_args, overwrite=overwrite, **saved)
    set_seed(training_args.seed)
    model, tokenizer = load_model(args, list(sources))
    rows = {split: concatenate(sources, split) for split in ("train", "validation")}
    if training_args.eval_strategy != "no" and rows["validation"] is None:
        raise ValueError(
            f"--eval-strategy {training_args.eval_strategy} needs a validation split, and --datasets has none. Pass "
            "--eval-strategy no."
        )
    trainer = make_trainer(choose_weights(model, args), tokenizer, args, data_args, training_args, **rows)
    train_or_resume(trainer, folder)
    if trainer.is_world_process_zero():
        model = trainer.model if args.lora_r is None else trainer.model.merge_and_unload()
        lengths = {"max_length": length} if length else {}
        if length and is_decoder(model.config):  # whose max_length counts the document
            lengths = {"max_new_tokens": length - 1}
        unsampled = dict.fromkeys(("temperature", "top_k", "top_p")) | {"do_sample": False}  # as chat models are not
        model.generation_config.update(**unsampled, **generation_args.generate_kwargs(), **lengths)
        pipeline("moe-summarization", model=model, tokenizer=tokenizer).save_pretrained(output)
        write_file(output / "log.json", json.dumps(trainer.state.log_history, indent=1))
        folder.mark_finished(ran=training_summary(training_args, trainer.state))
        collator = trainer.data_collator
        for kind, limit in collator.limits.items():
            if count := collator.truncated_rows[kind]:
                print(f"{count:,} of {collator.truncated_rows['rows']:,} {kind} were truncated to {limit:,} tokens.")
        print(f"\nThe model is in {output}. To use it: pipeline('moe-summarization', model={str(output)!r})")


def check_model(file: SummaryFile, saved: Path) -> None:
    """Raises a `SettingsMismatchError` if the folder of a sample's model exists, and its summaries have no record of a run."""
    if saved.exists() and not file.record.exists():
        raise SettingsMismatchError(
            f"{saved} exists, but {file.record.name}, the record of a run that wrote it, does not. Move the folder away, or use "
            "another --output-dir."
        )


def changes_of(args: ModelArguments, config) -> dict:
    """The fields of a trained model's configuration that few-shot training is to change. Raises a `UserError` for an option that a
    trained model cannot follow.
    """
    given = {field: getattr(args, field) for field in (*LOSSES, *STRUCTURE)}
    given = {field: value for field, value in given.items() if value != getattr(ModelArguments, field)}
    of_variant = {"main_expert": None} if args.variant == "backbone" else VARIANTS[args.variant]
    changes = given | of_variant
    for field in dict.fromkeys([*of_variant, *given]):
        if field not in LOSSES and changes[field] != (own := getattr(config, field)):
            option = "variant" if field in of_variant else field
            raise UserError(
                f"--{option.replace('_', '-')} {getattr(args, option)} is not for {args.model_name_or_path}, a trained model with "
                f"{field}={own}. Leave it out, or train a model in_domain with it first."
            )
    return {field: value for field, value in changes.items() if field in LOSSES}


@dataclass
class FewShot:
    """Few-shot training: for each sample of rows a model from the same start, and its summaries; finished ones are kept."""

    args: ModelArguments
    few_shot_args: FewShotArguments
    data_args: DataArguments
    generation_args: GenerationArguments
    training_args: TrainingArguments
    folder_args: RunFolderArguments

    def prepare(self):
        """Loads everything that does not depend on the sample."""
        self.output = Path(self.training_args.output_dir)
        sources = load_sources(self.data_args)
        self.train = require_split(sources, "train", self.data_args)
        self.test = require_split(sources, "test", self.data_args)
        for rows in self.train.values():
            sample_rows(rows, max(self.few_shot_args.few_shot_rows), seed=0)
        self.start = fingerprint(self.args.model_name_or_path)
        with describe_load_errors("--model-name-or-path", self.args.model_name_or_path):
            self.tokenizer = open_tokenizer(self.args.model_name_or_path)
            config = open_config(self.args.model_name_or_path)
        self.has_datasets = hasattr(config, "datasets")
        self.changes = changes_of(self.args, config) if self.has_datasets else {}

    def run(self):
        """Trains and tests on all samples."""
        self.prepare()
        few = self.few_shot_args
        for name, number, draw in itertools.product(self.train, few.few_shot_rows, range(few.draws)):
            path = self.output / f"draw_{draw}" / f"{name}-{number}.jsonl"
            dataset = name if self.has_datasets else None
            rows = sample_rows(self.train[name], number, seed=1000 * number + draw)
            settings = self.settings(rows, draw)
            saved = path.parent / f"{name}-{number}-model"
            file = self.open_summaries(path, settings, dataset, name)
            check_model(file, saved)
            if file.is_finished and (saved.exists() or not few.save_models):
                continue
            print(f"{name}, {number} rows, draw {draw}", flush=True)
            with file:  # which has a record, so that the model is known to be of this run
                shutil.rmtree(saved, ignore_errors=True)
                model = self.adapt(name, rows, draw)
                if few.save_models:
                    part = saved.with_name(f"{saved.name}.part")
                    pipeline("moe-summarization", model=model, tokenizer=self.tokenizer).save_pretrained(part)
                    part.rename(saved)
                file.write_summaries(model, self.tokenizer)
        print(f"\nThe summaries are in {self.output}: lexperts evaluate summaries FILE --prediction-column prediction")

    def open_summaries(self, path: Path, settings: dict, dataset: str | None, name: str) -> SummaryFile:
        """The summaries of a sample. Those of other settings are removed if the folder is to be overwritten."""
        arguments = path, self.test[name], self.generation_args, settings, dataset
        try:
            return SummaryFile(*arguments)
        except UserError:
            if not self.folder_args.overwrite_output_dir or not Path(f"{path}.settings.json").exists():
                raise
            path.unlink(missing_ok=True)
            return SummaryFile(*arguments)

    def settings(self, rows: Dataset, draw: int) -> dict:
        """The settings of the training on a sample."""
        lengths = {limit: getattr(self.data_args, limit) for limit in ("max_source_length", "max_target_length")}
        sample = {"name": f"{len(rows)} rows, draw {draw}", "sha256": hash_rows(rows)}
        more = {"few_rows": sample, "deputies_only": self.few_shot_args.deputies_only or not self.has_datasets}
        more["model_name_or_path"] = self.start
        return collect_settings("moesumm/train.py, few_shot", self.args, self.training_args, **lengths, **more)

    def adapt(self, name: str, rows: Dataset, draw: int):
        """The model after training on a sample: deputies and selectors, or all weights of a backbone or on request."""
        training_args = copy.copy(self.training_args)
        training_args.seed = self.training_args.seed + draw
        set_seed(training_args.seed)
        auto = auto_class("--model-name-or-path", self.args.model_name_or_path)
        model = open_model(auto, self.args.model_name_or_path, dtype="float32")
        if self.has_datasets:
            if name not in model.config.datasets:
                model.add_dataset(name)
            for field, value in self.changes.items():
                setattr(model.config, field, value)
            if self.few_shot_args.deputies_only:
                model.freeze_all_but_deputies()
        make_trainer(model, self.tokenizer, self.args, self.data_args, training_args, rows).train()
        return model


def train(args, few_shot_args, data_args, generation_args, folder_args, training_args) -> None:
    """The command `lexperts train moesumm`."""
    if training_args.label_smoothing_factor:  # the Trainer would not pass labels to the model
        args.label_smoothing, training_args.label_smoothing_factor = training_args.label_smoothing_factor, 0.0
    if args.setting == "few_shot":
        training_args.save_strategy = training_args.eval_strategy = "no"  # each training is short
        FewShot(args, few_shot_args, data_args, generation_args, training_args, folder_args).run()
    else:
        train_in_domain(args, data_args, generation_args, training_args, folder_args)


main = command("moesumm", "train", train, RESUME)
