"""A model card for a checkpoint without one: what the model is, its base model, how to load it.

The same file in all modeling packages of lexperts: edit modeling_seke/card.py, then run `make fix-copies`.
"""

import filecmp
import os
import warnings
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, ModelCard, ModelCardData


class Use(NamedTuple):
    """The purpose of a model class, its attribute `card_use`. `tag` is the Hub's name of the task, `task` the name of our
    pipeline, if any. The attribute `card_family` is how models of the package work, and their paper.
    """

    what: str
    tag: str
    package: str  # registers the class and the pipeline when it is imported
    task: str | None = None
    call: str = ""


UNKNOWN_PATH = "PATH"  # in the code of a card that was written before its model had a place

CARD = """---
{metadata}
---

# {title}

{what}. {how}. {parameters:,} parameters{base}.

## How to open it

```python
{code}
```

The same without the package: pin a revision whose code you have read, and pass `revision="..."` and
`trust_remote_code=True`.

## Scores

None are recorded: this card was written when the model was saved. Evaluate the model on your own data.
{missing}"""


def write_model_card(model, folder: str | os.PathLike, *, repo_id: str | None = None, **metadata) -> Path | None:
    """Writes `folder/README.md`. An existing card is never replaced, except transformers' blank one.

    Args:
        model: a model of this package.
        folder: its checkpoint.
            The card of the folder that the model was loaded from is copied if the weights are the same.
        repo_id: pass it when the folder is about to be pushed. Then the base model's licence and language are looked up on
            the Hub, and an unedited card that an earlier save wrote is written anew.
        metadata: for `ModelCardData`, such as `license`, `language` and `datasets`.

    Returns:
        The path, or `None` if an existing card was kept.
    """
    path = Path(folder) / "README.md"
    old = read_card(path)
    if path.is_file() and (old is None or not is_blank(old)):
        return None
    card = card_of_source(model, Path(folder), repo_id)
    card = card or build_model_card(model, repo_id=repo_id, **metadata)
    if old is not None and old.data.tags:  # passed to push_to_hub
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *old.data.tags]))
    path.write_text(str(card), encoding="utf-8", newline="\n")
    return path


def build_model_card(model, *, repo_id: str | None = None, **metadata) -> ModelCard:
    """A card from the model's class and configuration, without scores. Arguments as in `write_model_card`."""
    config, name = model.config, type(model).__name__
    bare = Use("Computes hidden states", "feature-extraction", f"modeling_{config.model_type}")
    use = getattr(model, "card_use", bare)
    base = metadata["base_model"] if "base_model" in metadata else base_model_of(model, repo_id)
    known = {"base_model": base, **(hub_metadata(base) if base and repo_id else {})}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=use.tag,
        tags=["lexperts", config.model_type, *([use.task] if use.task else [])],
        **{**known, **{key: value for key, value in metadata.items() if value is not None}},
    )
    lacking = [key for key in ("license", "language") if not getattr(data, key, None)]
    missing = f"\nBefore you publish it, add to the metadata above: {', '.join(lacking)}.\n" if lacking else ""
    text = CARD.format(
        metadata=data.to_yaml(), title=repo_id.split("/")[-1] if repo_id else name, what=use.what,
        how=getattr(model, "card_family", name), parameters=model.num_parameters(),
        base=f", made from `{base}`" if base else "", code=opening_code(type(model), use, repo_id or UNKNOWN_PATH),
        missing=missing,
    )  # fmt: skip
    return ModelCard(text)


def opening_code(model_class: type, use: Use, path: str) -> str:
    """The lines that open the model with lexperts installed."""
    lines = [f"import {use.package}  # pip install lexperts"]
    if use.task:
        lines += ["from transformers import pipeline", "", f'run = pipeline("{use.task}", model="{path}")', use.call]
    else:
        own = "card_use" in vars(model_class)
        package, cls = (use.package, model_class.__name__) if own else ("transformers", "AutoModel")
        lines += [f"from {package} import {cls}", "", f'model = {cls}.from_pretrained("{path}")']
    return "\n".join(lines)


def base_model_of(model, repo_id: str | None = None) -> str | None:
    """The Hub id of the model that this one was fine-tuned from, or else of its backbone; `None` for folders."""
    for config in (model.config, model.config.get_text_config()):
        name = str(getattr(config, "name_or_path", None) or "")
        local = name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).exists()
        if not local and name != repo_id:
            return name
    return None


def hub_metadata(base: str) -> dict:
    """Licence and language of a model on the Hub; empty without a network."""
    try:
        data = HfApi().model_info(base, timeout=5).card_data
    except Exception:  # no network, no rights, no such model: the card is written without
        return {}
    return {key: data[key] for key in ("license", "license_name", "license_link", "language") if data and data.get(key)}


def card_of_source(model, folder: Path, repo_id: str | None) -> ModelCard | None:
    """The card of the folder that the model was loaded from, if the weights in the new folder are the same. `None` for a card
    without anything to keep: transformers' blank one, and ours if it is unedited.
    """
    source = Path(model.name_or_path or "no folder")
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if not (source / "README.md").is_file() or not weights:
        return None
    if filecmp.cmpfiles(source, folder, weights, shallow=False)[0] != weights:
        return None
    card = read_card(source / "README.md")
    if card is None or is_blank(card):
        return None
    metadata = {name: card.data.get(name) for name in ("base_model", "license", "language")}
    if card.text == build_model_card(model, **metadata).text:
        return None
    text = str(card)
    for path in (model.name_or_path, UNKNOWN_PATH):
        text = text.replace(f'model="{path}"', f'model="{repo_id or UNKNOWN_PATH}"')
    return ModelCard(text)


def read_card(path: Path) -> ModelCard | None:
    """The card in a file; `None` for a missing file, and for metadata that is not valid YAML."""
    try:
        return ModelCard(path.read_text(encoding="utf-8")) if path.is_file() else None
    except Exception:  # PyYAML's errors and huggingface_hub's
        return None


def is_blank(card: ModelCard) -> bool:
    """Whether a card is the unedited template that transformers writes for a model without a card."""
    if "[More Information Needed]" not in card.text:
        return False
    try:
        template = ModelCard.from_template(ModelCardData(), model_description="DESCRIPTION")
    except ImportError:  # without jinja2 transformers writes none
        return False
    before, after = template.text.strip().split("DESCRIPTION")
    text = card.text.strip()
    described = text[len(before) : len(text) - len(after)].strip()
    return text.startswith(before) and text.endswith(after) and "\n" not in described


def warn_if_unsaved(model):
    """For `lora_config`: an adapter records its base model by name, but a model that was never saved has no name."""
    if model.name_or_path in ("", None, getattr(getattr(model.config, "text_config", None), "name_or_path", "")):
        name = type(model).__name__
        warnings.warn(
            f"An adapter over this {name} records no base model, because the model has not been saved: pipeline() and "
            "AutoPeftModel will not open the adapter, nor checkpoints of the Trainer. Save the model with its tokenizer "
            f"and load it again first: model.save_pretrained('base'); model = {name}.from_pretrained('base'). "
            "merge_and_unload() is not affected.",
            UserWarning,
            stacklevel=3,
        )
