"""From the configuration of a recipe to its steps: the command, inputs and folder of each.

The name of a step's folder is a hash of its settings, of the files that it reads, and of the steps that it depends on. Recipes
that have a step in common share its folder. A changed setting changes the folders of that step and of those that depend on
it, and no others.
"""

import hashlib
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from merge_tools.clustering.embeddings import model_identity
from merge_tools.clustering.pipeline import EMBEDDED, METHODS
from merge_tools.recipe import Recipe
from run_tools.errors import UserError, did_you_mean, short_repr
from run_tools.fingerprints import fingerprint
from run_tools.option_values import find_problem
from run_tools.versions import package_version
from run_tools.yaml_files import check_names, read_yaml

from ..common.arguments import SEED
from ..common.jsonl_resume import digest
from .embedders import portable_name, resolve_embedder

FOLDER = Path(__file__).resolve().parent
COMMANDS = {  # of `lexperts`, by module
    "train_expert": ["train", "lexicon-expert"],
    "tune_router": ["train", "lexicon-router"],
    "train_reward": ["train", "lexicon-reward"],
    "generate": ["define", "generate"],
    "evaluate": ["evaluate", "definitions"],
}
MOST_EXPERTS = 1024
SPLITS = ("train", "validation", "test")
SECTIONS = ("base", "shared_finetune", "cluster", "expert", "compose", "router", "reward", "plain", "best", "evaluate")
DEFAULTS = {
    "data": None,  # a folder of train.jsonl, validation.jsonl, test.jsonl, or
    **{f"{split}_files": None for split in SPLITS},
    "work_dir": "runs/lexicon",
    "seed": 42,
    "experts": 4,
    **dict.fromkeys(SECTIONS),
}
REQUIRED = ("base", "expert", "plain")
CLUSTER_CHOICES = {"method": (*METHODS, "none"), "embedded": tuple(EMBEDDED)}
CLUSTER_OPTIONS = ("method", "embedder", "name", "embedded", "seed", "plot")
DEFINITIONS = "definitions.jsonl"
SET_BY_RECIPE = (
    "output_dir", "output", "model_name_or_path", "reward_base", "train_files", "validation_files", "test_files",
    "files", "overwrite_output_dir", "resume_from_checkpoint",
)  # fmt: skip
# settings that name models or files
PLACES = ("reward_model", "embedder", "centroids", "bertscore_model", "moverscore_model", "mauve_model")
EXPERT_ONLY = ("from_scratch", "attention_dropout", "train", "learn")  # options of train_expert
ROUTER_ONLY = ("train", "router_aux_loss_coef", "lora", "lora_r")  # options of tune_router


@dataclass
class Step:
    """One command of a recipe."""

    name: str  # unique in a recipe, such as expert-2
    kind: str  # the same for all experts
    key: str  # the hash of everything that the output depends on
    folder: Path  # contains the output `out`, the settings, the log, and when the step is complete done.json
    module: str | None  # of this package, or None for a command of `lexperts merge`
    arguments: list[str]  # of the command `lexperts`
    inputs: list["Step"]  # the steps that it depends on
    files: dict[str, dict]  # YAML files in the folder, which the command reads, by name
    parallel: bool = False  # whether it may run at the same time as other steps of its kind
    experts: int | None = None  # for a clustering, the required number of clusters

    @property
    def out(self) -> Path:
        """The folder of the output."""
        return self.folder / "out"

    @property
    def command(self) -> list[str]:
        """The command that starts the step's process."""
        return [sys.executable, "-m", "lexperts", *self.arguments]


def contents_of(settings: dict) -> dict:
    """The contents of the models and files that settings name."""
    return {name: content_of(settings[name]) for name in PLACES if isinstance(settings.get(name), str)}


def merge_configs(config: dict, changes: dict) -> dict:
    """A configuration with changes; nested mappings are merged."""
    merged = dict(config)
    for name, value in changes.items():
        before = merged.get(name)
        is_nested = isinstance(before, dict) and isinstance(value, dict)
        merged[name] = merge_configs(before, value) if is_nested else value
    return merged


def content_of(place: str) -> str:
    """The hash of the content of a folder or file, wherever it is; a Hub id is returned unchanged."""
    return fingerprint(resolve_embedder(place)).get("sha256", place)


