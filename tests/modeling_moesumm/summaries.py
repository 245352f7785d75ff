"""For the tests of summaries: a tokenizer that reads any ASCII text, a model that copies, and texts."""

import random
import string
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from modeling_moesumm.generation_moesumm import Summarizer
from tests.modeling_moesumm.conftest import DECODERS, tiny_moesumm

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = [
    "a", "and", "bridge", "council", "fast", "fell", "in", "left", "met", "on", "people", "river", "rose", "the",
    "water",
]  # fmt: skip
POSITIONS = 40


def small_tokenizer():
    """Whole words, and else single characters with a mark inside words; `<s> text </s>`, as BART's."""
    signs = string.ascii_letters + string.digits
    pieces = [*SPECIAL, *signs, *string.punctuation, "…", *(f"##{sign}" for sign in signs), *WORDS]
    pieces += [word.capitalize() for word in WORDS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=10**6))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **names)


def writing_moesumm(tokenizer, backbone="bart", **options):
    """A MoeSumm whose summaries differ between texts and datasets."""
    special = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    changes, writing = {"vocab_size": len(tokenizer), **special}, {}
    if backbone not in DECODERS:
        special["decoder_start_token_id"] = 2
        changes |= {"init_std": 0.4, "forced_eos_token_id": 2, **special}
        writing = {"forced_eos_token_id": 2, "no_repeat_ngram_size": 1}
    model = tiny_moesumm(backbone, changes=changes, **options)
    model.generation_config = GenerationConfig(**special, num_beams=1, **writing)
    return model


def summaries_by(model, texts, tokenizer, dataset=None, **options):
    """The summary of a text, or a list of them, by the engine of the pipeline."""
    summaries = Summarizer(model, tokenizer, **options)([texts] if isinstance(texts, str) else list(texts), dataset)
    return summaries[0] if isinstance(texts, str) else summaries


class Copying(nn.Module):
    """Writes the text's first tokens, up to its length limit (or `share` of them), and records its calls."""

    def __init__(self, positions=POSITIONS, datasets=("news", "letters"), share=1.0, **settings):
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=positions, model_type="copying", datasets=list(datasets))
        self.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=1, **settings)
        self.device, self.share, self.calls = torch.device("cpu"), share, []

    def generate(self, input_ids, attention_mask, min_length, max_length, dataset=None, **options):
        self.calls.append(SimpleNamespace(**locals()))
        rows = []
        for ids, mask in zip(input_ids.tolist(), attention_mask, strict=True):
            text = ids[1 : mask.sum() - 1]
            rows.append([2, 0, *text[: max(1, min(max_length - 3, int(len(text) * self.share)))], 2])
        width = max(map(len, rows))
        return torch.tensor([row + [1] * (width - len(row)) for row in rows])

    def rows(self):
        """The rows of all calls: (tokens without padding, dataset, minimum and maximum length)."""
        for call in self.calls:
            names = call.dataset or [None] * len(call.input_ids)
            for ids, mask, name in zip(call.input_ids, call.attention_mask, names, strict=True):
                yield ids[mask.bool()].tolist(), name, call.min_length, call.max_length


def story(words, seed=0, sentence=9):
    """A text of so many words, in sentences of about nine."""
    chosen, parts = random.Random(seed), []
    while words > 0:
        length = min(words, chosen.randint(max(1, sentence - 4), sentence + 4))
        parts.append(" ".join(chosen.choice(WORDS) for _ in range(length)).capitalize() + ".")
        words -= length
    return " ".join(parts)
