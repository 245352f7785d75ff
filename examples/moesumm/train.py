"""Fine-tunes a summariser on several data sets at once, or adapts one to a new data set from few examples.

    python examples/moesumm/train.py examples/moesumm/bart_large_paper.yml --output_dir runs/moesumm
    python examples/moesumm/train.py examples/moesumm/small_cpu.yml --datasets mail=data/mail news=data/news \
        --model_name_or_path runs/small-bart --output_dir runs/moesumm
    python examples/moesumm/train.py --setting few_shot --few_shot_rows 10 100 --draws 10 --max_steps 100 \
        --model_name_or_path runs/moesumm --datasets chat=data/chat --output_dir runs/few-shot

`--setting in_domain` (the default) trains all weights on the mix; MoeSumm's baselines and ablations are `--variant
backbone` (on the mix, or on one data set where one is given), `flat_moe`, `no_dataset` and `no_margin`. `--setting
few_shot` takes a model that was trained so, draws rows of each data set's train split, trains deputies and selectors on
them (a backbone: all weights) and writes the summaries of its test split, for evaluate.py. Zero-shot needs no training:
evaluate.py --zero_shot. Interrupted, the same command resumes. With other settings, data or another start model it stops,
and names what differs: use another --output_dir, or --overwrite_output_dir true. What the model cannot read or
write is cut, and counted.
"""

import copy
import itertools
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import parse_arguments, run_or_exit
from run_folder import RunFolderArguments, fingerprint, open_run, replace_file, settings_of, what_ran
from sources import DataArguments, drawn, fingerprints, mixed, one_split, read_sources
from summaries import SummaryFile, Writing, hash_of_rows
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.opening import opening
from modeling_moesumm import MixedDatasetSampler, MixedSampling, MoeSummCollator, MoeSummForConditionalGeneration

# what each is made of, as options of MoeSummForConditionalGeneration.from_backbone
VARIANTS = {
    "moesumm": {},
    "no_dataset": {"dataset_aware": False},
    "no_margin": {"margin_loss_coef": 0.0},
    "flat_moe": {"main_expert": False, "deputy_size": None},
    "backbone": None,
}


