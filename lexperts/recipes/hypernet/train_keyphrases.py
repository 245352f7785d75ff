"""Fine-tunes the hypernetwork, or a baseline, to extract keyphrases from texts with titles.

    lexperts train hypernet-keyphrases inspec_cpu --train-files train.jsonl --test-files test.jsonl
    lexperts train hypernet-keyphrases keyphrases_paper --dataset-name midas/inspec

Each line of a file is an object such as {"title": "...", "text": "...", "keyphrases": ["..."]}. To resume after an
interruption, start the same command again. The output folder contains the best model with its code and pipeline.

results.json has the scores of every epoch and of the test set. "paths" is the phrase-level micro F1 of the most likely label
sequences, as in the paper. "spans" is the same with the probability threshold that is best on the validation documents, if a
threshold improves F1 there. "lexperts" and "seke" are F1@5 and F1@10 with this threshold, by two sets of scoring rules.
"""

import json
from pathlib import Path

from datasets import Dataset
from transformers import EarlyStoppingCallback, Trainer, pipeline, set_seed

from keyphrase_tools.clean_text import CleanText
from keyphrase_tools.decoding import tag_spans
from keyphrase_tools.evaluation import THRESHOLDS, ExtractionMetrics, evaluate_pipeline, gold_phrases, keep_best
from keyphrase_tools.labels import RULES, tag_words, tokenize_documents
from keyphrase_tools.rows import describe_coverage
from keyphrase_tools.words import check_language, split_words
from modeling_hypernet import DataCollatorForTextPairs
from run_tools.errors import RESUME
from run_tools.files import write_file

from ..common.arguments import RunFolderArguments, command
from ..common.run_folder import training_summary
from ..common.training import train_or_resume, trainer_options
from .arguments import KeyphraseDataArguments, ModelArguments
from .data import load_documents
from .systems import ViterbiTrainer, build_model, cache_states, open_folder, open_tokenizer


def prepare(
    model_args: ModelArguments, data_args: KeyphraseDataArguments, folder_args: RunFolderArguments, training_args
):
    """The groups of arguments, run folder, trainer and test documents. Does everything before training, where the errors of users occur."""
    documents = load_documents(data_args)
    language = check_language(None if data_args.language == "none" else data_args.language)
    folder, backbone = open_folder("train_keyphrases", model_args, data_args, folder_args, training_args)
    tokenizer = open_tokenizer(backbone, data_args.max_length)
    windows = tokenize_documents(documents["train"], tokenizer, title_as="meta", language=language)
    print(
        f"train: {len(documents['train']['text']):,} documents in {len(windows['labels']):,} windows; {describe_coverage(windows)}"
    )
    set_seed(training_args.seed)
    model = build_model("keyphrases", model_args, backbone)
    model.config.keyphrase_language = language
    validation = documents["validation"]
    options = {"titles": validation["title"], "spans": True, "thresholds": (None, *THRESHOLDS), "language": language}
    columns = validation["text"], validation["keyphrases"]
    metrics = ExtractionMetrics(*columns, tokenizer, model.config.id2label, **options)
    if test := documents.get("test"):
        for rules in RULES:
            gold_phrases(test["text"], test["keyphrases"], rules, language, f"--test-files, by the rules {rules!r}")
    rows = {"train": Dataset.from_dict(windows), "validation": Dataset.from_dict(metrics.rows)}
    rows = {split: r.remove_columns(["document", "num_keyphrases", "num_present"]) for split, r in rows.items()}
    collator = DataCollatorForTextPairs(tokenizer, id2label=model.config.id2label)
    rows = cache_states(model, rows, collator, data_args, training_args.output_dir)
    keep_best(training_args, "span_f1")
    options = trainer_options(model, training_args, rows, collator, tokenizer)
    trainer = ViterbiTrainer(**options, compute_metrics=metrics)
    trainer.backbone_lr = model_args.backbone_lr
    if data_args.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(data_args.early_stopping_patience))
    return model_args, data_args, folder, trainer, documents.get("test")


