"""The rows of embeddings and output layer: how many a mixture has, and which experts a row of a new token comes from."""

import hashlib
from dataclasses import dataclass

from .checkpoints import Source
from .recipe import Recipe
from .tokenizers import source_tokenizer, source_vocabulary, tokenizer_of_mixture

VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class VocabularyRows:
    """`count` rows. `runs` lists `(start, stop, names of experts)`: rows of tokens that the base does not have."""

    count: int
    runs: tuple[tuple[int, int, frozenset[str]], ...] = ()

    def stops(self, sizes: set[int]) -> list[int]:
        """The rows before which the sources of a row may change; `sizes` are the numbers of rows in the sources."""
        inner = sizes | {edge for start, stop, _ in self.runs for edge in (start, stop)}
        return sorted({min(edge, self.count) for edge in inner if edge > 0} | {self.count})

    def owners(self, stop: int) -> frozenset[str] | None:
        """The experts whose tokenizers have the token of row `stop - 1`; None if the base has it, or no tokenizer."""
        return next((names for start, end, names in self.runs if start < stop <= end), None)


def has_tokenizer_of(source: Source, other: Source) -> bool:
    """Whether the files with the vocabularies of two sources are equal."""
    ours, theirs = source_tokenizer(source), source_tokenizer(other)
    return ours == theirs or (ours is not None and theirs is not None and ours.read_bytes() == theirs.read_bytes())


def digest_of_tokenizer(source: Source) -> str | None:
    """The SHA-256 of the file with a source's vocabulary."""
    file = source_tokenizer(source)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else None


def vocabulary_rows(recipe: Recipe, base: Source, experts: list[Source]) -> VocabularyRows:
    """The rows of a mixture: those of the source that `tokenizer_source` names, otherwise the most that a source has."""
    sources = [base, *experts]
    written = tokenizer_of_mixture(recipe, base, experts)
    chosen = [written] if written and recipe.tokenizer_source not in (None, "union") else sources
    count = max(source.shape.vocab_size for source in chosen)
    if written is None or all(has_tokenizer_of(source, written) for source in sources):
        return VocabularyRows(count)
    contents = {source.name: digest_of_tokenizer(source) for source in sources}
    known: dict[str | None, dict[str, int]] = {}
    for source in sources:
        if contents[source.name] not in known:
            known[contents[source.name]] = source_vocabulary(source) or {}
    ours, in_base = known[contents[written.name]], known[contents[base.name]]
    if not in_base:  # no token is known to be new
        return VocabularyRows(count)
    runs: list[tuple[int, int, frozenset[str]]] = []
    for token, row in sorted(ours.items(), key=lambda item: item[1]):
        if in_base.get(token) == row or not 0 <= row < count:
            continue
        names = frozenset(expert.name for expert in experts if known[contents[expert.name]].get(token) == row)
        if runs and runs[-1][1:] == (row, names):
            runs[-1] = (runs[-1][0], row + 1, names)
        else:
            runs.append((row, row + 1, names))
    return VocabularyRows(count, tuple(runs))
