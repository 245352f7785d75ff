"""The model card of a trained expert, with the licence of the model that it started from."""

from pathlib import Path

import yaml
from transformers import TrainerCallback

from merge_tools.record import read_license
from run_tools.cards import hub_metadata, join_card, read_card
from run_tools.files import write_file
from run_tools.packaged import PACKAGED_MODELS, is_hub_id, published_name, resolve_model

from .arguments import ModelArguments

CARD = """# {title}

An expert made from {base} in {steps} of training on texts of one domain. {trained}

## How to merge it

`recipe.yml`, beside the folders of the experts:

```yaml
{recipe}
```

```
lexperts merge compose recipe.yml mixture
```"""
TRAINED = {
    "shared": "Its MLPs were trained; all other weights are those of the base, so merging changes nothing that is not routed.",
    "embeddings": "All of its weights but the embeddings were trained.",
    "nothing": "All of its weights were trained.",
}


class CardCallback(TrainerCallback):
    """Writes README.md when the training ends; a card that is there already is kept."""

    def __init__(self, args: ModelArguments):
        self.args, self.base = args, published_name(args.model_name_or_path)
        self.on_hub = is_hub_id(self.base)
        if self.on_hub and self.base == args.model_name_or_path:
            self.license = hub_metadata(self.base).get("license")
        else:
            self.license = read_license(Path(resolve_model(args.model_name_or_path)))

    def on_train_end(self, args, state, control, **kwargs):
        """Before the model is saved, so that peft adds its fields."""
        path = Path(args.output_dir).resolve() / "README.md"
        if state.is_world_process_zero and not path.exists():
            write_file(path, self.card(path.parent, state.global_step))

    def card(self, folder: Path, steps: int) -> str:
        """The text of README.md in a folder."""
        args, trained = self.args, TRAINED[self.args.freeze]
        if args.lora:
            trained = "It is a LoRA adapter of the base's MLPs."
        metadata = {
            "license": self.license,
            "base_model": self.base if self.on_hub else None,
            "library_name": "peft" if args.lora else "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["lexperts", "merge"],
        }
        text = CARD.format(
            title=folder.name,
            base=self.base,
            steps=f"{steps:,} step{'s' * (steps != 1)}",
            trained=trained,
            recipe=self.recipe(folder).strip(),
        )
        return join_card(metadata, text)

    def recipe(self, folder: Path) -> str:
        """The YAML of a recipe with the expert and another one."""
        sources = {folder.name: "TEXTS.jsonl", "OTHER_EXPERT": "OTHER.jsonl"}
        experts = [{"source_model": name, "samples": samples} for name, samples in sources.items()]
        base = self.args.model_name_or_path
        keys = {"base_model": base if base in PACKAGED_MODELS else self.base, "average": "base", "gate_mode": "ridge"}
        return yaml.safe_dump({**keys, "experts": experts}, sort_keys=False, allow_unicode=True)


def name_base(folder: Path, base: str) -> None:
    """Replaces the path of an adapter's base in the card's metadata, which peft has filled in, by its Hub id, or leaves it out without
    one. In adapter_config.json it stays: peft opens the base by it.
    """
    card = read_card(folder / "README.md")
    if card is None or card.data.base_model in (None, base):
        return
    place, names = card.data.base_model, [base] if is_hub_id(base) else []
    card.data.base_model = next(iter(names), None)
    new = {f"base_model:adapter:{place}": [f"base_model:adapter:{name}" for name in names]}
    card.data.tags = [tag for old in card.data.tags or [] for tag in new.get(old, [old])]
    write_file(folder / "README.md", str(card))