def read_config(path: str | Path, *changes: dict) -> dict:
    """A recipe's YAML file with changes. Raises a `ValueError` for unknown keys and missing sections."""
    config = {**DEFAULTS, **read_yaml(path)}
    for change in changes:
        config = merge_configs(config, change)
    check_names(config, str(path), DEFAULTS)
    for name in ("data", "work_dir"):
        if config[name] is not None and (not isinstance(config[name], str) or find_problem(config[name])):
            raise UserError(f"{name}={short_repr(config[name])} in {path} must be the name of a folder.")
    if type(config["seed"]) is not int or not SEED.contain(config["seed"]):
        raise UserError(f"seed={short_repr(config['seed'])} in {path} must be a whole number {SEED.describe()}.")
    for name in SECTIONS:
        if config[name] is None and name in REQUIRED:
            raise UserError(f"{path} has no settings of {name!r}. Add some, or {name}: {{}} for the defaults.")
        if not isinstance(config[name], dict | None) and not (name == "base" and isinstance(config[name], str)):
            raise UserError(f"{name}={config[name]!r:.60} in {path} must be a mapping of settings.")
    if type(config["experts"]) is not int or not 1 <= config["experts"] <= MOST_EXPERTS:
        raise UserError(
            f"experts={short_repr(config['experts'])} in {path} must be a whole number from 1 to {MOST_EXPERTS}."
        )
    for name in ("cluster", "compose") if config["experts"] > 1 else ():
        config[name] = config[name] or {}
    if config["shared_finetune"] is not None:
        config["shared_finetune"] = merge_configs({**config["expert"], "train": "all"}, config["shared_finetune"])
    for section, known in (("cluster", CLUSTER_OPTIONS), ("compose", [f.name for f in fields(Recipe)])):
        check_names(config[section] or {}, f"{section} in {path}", known)
    for name, choices in CLUSTER_CHOICES.items():
        value = (config["cluster"] or {}).get(name, choices[0])
        if value not in choices:
            raise UserError(f"cluster.{name}={short_repr(value)} in {path}.{did_you_mean(str(value), choices)}")
    return {**config, **split_files(config, path), "folder": str(Path(path).parent)}


def split_files(config: dict, path) -> dict[str, list[str]]:
    """The files of each split."""
    files = {}
    for split in SPLITS:
        paths = config[f"{split}_files"]
        if not isinstance(paths, str | list | None) or not all(isinstance(one, str) and one for one in paths or ()):
            raise UserError(f"{split}_files={short_repr(paths)} in {path} must be a file or a list of files.")
        if paths is None and config["data"] is not None:
            file = Path(config["data"]) / f"{split}.jsonl"
            paths = [str(file)] if file.exists() or split != "validation" else []
        files[f"{split}_files"] = [paths] if isinstance(paths, str) else paths or []
        if not files[f"{split}_files"] and split != "validation":
            raise UserError(f"{path} has no {split}_files. Set data: FOLDER, or --data FOLDER, or these.")
    return files


