"""From the configuration of a recipe to its steps: the command, settings and folder of each.

The name of a step's folder has a hash of its settings, in which files, models and the outputs of other steps are replaced by what
they hold. Recipes that have a step in common share its folder, and a change repeats the steps that depend on it and no others.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from merge_tools.gate_modes import GATE_MODES
from merge_tools.recipe import Recipe, read_recipe
from run_tools.errors import UserError, short_repr
from run_tools.fingerprints import digest, fingerprint
from run_tools.option_values import Limits, find_problem
from run_tools.versions import __version__
from run_tools.yaml_files import check_names, read_yaml

from .. import DEFINE, EVALUATE, TRAIN
from ..common.arguments import SEED
from ..common.embedders import portable_name, resolve_embedder

FOLDER = Path(__file__).resolve().parent
COMMANDS = {  # of `lexperts`, by module of this package; those of merge_tools by their own name
    **{command.module: [group, name] for group, commands in (("train", TRAIN), ("define", DEFINE), ("evaluate", EVALUATE))
       for name, command in commands.items() if command.recipe == "lexicon"},
    "cluster": ["merge", "cluster"],
    "compose": ["merge", "compose"],
}  # fmt: skip
SETTINGS, DEFINITIONS = "settings.yml", "definitions.jsonl"
TRAININGS = ("train_expert", "tune_router", "train_reward")
OUTPUTS = dict.fromkeys((*TRAININGS, "evaluate"), ("output_dir", "out")) | {
    "generate": ("output", f"out/{DEFINITIONS}")
}
SECTIONS = ("base", "shared_finetune", "cluster", "expert", "compose", "router", "reward", "plain", "best", "evaluate")
REQUIRED = ("base", "expert", "plain")
ROWS = ("train_files", "validation_files", "test_files")
# `data` is a folder of train.jsonl, validation.jsonl, test.jsonl, in place of ROWS
DEFAULTS = dict.fromkeys(("data", *ROWS, *SECTIONS)) | {"work_dir": "runs/lexicon", "seed": 42, "experts": 4}
COUNTS = {"seed": SEED, "experts": Limits(least=1, most=1024)}
CLUSTER_OPTIONS = ("method", "embedder", "name", "embedded", "seed", "plot")
SET_BY_RECIPE = (
    *ROWS, "files", "model_name_or_path", "reward_base", "output_dir", "output", "overwrite_output_dir",
    "resume_from_checkpoint",
)  # fmt: skip
PLACES = re.compile(r".*_(files|path|base|model)|references|embedder|centroids")  # settings whose content counts
WITHOUT_EFFECT = ("cache", "embedding_cache", "plot")
EXPERT_ONLY = ("from_scratch", "attention_dropout", "train", "lora_r", "learn")  # options of train_expert
ROUTER_ONLY = ("train", "router_aux_loss_coef", "lora", "lora_r")  # options of tune_router


@dataclass(frozen=True)
class Step:
    """One command of a recipe."""

    name: str  # unique in a recipe, such as expert-2
    kind: str  # the section of the recipe, or mixture; the same for all experts
    module: str  # a key of COMMANDS
    settings: dict  # the content of settings.yml
    inputs: list["Step"]  # the steps that it depends on
    key: str  # the hash of everything that the output depends on
    folder: Path  # contains the output `out`, the settings, the log, and the record

    @property
    def out(self) -> Path:
        """The folder of the output."""
        return self.folder / "out"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `lexperts`."""
        command = [*COMMANDS[self.module], str(self.folder / SETTINGS)]
        if self.module == "compose":
            return [*command, str(self.out), "--resume"]
        if self.module != "cluster":
            return command
        options = {name: value for name, value in self.settings.items() if name not in ("train_files", "plot")}
        switches = [] if self.settings.get("plot", True) else ["--no-plot"]
        switches += [f"--{name}={value}" for name, value in options.items()]
        return [*COMMANDS[self.module], *self.settings["train_files"], str(self.out), *switches]

    def depends_on(self, name: str) -> bool:
        """Whether the step, or one that it depends on, has this name or kind."""
        return name in (self.name, self.kind) or any(step.depends_on(name) for step in self.inputs)


