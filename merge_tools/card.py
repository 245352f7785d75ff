"""The model card of a mixture: written from its record, never typed."""

import json
from pathlib import Path
from typing import Any

from .errors import size

SHA_SHOWN = 16  # hexadecimal digits


def model_card(record: dict[str, Any], counts: dict[str, int], nbytes: int) -> bytes:
    """README.md: how the mixture opens, what it is made of, where its prompts are routed, the recipe."""
    sections = [
        front_matter(record),
        summary(record["recipe"], counts, nbytes),
        how_to_open(record["format"] == "mixtral"),
        made_of(record),
        where_prompts_go(record),
        "## Recipe\n\n```yaml\n" + to_yaml(record["recipe"]) + "\n```",
    ]
    return ("\n\n".join(section for section in sections if section) + "\n").encode()


def front_matter(record: dict[str, Any]) -> str:
    """The metadata, dumped as YAML: a licence or a name may hold any sign."""
    sources = [record["base"], *record["experts"]]
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "moe", "lexperts"],
    }
    licences = {source.get("license") for source in sources}
    if len(licences) == 1 and None not in licences:
        metadata["license"] = licences.pop()
    on_hub = sorted({s["source"] for s in sources if s["source"].count("/") == 1 and not Path(s["source"]).exists()})
    if on_hub:
        metadata["base_model"] = on_hub
    return f"---\n{to_yaml(metadata)}\n---"


def summary(recipe: dict[str, Any], counts: dict[str, int], nbytes: int) -> str:
    policy, k = recipe["routing_policy"], recipe["experts_per_token"]
    routing = f"{policy} (top {k})" if policy == "token" else policy
    return (
        f"# {len(recipe['experts'])} experts in one mixture\n\n"
        f"{counts['total']:,} parameters, {counts['active']:,} of them at work on one token; {size(nbytes)}.\n"
        f"Routed: {', '.join(recipe['router_layers'])}. Policy: {routing}."
    )


def how_to_open(stock: bool) -> str:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if not stock:
        lines.insert(0, "import modeling_lexicon  # from the package lexperts; without it, pass trust_remote_code=True")
    lines += [
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
    ]
    return "\n".join(["```python", *lines, "```"])


def made_of(record: dict[str, Any]) -> str:
    recipe = record["recipe"]
    lines = ["## Made of", "", "| expert | source | licence | sha256 |", "| --- | --- | --- | --- |"]
    for expert in record["experts"]:
        hashes = ", ".join(f"`{file['sha256'][:SHA_SHOWN]}`" for file in expert["files"])
        cells = (expert["name"], expert["source"], expert.get("license", "not stated"), hashes)
        lines.append(f"| {' | '.join(map(in_cell, cells))} |")
    shared = f"those of {record['base']['source']}"
    if recipe["average"] == "mean":
        shared = f"the mean of those of {', '.join(record.get('shared_from') or names_of(record))}"
    lines += ["", f"The weights that are not routed are {shared}. Gates: {recipe['gate_mode']}."]
    if recipe["gate_mode"] != "none":
        lines[-1] += " Gates that no training has seen are a heuristic: tune them on a sample of every domain."
    return "\n".join(lines)


def in_cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def names_of(record: dict[str, Any]) -> list[str]:
    return [expert["name"] for expert in record["experts"]]


def where_prompts_go(record: dict[str, Any]) -> str:
    names = names_of(record)
    rows = record["gates"].get("prompts")
    if not rows or record["gates"]["experts"] != names:  # measured with other experts: no longer true
        return ""
    lines = ["## Where prompts go", "", "Share of the routers whose first choice for the prompt is each expert.", ""]
    lines += [f"| prompt | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for row in rows:
        lines.append(f"| {in_cell(row['prompt'])} | {' | '.join(f'{share:.2f}' for share in row['shares'])} |")
    return "\n".join(lines)


def to_yaml(content: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:  # JSON is YAML too
        return json.dumps(content, indent=2, ensure_ascii=False)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).strip()
