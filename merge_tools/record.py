"""merge_record.json: the recipe of a mixture and its sources with their hashes and licences, from which it is verified and edited; and the
model card that is generated from it.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run_tools.cards import join_card, make_table
from run_tools.errors import UserError, escape
from run_tools.files import sha256_of
from run_tools.packaged import published_name

from .families import FAMILIES, FORMATS
from .sources import Source, read_json
from .writer import write_json

RECORD = "merge_record.json"
SOURCE_KEYS = {"name", "source", "files", "row"}
IMPORTS = "import modeling_lexicon  # of https://github.com/lexperts/lexperts; or pass trust_remote_code=True\n"
HOW_TO_OPEN = """```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


class Hashes:
    """The SHA-256 of the sources' files, computed by a thread while tensors are written."""

    def __init__(self, sources: Sequence[Source]):
        pool, paths = ThreadPoolExecutor(1), {path for source in sources for path in source.files}
        self._known = {path: pool.submit(sha256_of, path) for path in sorted(paths)}
        pool.shutdown(wait=False)

    def of(self, source: Source) -> dict[str, str]:
        """Name of a file -> its SHA-256."""
        return {path.name: self._known[path].result() for path in source.files}


def source_record(source: Source, hashes: Hashes, out: str | Path) -> dict[str, Any]:
    """A source: its name, path or Hub id, where its folder is from the mixture, its licence and the hashes of its files."""
    folder = source.adapter.folder if source.adapter else source.folder
    record: dict[str, Any] = {"name": source.name, "source": source.origin, "files": hashes.of(source)}
    if os.path.isdir(Path(source.origin.split("+")[-1]).expanduser()):
        places = {"path": folder} | ({"over": source.adapter.base} if source.adapter else {})
        record |= {k: os.path.relpath(place.resolve(), Path(out).expanduser().resolve()) for k, place in places.items()}
    if license := read_license(folder):
        record["license"] = license
    return record


def read_license(folder: Path) -> str | None:
    """The licence in the metadata of README.md."""
    from huggingface_hub import metadata_load

    if not (readme := folder / "README.md").is_file():
        return None
    try:
        license = (metadata_load(readme) or {}).get("license")
    except Exception:  # of YAML: a card with broken metadata states no licence
        return None
    return escape(license)[:200] if isinstance(license, str) else None


def write_record(folder: Path, record: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Writes the record of a mixture, and its model card: how to open it, its sources, where held-out tokens are routed, and the recipe."""
    import yaml

    write_json(folder / RECORD, record)
    recipe = yaml.safe_dump(published_recipe(record), sort_keys=False, allow_unicode=True).strip()
    text = join_card(
        metadata(record),
        f"# Mixture of {len(record['experts'])} experts",
        f"{sizes['parameters']:,} parameters, {sizes['active_parameters']:,} of them active per token; {sizes['bytes'] / 1e9:.3g} GB.",
        HOW_TO_OPEN.format(imports=IMPORTS if record["format"] == "lexicon" else ""),
        *describe_sources(record),
        *describe_routing(record),
        f"## Recipe\n\n```yaml\n{recipe}\n```",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a mixture. Raises a `UserError` if the folder has none, or one without the keys that all have."""
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder} has no {RECORD}. Give a folder that `lexperts merge` has written.")
    record = read_json(folder / RECORD)
    experts, base = record.get("experts"), record.get("base")
    complete = isinstance(experts, list) and all(isinstance(e, dict) and e.keys() >= SOURCE_KEYS for e in experts)
    complete &= isinstance(base, dict) and {*base, "row"} >= SOURCE_KEYS
    complete &= all(isinstance(record.get(key), dict) for key in ("recipe", "gates", "written"))
    if not complete or record.get("family") not in FAMILIES or record.get("format") not in FORMATS:
        raise UserError(f"{folder / RECORD} is damaged, or of another version. Copy or compose the mixture again.")
    return record


def published(source: dict[str, Any]) -> str:
    """A source as the card names it: by its Hub id, or by the last part of its folder's path."""
    return published_name(os.path.join(os.curdir, source["source"]) if "path" in source else source["source"])


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


def describe_sources(record: dict[str, Any]) -> list[str]:
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


def describe_routing(record: dict[str, Any]) -> list[str]:
    """Where held-out tokens are routed; empty if that is not known, or the gates have changed since."""
    table = record["gates"].get("confusion")
    if not table or "tuned" in record:
        return []
    names = [expert["name"] for expert in record["experts"]]
    rows = [(name, *(f"{share:.1%}" for share in row)) for name, row in zip(names, table, strict=True)]
    text = "Share of each expert's held-out tokens that are routed first to each expert, the mean over all routers."
    return ["## Routing of held-out tokens", text, make_table(("tokens of", *names), rows)]
