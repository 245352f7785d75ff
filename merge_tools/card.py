"""The model card of a mixture, generated from its merge record."""

import os
import re
from pathlib import Path
from typing import Any

from run_tools.cards import join_card, make_table
from run_tools.errors import format_size
from run_tools.model_options import is_path
from run_tools.pretrained import PACKAGED, hub_id, published_name

from .places import is_on_hub

SHA_DIGITS = 16  # of a hash
RECIPE, EVALUATION = "## Recipe", "## What the mixture keeps of its experts"
IMPORTS = "import modeling_lexicon  # pip install lexperts; or pass trust_remote_code=True\n"
HOW_TO_OPEN = """```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


def model_card(record: dict[str, Any], sizes: dict[str, int]) -> bytes:
    """README.md: how to open the mixture, its sources, a routing preview, and the recipe."""
    import yaml

    recipe = yaml.safe_dump(published_recipe(record), sort_keys=False, allow_unicode=True).strip()
    return join_card(
        metadata(record),
        f"# Mixture of {len(record['recipe']['experts'])} experts",
        summary(record["recipe"], sizes),
        HOW_TO_OPEN.format(imports="" if record["format"] != "lexicon" else IMPORTS),
        *sources(record),
        *routing(record),
        f"{RECIPE}\n\n```yaml\n{recipe}\n```",
    ).encode()


def published(record: dict[str, Any], origin: str) -> str:
    """A source as the card names it: by its Hub id, or by the last part of its folder's path."""
    return hub_id(origin) if is_on_hub(record, origin) else published_name(os.path.join(os.curdir, origin))


def published_recipe(record: dict[str, Any]) -> dict[str, Any]:
    """The recipe without the places of its folders and files; a packaged model has its own name, by which a merge finds it."""

    def place(value):
        return value if value in PACKAGED and is_on_hub(record, value) else published(record, value)

    def without_places(options: dict[str, Any]) -> dict[str, Any]:
        places = {key: place(options[key]) for key in ("base_model", "source_model") if options.get(key)}
        files = {key: Path(options[key]).name for key in ("samples", "centroids") if options.get(key)}
        return {**options, **places, **files}

    recipe = without_places(record["recipe"])
    if is_path(recipe.get("embedder") or ""):
        recipe["embedder"] = published_name(recipe["embedder"])
    return recipe | {"experts": [without_places(expert) for expert in recipe["experts"]]}


def metadata(record: dict[str, Any]) -> dict[str, Any]:
    """The front matter. The licence is the one that all sources have, if they have one."""
    sources = [record["base"], *record["experts"]]
    licences = {source.get("license") for source in sources}
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "moe", "lexperts"],
        "license": licences.pop() if len(licences) == 1 else None,
        "base_model": sorted({hub_id(source["source"]) for source in sources if is_on_hub(record, source["source"])}),
    }


def summary(recipe: dict[str, Any], sizes: dict[str, int]) -> str:
    """The number of parameters, and the routing."""
    policy, k = recipe["routing_policy"], recipe["experts_per_token"]
    routing = f"{policy} (top {k})" if policy == "token" else policy
    return (
        f"{sizes['parameters']:,} parameters, {sizes['active_parameters']:,} of them active per token; "
        f"{format_size(sizes['bytes'])}.\n"
        f"Routed: {', '.join(recipe['router_layers'])}. Policy: {routing}."
    )


def sources(record: dict[str, Any]) -> list[str]:
    """The sources of the weights and of the gates."""
    recipe, experts = record["recipe"], [expert["name"] for expert in record["experts"]]
    rows = [
        (
            e["name"],
            published(record, e["source"]),
            e.get("license", "not stated"),
            ", ".join(filter(None, map(short_hash, e["files"]))),
        )
        for e in record["experts"]
    ]
    base = published(record, record["base"]["source"])
    shared = f"copied from {base}"
    if recipe["average"] != "base":
        names = ", ".join(record.get("shared_from") or experts)
        shared = f"the {recipe['average']} over {names}"
        if density := recipe.get("density"):
            shared = f"merged by {recipe['average']} (density {density:g}) from {names} over {base}"
    origins, tuned = f"Weights that are not routed are {shared}. Gates: {recipe['gate_mode']}.", record.get("tuned")
    if tuned:
        origins += f" They were tuned for {tuned['steps']} steps with everything else frozen."
    elif recipe["gate_mode"] not in ("none", "ridge"):
        origins += " Untrained gates are a heuristic: fine-tune them on samples of every domain."
    perplexity = tuning_table(tuned["perplexity"]) if tuned and tuned["experts"] == experts else ""
    return ["## Sources", make_table(("expert", "source", "licence", "hash"), rows), origins, perplexity]


