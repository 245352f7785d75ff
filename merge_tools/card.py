"""The model card of a mixture, generated from its merge record."""

from typing import Any

from run_tools.errors import escape, format_size

from .places import is_on_hub

SHA_DIGITS = 16  # of a hash
IMPORTS = "import modeling_lexicon  # pip install lexperts; or pass trust_remote_code=True\n"
HOW_TO_OPEN = """```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


def model_card(record: dict[str, Any], sizes: dict[str, int]) -> bytes:
    """README.md: how to open the mixture, its sources, a routing preview, and the recipe."""
    sections = [
        front_matter(record),
        summary(record["recipe"], sizes),
        HOW_TO_OPEN.format(imports="" if record["format"] != "lexicon" else IMPORTS),
        sources_table(record),
        routing_table(record),
        "## Recipe\n\n```yaml\n" + to_yaml(record["recipe"]) + "\n```",
    ]
    return ("\n\n".join(section for section in sections if section) + "\n").encode()


def front_matter(record: dict[str, Any]) -> str:
    """The metadata as YAML."""
    sources = [record["base"], *record["experts"]]
    metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["merge", "moe", "lexperts"]}
    licences = {source.get("license") for source in sources}
    if len(licences) == 1 and None not in licences:
        metadata["license"] = licences.pop()
    on_hub = sorted({source["source"] for source in sources if is_on_hub(record, source["source"])})
    if on_hub:
        metadata["base_model"] = on_hub
    return f"---\n{to_yaml(metadata)}\n---"


def summary(recipe: dict[str, Any], sizes: dict[str, int]) -> str:
    """The title, the number of parameters, and the routing."""
    policy, k = recipe["routing_policy"], recipe["experts_per_token"]
    routing = f"{policy} (top {k})" if policy == "token" else policy
    return (
        f"# Mixture of {len(recipe['experts'])} experts\n\n"
        f"{sizes['parameters']:,} parameters, {sizes['active_parameters']:,} of them active per token; "
        f"{format_size(sizes['bytes'])}.\n"
        f"Routed: {', '.join(recipe['router_layers'])}. Policy: {routing}."
    )


def sources_table(record: dict[str, Any]) -> str:
    """The sources of the weights."""
    recipe = record["recipe"]
    lines = ["## Sources", "", "| expert | source | licence | hash |", "| --- | --- | --- | --- |"]
    for expert in record["experts"]:
        hashes = ", ".join(filter(None, map(short_hash, expert["files"])))
        cells = (expert["name"], expert["source"], expert.get("license", "not stated"), hashes)
        lines.append(f"| {' | '.join(map(in_cell, cells))} |")
    shared = f"copied from {record['base']['source']}"
    if recipe["average"] != "base":
        names = ", ".join(record.get("shared_from") or [expert["name"] for expert in record["experts"]])
        shared = f"the mean over {names}"
        if density := recipe.get("density"):
            shared = f"merged by {recipe['average']} (density {density:g}) from {names} over {record['base']['source']}"
    lines += ["", f"Weights that are not routed are {shared}. Gates: {recipe['gate_mode']}."]
    if "tuned" in record:
        lines[-1] += f" They were tuned for {record['tuned']['steps']} steps with everything else frozen."
        if record["tuned"]["experts"] == [expert["name"] for expert in record["experts"]]:
            lines += ["", *tuning_table(record["tuned"]["perplexity"])]
    elif recipe["gate_mode"] != "none":
        lines[-1] += " Untrained gates are a heuristic: fine-tune them on samples of every domain."
    return "\n".join(lines)


def short_hash(file: dict[str, Any]) -> str:
    """The beginning of the hash of a file: SHA-256 if it was computed, else XXH3; empty if neither was."""
    kind = next((kind for kind in ("sha256", "xxh3") if kind in file), None)
    return f"{kind} `{file[kind][:SHA_DIGITS]}`" if kind else ""


def tuning_table(perplexity: dict[str, dict[str, Any]]) -> list[str]:
    """Perplexity of held-out texts of each domain before and after the gates were tuned."""
    lines = ["| held-out texts | number | perplexity before tuning | after |", "| --- | --- | --- | --- |"]
    for name, row in perplexity.items():
        lines.append(f"| {in_cell(name)} | {row['texts']} | {row['before']:.2f} | {row['after']:.2f} |")
    return lines


def in_cell(text: str) -> str:
    """Escapes a text for a cell of a Markdown table."""
    return escape(" ".join(text.splitlines())).replace("|", "\\|")


def routing_table(record: dict[str, Any]) -> str:
    """Where the prompts of the recipe are routed; empty if the experts have changed since."""
    names = [expert["name"] for expert in record["experts"]]
    rows = record["gates"].get("prompts")
    if not rows or record["gates"]["experts"] != names or "tuned" in record:  # measured with other experts or gates
        return ""
    lines = ["## Routing of the prompts", "", "Share of routers that select each expert for the prompt.", ""]
    lines += [f"| prompt | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for row in rows:
        lines.append(f"| {in_cell(row['prompt'])} | {' | '.join(f'{share:.2f}' for share in row['shares'])} |")
    return "\n".join(lines)


def to_yaml(content: dict[str, Any]) -> str:
    """A dict as YAML."""
    import yaml

    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).strip()