def merge_configs(config: dict, changes: dict) -> dict:
    """A configuration with changes; nested mappings are merged."""
    merged = dict(config)
    for name, value in changes.items():
        before = merged.get(name)
        is_nested = isinstance(before, dict) and isinstance(value, dict)
        merged[name] = merge_configs(before, value) if is_nested else value
    return merged


def read_config(path: str | Path, *changes: dict) -> dict:
    """A recipe's YAML file with changes. Raises a `UserError` for unknown keys, invalid values and missing sections."""
    config = DEFAULTS | read_yaml(path)
    check_names(config, str(path), DEFAULTS)
    places = dict.fromkeys(config, f"in {path}")  # where each value comes from
    for change in changes:
        check_names(change, "--set or an ablation", DEFAULTS)
        config = merge_configs(config, change)
        places |= dict.fromkeys(change, "of --set or an ablation")
    for name in ("data", "work_dir"):
        if config[name] is not None and (not isinstance(config[name], str) or find_problem(config[name])):
            raise UserError(f"{name}={short_repr(config[name])} {places[name]} must be the name of a folder.")
    for name, limits in COUNTS.items():
        if type(config[name]) is not int or not limits.contain(config[name]):
            value = f"{name}={short_repr(config[name])} {places[name]}"
            raise UserError(f"{value} must be a whole number {limits.describe()}.")
    for name in SECTIONS:
        if config[name] is None and name in REQUIRED:
            raise UserError(f"{path} has no settings of {name!r}. Add some, or {name}: {{}} for the defaults.")
        if not isinstance(config[name], dict | None) and not (name == "base" and isinstance(config[name], str)):
            raise UserError(f"{name}={short_repr(config[name])} {places[name]} must be a mapping of settings.")
    for name, known in (("cluster", CLUSTER_OPTIONS), ("compose", [f.name for f in fields(Recipe)])):
        config[name] = config[name] or {}
        check_names(config[name], f"{name} {places[name]}", known)
    if config["shared_finetune"] is not None:
        config["shared_finetune"] = merge_configs({**config["expert"], "train": "all"}, config["shared_finetune"])
    for name in ROWS:
        files = config[name]
        if not isinstance(files, str | list | None) or not all(isinstance(one, str) and one for one in files or ()):
            raise UserError(f"{name}={short_repr(files)} {places[name]} must be a file or a list of files.")
        if files is None and config["data"] is not None:
            file = Path(config["data"], name.replace("_files", ".jsonl"))
            files = str(file) if file.exists() or name != "validation_files" else None
        if not files and name != "validation_files":
            raise UserError(f"{path} has no {name}. Set data: FOLDER, or --data FOLDER, or these.")
        config[name] = [files] if isinstance(files, str) else files or []
    return config | {"folder": str(Path(path).parent)}


