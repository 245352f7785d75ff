"""Model cards: front matter, tables, and a small card for a model that has none. A card that exists is never replaced."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import escape
from .packaged import is_hub_id

BLANK = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been automatically generated."


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


def is_blank(text: str) -> bool:
    """Whether a card is the one that transformers writes for a model without a card."""
    from huggingface_hub import ModelCard, ModelCardData

    template = ModelCard.from_template(ModelCardData(), model_description=BLANK)
    return text.split("---\n", 2)[-1].strip() == template.text.strip()


def write_model_card(model, folder: str | os.PathLike, *, repo_id: str | None = None, **metadata) -> Path | None:
    """Writes `folder/README.md`, with fields of `ModelCardData` such as `license`; `None` if there is a card, other than a blank one."""
    from huggingface_hub import ModelCard

    path, config, tags = Path(folder) / "README.md", model.config, list[str]()
    if path.is_file():
        if not is_blank(text := path.read_text(encoding="utf-8")):
            return None
        tags = ModelCard(text).data.tags or []  # of push_to_hub
    use = getattr(model, "card_use", {"what": "Computes hidden states", "tag": "feature-extraction"})
    names = [str(getattr(each, "name_or_path", None) or "") for each in (config, config.get_text_config())]
    base = next((name for name in names if is_hub_id(name) and name != repo_id), None)
    place, task, auto = repo_id or "PATH", use.get("task"), model._auto_class or "AutoModel"
    code = f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{place}")'
    if task:
        code = f'from transformers import pipeline\n\nrun = pipeline("{task}", model="{place}")\n{use["call"]}'
    tags = [*dict.fromkeys(filter(None, ("lexperts", config.model_type, task, *tags)))]
    known = {"base_model": base, "library_name": "transformers", "pipeline_tag": use["tag"], "tags": tags}
    text = f"""# {repo_id.split("/")[-1] if repo_id else type(model).__name__}

{use["what"]}. {getattr(model, "card_family", type(model).__name__)}. {model.num_parameters():,} parameters\
{f", made from `{base}`" if base else ""}.

## How to open it

```python
import lexperts  # https://github.com/lexperts/lexperts
{code}
```

Without the package: pin a revision whose code you have read, and pass `revision="..."` and `trust_remote_code=True`."""
    path.write_text(join_card(known | metadata, text), encoding="utf-8", newline="\n")
    return path
