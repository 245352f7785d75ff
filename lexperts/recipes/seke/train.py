"""Fine-tunes SEKE on documents with keyphrases, with the stock Trainer, and scores it on a test set.

    lexperts train seke minilm_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train seke deberta_paper --dataset-name midas/inspec --output-dir runs/inspec
    lexperts train seke minilm_cpu --train-files train.jsonl --start-from runs/kp20k                # a second stage
    lexperts train seke distill --train-files train.jsonl --unlabelled-files texts.jsonl            # a small model

Each line of a file is an object such as {"title": "...", "text": "...", "keyphrases": ["..."]}. The output folder
contains the best model with its code, its pipeline and its model card, and results.json with the scores of every epoch.
"""

from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import HfApi
from peft import get_peft_model
from torch import nn
from transformers import DataCollatorForTokenClassification, EarlyStoppingCallback, pipeline, set_seed

from keyphrase_tools.calibration import calibrate
from keyphrase_tools.cards import write_card
from keyphrase_tools.evaluation import ExtractionMetrics, keep_best
from keyphrase_tools.labels import RULES
from keyphrase_tools.rows import describe_coverage
from lexperts_lite.words import check_language
from modeling_seke import SekeForTokenClassification
from run_tools.errors import UserError
from run_tools.loading import open_model, open_tokenizer
from run_tools.packaged import locate_model

from ..training import RecipeTrainer, best_evaluation, fit, save_pipeline, write_results
from .arguments import DataArguments, ModelArguments
from .data import Documents, MixtureSampler, hide_styles, load_files, load_unlabelled, make_windows
from .distill import DistillationTrainer, new_student
from .ranking import fit_rankers, score_tests
from .word_classes import add_word_classes, open_tagger

HEAD = (
    "use_moe", "use_rnn", "rnn_num_layers", "num_experts", "num_experts_per_tok", "expert_intermediate_size",
    "router_aux_loss_coef",
)  # fmt: skip
Files = dict[str, list[Documents]]


def columns(files: list[Documents]) -> tuple[list[str], list[list[str]]]:
    """All texts, and the keyphrases of each."""
    return [text for file in files for text in file.texts], [each for file in files for each in file.keyphrases]


def build_model(args: ModelArguments, styles: list[str], teacher: SekeForTokenClassification | None):
    """A model that was trained before, a small one that imitates a teacher, or a new one on a backbone."""
    head = {name: getattr(args, name) for name in HEAD}
    if args.start_from:
        model = open_model(SekeForTokenClassification, args.start_from)
    elif teacher is not None:
        model = new_student(teacher, args, head)
    else:
        head |= {"attention_dropout": args.attention_dropout, "styles": styles or None}
        model = SekeForTokenClassification.from_backbone(args.backbone, **head)
    if args.frozen_layers is not None:
        freeze_layers(model.backbone, args.frozen_layers)
    return model


def freeze_layers(backbone: Any, number: int) -> None:
    """Freezes the embeddings and the first layers of a backbone. Raises a `UserError` if it has fewer."""
    lists = ((name, module) for name, module in backbone.named_modules() if isinstance(module, nn.ModuleList))
    layers = next((module for name, module in lists if "." not in name.removeprefix("encoder.")), nn.ModuleList())
    if number > len(layers):
        raise UserError(f"--frozen-layers {number} exceeds the {len(layers)} layers of the backbone.")
    for module in (getattr(backbone, "embeddings", backbone.get_input_embeddings()), *layers[:number]):
        module.requires_grad_(False)


def add_lora(model, tokenizer, training_args):
    """The model with LoRA adapters. The model is saved first, so that the adapter of every checkpoint can be opened."""
    base = Path(training_args.output_dir) / "base"
    if training_args.should_save:
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    model.name_or_path = str(base)
    set_seed(training_args.seed)
    return get_peft_model(model, model.lora_config())


def check_files(files: Files, styles: list[str], language: str | None) -> None:
    """Raises an error for a style that the model does not have, and for evaluation without a usable keyphrase."""
    for file in sum(files.values(), []):
        if file.style not in ("", *styles):
            raise UserError(f"{file.source}: the model has no style {file.style!r}. Its styles: {styles}.")
    for file in files["validation"] + files["test"]:
        for rules in RULES if file in files["test"] else RULES[:1]:
            file.gold(rules, language)


