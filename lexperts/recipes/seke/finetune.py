"""One training run of SEKE: writes a folder with the best model, its pipelines, its model card and results.json."""

import json
from pathlib import Path

from datasets import Dataset
from huggingface_hub import HfApi
from peft import get_peft_model
from transformers import (
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.cards import write_card
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline, keep_best
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import describe_coverage
from keyphrase_tools.words import check_language
from modeling_seke import SekeForTokenClassification
from run_tools.backbones import resolve_backbone
from run_tools.errors import UserError
from run_tools.files import write_file
from run_tools.fingerprints import RECORD
from run_tools.loading import describe_load_errors, open_config, open_model, open_tokenizer
from run_tools.versions import package_versions

from ..common.run_folder import RunFolder, training_summary
from ..common.training import RecipeTrainer, best_evaluation, train_or_resume, trainer_options
from .arguments import DataArguments, ModelArguments
from .data import Documents, describe_data, parse_test_file
from .distill import DistillationTrainer, add_unlabelled, new_student, open_graph_of
from .mixture import HideStyles, MixtureSampler, freeze_layers
from .scoring import (
    SHOWN,
    add_rankers,
    check_gold_of_files,
    extract_by_file,
    measure_calibration,
    score_test_files,
    score_test_set,
)
from .word_classes import add_noun_phrases, add_word_classes, open_tagger

HEAD = (
    "use_moe", "use_rnn", "rnn_num_layers", "num_experts", "num_experts_per_tok", "expert_intermediate_size", "expert_init",
    "router_aux_loss_coef",
)  # fmt: skip
RECORDED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay", "lr_scheduler_type",
    "warmup_steps", "bf16", "seed",
)  # fmt: skip
NOT_PUSHED = ["checkpoint-*", "base/*", "*.pt", "*.bin", RECORD]


class ScoreTestSet(TrainerCallback):
    """Scores the test set after each evaluation, at its threshold, for a learning curve. Nothing is selected by it."""

    def __init__(self, trainer, tokenizer, test: Documents, rules: str):
        self.trainer, self.tokenizer, self.test, self.rules = trainer, tokenizer, test, rules

    def on_evaluate(self, args, state, control, metrics, model=None, **kwargs):
        """Logs the scores of the test set."""
        threshold = metrics["eval_threshold"]
        extract = pipeline(
            "keyphrase-extraction", model=model, tokenizer=self.tokenizer, threshold=threshold, device=model.device
        )
        scores = evaluate_pipeline(extract, self.test.texts, self.test.gold, rules=self.rules)
        self.trainer.log({f"test_{name}": value for name, value in scores.items()})


def build_model(
    args: ModelArguments, backbone: str, tokenizer, base: Path, seed: int, styles: list[str] | None = None, teacher=None
):
    """Builds the model. With LoRA the base model is saved first, so that the adapter of every checkpoint can be opened."""
    set_seed(seed)

    def new():
        if args.start_from:
            return open_model(SekeForTokenClassification, args.start_from)
        options = {name: getattr(args, name) for name in HEAD}
        if teacher is not None:
            return new_student(teacher, args, options)
        options |= {"attention_dropout": args.attention_dropout}
        return SekeForTokenClassification.from_backbone(backbone, styles=styles, **options)

    if not args.lora:
        model = new()
        freeze_layers(model, args.frozen_layers)
        return model
    if not base.exists():  # if it does, it is of this run, since the settings of the folder were compared
        part = base.with_name("base.part")
        new().save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(base)
    model = open_model(SekeForTokenClassification, base)
    set_seed(seed)
    return get_peft_model(model, model.lora_config())


