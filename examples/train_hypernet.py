"""Fine-tunes a hypernetwork, which extracts keyphrases from a text conditioned on its title, with the stock Trainer.

    python examples/train_hypernet.py              # about 2 minutes on two cores; pip install 'lexperts[train,offline]'

For early stopping, classification and question answering use `lexperts train hypernet-keyphrases`,
`hypernet-classes` and `hypernet-qa`.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline, set_seed

from keyphrase_tools.evaluation import evaluate_pipeline
from keyphrase_tools.labels import tokenize_documents
from modeling_hypernet import DataCollatorForTextPairs, HypernetForTokenClassification
from run_tools.backbones import resolve_backbone
from run_tools.jsonl import read_jsonl

CORPUS = Path(__file__).parent / "corpus"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", default="minilm", help="Hub id or folder of an encoder")
    parser.add_argument("--output", default="runs/example-hypernet", help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=60, help="training steps of 8 documents")
    args = parser.parse_args(argv)
    set_seed(1)

    backbone = resolve_backbone(args.backbone)  # the folder of the package for "minilm"
    tokenizer = AutoTokenizer.from_pretrained(backbone, model_max_length=256)
    # the backbone is frozen; an LSTM encodes the title, and from its code the weights of a second LSTM are generated
    model = HypernetForTokenClassification.from_backbone(backbone, hidden_size=128, bidirectional=True)

    # title_as="meta": rows with meta_mask (the title), main_mask (the text), and labels for the words of the text
    documents = Dataset.from_json(str(CORPUS / "train.jsonl"))
    rows = documents.map(
        tokenize_documents,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "title_as": "meta"},
        remove_columns=documents.column_names,
    ).remove_columns(["document", "num_keyphrases", "num_present"])
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            args.output, max_steps=args.steps, learning_rate=5e-3, warmup_steps=6, save_strategy="no", report_to="none"
        ),
        train_dataset=rows,
        data_collator=DataCollatorForTextPairs(tokenizer, id2label=model.config.id2label),
        processing_class=tokenizer,
    )
    trainer.train()

    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer)
    extract.save_pretrained(args.output)  # weights, tokenizer, pipeline and their code
    test = read_jsonl(CORPUS / "test.jsonl")
    columns = {name: [row[name] for row in test] for name in ("text", "keyphrases", "title")}
    scores = evaluate_pipeline(extract, columns["text"], columns["keyphrases"], titles=columns["title"])
    print(f"F1@5 {100 * scores['f1@5']:.1f}, F1@10 {100 * scores['f1@10']:.1f} on {len(test)} documents")
    for phrase in extract({"title": test[0]["title"], "text": test[0]["text"]}, top_k=5):
        print(f"{phrase['score']:.2f}  {phrase['keyphrase']}  {phrase['field']} {phrase['start']}-{phrase['end']}")


if __name__ == "__main__":
    main()