def make_trainer(model, teacher, tokenizer, files: Files, args: ModelArguments, data_args: DataArguments, training):
    """The Trainer with the windows of the training documents, and metrics on the validation documents."""
    styles, language = model.config.styles or [], model.config.keyphrase_language
    train = [*files["train"], *load_unlabelled(data_args)]
    windows = make_windows(train, tokenizer, styles, language, training.seed)
    number, size = len(columns(train)[0]), len(windows["labels"])
    print(f"train: {size:,} windows of {number:,} documents; {describe_coverage(windows)}")
    texts, keyphrases = columns(files["validation"])
    metrics = ExtractionMetrics(texts, keyphrases, tokenizer, model.config.id2label, language=language)
    print(f"validation: {len(texts):,} documents; {describe_coverage(metrics.rows)}")
    collator = DataCollatorForTokenClassification(tokenizer)
    patience, sampler = data_args.early_stopping_patience, None
    if data_args.rows_per_epoch or data_args.mixing_temperature != 1:
        sampler = MixtureSampler(
            windows["file"], [len(file.texts) for file in train], list(map(len, windows["input_ids"])),
            temperature=data_args.mixing_temperature, num_rows=data_args.rows_per_epoch or size,
            batch_size=training.train_batch_size * training.gradient_accumulation_steps, seed=training.seed,
        )  # fmt: skip
    trainer = RecipeTrainer if teacher is None else partial(DistillationTrainer, teacher=teacher)
    return trainer(
        model=model, args=training, processing_class=tokenizer, compute_metrics=metrics, sampler=sampler,
        train_dataset=Dataset.from_dict(windows), eval_dataset=Dataset.from_dict(metrics.rows),
        data_collator=partial(hide_styles, collator=collator, share=data_args.style_dropout),
        part=[p for name, p in model.named_parameters() if p.requires_grad and "backbone." not in name],
        part_rate=args.head_learning_rate,
        callbacks=[EarlyStoppingCallback(patience, data_args.early_stopping_gain)] if patience else [],
    )  # fmt: skip


def fit_scores(extract, files: Files, tagger, data_args: DataArguments, seed: int, results: dict):
    """Fits a ranker or a temperature on the validation documents, notes it in the results, and returns its pipeline."""
    if data_args.fit_ranker:
        if tagger is not None:
            results["word_classes"] = add_word_classes(extract, columns(files["train"])[0], tagger, seed)
            extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
        extract, results["ranker_validation_f1@10"] = fit_rankers(extract, files["validation"], data_args)
        return extract
    try:
        results["temperature"] = calibrate(extract, *columns(files["validation"]), batch_size=16)
    except ValueError as error:
        print(f"scores are not calibrated: {error}")
        results["not_calibrated"] = str(error)
    return extract


def train(model_args: ModelArguments, data_args: DataArguments, training_args, checkpoint: str | None) -> None:
    """Trains, selects, scores and saves a model."""
    if data_args.unlabelled_files and not model_args.teacher:
        raise UserError(f"--unlabelled-files {data_args.unlabelled_files[0]} needs --teacher.")
    files = load_files(data_args)
    tagger = open_tagger(data_args.tagger) if data_args.tagger else None
    source = locate_model(model_args.start_from or model_args.teacher or model_args.backbone)
    tokenizer = open_tokenizer(source, model_max_length=data_args.max_length)  # pipelines use the same windows
    teacher = open_model(SekeForTokenClassification, model_args.teacher) if model_args.teacher else None
    set_seed(training_args.seed)
    styles = list(dict.fromkeys(file.style for file in files["train"] if file.style))
    model = build_model(model_args, styles, teacher)
    language = data_args.language or getattr((teacher or model).config, "keyphrase_language", "english")
    language = model.config.keyphrase_language = check_language(None if language == "none" else language)
    check_files(files, model.config.styles or [], language)
    if model_args.lora:
        model = add_lora(model, tokenizer, training_args)
    push, training_args.push_to_hub = training_args.push_to_hub, False  # the Trainer would push every checkpoint
    keep_best(training_args, "f1@10")
    trainer = make_trainer(model, teacher, tokenizer, files, model_args, data_args, training_args)
    fit(trainer, checkpoint)
    if trainer.state.best_metric is None:  # --num-train-epochs 0: the model of --start-from stays, and gets rankers
        trainer.state.best_metric = trainer.evaluate()["eval_f1@10"]
    model = trainer.model.merge_and_unload() if model_args.lora else trainer.model
    threshold = model.config.keyphrase_threshold = best_evaluation(trainer, "eval_f1@10")["eval_threshold"]
    results: dict[str, Any] = {
        "documents": {split: len(columns(own)[0]) for split, own in files.items()},
        "best_validation_f1@10": trainer.state.best_metric, "threshold": threshold,
    }  # fmt: skip
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer)
    extract = fit_scores(extract, files, tagger, data_args, training_args.seed, results)
    if files["test"]:
        results["test"] = score_tests(extract, files["test"])
    save(model, tokenizer, trainer, results, push)


def save(model, tokenizer, trainer: RecipeTrainer, results: dict, push: bool) -> None:
    """Saves the pipeline, the model card and results.json, and uploads them with `--push-to-hub true`."""
    args, folder, repository = trainer.args, trainer.args.output_dir, None
    api, name = HfApi(token=args.hub_token), args.hub_model_id or Path(folder).resolve().name
    if push:
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
    write_card(model, folder, results, args, repository)
    save_pipeline("keyphrase-extraction", model, tokenizer, folder)  # which keeps a card
    write_results(trainer, **results)
    if repository:
        ignored = ["checkpoint-*", "base/*", "arguments.yml"]
        api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=ignored)
