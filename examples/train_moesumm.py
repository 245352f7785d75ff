"""Trains MoeSumm, one summariser with deputy experts for several domains, with the stock Trainer.

    python examples/train_moesumm.py               # about 2 minutes on two cores; pip install 'lexperts[train]'
    python examples/train_moesumm.py --backbone facebook/bart-base

Without --backbone a tiny BART with random weights is used, which is too small to write summaries: it shows the steps.
The domains are the subjects of the corpus, and the summary of a text is its title. For data from files, mixing of
datasets, few-shot domains and ROUGE use `lexperts train moesumm` and `lexperts evaluate summaries`.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from modeling_moesumm import DataCollatorForMoeSumm, MoeSummForConditionalGeneration

CORPUS = Path(__file__).parent / "corpus"
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def save_tiny_bart(folder: Path, texts: list[str]) -> str:
    """Saves a BART with random weights and a word tokenizer."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=list(SPECIAL.values()), min_frequency=2))
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=256, **SPECIAL)
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in
              {"layers": 2, "attention_heads": 4, "ffn_dim": 128}.items()}  # fmt: skip
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = BartConfig(vocab_size=len(tokenizer), d_model=64, max_position_embeddings=256, **halves, **ids)
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", help="Hub id or folder of a BART, PEGASUS or mBART; by default a tiny one")
    parser.add_argument("--output", default="runs/example-moesumm", help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=300, help="training steps of 8 documents")
    args = parser.parse_args(argv)
    set_seed(1)

    rows = Dataset.from_json(str(CORPUS / "train.jsonl")).rename_columns(
        {"text": "document", "title": "summary", "subject": "dataset"}
    )
    texts = [*rows["document"], *rows["summary"]]
    backbone = args.backbone or save_tiny_bart(Path(args.output) / "backbone", texts)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    # each feed-forward layer gets small deputy experts; a selector chooses one per token, depending on the dataset
    model = MoeSummForConditionalGeneration.from_backbone(
        backbone, datasets=sorted(set(rows["dataset"])), num_deputies=3, deputy_intermediate_size=64
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            args.output, max_steps=args.steps, learning_rate=2e-3, save_strategy="no", report_to="none",
            logging_steps=25, remove_unused_columns=False,  # the collator tokenizes the texts
        ),
        train_dataset=rows,
        data_collator=DataCollatorForMoeSumm(tokenizer, model, on_long="truncate"),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()

    summarize = pipeline("moe-summarization", model=model, tokenizer=tokenizer)
    summarize.save_pretrained(args.output)  # weights, tokenizer, pipeline and their code
    document = rows[0]["document"]
    for dataset in (rows[0]["dataset"], None):  # None: only the main expert
        print(dataset, summarize(document, dataset=dataset, min_length=4, max_length=16)[0]["summary_text"], sep=": ")


if __name__ == "__main__":
    main()