def short_hash(file: dict[str, Any]) -> str:
    """The beginning of the hash of a file: SHA-256 if it was computed, else XXH3; empty if neither was."""
    kind = next((kind for kind in ("sha256", "xxh3") if kind in file), None)
    return f"{kind} `{file[kind][:SHA_DIGITS]}`" if kind else ""


def tuning_table(perplexity: dict[str, dict[str, Any]]) -> str:
    """Perplexity of held-out texts of each domain before and after the gates were tuned."""
    rows = [(name, row["texts"], f"{row['before']:.2f}", f"{row['after']:.2f}") for name, row in perplexity.items()]
    return make_table(("held-out texts", "number", "perplexity before tuning", "after"), rows)


def routing(record: dict[str, Any]) -> list[str]:
    """Where the prompts of the recipe or held-out tokens are routed; empty if the experts or gates have changed since."""
    names, made = [expert["name"] for expert in record["experts"]], record["gates"]
    if made.get("experts") != names or "tuned" in record:
        return []
    if "confusion" in made:
        rows = [(name, *(f"{share:.1%}" for share in row)) for name, row in zip(names, made["confusion"], strict=True)]
        text = "Share of each expert's held-out tokens that are routed first to each expert, the mean over all routers."
        return ["## Routing of held-out tokens", text, make_table(("tokens of", *names), rows)]
    prompts = made.get("prompts")
    if not prompts:
        return []
    rows = [(row["prompt"], *(f"{share:.2f}" for share in row["shares"])) for row in prompts]
    text = "Share of routers that select each expert for the prompt."
    return ["## Routing of the prompts", text, make_table(("prompt", *names), rows)]


def with_evaluation(card: str, result: dict[str, Any]) -> str:
    """A card with the result of `evaluate` as a section, in place of an earlier one. All else stays as it is."""
    section = f"{EVALUATION}\n\n{evaluation(result)}\n\n"
    start = re.search(rf"^{EVALUATION}$", card, re.MULTILINE) or re.search(rf"^{RECIPE}$", card, re.MULTILINE)
    if start is None:
        return f"{card.rstrip()}\n\n{section}".strip() + "\n"
    before, rest = card[: start.start()], card[start.start() :]
    if rest.startswith(EVALUATION):
        following = re.search(r"^#{1,2} ", rest[len(EVALUATION) :], re.MULTILINE)
        rest = rest[len(EVALUATION) + following.start() :] if following else ""
    return f"{before}{section}{rest}".rstrip() + "\n"


def evaluation(result: dict[str, Any]) -> str:
    """The table of `evaluate`, and what its columns are."""
    rows = []
    for name, row in result["domains"].items():
        own, kept = row["experts"].get(name), row["kept"]
        losses = (row["texts"], f"{row['base']:.3f}", "" if own is None else f"{own:.3f}", f"{row['mixture']:.3f}")
        rows.append((name, *losses, share(row["change"], "+.1%"), share(kept) if kept else ""))
    head = ("held-out texts", "number", "base", "own expert", "mixture", "mixture against base", "gain kept")
    text = "Losses in nats per token. The gain that is kept is (base - mixture) / (base - own expert); in brackets, 95% intervals over texts."
    if result["kept"] is not None:
        text += f" The mean over the experts' domains is {result['kept']:.1%}."
    return f"{text}\n\n{make_table(head, rows)}"


def share(measured: dict[str, Any], form: str = ".1%") -> str:
    """A share with its interval."""
    low, high = measured["interval"]
    return f"{measured['value']:{form}} [{low:{form}}, {high:{form}}]"
