"""Fine-tunes SEKE, a keyphrase extractor, with the stock Trainer, and extracts the keyphrases of a text.

    python examples/train_seke.py                  # a few minutes on two cores; pip install 'lexperts[train,offline]'

For early stopping, several seeds, LoRA, calibration and a model card use `lexperts train seke`.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.evaluation import ExtractionMetrics
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import full_text
from modeling_seke import SekeForTokenClassification
from run_tools.backbones import resolve_backbone
from run_tools.jsonl import read_jsonl

CORPUS = Path(__file__).parent / "corpus"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", default="minilm", help="Hub id or folder of an encoder")
    parser.add_argument("--output", default="runs/example-seke", help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=60, help="training steps of 8 documents")
    args = parser.parse_args(argv)
    set_seed(1)

    backbone = resolve_backbone(args.backbone)  # the folder of the package for "minilm"
    tokenizer = AutoTokenizer.from_pretrained(backbone, model_max_length=256)
    model = SekeForTokenClassification.from_backbone(backbone, num_experts=4, attention_dropout=0.0)

    # rows with title, text and keyphrases -> input_ids and one label per word: O, B-KEY or I-KEY
    documents = Dataset.from_json(str(CORPUS / "train.jsonl"))
    rows = documents.map(
        tokenize_documents, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=documents.column_names
    )
    test = read_jsonl(CORPUS / "test.jsonl")
    metrics = ExtractionMetrics(
        [full_text(row) for row in test], [row["keyphrases"] for row in test], tokenizer, model.config.id2label
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            args.output, max_steps=args.steps, learning_rate=1e-4, warmup_steps=10, save_strategy="no", report_to="none"
        ),
        train_dataset=rows,
        eval_dataset=Dataset.from_dict(metrics.rows),
        compute_metrics=metrics,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    scores = trainer.evaluate()
    print(f"F1@5 {100 * scores['eval_f1@5']:.1f}, F1@10 {100 * scores['eval_f1@10']:.1f} on {len(test)} documents")

    # in real use the threshold is chosen on validation documents, not on the test documents
    model.config.keyphrase_threshold = scores["eval_threshold"]
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer)
    extract.save_pretrained(args.output)  # weights, tokenizer, pipeline and their code
    text = (CORPUS / "paragraph.txt").read_text(encoding="utf-8").strip()
    for phrase in extract(text, top_k=5):
        print(f"{phrase['score']:.2f}  {phrase['keyphrase']}  {phrase['start']}-{phrase['end']}")


if __name__ == "__main__":
    main()