def prepare(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments, rows: dict):
    """Everything before training, so that errors that the user can fix occur early. `rows` are those of `load_documents`.

    Returns:
        The trainer, the documents of each split, and the record for results.json.
    """
    documents = {split: Documents.from_rows(of_split, data_args) for split, of_split in rows.items()}
    backbone = resolve_backbone(model_args.backbone)
    start, teacher = model_args.start_from or model_args.teacher or backbone, None
    with describe_load_errors(named_model(model_args), start):
        tokenizer = open_tokenizer(start)
        if model_args.teacher:
            teacher = answers = open_model(SekeForTokenClassification, start)
    if model_args.teacher_graph:
        answers = open_graph_of(teacher, tokenizer, model_args.teacher_graph)
    tokenizer.model_max_length = data_args.max_length  # saved with it, so that the pipelines use the same windows
    language = read_language(data_args.language, model_args.start_from or model_args.teacher)
    labelling = {"rules": data_args.rules, "language": language}
    given = dict(documents)
    if apart := data_args.as_noun_phrases:
        check_apart(apart, documents["train"])
        tagger = open_tagger(data_args.tagger)
        for split in documents.keys() & {"train", "validation"}:
            documents[split] = add_noun_phrases(documents[split], apart, tagger, language)
    train, validation = documents["train"], documents["validation"]
    windows = tokenize_documents({"text": train.texts, "keyphrases": train.gold}, tokenizer, **labelling)
    print(f"train: {len(train.texts):,} documents in {len(windows['labels']):,} windows; {describe_coverage(windows)}")
    check_gold_of_files(given, data_args, language)
    styles = list(dict.fromkeys(style for _, style in train.files if style))
    if data_args.unlabelled_files and teacher is None:
        raise UserError("--unlabelled-files needs --teacher, which says what to learn of them.")
    with training_args.main_process_first(desc="base model"):
        base = Path(training_args.output_dir) / "base"
        model = build_model(model_args, backbone, tokenizer, base, training_args.seed, styles or None, teacher)
    model.config.keyphrase_language = language
    check_styles(documents, data_args, model.config.styles or [])
    ids = {style: index for index, style in enumerate(["", *(model.config.styles or [])])}  # 0 without a style
    if model.config.styles:
        windows["style_ids"] = [ids[train.files[i][1]] for i in windows["document"]]
    files, unlabelled = [file for file, _ in train.files], {}
    if data_args.unlabelled_files:
        unlabelled["unlabelled"] = add_unlabelled(
            windows, files, data_args, tokenizer, language, len(ids), training_args.seed
        )
    metrics = ExtractionMetrics(validation.texts, validation.gold, tokenizer, model.config.id2label, **labelling)
    print(f"validation: {len(validation.texts):,} documents; {describe_coverage(metrics.rows)}")

    keep_best(training_args, "f1@10")
    splits = {"train": Dataset.from_dict(windows), "validation": Dataset.from_dict(metrics.rows)}
    kept = [ids[style] for style in apart or []]
    collator = HideStyles(DataCollatorForTokenClassification(tokenizer), data_args.style_dropout, kept)
    trainer_class, more = RecipeTrainer, {}
    if teacher is not None:
        trainer_class, more = DistillationTrainer, {"teacher": answers, "weight": model_args.teacher_weight}
    trainer = trainer_class(
        **trainer_options(model, training_args, splits, collator, tokenizer),
        compute_metrics=metrics,
        train_sampler=make_sampler(windows, files, data_args, training_args) if data_args.mixing_temperature else None,
        part=(p for name, p in model.named_parameters() if p.requires_grad and "backbone." not in name),
        part_rate=model_args.head_learning_rate,
        **more,
    )
    if data_args.early_stopping_patience:
        patience, gain = data_args.early_stopping_patience, data_args.early_stopping_gain
        trainer.add_callback(EarlyStoppingCallback(patience, gain))
    if data_args.test_every_epoch and "test" in documents:
        trainer.add_callback(ScoreTestSet(trainer, tokenizer, documents["test"], data_args.rules))
    labelled = {"train": windows, "validation": metrics.rows}
    record = {
        "model": describe_model(model, model_args),
        "data": describe_data(data_args, documents, labelled, tokenizer, language),
        "training": collect_settings(model_args, data_args, training_args),
        **unlabelled,
    }
    return trainer, documents, record


def read_language(given: str | None, start_from: str | None) -> str | None:
    """The language of stems: the one that is given, "none" for no stemming, or else that of the model to fine-tune, or English."""
    if given is None and start_from:
        given = getattr(open_config(start_from), "keyphrase_language", "english")
        return check_language(given)
    return None if given == "none" else check_language(given or "english")


def check_apart(styles: list[str], train: Documents) -> None:
    """Raises a `UserError` for a style of `--as-noun-phrases` that no training file has."""
    known = sorted({style for _, style in train.files if style})
    if unknown := [style for style in styles if style not in known]:
        raise UserError(
            f"--as-noun-phrases {unknown[0]} is not a style of --train-files, which are {', '.join(known)}."
        )


def check_styles(documents: dict[str, Documents], args: DataArguments, styles: list[str]) -> None:
    """Raises a `ValueError` for a style in the name of a file that the model does not have."""
    given = {split: {style for _, style in documents[split].files} for split in ("train", "validation")}
    given["test"] = {parse_test_file(file)[1] for file in args.test_files or []}
    for split, names in given.items():
        if unknown := sorted(names - {"", *styles}):
            known = f"its styles are {', '.join(map(repr, styles))}" if styles else "it has none"
            raise ValueError(f"--{split}-files has the style {unknown[0]!r}, which the model does not have: {known}.")


def named_model(args: ModelArguments) -> str:
    """The option that names the model whose tokenizer is used."""
    return "--start-from" if args.start_from else "--teacher" if args.teacher else "--backbone"


