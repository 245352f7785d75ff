"""A keyphrase model that is almost nothing but its tokenizer: for measurements of what happens around the model."""

import json
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

from modeling_seke import SekeConfig, SekeForTokenClassification

WORDS = 5000  # of the vocabulary
LENGTH = 256  # tokens of a window
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def read_documents(data: Path) -> list[dict]:
    """The rows of DATA/*/test.jsonl."""
    return [json.loads(line) for file in sorted(data.glob("*/test.jsonl")) for line in file.open(encoding="utf-8")]


def save_tiny_model(folder: Path, documents: list[dict]) -> None:
    """Saves a model of one layer with random weights, always the same, and a tokenizer of the documents' most frequent words."""
    counts = Counter(word for document in documents for word in document["text"].lower().split())
    words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:WORDS]]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL.values(), *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **SPECIAL).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
    model = SekeForTokenClassification(SekeConfig(text_config=encoder, keyphrase_threshold=0.45))
    model.classifier.weight.data *= 15  # so that scores spread
    model.classifier.bias.data[:] = torch.tensor([2.5, -1.0, -1.0])
    model.save_pretrained(folder)
