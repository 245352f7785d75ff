"""Trains ExHiRD, which generates present and absent keyphrases, from scratch with the stock Trainer.

    python examples/train_exhird.py                # about 2 minutes on two cores; pip install 'lexperts[train]'

150 documents are too few to learn to write: this shows the steps. For pretrained encoders, the papers' learning-rate
schedule and scores use `lexperts train exhird` and `lexperts evaluate keyphrases`.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import Trainer, TrainingArguments, pipeline, set_seed

from keyphrase_tools.metrics import keyphrase_f1
from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdForKeyphraseGeneration,
    ExhirdTokenizer,
    tokenize_documents,
)

CORPUS = Path(__file__).parent / "corpus"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="runs/example-exhird", help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=150, help="training steps of 8 documents")
    args = parser.parse_args(argv)
    set_seed(1)

    documents, test = (Dataset.from_json(str(CORPUS / f"{split}.jsonl")) for split in ("train", "test"))
    texts = [text for row in documents for text in (row["title"], row["text"], *row["keyphrases"])]
    tokenizer = ExhirdTokenizer.from_texts(texts, min_count=2)  # rarer words can still be copied from the source
    config = ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru", num_hidden_layers=1, hidden_size=128)
    model = ExhirdForKeyphraseGeneration(config)

    # rows with title, text and keyphrases -> source words, and one row of labels per keyphrase
    rows = documents.map(
        tokenize_documents, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=documents.column_names
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            args.output,
            max_steps=args.steps,
            learning_rate=3e-3,
            save_strategy="no",
            report_to="none",
            logging_steps=25,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForKeyphraseGeneration(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()

    generate = pipeline("keyphrase-generation", model=model, tokenizer=tokenizer)
    generate.save_pretrained(args.output)  # weights, tokenizer, pipeline and their code
    results = generate([{"title": row["title"], "text": row["text"]} for row in test], batch_size=16)
    predictions = [[phrase["keyphrase"] for phrase in phrases] for phrases in results]
    scores = keyphrase_f1(predictions, list(test["keyphrases"]), convention="exhird", k=(5, "M"))
    print(f"F1@5 {100 * scores['f1@5']:.1f}, F1@M {100 * scores['f1@M']:.1f} on {len(test)} documents")
    for phrase in results[0]:
        print(f"{phrase['score']:.2f}  {phrase['keyphrase']}  {'present' if phrase['present'] else 'absent'}")


if __name__ == "__main__":
    main()