def make_sampler(windows: dict, files: list[int], data_args, training_args) -> MixtureSampler:
    """The sampler of `--mixing-temperature`; `files` has the number of each document's file."""
    return MixtureSampler(
        [files[document] for document in windows["document"]],
        [files.count(file) for file in range(max(files) + 1)],
        [len(ids) for ids in windows["input_ids"]],
        temperature=data_args.mixing_temperature,
        num_rows=data_args.rows_per_epoch,
        batch_size=training_args.train_batch_size * training_args.gradient_accumulation_steps,
        seed=training_args.seed,
    )


def short_name(model: str) -> str:
    """A Hub id, or a local folder without its path."""
    return Path(model).name if Path(model).exists() else model


def describe_model(model, args: ModelArguments) -> dict:
    """The backbone (a local folder without its path), the head, and the number of trained parameters."""
    return {
        "type": "seke",
        **(
            {
                "teacher": short_name(args.teacher),
                "backbone": f"{args.student_layers} layer{'s' * (args.student_layers != 1)} of width {args.student_hidden_size}",
            }
            if args.teacher
            else {"backbone": short_name(args.start_from or args.backbone)}
        ),
        **{name: getattr(model.config, name) for name in HEAD},
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def collect_settings(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> dict:
    """The settings that results.json and the model card list."""
    settings = {name: getattr(training_args, name) for name in RECORDED if hasattr(training_args, name)}
    scheduler = settings["lr_scheduler_type"]
    settings["lr_scheduler_type"] = str(getattr(scheduler, "value", scheduler))
    settings |= {"max_length": data_args.max_length, "lora": model_args.lora, "rules": data_args.rules}
    return settings | package_versions(("torch", "transformers"))


def run(
    model_args: ModelArguments, data_args: DataArguments, training_args, folder: RunFolder, prepared: tuple
) -> None:
    """Trains, selects, scores and saves what `prepare` returned."""
    trainer, documents, record = prepared
    pushes, training_args.push_to_hub = training_args.push_to_hub, False  # the Trainer would push every checkpoint
    train_or_resume(trainer, folder)
    training_args.push_to_hub = pushes
    if trainer.state.best_metric is None:  # --num-train-epochs 0: the model of --start-from stays, and gets rankers
        trainer.state.best_metric = trainer.evaluate()["eval_f1@10"]
    ran = training_summary(training_args, trainer.state)
    record["training"] |= ran
    model = trainer.model.merge_and_unload() if model_args.lora else trainer.model
    model.requires_grad_(True)
    record["model"]["parameters"] = model.num_parameters()
    model.config.keyphrase_threshold = best_evaluation(trainer.state, "eval_f1@10")["eval_threshold"]
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=trainer.processing_class)
    record |= {"best_validation_f1@10": trainer.state.best_metric, "threshold": model.config.keyphrase_threshold}
    if data_args.fit_ranker:
        if data_args.tagger:
            tagger = open_tagger(data_args.tagger)
            record["word_classes"] = add_word_classes(extract, documents["train"].texts, tagger, training_args.seed)
            extract = pipeline("keyphrase-extraction", model=model, tokenizer=trainer.processing_class)
        extract, record["ranker"] = add_rankers(extract, documents["validation"], data_args)
    elif data_args.calibrate:
        record["calibration"] = measure_calibration(extract, documents, data_args.rules)
    extract.save_pretrained(folder.path)
    if test := documents.get("test"):
        phrases = extract_by_file(extract, test, data_args)
        record["test"] = score_test_set(phrases, test, extract.language)
        record["test_files"] = score_test_files(phrases, test, data_args, extract.language)
        for text, found in list(zip(test.texts, phrases, strict=True))[: data_args.show]:
            print(f"\n{text}\n  -> " + "; ".join(f"{p['keyphrase']} ({p['score']:.2f})" for p in found[:SHOWN]))
    record["epochs"] = trainer.state.log_history
    conclude(record, folder.path, training_args)
    folder.mark_finished(ran=ran)


def conclude(record: dict, output: Path, training_args: TrainingArguments):
    """Writes results.json and the model card beside the saved model; pushes the folder with `--push-to-hub true`."""
    write_file(output / "results.json", json.dumps(record, indent=1))
    repository = training_args.hub_model_id or output.resolve().name
    write_card(output, repository.split("/")[-1], training_args.hub_model_id or str(output))
    if training_args.push_to_hub:
        api = HfApi(token=training_args.hub_token)
        repository = api.create_repo(repository, private=training_args.hub_private_repo, exist_ok=True).repo_id
        upload = {"repo_id": repository, "folder_path": output, "ignore_patterns": NOT_PUSHED}
        api.upload_folder(**upload, commit_message="Add the best model, its card and its results")