def best_threshold(state) -> float | None:
    """The threshold of the best model's validation score; `None` if the most likely path was better than any threshold."""
    evaluations = [entry for entry in state.log_history if "eval_span_f1" in entry]
    return max(evaluations, key=lambda entry: entry["eval_span_f1"]).get("eval_threshold")


def score_mentions(extract, documents: dict[str, list]) -> dict[str, float]:
    """Micro precision, recall and F1 of the mentions that a pipeline extracts, against the spans of the gold labels."""
    correct = predicted = gold = 0
    inputs = [{"title": title, "text": text} for title, text in zip(documents["title"], documents["text"], strict=True)]
    for text, keyphrases, phrases in zip(
        documents["text"], documents["keyphrases"], extract(inputs, top_k=None, batch_size=16), strict=True
    ):
        source = CleanText(text)
        words = split_words(source.text)
        spans = {
            source.source_span(words[a][1], words[b - 1][2])
            for a, b in tag_spans(tag_words(words, keyphrases, language=extract.language))
        }
        mentions = [mention for phrase in phrases for mention in phrase["mentions"]]
        extracted = {(m["start"], m["end"]) for m in mentions if m.get("field", "text") == "text"}
        correct += len(spans & extracted)
        predicted, gold = predicted + len(extracted), gold + len(spans)
    precision, recall = correct / max(predicted, 1), correct / max(gold, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * correct / max(predicted + gold, 1)}


def report(trainer: Trainer, extract, documents: dict[str, list] | None, show: int):
    """Writes results.json; prints the test scores and some documents' keyphrases."""
    config, state = extract.model.config, trainer.state
    results = {"best_validation_span_f1": state.best_metric, "threshold": config.keyphrase_threshold}
    results |= {"ran": training_summary(trainer.args, state), "epochs": state.log_history}
    if documents:
        results["test"] = {"spans": score_mentions(extract, documents)}
        threshold, config.keyphrase_threshold = config.keyphrase_threshold, None
        results["test"]["paths"] = score_mentions(extract, documents)
        config.keyphrase_threshold = threshold
        for rules in RULES:
            results["test"][rules] = evaluate_pipeline(
                extract, documents["text"], documents["keyphrases"], titles=documents["title"], rules=rules
            )
        scores = results["test"]["lexperts"]
        at_k = "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))
        spans, paths = (100 * results["test"][name]["f1"] for name in ("spans", "paths"))
        print(f"test, {len(documents['text']):,} documents: F1 of spans {spans:.1f} (best paths {paths:.1f})   {at_k}")
        for title, text in list(zip(documents["title"], documents["text"], strict=True))[:show]:
            phrases = extract({"title": title, "text": text})
            print(f"\n{title}\n{text}\n  -> " + "; ".join(f"{p['keyphrase']} ({p['score']:.2f})" for p in phrases))
    write_file(Path(trainer.args.output_dir) / "results.json", json.dumps(results, indent=1))


def train(*groups) -> None:
    """Runs the command."""
    model_args, data_args, folder, trainer, documents = prepare(*groups)
    output = trainer.args.output_dir
    train_or_resume(trainer, folder.start)
    trainer.model.config.keyphrase_threshold = best_threshold(trainer.state)
    extract = pipeline("keyphrase-extraction", model=trainer.model, tokenizer=trainer.processing_class)
    if model_args.reader == "hypernet":
        extract.save_pretrained(output)
    report(trainer, extract, documents, data_args.show)
    folder.mark_finished(ran=training_summary(trainer.args, trainer.state))
    if model_args.reader == "hypernet":
        print(f"\nThe model is in {output}: pipeline('keyphrase-extraction', model={output!r})")


main = command("hypernet", "train_keyphrases", train, RESUME)