class Plan:
    """The `steps` of a configuration, in an order in which they can run. Models are passed on as the paths of outputs."""

    def __init__(self, config: dict):
        self.config, self.work, self.count = config, Path(config["work_dir"]), config["experts"]
        self.steps: list[Step] = []
        clustered = self.count > 1 and config["cluster"].get("method") != "none"
        self.embedder = config["cluster"].get("embedder") if clustered else None
        self.has_centroids = False
        base = self.base()
        if config["shared_finetune"] is not None:
            settings = self.settings("shared_finetune", ("from_scratch",)) | {"model_name_or_path": base}
            base = self.add("shared_finetune", "train_expert", settings | self.rows())
        clusters = self.cluster() if clustered else None
        parts = [f"{clusters}/{k}.jsonl" for k in range(self.count)] if clusters else []
        experts = [self.expert(k, base, parts) for k in range(self.count)]
        model = self.mixture(base, clusters, parts, experts) if self.count > 1 else experts[0]
        if config["router"] is not None:
            model = self.router(model, parts) if self.count > 1 else self.dense(model)
        reward = best = None
        if config["reward"] is not None:
            settings = self.settings("reward", EXPERT_ONLY) | {"model_name_or_path": model, "reward_base": base}
            reward = self.add("reward", "train_reward", settings | self.rows())
        plain = self.generate("plain", model)
        if config["best"] is not None:
            best = self.generate("best", model, reward)
        if config["evaluate"] is not None:
            self.evaluate(plain, best)

    def add(self, name: str, module: str, settings: dict, kind: str = "") -> str:
        """Adds a step -> the path of its output."""
        inputs: dict[str, Step] = {}
        content = self.content_of(settings, "", inputs)
        key = digest({"module": module, "settings": content, "lexperts": __version__})
        folder = self.work / "steps" / f"{name}-{key[:12]}"
        if module in OUTPUTS:
            settings = {**settings, OUTPUTS[module][0]: str(folder / OUTPUTS[module][1])}
        self.steps.append(Step(name, kind or name, module, settings, list(inputs.values()), key, folder))
        return str(self.steps[-1].out)

    def content_of(self, value, name: str, inputs: dict[str, Step]):
        """A setting with the content of what it names; the steps whose outputs it names are added to `inputs`."""
        if isinstance(value, dict):
            return {key: self.content_of(one, key, inputs) for key, one in value.items() if key not in WITHOUT_EFFECT}
        if isinstance(value, list):
            return [self.content_of(one, name, inputs) for one in value]
        for step in self.steps if isinstance(value, str) else ():
            if f"{step.folder}/" in value:
                inputs[step.key] = step
                return value.replace(str(step.folder), step.key)
        if not isinstance(value, str) or not PLACES.fullmatch(name):
            return value
        if name in (*ROWS, "references") and not Path(value).is_file():
            raise UserError(
                f"The data file {value!r} does not exist. Make it with `lexperts define prepare`, or set --data."
            )
        return fingerprint(resolve_embedder(value)).get("sha256", value)

    def settings(self, section: str, without: tuple[str, ...] = ()) -> dict:
        """The settings of a section, over those of its `recipe` file, of which `without` are left out."""
        own = dict(self.config[section])
        for name in own:
            if name in SET_BY_RECIPE and (section, name) != ("base", "model_name_or_path"):
                raise UserError(f"{section}.{name} is set by the recipe itself. Leave it out.")
        if (recipe := own.pop("recipe", None)) is not None:
            beside, packaged = Path(self.config["folder"], recipe), FOLDER / f"{recipe.removesuffix('.yml')}.yml"
            shared = read_yaml(packaged if packaged.is_file() and not beside.is_file() else beside)
            own = {
                name: value for name, value in shared.items() if name not in (*without, *SET_BY_RECIPE, "seed")
            } | own
        return {name: value for name, value in {"seed": self.config["seed"], **own}.items() if value is not None}

    def rows(self, train: list[str] | None = None) -> dict:
        """The options that name the rows of a training; without validation rows nothing is evaluated."""
        held_out = self.config["validation_files"]
        files = {"train_files": train or self.config["train_files"]}
        return files | ({"validation_files": held_out} if held_out else {"eval_strategy": "no"})

    def base(self) -> str:
        """The model that all experts start from: trained in a step, or given."""
        if isinstance(self.config["base"], str):
            return self.config["base"]
        settings = self.settings("base", ("from_scratch",) if "model_name_or_path" in self.config["base"] else ())
        return self.add("base", "train_expert", settings | self.rows())

    def cluster(self) -> str:
        """Splits the training rows."""
        settings = {"seed": self.config["seed"], **self.config["cluster"], "clusters": self.count}
        if self.embedder == "minilm":
            settings["name"] = settings.get("name") or portable_name(self.embedder)
            settings["embedder"] = resolve_embedder(self.embedder)
        places = {"train_files": self.config["train_files"], "cache": str(self.work / "embeddings")}
        return self.add("cluster", "cluster", {n: value for n, value in settings.items() if value is not None} | places)

    def expert(self, k: int, base: str, parts: list[str]) -> str:
        """Trains expert k on its cluster, or without clusters on all rows, for as many steps as with clusters."""
        settings = self.settings("expert", ("from_scratch",)) | {"model_name_or_path": base}
        settings["seed"] += k  # experts of the same rows must differ
        if not parts:
            settings["num_train_epochs"] = settings.get("num_train_epochs", 3) / self.count
        return self.add(f"expert-{k}", "train_expert", settings | self.rows(parts[k : k + 1]), "expert")

    def mixture(self, base: str, clusters: str | None, parts: list[str], experts: list[str]) -> str:
        """Composes the experts."""
        settings = {"base_model": base, "seed": self.config["seed"], **self.config["compose"]}
        mode = GATE_MODES.get(settings.get("gate_mode", "none"))
        by_samples = mode is not None and mode.texts == "samples"
        if not parts and (by_samples or settings.get("routing_policy") == "domain"):
            raise UserError(
                f"compose.gate_mode: {mode.name if by_samples else 'centroid'} and compose.routing_policy: domain need clusters, and cluster.method is none. "
                "Use other values, such as compose.gate_mode: random."
            )
        settings["experts"] = [
            {"source_model": model, "name": f"expert-{k}"} | ({"samples": parts[k]} if by_samples else {})
            for k, model in enumerate(experts)
        ]
        recipe = read_recipe(settings)
        self.has_centroids = self.embedder is not None and (recipe.format == "lexicon" or not recipe.is_stock)
        if self.has_centroids:
            centroids = {"centroids": f"{clusters}/centroids.safetensors", "embedder": portable_name(self.embedder)}
            settings = centroids | settings
        return self.add("mixture", "compose", settings)

    def router(self, model: str, parts: list[str]) -> str:
        """Tunes the mixture. With the domain policy it reads clusters, which have the experts of rows."""
        rows = self.rows()
        if self.config["compose"].get("routing_policy") == "domain":
            rows = {"train_files": parts, "eval_strategy": "no"}
        return self.add(
            "router", "tune_router", self.settings("router", EXPERT_ONLY) | {"model_name_or_path": model} | rows
        )

    def dense(self, model: str) -> str:
        """Trains a single expert on as many rows as the router of a mixture."""
        settings, expert = self.settings("router", ("from_scratch",)), self.settings("expert")
        settings = {name: value for name, value in settings.items() if name not in ROUTER_ONLY}
        from_expert = {name: expert[name] for name in ("train", "max_length") if name in expert}
        return self.add("dense", "train_expert", from_expert | settings | {"model_name_or_path": model} | self.rows())

    def generate(self, name: str, model: str, reward: str | None = None) -> str:
        """Writes the definitions of the test rows."""
        settings = {**self.settings(name), "model_name_or_path": model, "test_files": self.config["test_files"]}
        if reward and settings.get("scorer", "reward") == "reward":
            settings["reward_model"] = reward
        if self.has_centroids:
            settings |= {"embedder": self.embedder, "embedding_cache": str(self.work / "embeddings")}
        return self.add(name, "generate", settings)

    def evaluate(self, plain: str, best: str | None) -> None:
        """Scores the definitions."""
        settings, files = self.settings("evaluate"), {"plain": f"{plain}/{DEFINITIONS}"}
        if best is not None:
            curve = {
                n: f"{best}/{DEFINITIONS.replace('.', f'.best{n}.')}" for n in self.config["best"].get("curve") or ()
            }
            curve[self.config["best"].get("best_of", 1)] = f"{best}/{DEFINITIONS}"
            files |= {f"best_of_{n}": curve[n] for n in sorted(curve)}
            settings.setdefault("baseline", "plain")
        self.add("evaluate", "evaluate", {**settings, "files": [f"{name}={path}" for name, path in files.items()]})
