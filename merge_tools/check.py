"""Checks that sources can be merged: each is complete, and they agree in all that determines shapes or results."""

from pathlib import Path

import torch

from run_tools.errors import UserError, one_line

from .families import FAMILIES, LEXICON, MLP, MixtureClass, family_of
from .recipe import ARCHITECTURES, Recipe
from .sources import VOCABULARY, Source, read_json, read_tokenizer

# fields of a configuration without an effect on what a model computes, or that tensor shapes show
WITHOUT_EFFECT = {
    "attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "max_window_layers", "vocab_size", "output_router_logits",
}  # fmt: skip
REPORTED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # the base's are written
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# parts of a tokenizer that decide which ids a text gets
TOKENIZER_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def check_sources(recipe: Recipe, base: Source, experts: list[Source]) -> list[str]:
    """Checks sources against each other. Returns warnings.

    Raises:
        UserError: for the first that cannot be merged. The message names it.
    """
    check_base(base)
    has_tokenizer = any((base.folder / name).is_file() for name in TOKENIZER_FILES)
    warnings = [] if has_tokenizer else [f"{base.name} has no tokenizer, so none is written."]
    for expert in experts:
        if expert.folder == base.folder:
            continue
        warnings += compare_configs(base, expert)
        compare_tensors(recipe, base, expert)
        if recipe.tokenizer is None:
            compare_tokenizers(base, expert)
        if chat_template(expert.folder) != chat_template(base.folder):
            warnings.append(f"{expert.name} has another chat template than {base.name}, whose tokenizer is written.")
        if expert.adapter and not expert.adapter.changes_mlp:
            lost = " Its changes are lost with average: base." if recipe.average == "base" else ""
            warnings.append(f"{expert.name}: its adapter changes no MLP, so routing to it has no effect.{lost}")
        if (adapter := expert.adapter) and recipe.average == "base" and not adapter.base.samefile(base.folder):
            over = Source(expert.name, expert.origin, adapter.base)
            shared = [n for n, spec in over.specs.items() if ".mlp." not in n and base.specs.get(n) == spec]
            if any(not torch.equal(over[n], base[n]) for n in shared):
                warnings.append(f"{expert.name}: its adapter is over {adapter.base}, another model than {base.name}.")
    return warnings


def check_base(base: Source) -> None:
    """Checks that the base is of a supported family, whose mixture can represent it, and has every tensor in its shape."""
    family = FAMILIES[base.config.model_type]
    allowed = {**family.refused, "layer_types": (None, ["full_attention"] * base.config.num_hidden_layers)}
    for key, values in allowed.items():
        if (value := getattr(base.config, key, values[0])) not in values:
            raise UserError(f"{base.name}: the mixture of a {family.model_type} cannot have {key}={value!r:.60}.")
    check_complete(base)
    if others := [name for name in base.specs if ".mlp." in name and not MLP.fullmatch(name)]:
        raise UserError(f"{base.name}: {others[0]} cannot be routed: experts have three matrices and no biases.")


def check_complete(source: Source) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a model as transformers saves them. Raises a `UserError` if the source does not have exactly these."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(source.config)
    except Exception as error:  # whatever transformers raises for an invalid value
        raise UserError(f"{source.name}: transformers cannot open its config.json: {one_line(error):.300}") from error
    stored = revert_weight_conversion(model, model.state_dict())
    expected = {name: tuple(value.shape) for name, value in stored.items()}
    if source.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    compare_shapes(source, {n: s for n, (_, s) in source.specs.items()}, expected, "its config.json requires")
    return expected


def compare_configs(base: Source, expert: Source) -> list[str]:
    """Raises a `UserError` for the first field with an effect that differs. Returns warnings of ids and lengths that do."""
    from transformers import PreTrainedConfig

    common = PreTrainedConfig().to_dict().keys() - {"model_type", "tie_word_embeddings"}
    ours, theirs = ({k: v for k, v in s.config.to_dict().items() if k not in common} for s in (base, expert))
    warnings = []
    for key in sorted((ours.keys() | theirs.keys()) - WITHOUT_EFFECT, key=lambda key: key != "model_type"):
        if ours.get(key) == theirs.get(key):
            continue
        message = f"{expert.name}: {key} is {theirs.get(key)!r:.60}, but {ours.get(key)!r:.60} in {base.name}"
        if key not in REPORTED:
            raise UserError(f"{message}. Only models that agree in it can be merged.")
        warnings.append(f"{message}, which is written.")
    return warnings


