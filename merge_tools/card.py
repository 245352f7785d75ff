"""The model card of a mixture, generated from its merge record."""

import os
from pathlib import Path
from typing import Any

from run_tools.cards import join_card, make_table
from run_tools.errors import format_size
from run_tools.pretrained import hub_id, published_name

IMPORTS = "import modeling_lexicon  # pip install lexperts; or pass trust_remote_code=True\n"
HOW_TO_OPEN = """```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


def write_card(folder: Path, record: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Writes README.md: how to open the mixture, its sources, where held-out tokens are routed, and the recipe."""
    import yaml

    recipe = yaml.safe_dump(published_recipe(record), sort_keys=False, allow_unicode=True).strip()
    text = join_card(
        metadata(record),
        f"# Mixture of {len(record['experts'])} experts",
        f"{sizes['parameters']:,} parameters, {sizes['active_parameters']:,} of them active per token; {format_size(sizes['bytes'])}.",
        HOW_TO_OPEN.format(imports=IMPORTS if record["format"] == "lexicon" else ""),
        *sources(record),
        *routing(record),
        f"## Recipe\n\n```yaml\n{recipe}\n```",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def published(source: dict[str, Any]) -> str:
    """A source as the card names it: by its Hub id, or by the last part of its folder's path."""
    return published_name(os.path.join(os.curdir, source["source"])) if "path" in source else hub_id(source["source"])


def published_recipe(record: dict[str, Any]) -> dict[str, Any]:
    """The recipe without the places of its folders and files."""

    def without_places(options: dict[str, Any], source: dict[str, Any], key: str) -> dict[str, Any]:
        names = {name: Path(options[name]).name for name in ("samples", "centroids", "embedder") if options.get(name)}
        return {**options, **names, **({key: published(source)} if options.get(key) else {})}

    recipe = without_places(record["recipe"], record["base"], "base_model")
    pairs = zip(recipe["experts"], record["experts"], strict=True)
    return recipe | {"experts": [without_places(options, source, "source_model") for options, source in pairs]}


def metadata(record: dict[str, Any]) -> dict[str, Any]:
    """The front matter. The licence is the one that all sources have, if they have one."""
    sources = [record["base"], *record["experts"]]
    licences = {source.get("license") for source in sources}
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "moe", "lexperts"],
        "license": licences.pop() if len(licences) == 1 else None,
        "base_model": sorted({published(source) for source in sources if "path" not in source}),
    }


def sources(record: dict[str, Any]) -> list[str]:
    """The sources of the weights and of the gates."""
    recipe = record["recipe"]
    rows = [
        (e["name"], published(e), e.get("license", "not stated"), ", ".join(f"`{h[:16]}`" for h in e["files"].values()))
        for e in record["experts"]
    ]
    names = ", ".join(record.get("shared_from") or [expert["name"] for expert in record["experts"]])
    shared = f"copied from {published(record['base'])}" if recipe["average"] == "base" else f"the mean over {names}"
    origins, tuned = f"Weights that are not routed are {shared}. Gates: {recipe['gate_mode']}.", record.get("tuned")
    if tuned:
        origins += f" They were tuned for {tuned['steps']} steps with everything else frozen."
    elif recipe["gate_mode"] not in ("none", "ridge"):
        origins += " Untrained gates are a heuristic: tune them on texts of every domain."
    return ["## Sources", make_table(("expert", "source", "licence", "SHA-256"), rows), origins]


def routing(record: dict[str, Any]) -> list[str]:
    """Where held-out tokens are routed; empty if that is not known, or the gates have changed since."""
    table = record["gates"].get("confusion")
    if not table or "tuned" in record:
        return []
    names = [expert["name"] for expert in record["experts"]]
    rows = [(name, *(f"{share:.1%}" for share in row)) for name, row in zip(names, table, strict=True)]
    text = "Share of each expert's held-out tokens that are routed first to each expert, the mean over all routers."
    return ["## Routing of held-out tokens", text, make_table(("tokens of", *names), rows)]
