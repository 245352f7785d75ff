"""Trains a keyphrase generator, and scores it.

    lexperts train exhird bigru_paper --dataset-name midas/kp20k --output-dir runs/bigru
    lexperts train exhird smollm2_cpu --train-files train.jsonl --output-dir runs/smollm2

Each line of a file is an object such as {"title": "...", "text": "...", "keyphrases": ["..."]}. A --backbone is a stock decoder, such as
smollm2, which reads the document as a prompt; with --adapter-rank a LoRA adapter of it is trained by peft, and added to its weights.
"--lr-scheduler-type reduce_lr_on_plateau" is the reference's schedule.

The output folder contains the best model by validation loss, with its code and pipeline. results.json has the scores by
ExHiRD's convention: of present and absent keyphrases, and the share of generated phrases that repeat an earlier one.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from datasets import Dataset, Features, Value
from peft import LoraConfig, PeftModel, get_peft_model
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from keyphrase_tools.evaluation import keep_best
from keyphrase_tools.metrics import check_gold
from lexperts_lite.words import stem_phrase
from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    DataCollatorForPrompts,
    ExhirdConfig,
    ExhirdForKeyphraseGeneration,
    ExhirdTokenizer,
    tokenize_documents,
    tokenize_prompts,
)
from modeling_exhird.data_exhird import split_keyphrases
from modeling_exhird.pipeline_keyphrase_generation import make_generator
from modeling_exhird.tokenization_exhird import split_words
from run_tools.cards import write_model_card
from run_tools.errors import UserError
from run_tools.loading import open_model, open_tokenizer
from run_tools.packaged import published_name
from run_tools.versions import __version__

from ...evaluate.scores import score_keyphrases
from ..data import Rows, as_text, hold_out_validation, load_documents
from ..training import RecipeTrainer, fit, save_pipeline, write_results
from .arguments import DataArguments, ModelArguments

FEATURES = Features({"title": Value("string"), "text": Value("string"), "keyphrases": [Value("string")]})


def load_rows(args: DataArguments) -> Rows:
    """Documents of each split. Raises a `UserError` for a test without keyphrases."""
    rows = load_documents(args)
    hold_out_validation(rows)
    if "test" in rows:
        check_gold([row["keyphrases"] for row in rows["test"]], "the test documents")
    return {
        split: [{name: row[name] for name in FEATURES} | {"title": as_text(row["title"] or "")} for row in own]
        for split, own in rows.items()
    }


def iterate(rows: list[dict], version: dict) -> Iterator[dict]:
    """For `Dataset.from_generator`, whose cache is that of these rows and this version."""
    yield from rows


def tokenize(rows: Rows, function, **options) -> dict[str, Dataset]:
    """Rows for training and validation, whose numbers are printed. Raises a `UserError` for a split without any."""
    splits, more = {}, {"batched": True, "fn_kwargs": options, "remove_columns": list(FEATURES)}
    for split in ("train", "validation"):
        generator = {"rows": rows[split], "version": {"lexperts": __version__}}
        documents = Dataset.from_generator(iterate, features=FEATURES, gen_kwargs=generator)
        splits[split] = documents.map(function, desc=split, **more)
        kept = f"{len(splits[split]):,} of {len(documents):,}"
        if not len(splits[split]):
            raise UserError(f"{split}: {kept} documents have a keyphrase and fit. Check keyphrases and lengths.")
        print(f"{split}: {kept} documents")
    return splits


def changed(args: ModelArguments, *without: str) -> dict:
    """The options that do not have their defaults, for a model, which raises an error for one that it does not have."""
    options = {one.name: getattr(args, one.name) for one in fields(args) if getattr(args, one.name) != one.default}
    if options.get("relative_attention") == "off":
        options["relative_attention"] = None
    return {name: value for name, value in options.items() if name not in without}


def describe(rows: list[dict]) -> dict[str, str]:
    """The keyphrases of at least two documents, at most 2,000, and the thirty most frequent words of all documents."""
    keyphrases = Counter(phrase for row in rows for phrase in set(map(str.strip, split_keyphrases(row["keyphrases"]))))
    words = Counter(word for row in rows for word, *_ in split_words(row["text"]) if word.isalpha())
    known = [phrase for phrase, n in keyphrases.most_common(2_000) if phrase and n > 1]
    return {"known_keyphrases": "; ".join(known), "frequent_words": " ".join(word for word, _ in words.most_common(30))}


def make_decoder(args: ModelArguments, data_args: DataArguments, rows: Rows):
    """A stock decoder, with an adapter if there is a rank for it; tokenized splits, and their collator."""
    model, tokenizer = open_model(AutoModelForCausalLM, args.backbone, dtype="float32"), open_tokenizer(args.backbone)
    model.config.name_or_path = published_name(str(args.backbone))
    length = {"max_source_length": data_args.max_source_length} if data_args.max_source_length else {}
    model.config.keyphrase_generation = changed(args, "backbone", "adapter_rank") | length | describe(rows["train"])
    splits = tokenize(rows, tokenize_prompts, tokenizer=tokenizer, config=model.config, max_length=data_args.max_length)
    if (rank := args.adapter_rank) is not None:
        adapter = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    return model, splits, DataCollatorForPrompts(tokenizer)


def make_encoder(args: ModelArguments, data_args: DataArguments, rows: Rows):
    """A model with the vocabulary of the training documents, tokenized splits, and their collator."""
    texts = (text for row in rows["train"] for text in (row["title"], row["text"], " ; ".join(row["keyphrases"])))
    tokenizer = ExhirdTokenizer.from_texts(texts, vocab_size=data_args.vocab_size)
    print(f"vocabulary: {len(tokenizer):,} words")
    model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer, **changed(args)))
    length = data_args.max_source_length or 400
    splits = tokenize(rows, tokenize_documents, tokenizer=tokenizer, max_source_length=length)
    return model, splits, DataCollatorForKeyphraseGeneration(tokenizer)


def score(model, tokenizer, rows: list[dict]) -> dict[str, float]:
    """The scores of the phrases that a model generates for documents, and the share of repeats, in per cent; prints them."""
    generator = make_generator(model, tokenizer, batch_size=32, raw=True)
    generated = tqdm(generator.stream(rows), total=len(rows), unit="document", desc="test")
    found = [[" ".join(words) for words in phrases] for phrases in generated]
    scored = score_keyphrases(found, [row["keyphrases"] for row in rows], rows, convention="exhird")
    stems = [[stem_phrase(phrase) for phrase in phrases] for phrases in found]
    distinct, total = (sum(map(len, each)) for each in (map(set, stems), stems))
    scores = {name: one.value for name, one in scored.items()} | {"repeats": 100 * (1 - distinct / max(total, 1))}
    print(f"test, {len(rows):,} documents: {'   '.join(f'{name} {value:.1f}' for name, value in scores.items())}")
    return scores


class PlateauSchedule(ReduceLROnPlateau):
    """Reduces the learning rate after an evaluation that is worse than the previous one, which need not be the best."""

    def step(self, metrics, epoch=None):
        """Called by the Trainer with the loss of an evaluation."""
        super().step(metrics, epoch)
        self.best = float(metrics)


class KeyphraseTrainer(RecipeTrainer):
    """A Trainer whose `reduce_lr_on_plateau` is the reference's: it halves the rate, down to 1e-5."""

    def create_scheduler(self, *args, **kwargs):
        """As in the Trainer."""
        if self.lr_scheduler is None and self.args.lr_scheduler_type == "reduce_lr_on_plateau":
            self.lr_scheduler = PlateauSchedule(self.optimizer, patience=0, threshold=0, factor=0.5, min_lr=1e-5)
        return super().create_scheduler(*args, **kwargs)


