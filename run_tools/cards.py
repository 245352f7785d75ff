"""Model cards: front matter, tables, and a small card for a model that has none. A card that exists is never replaced."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import escape
from .packaged import is_hub_id

HUB_FIELDS = ("license", "license_name", "license_link", "language")
CARD = """# {title}

{what}. {family}. {parameters:,} parameters{base}.

## How to open it

```python
{code}
```

Without the package: pin a revision whose code you have read, and pass `revision="..."` and `trust_remote_code=True`."""


def join_card(metadata: dict[str, Any], *sections: str) -> str:
    """The text of a card: fields of `ModelCardData` that are not `None` or empty, and the sections that are not empty."""
    from huggingface_hub import ModelCardData  # which imports what `--help` need not wait for

    data = ModelCardData(**{name: value for name, value in metadata.items() if value})
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)).rstrip("\n") + "\n"


def make_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; empty without rows."""
    cells = [[escape(" ".join(str(cell).splitlines())).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]]) if len(lines) > 1 else ""


def hub_metadata(base: str) -> dict[str, Any]:
    """Licence and language of a model on the Hub; empty without a network."""
    from huggingface_hub import HfApi

    try:
        data = HfApi().model_info(base, timeout=5).card_data
    except Exception:  # no network, no rights, no such model: the card is written without
        return {}
    return {key: data[key] for key in HUB_FIELDS if data and data.get(key)}


def write_model_card(model, folder: str | os.PathLike, *, repo_id: str | None = None, **metadata) -> Path | None:
    """Writes `folder/README.md` with fields of `ModelCardData`, such as `license`, and returns its path; `None` if an existing card, other
    than transformers' blank one, was kept. For a `repo_id` to push to, the base model's licence and language are looked up on the Hub.
    """
    path, config = Path(folder) / "README.md", model.config
    old = read_card(path)
    if path.is_file() and (old is None or not is_blank(old)):
        return None
    use = getattr(model, "card_use", {"what": "Computes hidden states", "tag": "feature-extraction"})
    names = [str(getattr(each, "name_or_path", None) or "") for each in (config, config.get_text_config())]
    base = next((name for name in names if is_hub_id(name) and name != repo_id), None)
    place, task, lines = repo_id or "PATH", use.get("task"), ["import lexperts  # pip install lexperts"]
    if task:
        lines += ["from transformers import pipeline", "", f'run = pipeline("{task}", model="{place}")', use["call"]]
    else:
        auto = model._auto_class or "AutoModel"
        lines += [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("{place}")']
    known = {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": use["tag"],
        "tags": [*dict.fromkeys(filter(None, ("lexperts", config.model_type, task, *(old and old.data.tags or ()))))],
        **(hub_metadata(base) if base and repo_id else {}),
        **metadata,
    }
    text = CARD.format(
        title=repo_id.split("/")[-1] if repo_id else type(model).__name__,
        what=use["what"],
        family=getattr(model, "card_family", type(model).__name__),
        parameters=model.num_parameters(),
        base=f", made from `{base}`" if base else "",
        code="\n".join(lines),
    )
    path.write_text(join_card(known, text), encoding="utf-8", newline="\n")
    return path


def read_card(path: Path) -> Any:
    """The `ModelCard` in a file; `None` for a missing file, and for metadata that is not valid YAML."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(path.read_text(encoding="utf-8")) if path.is_file() else None
    except Exception:  # PyYAML's errors and huggingface_hub's
        return None


def is_blank(card: Any) -> bool:
    """Whether a card is the unedited template that transformers writes for a model without a card."""
    from huggingface_hub import ModelCardData

    if "[More Information Needed]" not in card.text:
        return False
    template = type(card).from_template(ModelCardData(), model_description="DESCRIPTION")
    before, after = template.text.strip().split("DESCRIPTION")
    text = card.text.strip()
    return text.startswith(before) and text.endswith(after) and "\n" not in text[len(before) : -len(after)].strip()