class Planner:
    """The `steps` of a configuration, in an order in which they can run; planners can share the `digests` of data files."""

    def __init__(self, config: dict, digests: dict[str, str] | None = None):
        self.config, self.work = config, Path(config["work_dir"])
        self.digests = {} if digests is None else digests
        self.steps: list[Step] = []
        self.rows = {split: config[f"{split}_files"] for split in SPLITS}
        self.has_mixture = config["experts"] > 1
        self.has_clusters = self.has_mixture and config["cluster"].get("method", "balanced") != "none"
        self.plan()

    def plan(self) -> None:
        """Adds all steps."""
        base = self.base()
        if self.config["shared_finetune"] is not None:
            base = self.shared_finetune(base)
        clusters = self.clusters() if self.has_clusters else None
        experts = [self.expert(k, base, clusters) for k in range(self.config["experts"])]
        model = self.mixture(base, clusters, experts) if self.has_mixture else experts[0]
        if self.config["router"] is not None:
            model = self.router(model, clusters) if self.has_mixture else self.dense(model)
        reward = None if self.config["reward"] is None else self.reward(model, base)
        outputs = {"plain": self.generate("plain", model, clusters, None)}
        if self.config["best"] is not None:
            outputs["best"] = self.generate("best", model, clusters, reward)
        if self.config["evaluate"] is not None:
            self.evaluate(**outputs)

    def hash_of(self, path: str) -> str:
        """The SHA-256 of a data file."""
        if path not in self.digests:
            if not Path(path).is_file():
                raise UserError(
                    f"The data file {path!r} does not exist. Make it with `lexperts define prepare`, or set --data."
                )
            with Path(path).open("rb") as file:
                self.digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.digests[path]

    def settings(self, section: str, without: tuple[str, ...] = ()) -> dict:
        """The settings of a section, over those of the file of its key `recipe`, `without` some of the latter."""
        own = dict(self.config[section])
        recipe = own.pop("recipe", None)
        settings = {"seed": self.config["seed"]}
        if recipe is not None:
            excluded = (*without, *SET_BY_RECIPE, "seed")
            beside, packaged = Path(self.config["folder"], recipe), FOLDER / f"{recipe.removesuffix('.yml')}.yml"
            shared = read_yaml(packaged if packaged.is_file() and not beside.is_file() else beside)
            settings = {name: value for name, value in shared.items() if name not in excluded} | settings
        for name in own:
            if name in SET_BY_RECIPE and not (section == "base" and name == "model_name_or_path"):
                raise UserError(f"{section}.{name} is set by the recipe itself. Leave it out.")
        return {name: value for name, value in {**settings, **own}.items() if value is not None}

    def add(self, name: str, about: dict, inputs: list[Step | None], files: dict, make_command, **more) -> Step:
        """Adds a step that depends on `about`, on its `inputs` and on the content of `files`; `make_command` maps the
        step's folder to arguments of `lexperts` and the YAML files that they read.
        """
        steps = [step for step in inputs if step is not None]
        kind, module = more.pop("kind", name), more.pop("module", None)
        hashes = {role: [self.hash_of(path) for path in paths] for role, paths in files.items()}
        keys = [step.key for step in steps]
        key = digest({"kind": kind, "about": about, "inputs": keys, "files": hashes, "lexperts": package_version()})
        folder = self.work / "steps" / f"{name}-{key[:12]}"
        arguments, contents = make_command(folder)
        self.steps.append(Step(name, kind, key, folder, module, arguments, steps, contents, **more))
        return self.steps[-1]

    def add_module(
        self, name, module, settings, paths, inputs, files=None, about=None, output="output_dir", **more
    ) -> Step:
        """Adds a step that runs a module with `settings`, which its output depends on, and `paths`, which do not matter."""

        def make_command(folder: Path) -> tuple[list[str], dict]:
            path = folder / "out" / DEFINITIONS if output == "output" else folder / "out"
            content = {**settings, **paths, output: str(path)}
            return [*COMMANDS[module], str(folder / "settings.yml")], {"settings.yml": content}

        about = {"module": module, "settings": settings, "contents": contents_of(settings), **(about or {})}
        return self.add(name, about, inputs, files or {}, make_command, module=module, **more)

    def add_rows(self, settings: dict, paths: dict) -> dict:
        """Adds the training and validation files to the paths, as `add_validation` -> the files by role."""
        paths["train_files"] = self.rows["train"]
        return {"train": self.rows["train"], **self.add_validation(settings, paths)}

    def add_validation(self, settings: dict, paths: dict) -> dict:
        """Adds the validation files to the paths, or disables evaluation if there are none -> the files by role."""
        if self.rows["validation"]:
            paths["validation_files"] = self.rows["validation"]
            return {"validation": self.rows["validation"]}
        settings["eval_strategy"] = "no"
        return {}

    def base(self) -> "Model":
        """The model that all experts start from: trained in a step, or given."""
        base = self.config["base"]
        if isinstance(base, str):
            return Model(base, None, {"base": content_of(base)})
        settings, paths, about = self.settings("base"), {}, {}
        if "model_name_or_path" in settings:
            settings.pop("from_scratch", None)
            paths["model_name_or_path"] = settings.pop("model_name_or_path")
            about = {"base": content_of(paths["model_name_or_path"])}
        files = self.add_rows(settings, paths)
        step = self.add_module("base", "train_expert", settings, paths, [], files, about)
        return Model(str(step.out), step, {})

    def shared_finetune(self, base: "Model") -> "Model":
        """The base after training on all rows, from which the experts start."""
        settings = self.settings("shared_finetune", ("from_scratch",))
        paths = {"model_name_or_path": base.path}
        files = self.add_rows(settings, paths)
        step = self.add_module("shared_finetune", "train_expert", settings, paths, [base.step], files, base.about)
        return Model(str(step.out), step, {})

    def clusters(self) -> Step:
        """Splits the training rows."""
        options, k = dict(self.config["cluster"]), self.config["experts"]
        settings = {"seed": self.config["seed"], **options, "clusters": k}
        plot, contents = settings.pop("plot", True), {}
        if embedder := settings.get("embedder"):
            contents["embedder"] = model_identity(resolve_embedder(embedder))
        values = dict(settings)
        if embedder == "minilm":
            values |= {"embedder": resolve_embedder(embedder), "name": settings.get("name") or portable_name(embedder)}
        values = [f"--{name}={value}" for name, value in values.items() if value is not None]
        cache = f"--cache={self.work / 'embeddings'}"

        def make_command(folder: Path) -> tuple[list[str], dict]:
            paths = [*self.rows["train"], str(folder / "out")]
            return ["merge", "cluster", *paths, *values, cache, *["--no-plot"] * (not plot)], {}

        about, files = {"settings": settings, **contents}, {"train": self.rows["train"]}
        return self.add("cluster", about, [], files, make_command, experts=k)

    def expert(self, k: int, base: "Model", clusters: Step | None) -> Step:
        """Trains expert k on its cluster, or without clusters on all rows, for as many steps as with clusters."""
        settings, paths = self.settings("expert", ("from_scratch",)), {"model_name_or_path": base.path}
        settings["seed"] += k  # experts of the same rows must differ
        files, about = self.add_validation(settings, paths), {**base.about}
        if clusters is not None:
            about["cluster"], paths["train_files"] = k, [str(clusters.out / f"{k}.jsonl")]
        else:
            files["train"] = paths["train_files"] = self.rows["train"]
            epochs = settings.get("num_train_epochs", 3)
            settings["num_train_epochs"] = epochs / self.config["experts"] if self.has_mixture else epochs
        inputs = [base.step, clusters]
        return self.add_module(
            f"expert-{k}", "train_expert", settings, paths, inputs, files, about, kind="expert", parallel=True
        )

    def has_centroids(self) -> bool:
        """Whether the mixture has centroids; a Mixtral has none."""
        compose = self.config["compose"] or {}
        is_mixtral = compose.get("routing_policy", "token") == "token" and compose.get("format") != "lexicon"
        is_mixtral = is_mixtral and compose.get("router_layers") is None and compose.get("router_layers_index") is None
        return self.has_clusters and bool(self.config["cluster"].get("embedder")) and not is_mixtral

    def mixture(self, base: "Model", clusters: Step | None, experts: list[Step]) -> Step:
        """Composes the experts."""
        settings = {"seed": self.config["seed"], **self.config["compose"]}
        recipe = {"base_model": base.path, **settings}
        recipe["experts"] = [{"source_model": str(step.out), "name": f"expert-{k}"} for k, step in enumerate(experts)]
        if settings.get("gate_mode") == "centroid":
            if clusters is None:
                raise UserError(
                    "compose.gate_mode: centroid needs clusters, and cluster.method is none. Use compose.gate_mode: random."
                )
            for k, expert in enumerate(recipe["experts"]):
                expert["samples"] = str(clusters.out / f"{k}.jsonl")
        contents = contents_of(settings)
        about = {"settings": settings, "contents": contents, "centroids": self.has_centroids()} | base.about
        if self.has_centroids():
            recipe["centroids"] = str(clusters.out / "centroids.safetensors")
            recipe["embedder"] = portable_name(self.config["cluster"]["embedder"])
            recipe |= {name: settings[name] for name in ("centroids", "embedder") if name in settings}

        def make_command(folder: Path) -> tuple[list[str], dict]:
            arguments = ["merge", "compose", str(folder / "mixture.yml"), str(folder / "out"), "--resume"]
            return arguments, {"mixture.yml": recipe}

        return self.add("mixture", about, [base.step, clusters, *experts], {}, make_command)

    def router(self, model: Step, clusters: Step | None) -> Step:
        """Tunes the mixture. With the domain policy it reads clusters, which have the experts of rows."""
        settings = self.settings("router", EXPERT_ONLY)
        paths: dict = {"model_name_or_path": str(model.out)}
        by_domain = self.config["compose"].get("routing_policy") == "domain"
        if by_domain and clusters is None:
            raise UserError("compose.routing_policy: domain needs clusters, but cluster.method is none. Use another.")
        if by_domain:
            paths["train_files"] = [str(clusters.out / f"{k}.jsonl") for k in range(self.config["experts"])]
            settings["eval_strategy"], files = "no", {}
        else:
            files = self.add_rows(settings, paths)
        inputs = [model, clusters if by_domain else None]
        return self.add_module("router", "tune_router", settings, paths, inputs, files)

    def dense(self, model: Step) -> Step:
        """Trains a single expert on as many rows as the router of a mixture."""
        settings = self.settings("router", ("from_scratch",))
        settings = {name: value for name, value in settings.items() if name not in ROUTER_ONLY}
        expert = self.settings("expert")
        from_expert = {name: expert[name] for name in ("train", "max_length") if name in expert}
        settings, paths = {**from_expert, **settings}, {"model_name_or_path": str(model.out)}
        files = self.add_rows(settings, paths)
        return self.add_module("dense", "train_expert", settings, paths, [model], files)

    def reward(self, model: Step, base: "Model") -> Step:
        """Trains the reward model."""
        settings = self.settings("reward", EXPERT_ONLY)
        paths = {"model_name_or_path": str(model.out), "reward_base": base.path}
        files = self.add_rows(settings, paths)
        return self.add_module("reward", "train_reward", settings, paths, [model, base.step], files, base.about)

    def generate(self, name: str, model: Step, clusters: Step | None, reward: Step | None) -> Step:
        """Writes the definitions of the test rows."""
        settings = self.settings(name)
        paths: dict = {"model_name_or_path": str(model.out), "test_files": self.rows["test"]}
        if settings.get("scorer", "reward") != "reward":
            reward = None
        if reward is not None:
            paths["reward_model"] = str(reward.out)
        elif settings.get("scorer") == "reward" and "reward_model" not in settings:
            raise UserError(f"{name}.scorer is reward, and there are no settings of 'reward'. Add some.")
        if self.has_centroids():
            paths |= {"embedder": self.config["cluster"]["embedder"], "embedding_cache": str(self.work / "embeddings")}
        inputs, files = [model, clusters if self.has_centroids() else None, reward], {"test": self.rows["test"]}
        return self.add_module(name, "generate", settings, paths, inputs, files, output="output", kind="generate")

    def evaluate(self, plain: Step, best: Step | None = None) -> Step:
        """Scores the definitions."""
        settings = self.settings("evaluate")
        if "seed" not in self.config["evaluate"]:
            settings.pop("seed", None)
        files = {"plain": plain.out / DEFINITIONS}
        if best is not None:
            n, curve = self.config["best"].get("best_of", 1), self.config["best"].get("curve") or []
            paths = {c: best.out / f"{Path(DEFINITIONS).stem}.best{c}.jsonl" for c in curve}
            paths[n] = best.out / DEFINITIONS
            files |= {f"best_of_{c}": path for c, path in sorted(paths.items())}
            settings.setdefault("baseline", "plain")
        references = {"references": settings["references"]} if settings.get("references") else {}
        paths = {"files": [f"{name}={path}" for name, path in files.items()]}
        return self.add_module("evaluate", "evaluate", settings, paths, [plain, best], references)


@dataclass
class Model:
    """The base model: its path, the step that makes it if there is one, and otherwise its content for hashes."""

    path: str
    step: Step | None
    about: dict


def depends_on(step: Step, names: set[str]) -> bool:
    """Whether a step, or one that it depends on, has one of these names or kinds."""
    return bool({step.name, step.kind} & names) or any(depends_on(one, names) for one in step.inputs)