class StopAfterRises(TrainerCallback):
    """Ends training after n consecutive evaluations that are each worse than the previous one."""

    def __init__(self, rises: int):
        self.rises = rises

    def on_evaluate(self, args, state, control, **kwargs):
        """Called by the Trainer after each evaluation."""
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry][-self.rises - 1 :]
        if len(losses) > self.rises and losses == sorted(set(losses)):
            control.should_training_stop = True


def train(model_args: ModelArguments, data_args: DataArguments, training_args, checkpoint) -> None:
    """Trains, saves and scores a model."""
    rows = load_rows(data_args)
    set_seed(training_args.seed)
    make = make_encoder if model_args.backbone is None else make_decoder
    with training_args.main_process_first(desc="documents"):  # the others read its cache
        model, splits, collator = make(model_args, data_args, rows)
    keep_best(training_args, "loss", greater_is_better=False)
    training_args.prediction_loss_only = True
    trainer = KeyphraseTrainer(
        model=model, args=training_args, data_collator=collator, processing_class=collator.tokenizer,
        train_dataset=splits["train"], eval_dataset=splits["validation"],
        callbacks=[StopAfterRises(data_args.stop_after_rises)] if data_args.stop_after_rises else [],
    )  # fmt: skip
    fit(trainer, checkpoint)
    print(f"validation loss {trainer.state.best_metric}, step {trainer.state.best_global_step}")
    if isinstance(trainer.model, PeftModel):
        trainer.model = trainer.model.merge_and_unload()
    save_pipeline("keyphrase-generation", trainer.model, collator.tokenizer, training_args.output_dir)
    if model_args.backbone is not None:  # a stock model brings no card
        trainer.model.card_use = ExhirdForKeyphraseGeneration.card_use
        write_model_card(trainer.model, training_args.output_dir)
    results = {"best_validation_loss": trainer.state.best_metric}
    if "test" in rows and trainer.is_world_process_zero():
        results["test"] = score(trainer.model, collator.tokenizer, rows["test"])
    write_results(trainer, **results)
