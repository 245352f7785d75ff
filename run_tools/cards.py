"""Model cards: front matter, tables, and the card of a model that is saved without one. A user's card is never replaced."""

import filecmp
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import escape
from .model_options import is_path

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

UNKNOWN_PATH = "PATH"  # in the code of a card that was written before its model had a place
HUB_FIELDS = ("license", "license_name", "license_link", "language")

CARD = """# {title}

{what}. {how}. {parameters:,} parameters{base}.

## How to open it

```python
{code}
```

The same without the package: pin a revision whose code you have read, and pass `revision="..."` and
`trust_remote_code=True`.

## Scores

{scores}
{missing}"""
NO_SCORES = "None are recorded: this card was written when the model was saved. Evaluate the model on your own data."


class ModelUse(NamedTuple):
    """The purpose of a model class, whose attribute `card_use` is a dictionary of these."""

    what: str  # a sentence without its subject
    tag: str  # the Hub's name of the task
    package: str  # registers the class and the pipeline when it is imported
    task: str | None = None  # the name of our pipeline
    call: str = ""  # calls the pipeline, as `run`


def join_card(metadata: dict[str, Any], *sections: str) -> str:
    """The text of a card: fields of `ModelCardData` that are not `None` or empty, and the sections that are not empty."""
    from huggingface_hub import ModelCardData  # which imports what `--help` need not wait for

    data = ModelCardData(**{name: value for name, value in metadata.items() if value})
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)).rstrip("\n") + "\n"


def make_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; empty without rows."""
    lines = ["| " + " | ".join(map(in_cell, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]]) if len(lines) > 1 else ""


def in_cell(value: Any) -> str:
    """The text of a cell of a Markdown table."""
    return escape(" ".join(str(value).splitlines())).replace("|", "\\|")


def is_hub_id(name: str) -> bool:
    """Whether a name can be the Hub id `owner/name`, and is not a local file or folder."""
    return name.count("/") == 1 and not is_path(name)


def hub_metadata(base: str) -> dict[str, Any]:
    """Licence and language of a model on the Hub; empty without a network."""
    from huggingface_hub import HfApi

    try:
        data = HfApi().model_info(base, timeout=5).card_data
    except Exception:  # no network, no rights, no such model: the card is written without
        return {}
    return {key: data[key] for key in HUB_FIELDS if data and data.get(key)}


def write_model_card(model, folder: str | os.PathLike, *, repo_id: str | None = None, **metadata) -> Path | None:
    """Writes `folder/README.md`. An existing card is never replaced, except transformers' blank one.

    Args:
        model: a model of a modeling package.
        folder: its checkpoint.
            The card of the folder that the model was loaded from is copied if the weights are the same.
        repo_id: pass it when the folder is about to be pushed. Then the base model's licence and language are looked up on
            the Hub, and an unedited card that an earlier save wrote is written again.
        metadata: for `ModelCardData`, such as `license`, `language` and `datasets`.

    Returns:
        The path, or `None` if an existing card was kept.
    """
    path = Path(folder) / "README.md"
    old = read_card(path)
    if path.is_file() and (old is None or not is_blank(old)):
        return None
    card = card_of_source(model, Path(folder), repo_id) or build_model_card(model, repo_id=repo_id, **metadata)
    if old is not None and old.data.tags:  # passed to push_to_hub
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *old.data.tags]))
    path.write_text(str(card), encoding="utf-8", newline="\n")
    return path


def build_model_card(model, *, repo_id: str | None = None, scores: str = NO_SCORES, **metadata: Any) -> "ModelCard":
    """A card from the model's class and configuration, and a section on its scores. Other arguments as in `write_model_card`."""
    from huggingface_hub import ModelCard

    config, name = model.config, type(model).__name__
    bare = {"what": "Computes hidden states", "tag": "feature-extraction", "package": f"modeling_{config.model_type}"}
    use = ModelUse(**getattr(model, "card_use", bare))
    base = metadata["base_model"] if "base_model" in metadata else base_model_of(model, repo_id)
    known = {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": use.tag,
        "tags": ["lexperts", config.model_type, *([use.task] if use.task else [])],
        **(hub_metadata(base) if base and repo_id else {}),
        **{key: value for key, value in metadata.items() if value is not None},
    }
    lacking = [key for key in ("license", "language") if not known.get(key)]
    text = CARD.format(
        title=repo_id.split("/")[-1] if repo_id else name,
        what=use.what,
        how=getattr(model, "card_family", name),
        parameters=model.num_parameters(),
        base=f", made from `{base}`" if base else "",
        code=opening_code(type(model), use, repo_id or UNKNOWN_PATH),
        scores=scores,
        missing=f"\nBefore you publish it, add to the metadata above: {', '.join(lacking)}.\n" if lacking else "",
    )
    return ModelCard(join_card(known, text))


def opening_code(model_class: type, use: ModelUse, path: str) -> str:
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
    names = (str(getattr(c, "name_or_path", None) or "") for c in (model.config, model.config.get_text_config()))
    return next((name for name in names if is_hub_id(name) and name != repo_id), None)


def card_of_source(model, folder: Path, repo_id: str | None) -> "ModelCard | None":
    """The card of the folder that the model was loaded from, if the weights in the new folder are the same. `None` for a card
    without anything to keep: transformers' blank one, and ours if it is unedited.
    """
    source = Path(model.name_or_path or "no folder")
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    card = read_card(source / "README.md") if weights else None
    if card is None or is_blank(card) or filecmp.cmpfiles(source, folder, weights, shallow=False)[0] != weights:
        return None
    metadata = {name: card.data.get(name) for name in ("base_model", "license", "language")}
    if card.text == build_model_card(model, **metadata).text:
        return None
    text = str(card)
    for path in (model.name_or_path, UNKNOWN_PATH):
        text = text.replace(f'model="{path}"', f'model="{repo_id or UNKNOWN_PATH}"')
    return type(card)(text)


def read_card(path: Path) -> "ModelCard | None":
    """The card in a file; `None` for a missing file, and for metadata that is not valid YAML."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(path.read_text(encoding="utf-8")) if path.is_file() else None
    except Exception:  # PyYAML's errors and huggingface_hub's
        return None


def is_blank(card: "ModelCard") -> bool:
    """Whether a card is the unedited template that transformers writes for a model without a card."""
    from huggingface_hub import ModelCardData

    if "[More Information Needed]" not in card.text:
        return False
    try:
        template = type(card).from_template(ModelCardData(), model_description="DESCRIPTION")
    except ImportError:  # without jinja2 transformers writes none
        return False
    before, after = template.text.strip().split("DESCRIPTION")
    text = card.text.strip()
    described = text[len(before) : len(text) - len(after)].strip()
    return text.startswith(before) and text.endswith(after) and "\n" not in described


def let_pipelines_push_cards() -> None:
    """Makes every pipeline's `push_to_hub`, also a stock one's, upload the card of a model that writes one: its last step
    finds transformers' blank card in the folder. `push_to_hub` saves the model before that step.
    """
    from transformers import Pipeline

    upload = Pipeline._upload_modified_files
    if hasattr(upload, "writes_cards"):
        return

    @functools.wraps(upload)
    def upload_with_card(self, working_dir, repo_id, *args, **kwargs):
        if hasattr(self.model, "write_model_card"):
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    upload_with_card.writes_cards = True  # type: ignore[attr-defined]
    Pipeline._upload_modified_files = upload_with_card
