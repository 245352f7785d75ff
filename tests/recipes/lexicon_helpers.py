"""Rows about animals and tools, and a sentence embedder that tells them apart."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from modeling_lexicon.data_lexicon import format_prompt

KINDS = ("cat", "dog", "saw", "axe")


def kind_rows(start: int, count: int) -> list[dict]:
    """Rows of the four kinds in turn."""
    rows = []
    for i in range(start, start + count):
        kind = KINDS[i % 4]
        context, definition = f"the {kind}{i} is {'old ' * (i % 3)}here", f"a {kind} of kind {i}"
        rows.append({"term": f"{kind}{i}", "context": context, "definition": definition, "source": "made"})
    return rows


def is_tool(text: str) -> bool:
    return text.startswith(("saw", "axe"))


def save_embedder(folder: Path, rows: list[dict]) -> Path:
    """A sentence-transformers model with a vector per word: animals here, tools there, the others nearly nowhere."""
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    except ImportError:  # before release 6
        from sentence_transformers.models import StaticEmbedding

    words = sorted({word for row in rows for word in format_prompt(row["term"], row["context"]).split()})
    words = ["[UNK]", *dict.fromkeys([*words, *(row["term"] for row in rows)])]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = torch.rand(len(words), 2, generator=torch.Generator().manual_seed(0)) * 0.02
    for i, word in enumerate(words):
        vectors[i, int(is_tool(word))] += 1.0 if word.startswith(KINDS) else 0.0
    model = SentenceTransformer(modules=[StaticEmbedding(backend, embedding_weights=vectors.numpy())], device="cpu")
    model.save(str(folder))
    return folder
