"""The files of a mixture or a dense model besides its weights: config.json, tokenizer, and the code that a lexicon mixture travels with."""

import hashlib
from pathlib import Path
from typing import Any

from run_tools.errors import UserError

from .families import FAMILIES, LEXICON, Family, MixtureClass
from .recipe import Recipe
from .sources import CARRIED, DTYPES, Source
from .writer import write_json

NOT_CARRIED = {"model_type", "architectures", "transformers_version", "layer_types", "auto_map", "dtype"}
AUTO_MAP = {
    "AutoConfig": "configuration_lexicon.LexiconConfig",
    "AutoModel": "modeling_lexicon.LexiconModel",
    "AutoModelForCausalLM": "modeling_lexicon.LexiconForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lexicon.LexiconForSequenceClassification",
}


def dtype_name(source: Source) -> str:
    """The name of the dtype of a model's embeddings, as in config.json."""
    return str(DTYPES[source.specs["model.embed_tokens.weight"][0]]).removeprefix("torch.")


def mixture_config(
    recipe: Recipe, base: Source, kind: MixtureClass, centroid_size: int | None = None
) -> dict[str, Any]:
    """config.json of a mixture: the fields of the base that its class has, and those of the experts."""
    count, settings = len(recipe.experts), dict(kind.settings)
    more: dict[str, Any] = {
        "architectures": [kind.architecture],
        "num_experts_per_tok": recipe.experts_per_token,
        "output_router_logits": False,
        "dtype": recipe.dtype or dtype_name(base),
        **dict.fromkeys(("num_local_experts", "num_experts"), count),
    }
    if kind is LEXICON:
        settings |= FAMILIES[base.config.model_type].lexicon or {}
        more |= {
            "expert_rank": recipe.rank, "routing_policy": recipe.routing_policy, "expert_names": recipe.names,
            "domain_gate": recipe.routing_policy == "domain" and recipe.gate_mode != "none",
            "centroid_size": centroid_size, "embedder": recipe.embedder,
        }  # fmt: skip
        more["auto_map"] = AUTO_MAP
    elif "moe_intermediate_size" in new_config(kind.model_type).to_dict():
        more["moe_intermediate_size"] = base.config.intermediate_size
    return config_content(kind.model_type, settings, base, more)


def dense_config(family: Family, mixture: Source) -> dict[str, Any]:
    """config.json of a dense model of a mixture; without a window it has full attention, whatever the default of its class is."""
    more = {"architectures": [family.architecture], "dtype": dtype_name(mixture)}
    settings = {"sliding_window": None} if "sliding_window" in new_config(family.model_type).to_dict() else {}
    return config_content(family.model_type, settings, mixture, more)


def config_content(model_type: str, settings: dict[str, Any], base: Source, more: dict[str, Any]) -> dict[str, Any]:
    """config.json of a class: `settings`, then the fields of the base that this class has, then `more`.

    RoPE settings, dtype and the number of experts are written in the spellings of transformers 4 too, which would take its defaults for
    fields that it does not find.
    """
    known = {*new_config(model_type).to_dict(), "head_dim"} - NOT_CARRIED
    carried = {key: value for key, value in base.config.to_dict().items() if key in known}
    config = new_config(model_type, **{**settings, **carried, **more})
    common = new_config("").to_dict().keys() - {"dtype", "architectures", "tie_word_embeddings", "model_type"}
    content = {key: value for key, value in config.to_dict().items() if key not in common or key in more}
    rope = dict(content["rope_parameters"])
    content |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if rope["rope_type"] != "default" else None}
    content |= {"torch_dtype": content["dtype"], "model_type": model_type}
    return content | {key: value for key, value in more.items() if key.startswith("num_")}


def new_config(model_type: str, **fields):
    """A configuration of a class of transformers or of `modeling_lexicon`; the plain one without a type."""
    from transformers import AutoConfig, PreTrainedConfig

    import modeling_lexicon  # noqa: F401  (registers its classes)

    return AutoConfig.for_model(model_type, **fields) if model_type else PreTrainedConfig(**fields)


def write_tokenizer(source: Path, folder: Path) -> dict[str, str]:
    """Copies the files of a tokenizer and the generation settings. Returns name -> SHA-256.

    Raises a `UserError` for a link out of the folder, by which a downloaded model would publish a file of the user.
    """
    hashes, real = {}, source.resolve()
    allowed = (real, real.parents[1] / "blobs") if real.parent.name == "snapshots" else (real,)
    for path in (source / name for name in CARRIED):
        if not path.is_file():
            continue
        if not any(path.resolve().is_relative_to(place) for place in allowed):
            raise UserError(f"{path} is a link to {path.resolve()}, outside of its folder. Copy the file into it.")
        content = path.read_bytes()
        (folder / path.name).write_bytes(content)
        hashes[path.name] = hashlib.sha256(content).hexdigest()
    return hashes


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json, and the modeling code of a mixture that only `LexiconForCausalLM` opens."""
    if config["model_type"] == "lexicon":
        import modeling_lexicon

        for path in sorted(Path(modeling_lexicon.__file__).parent.glob("*.py")):
            if path.name != "__init__.py":
                (folder / path.name).write_bytes(path.read_bytes())
    write_json(folder / "config.json", config)
