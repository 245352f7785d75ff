"""Checks of tokenizers: the same ids must represent the same texts in all sources, and what is written is named."""

from .checkpoints import Source
from .errors import MergeError
from .findings import Report
from .recipe import Recipe
from .tokenizers import (
    DifferenceKind,
    compare,
    compare_generation,
    compare_settings,
    extends,
    named_source,
    read_tokenizer,
    source_tokenizer,
    source_vocabulary,
    tokenizer_of_mixture,
    tokenizer_settings,
    vocabulary,
)


def check_tokenizers(report: Report, recipe: Recipe, first: Source, sources: list[Source]):
    """Checks the tokenizers of all sources, and compares them with that of the first and with the one that is written."""
    check_own_tokenizers(report, first, sources)
    if any(finding.check == "tokenizer" for finding in report.errors):
        return
    with_tokenizer = next((source for source in [first, *sources] if source_tokenizer(source)), first)
    written = tokenizer_of_mixture(recipe, first, sources) or first
    if source_tokenizer(written) is None and recipe.tokenizer_source:
        message = f"tokenizer_source: {recipe.tokenizer_source} has no tokenizer. Name another, or remove the key."
        report.add("error", "tokenizer", written.name, message)
    for source in sources:
        if source is not with_tokenizer:
            check_tokenizer(report, with_tokenizer, source, written)
    check_written_settings(report, written, named_source(recipe, sources) or first, sources)
    check_new_tokens(report, recipe, written, sources)


def check_own_tokenizers(report: Report, base: Source, sources: list[Source]):
    """Checks that the base has a tokenizer, that all can be read and that every token id has an embedding row."""
    if source_tokenizer(base) is None:
        other = next((source.name for source in sources if source_tokenizer(source)), None)
        message = (
            f"has no tokenizer: that of {other} is written."
            if other
            else "has no tokenizer, and so the output has none."
        )
        report.add("warning", "tokenizer", base.name, message)
    last_ids: dict[bytes, int] = {}  # content of a file -> its last id; most experts share one tokenizer
    for source in sources:
        file = source_tokenizer(source)
        if file is None or file.suffix != ".json":
            continue
        try:
            content = file.read_bytes()
            if content not in last_ids:
                last_ids[content] = max(vocabulary(read_tokenizer(file)).values(), default=-1)
        except (MergeError, OSError) as error:
            report.add("error", "tokenizer", source.name, str(error))
            continue
        rows = source.config["vocab_size"]
        if last_ids[content] >= rows:
            message = (
                f"its tokenizer has ids up to {last_ids[content]}, but its embeddings have {rows} rows: the "
                "model fails on such a token."
            )
            report.add("warning", "tokenizer", source.name, message)


def check_tokenizer(report: Report, first: Source, other: Source, written: Source):
    """Compares tokenizers: the same ids must represent the same texts. `written` provides the mixture's tokenizer."""
    ours, theirs = source_tokenizer(first), source_tokenizer(other)
    if ours is None or theirs is None:
        without = first.name if ours is None else other.name
        report.add("note", "tokenizer", other.name, f"{without} has no tokenizer; tokenizers were not compared.")
        return
    try:
        difference = compare(ours, theirs)
    except MergeError as error:
        if not any(finding.message == str(error) for finding in report.findings):
            report.add("error", "tokenizer", other.name, str(error))
        return
    if difference is None:
        report.add("ok", "tokenizer", other.name, f"same as {first.name}")
        return
    message = f"compared with {first.name}: {difference.text}"
    if difference.kind is DifferenceKind.SUPERSET:
        report.add("error", "tokenizer", other.name, f"{message}.", "vocab")
    elif difference.kind in (DifferenceKind.SPECIAL_TOKENS, DifferenceKind.DECODER_ONLY):
        level = "warning" if difference.kind is DifferenceKind.SPECIAL_TOKENS else "note"
        report.add(level, "tokenizer", other.name, f"{message}. The tokenizer of {written.name} is written.")
    else:
        same_ids = difference.kind is DifferenceKind.TOKENS
        effect = "the same ids represent different texts" if same_ids else "the same text is split into different ids"
        report.add("error", "tokenizer", other.name, f"{message}: {effect}.", "tokenizer")


def check_written_settings(report: Report, written: Source, generation: Source, sources: list[Source]):
    """Warns about sources with other settings than those that are written: the tokenizer's, and generation_config.json."""
    for source in sources:
        try:
            for chosen, changed in (
                (written, compare_settings(written, source)),
                (generation, compare_generation(generation, source)),
            ):
                if changed:
                    message = (
                        f"{', '.join(changed)} differ from those of {chosen.name}. Those of {chosen.name} are written."
                    )
                    report.add("warning", "tokenizer", source.name, message)
        except MergeError as error:
            report.add("error", "tokenizer", source.name, str(error))
    if written.checkpoint is not generation.checkpoint:
        warn_of_other_end(report, written, generation)


def warn_of_other_end(report: Report, written: Source, generation: Source):
    """Warns if the written tokenizer and the configuration have different end-of-text tokens."""
    token, tokens = tokenizer_settings(written).get("eos_token"), source_vocabulary(written) or {}
    ids = generation.config.get("eos_token_id")
    if token in tokens and ids is not None and tokens[token] not in (ids if isinstance(ids, list) else [ids]):
        message = (
            f"its tokenizer is written, whose eos_token {token!r} is {tokens[token]}, with eos_token_id={ids} of "
            f"{generation.name}: set tokenizer_source: {written.name} to write its ids, too."
        )
        report.add("warning", "tokenizer", written.name, message)


def check_new_tokens(report: Report, recipe: Recipe, written: Source, sources: list[Source]):
    """Checks that tokens which the first source does not have are those of the tokenizer that is written."""
    ours, refused = source_tokenizer(written), {finding.subject for finding in report.errors}
    for source in sources:
        theirs = source_tokenizer(source)
        if ours is None or theirs is None or source is written or source.name in refused:
            continue
        difference = compare(ours, theirs)
        if difference and difference.kind is DifferenceKind.TOKENS:
            message = f"compared with {written.name}, whose tokenizer is written: {difference.text}: the same ids represent different texts."
            report.add("error", "tokenizer", source.name, message, "tokenizer")
        elif difference and recipe.tokenizer_source == "union" and extends(ours, theirs):
            message = f"tokenizer_source: union needs a tokenizer with the tokens of all others; that of {written.name} has not: {difference.text}."
            report.add("error", "tokenizer", source.name, message)