def compare_tensors(recipe: Recipe, base: Source, expert: Source) -> None:
    """Raises a `UserError` for a tensor that the expert has in another shape than the base, or that only one of them has."""
    ours, theirs = ({name: shape for name, (_, shape) in source.specs.items()} for source in (base, expert))
    for name in VOCABULARY:
        if ours.get(name) != theirs.get(name) and None not in (ours.get(name), theirs.get(name)):
            if recipe.tokenizer is None:
                rows = f"{theirs[name][0]} rows, but {ours[name][0]} in {base.name}"
                raise UserError(f"{expert.name}: its vocabulary has {rows}. To keep the latter, write tokenizer: base.")
            theirs[name] = ours[name]
    compare_shapes(expert, theirs, ours, f"{base.name} has")


def compare_shapes(source: Source, found: dict[str, tuple], expected: dict[str, tuple], says: str) -> None:
    """Raises a `UserError` for the first tensor that is missing, not expected, or of another shape."""
    if (name := next((n for n in {**found, **expected} if found.get(n) != expected.get(n)), None)) is not None:
        shapes = ["no such tensor" if shape is None else list(shape) for shape in (found.get(name), expected.get(name))]
        raise UserError(f"{source.name}: {name} is {shapes[0]} in {source.folder}, but {says} {shapes[1]}.")


def compare_tokenizers(base: Source, expert: Source) -> None:
    """Raises a `UserError` if the expert's tokenizer gives a text other ids than the base's. A tokenizer that is missing is not compared."""
    files = [source.folder / name for name in TOKENIZER_FILES for source in (base, expert)]
    contents = [file.read_bytes() if file.is_file() else b"" for file in files]
    if contents[::2] == contents[1::2] or not any(contents[::2]) or not any(contents[1::2]):
        return
    ours, theirs = (read_tokenizer(source.folder)[1] for source in (base, expert))
    if part := next((part for part in TOKENIZER_PARTS if ours.get(part) != theirs.get(part)), None):
        problem = f"its tokenizer differs from that of {base.name} in {part}, so that texts have other ids"
        raise UserError(f"{expert.name}: {problem}. To write that of {base.name} anyway, write tokenizer: base.")


def chat_template(folder: Path) -> str | None:
    """The chat template of a folder."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    settings = folder / "tokenizer_config.json"
    return read_json(settings).get("chat_template") if settings.is_file() else None


def mixture_class(recipe: Recipe, base: Source) -> MixtureClass:
    """The class of the mixture. Raises a `UserError` if the format of the recipe cannot represent it."""
    family = family_of(base.config.model_type)
    stock, wanted = family.mixture, str(recipe.format)
    biases = not stock.attention_biases and any(name.endswith("_proj.bias") for name in base.specs)
    if wanted == "auto":
        wanted = stock.model_type if recipe.is_stock and not biases else "lexicon"
    named = recipe.architecture
    if named and not any(n.startswith(named.lower()) and ours == wanted for n, ours in ARCHITECTURES.items()):
        raise UserError(f"architecture: {named} is not the format of this mixture, which is {wanted}. Remove it.")
    if wanted not in (stock.model_type, "lexicon"):
        raise UserError(f"format: {wanted} is not the mixture of a {family.model_type}. Use {stock.model_type}.")
    if wanted == "lexicon":
        if family.lexicon is None:
            able = ", ".join(name for name, other in FAMILIES.items() if other.lexicon is not None)
            raise UserError(f"{base.name}: lexicon cannot represent a {family.model_type}, only {able}.")
        if window := getattr(base.config, "sliding_window", None):
            raise UserError(f"{base.name}: format: lexicon has full attention, but sliding_window is {window}.")
        return LEXICON
    if biases:
        raise UserError(f"format: {wanted} has no biases in attention, but {base.name} has. Use format: lexicon.")
    if recipe.centroids:
        raise UserError(f"format: {wanted} cannot store centroids. Use format: lexicon, or remove centroids.")
    return stock