@dataclass
class ModelArguments:
    model_name_or_path: str = field(
        metadata={"help": "folder or Hub id of a BART, PEGASUS or mBART; in few_shot, of what was trained in domain"}
    )
    setting: str = field(default="in_domain", metadata={"help": "in_domain, few_shot"})
    variant: str = field(default="moesumm", metadata={"help": ", ".join(VARIANTS)})
    num_deputies: int = field(default=3, metadata={"help": "deputies in every layer"})
    deputy_size: int = field(default=512, metadata={"help": "their inner size"})
    margin_loss_coef: float = field(default=1.0, metadata={"help": "weight of the max-margin loss"})
    margin_main: str = field(
        default="model",
        metadata={"help": "what the margin compares with: model (no deputies), last_layer (none there)"},
    )
    label_smoothing: float = field(default=0.0, metadata={"help": "of the generation loss, not of the margin"})
    gate_position: str = field(default="deputy", metadata={"help": "deputy (Eq. 6), layer_output, ffn_output"})
    selector_bias: bool = field(default=False, metadata={"help": "whether selectors have biases"})
    deputy_output_std: float = field(default=0.0, metadata={"help": "how the deputies' second matrix starts"})
    deputy_lr_factor: float = field(
        default=1.0, metadata={"help": "learning rate of deputies and selectors, as a factor"}
    )
    mixing: str = field(default="size", metadata={"help": "rows of each data set: by size, even, temperature"})
    temperature: float = field(default=2.0, metadata={"help": "of --mixing temperature"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})

    def __post_init__(self):
        for name, known in (("setting", ("in_domain", "few_shot")), ("variant", tuple(VARIANTS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known. Use one of {', '.join(known)}.")


@dataclass
class FewShotArguments:
    few_shot_rows: list[int] = field(default_factory=lambda: [10, 100], metadata={"help": "rows of a draw"})
    draws: int = field(default=10, metadata={"help": "draws of so many rows, each trained and tested by itself"})
    deputies_only: bool = field(
        default=True, metadata={"help": "of MoeSumm train deputies and selectors alone, as the paper does; false: all"}
    )
    save_models: bool = field(default=False, metadata={"help": "keep what each draw has trained"})


class SummaryTrainer(MixedSampling, Seq2SeqTrainer):
    """The stock trainer, with a mixing sampler and, if asked for, a learning rate of the deputies' own."""

    deputy_lr_factor = 1.0

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if self.deputy_lr_factor != 1.0:
            deputies = {id(p) for name, p in self.model.named_parameters() if ".deputies." in name}
            for group in list(optimizer.param_groups):
                new = [p for p in group["params"] if id(p) in deputies]
                if new:
                    group["params"] = [p for p in group["params"] if id(p) not in deputies]
                    lr = self.args.learning_rate * self.deputy_lr_factor
                    optimizer.add_param_group({**group, "params": new, "lr": lr, "initial_lr": lr})
        return optimizer


class BackboneTrainer(SummaryTrainer):
    """For a stock model, whose loss is the mean of a small batch: each token of the whole step counts alike, as in ours."""

    loss_is_scaled_for_ga = True
    label_smoothing = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # so that the tokens of the step are counted

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        if self.label_smoothing:
            labels = inputs["labels"].flatten()
            loss = cross_entropy(outputs.logits.flatten(0, 1), labels, label_smoothing=self.label_smoothing)
        if num_items_in_batch is not None:
            loss = loss * (inputs["labels"] != -100).sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def open_model(args: ModelArguments, names: list[str]):
    """A new model of the variant, whose selectors know these data sets, and its tokenizer."""
    with opening("--model_name_or_path", args.model_name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    if args.variant == "backbone":
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)
    else:
        names_of_options = ("num_deputies", "deputy_size", "deputy_output_std", "label_smoothing")
        names_of_options += ("gate_position", "selector_bias", "margin_main")
        options = {name: getattr(args, name) for name in names_of_options}
        if args.variant != "flat_moe":
            options["margin_loss_coef"] = args.margin_loss_coef
        options |= VARIANTS[args.variant]
        model = MoeSummForConditionalGeneration.from_backbone(args.model_name_or_path, datasets=names, **options)
    return model, tokenizer


def take_label_smoothing(args: ModelArguments, training_args):
    """The Trainer's own would keep the labels from the model, and with them the margin loss."""
    if training_args.label_smoothing_factor:
        args.label_smoothing, training_args.label_smoothing_factor = training_args.label_smoothing_factor, 0.0


def trainer_of(model, tokenizer, args: ModelArguments, data_args: DataArguments, training_args, train, validation=None):
    if data_args.max_source_length:
        tokenizer.model_max_length = data_args.max_source_length  # saved with it: summaries are of what training saw
    collator = MoeSummCollator(
        tokenizer, model, data_args.max_source_length, data_args.max_target_length, on_long="truncate"
    )
    training_args.remove_unused_columns = False  # texts are tokenised by the collator
    kind = SummaryTrainer if isinstance(model, MoeSummForConditionalGeneration) else BackboneTrainer
    trainer = kind(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=collator,
        processing_class=tokenizer,
        train_sampler=MixedDatasetSampler(train["dataset"], args.mixing, args.temperature, seed=training_args.seed),
    )
    trainer.deputy_lr_factor = args.deputy_lr_factor
    if kind is BackboneTrainer:
        trainer.label_smoothing = args.label_smoothing
    return trainer


def prepare_in_domain(args: ModelArguments, data_args: DataArguments, writing: Writing, training_args, overwrite: bool):
    """Everything before training -> the run folder and the trainer."""
    sources = read_sources(data_args)
    one_split(sources, "train", data_args)
    saved = {"num_beams": writing.num_beams, "summary_length": writing.summary_length}
    saved["datasets"] = fingerprints(data_args, ("train", "validation"))
    folder = open_run("moesumm/train.py", training_args, args, data_args, overwrite=overwrite, **saved)
    set_seed(training_args.seed)
    model, tokenizer = open_model(args, list(sources))
    validation = mixed(sources, "validation")
    if training_args.eval_strategy != "no" and validation is None:
        raise ValueError("There is no validation split to evaluate on. Pass --eval_strategy no, or data that has one.")
    return folder, trainer_of(model, tokenizer, args, data_args, training_args, mixed(sources, "train"), validation)


def in_domain(args: ModelArguments, data_args: DataArguments, writing: Writing, training_args, overwrite: bool):
    given = (args, data_args, writing, training_args, overwrite)
    folder, trainer = run_or_exit(prepare_in_domain, *given, traceback=args.traceback)
    output = Path(training_args.output_dir)
    trainer.train(resume_from_checkpoint=folder.start)
    if trainer.is_world_process_zero():
        model = trainer.model
        lengths = {"max_length": writing.summary_length} if writing.summary_length else {}
        model.generation_config.update(**writing.generation(), **lengths)
        pipeline("moe-summarization", model=model, tokenizer=trainer.processing_class).save_pretrained(output)
        replace_file(output / "log.json", json.dumps(trainer.state.log_history, indent=1))
        folder.mark_finished(ran=what_ran(training_args, trainer.state))
        report_cut(trainer.data_collator)
        print(f"\nThe model is in {output}: pipeline('moe-summarization', model={str(output)!r})")


def report_cut(collator: MoeSummCollator):
    rows = collator.cut_rows["rows"]
    for what, limit in (("documents", collator.max_source_length), ("summaries", collator.max_target_length)):
        if collator.cut_rows[what]:
            print(f"{collator.cut_rows[what]:,} of the {rows:,} {what} read were cut to {limit:,} tokens.")


@dataclass
class FewShot:
    """Draw after draw, a model from the same start, and its summaries; those that are written are passed over."""

    args: ModelArguments
    few: FewShotArguments
    data_args: DataArguments
    writing: Writing
    training_args: Seq2SeqTrainingArguments
    overwrite: bool = False

    def prepare(self):
        self.output = Path(self.training_args.output_dir)
        sources = read_sources(self.data_args)
        self.train = one_split(sources, "train", self.data_args)
        self.test = one_split(sources, "test", self.data_args)
        for rows in self.train.values():
            drawn(rows, max(self.few.few_shot_rows), seed=0)
        self.start = fingerprint(self.args.model_name_or_path)
        with opening("--model_name_or_path", self.args.model_name_or_path):
            self.tokenizer = AutoTokenizer.from_pretrained(self.args.model_name_or_path)
            self.knows_datasets = hasattr(AutoConfig.from_pretrained(self.args.model_name_or_path), "datasets")

    def run(self):
        run_or_exit(self.prepare, traceback=self.args.traceback)
        for name, rows, draw in itertools.product(self.train, self.few.few_shot_rows, range(self.few.draws)):
            path = self.output / f"draw_{draw}" / f"{name}-{rows}.jsonl"
            dataset = name if self.knows_datasets else None
            file = SummaryFile(path, self.test[name], self.writing, self.recipe(name, rows, draw), dataset)
            saved = path.parent / f"{name}-{rows}-model"
            done = run_or_exit(file.is_complete, self.overwrite, traceback=self.args.traceback)
            if not done or (self.few.save_models and not saved.exists()):
                print(f"{name}, {rows} rows, draw {draw}", flush=True)
                shutil.rmtree(saved, ignore_errors=True)
                model = self.adapted(name, rows, draw)
                if self.few.save_models:
                    part = saved.with_suffix(".part")
                    pipeline("moe-summarization", model=model, tokenizer=self.tokenizer).save_pretrained(part)
                    part.rename(saved)
                file.write(model, self.tokenizer)
        print(f"\nThe summaries are in {self.output}: evaluate.py --systems 'ours={self.output}/draw_*'")

    def recipe(self, name: str, rows: int, draw: int) -> dict:
        """The settings that a draw is trained with."""
        lengths = {limit: getattr(self.data_args, limit) for limit in ("max_source_length", "max_target_length")}
        learnt = {"name": f"{rows} rows, draw {draw}", "sha256": hash_of_rows(self.draw(name, rows, draw))}
        more = {"few_rows": learnt, "deputies_only": self.few.deputies_only or not self.knows_datasets}
        more["model_name_or_path"] = self.start
        return settings_of("moesumm/train.py, few_shot", self.args, self.training_args, **lengths, **more)

    def draw(self, name: str, rows: int, draw: int):
        return drawn(self.train[name], rows, seed=1000 * rows + draw)

    def adapted(self, name: str, rows: int, draw: int):
        """The model after training on a draw: of ours deputies and selectors, of a backbone (or if asked for) all weights."""
        settings = copy.copy(self.training_args)
        settings.seed = self.training_args.seed + draw
        set_seed(settings.seed)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.args.model_name_or_path)
        if self.knows_datasets:
            if name not in model.config.datasets:
                model.add_dataset(name)
            if self.args.label_smoothing:
                model.config.label_smoothing = self.args.label_smoothing
            if self.few.deputies_only:
                model.train_deputies_only()
        trainer_of(model, self.tokenizer, self.args, self.data_args, settings, self.draw(name, rows, draw)).train()
        return model


def main():
    kinds = (ModelArguments, FewShotArguments, DataArguments, Writing, RunFolderArguments, Seq2SeqTrainingArguments)
    args, few, data_args, writing, folder_args, training_args = parse_arguments(kinds, __doc__)
    take_label_smoothing(args, training_args)
    if args.setting == "few_shot":
        training_args.save_strategy = training_args.eval_strategy = "no"  # minutes each, and nothing to choose by
        FewShot(args, few, data_args, writing, training_args, folder_args.overwrite_output_dir).run()
    else:
        in_domain(args, data_args, writing, training_args, folder_args.overwrite_output_dir)


if __name__ == "__main__":
    main()
