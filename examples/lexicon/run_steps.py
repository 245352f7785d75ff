"""From the configuration of a whole recipe to its steps: what each runs, what it depends on, and where it lies.

A step's folder has the name of its content: a hash of its own settings, of the files that it reads and of the steps before
it. Two recipes that have a step in common have its folder in common, and a changed setting is another folder for that step
and those behind it, and for no other.
"""

import hashlib
import sys
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from cli_args import read_yaml
from resumable import digest
from run_folder import fingerprint, package_version

from merge_tools.embedding import identity
from merge_tools.errors import nearest
from merge_tools.recipe import Recipe

HERE = Path(__file__).resolve().parent
SPLITS = ("train", "validation", "test")
SECTIONS = ("base", "trunk", "cluster", "expert", "compose", "router", "reward", "plain", "best", "evaluate")
DEFAULTS = {
    "data": None,  # a folder of train.jsonl, validation.jsonl, test.jsonl, or
    **{f"{split}_files": None for split in SPLITS},
    "work_dir": "runs/lexicon",
    "seed": 42,
    "experts": 4,
    **dict.fromkeys(SECTIONS),
}
NEEDED = ("base", "expert", "plain")
CLUSTER = ("method", "embedder", "name", "embedded", "seed", "plot")
DEFINITIONS = "definitions.jsonl"
GIVEN = (
    "output_dir",
    "output",
    "model_name_or_path",
    "reward_base",
    "train_files",
    "validation_files",
    "test_files",
    "files",
    "overwrite_output_dir",
    "resume_from_checkpoint",
)
READ = ("reward_model", "embedder", "centroids", "bertscore_model", "moverscore_model", "mauve_model")  # places
OF_MODEL = ("from_scratch", "attention_dropout", "train", "learn")  # of train_expert.py alone
OF_ROUTER = ("train", "router_aux_loss_coef", "lora", "lora_r")  # of tune_router.py alone


@dataclass
class Step:
    """One command of a recipe.

    Args:
        name: unique in a recipe, such as `expert-2`; `kind` is the same for all experts.
        key: the hash of all that the output depends on.
        folder: holds `out`, the output, the settings, the log, and when all is done the stamp.
        written: YAML files in the folder, which the command reads.
        parallel: whether it may run beside others of its kind.
        experts: of a clustering, how many clusters there must be.
    """

    name: str
    kind: str
    key: str
    folder: Path
    command: list[str]
    inputs: list["Step"]
    written: dict[str, dict]
    parallel: bool = False
    experts: int | None = None

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def script(self) -> str | None:
        """The script of this folder that it runs, if it is one."""
        path = Path(self.command[1])
        return path.stem if path.suffix == ".py" else None


def contents_of(settings: dict) -> dict:
    """What the places are, that settings of a section name."""
    return {name: content_of(settings[name]) for name in READ if isinstance(settings.get(name), str)}


def merged(config: dict, changes: dict) -> dict:
    """A configuration with changes, mapping by mapping."""
    found = dict(config)
    for name, value in changes.items():
        before = found.get(name)
        found[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def content_of(place: str) -> str:
    """What tells a folder or file from others, wherever it lies: the hash of its content; a Hub id is its own name."""
    return fingerprint(place).get("sha256", place)


def read_config(path: str | Path, *changes: dict) -> dict:
    """A recipe's YAML with changes, checked.

    A section's `recipe: FILE.yml` stands for the settings of that file, which lies beside the configuration.

    Raises:
        ValueError: for an unknown key, with the nearest known one, and for what is missing.
    """
    config = {**DEFAULTS, **read_yaml(path)}
    for change in changes:
        config = merged(config, change)
    for name in config:
        if name not in DEFAULTS:
            raise ValueError(f"{path} has {name!r}, which is not known.{nearest(str(name), DEFAULTS)}")
    for name in SECTIONS:
        if config[name] is None and name in NEEDED:
            raise ValueError(f"{path} has no settings of {name!r}. Give some, or {name}: {{}} for the defaults.")
        if not isinstance(config[name], dict | None) and not (name == "base" and isinstance(config[name], str)):
            raise ValueError(f"{name} in {path} is {config[name]!r:.60}, and takes a mapping of settings.")
    if type(config["experts"]) is not int or config["experts"] < 1:
        raise ValueError(f"experts={config['experts']!r} in {path}: give a whole number from 1 on.")
    for name in ("cluster", "compose") if config["experts"] > 1 else ():
        config[name] = config[name] or {}
    if config["trunk"] is not None:
        config["trunk"] = merged({**config["expert"], "train": "all"}, config["trunk"])
    for section, known in (("cluster", CLUSTER), ("compose", [f.name for f in fields(Recipe)])):
        for name in config[section] or {}:
            if name not in known:
                raise ValueError(f"{section}.{name} in {path} is not known.{nearest(str(name), known)}")
    return {**config, **files_of(config, path), "beside": str(Path(path).parent)}


def files_of(config: dict, path) -> dict[str, list[str]]:
    """The files of each split."""
    found = {}
    for split in SPLITS:
        given = config[f"{split}_files"]
        if given is None and config["data"] is not None:
            file = Path(config["data"]) / f"{split}.jsonl"
            given = [str(file)] if file.exists() or split != "validation" else []
        found[f"{split}_files"] = [given] if isinstance(given, str) else given or []
        if not found[f"{split}_files"] and split != "validation":
            raise ValueError(f"{path} names no {split}_files. Give data: FOLDER, or --data FOLDER, or these.")
    return found


class Planner:
    """A configuration -> `steps`, in an order in which they can run."""

    def __init__(self, config: dict, digests: dict[str, str] | None = None):
        self.config, self.work = config, Path(config["work_dir"])
        self.digests = {} if digests is None else digests  # of files, which several recipes read
        self.steps: list[Step] = []
        self.rows = {split: config[f"{split}_files"] for split in SPLITS}
        self.shared = config["experts"] > 1  # whether there is a mixture at all
        self.split = self.shared and config["cluster"].get("method", "balanced") != "none"
        self.plan()

    def plan(self) -> None:
        base = self.base()
        if self.config["trunk"] is not None:
            base = self.trunk(base)
        clusters = self.clusters() if self.split else None
        experts = [self.expert(k, base, clusters) for k in range(self.config["experts"])]
        model = self.mixture(base, clusters, experts) if self.shared else experts[0]
        if self.config["router"] is not None:
            model = self.router(model, clusters) if self.shared else self.dense(model)
        reward = None if self.config["reward"] is None else self.reward(model, base)
        written = {"plain": self.generate("plain", model, clusters, None)}
        if self.config["best"] is not None:
            written["best"] = self.generate("best", model, clusters, reward)
        if self.config["evaluate"] is not None:
            self.evaluate(**written)

    def hash_of(self, path: str) -> str:
        if path not in self.digests:
            with Path(path).open("rb") as file:
                self.digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.digests[path]

    def settings(self, section: str, without: tuple[str, ...] = ()) -> dict:
        """A section's settings over those of its recipe, of which some are not for this script."""
        own = dict(self.config[section])
        recipe = own.pop("recipe", None)
        found = {"seed": self.config["seed"]}
        if recipe is not None:
            path = Path(self.config["beside"], recipe)
            found = {
                name: value for name, value in read_yaml(path).items() if name not in (*without, *GIVEN, "seed")
            } | found
        for name in own:
            if name in GIVEN and not (section == "base" and name == "model_name_or_path"):
                raise ValueError(f"{section}.{name} is given by the recipe itself. Leave it out.")
        return {name: value for name, value in {**found, **own}.items() if value is not None}

    def add(self, name: str, about: dict, inputs: list[Step | None], files: dict, command, **more) -> Step:
        """`command` takes the step's folder -> the command, and the YAML files that it reads."""
        steps = [step for step in inputs if step is not None]
        kind = more.setdefault("kind", name)
        hashes = {role: [self.hash_of(path) for path in paths] for role, paths in files.items()}
        inputs = [step.key for step in steps]
        key = digest({"kind": kind, "about": about, "inputs": inputs, "files": hashes, "lexperts": package_version()})
        folder = self.work / "steps" / f"{name}-{key[:12]}"
        words, written = command(folder)
        step = Step(name=name, key=key, folder=folder, command=words, written=written, inputs=steps, **more)
        self.steps.append(step)
        return step

    def run_script(
        self, name, script, settings, places, inputs, files=None, about=None, output="output_dir", **more
    ) -> Step:
        """A step whose script reads `settings`, which its output depends on, and `places`, which say where things lie."""

        def command(folder: Path) -> tuple[list[str], dict]:
            place = folder / "out" / DEFINITIONS if output == "output" else folder / "out"
            content = {**settings, **places, output: str(place)}
            return [sys.executable, str(HERE / script), str(folder / "settings.yml")], {"settings.yml": content}

        about = {"script": script, "settings": settings, "read": contents_of(settings), **(about or {})}
        return self.add(name, about, inputs, files or {}, command, **more)

    def validation(self, settings: dict, places: dict) -> dict:
        """Puts the validation files into the places -> the files; without any, nothing is evaluated on the way."""
        if self.rows["validation"]:
            places["validation_files"] = self.rows["validation"]
            return {"validation": self.rows["validation"]}
        settings["eval_strategy"] = "no"
        return {}

    def base(self) -> "Model":
        """The model that all experts start from: trained here, or given."""
        given = self.config["base"]
        if isinstance(given, str):
            return Model(given, None, {"base": content_of(given)})
        settings, places, about = self.settings("base"), {"train_files": self.rows["train"]}, {}
        if "model_name_or_path" in settings:
            settings.pop("from_scratch", None)
            places["model_name_or_path"] = settings.pop("model_name_or_path")
            about = {"base": content_of(places["model_name_or_path"])}
        files = {"train": self.rows["train"], **self.validation(settings, places)}
        step = self.run_script("base", "train_expert.py", settings, places, [], files, about)
        return Model(str(step.out), step, {})

    def trunk(self, base: "Model") -> "Model":
        """The base after it has read all rows, for the experts to branch from."""
        settings = self.settings("trunk", ("from_scratch",))
        places = {"model_name_or_path": base.place, "train_files": self.rows["train"]}
        files = {"train": self.rows["train"], **self.validation(settings, places)}
        step = self.run_script("trunk", "train_expert.py", settings, places, [base.step], files, base.about)
        return Model(str(step.out), step, {})

    def clusters(self) -> Step:
        given, k = dict(self.config["cluster"]), self.config["experts"]
        settings = {"seed": self.config["seed"], **given, "clusters": k}
        plot = settings.pop("plot", True)
        options = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        cache = f"--cache={self.work / 'embeddings'}"
        more = {"embedder": identity(given["embedder"])} if given.get("embedder") else {}

        def command(folder: Path) -> tuple[list[str], dict]:
            words = ["cluster", *self.rows["train"], str(folder / "out"), *options, cache]
            return [sys.executable, "-m", "merge_tools.cli", *words, *["--no-plot"] * (not plot)], {}

        about, files = {"settings": settings, **more}, {"train": self.rows["train"]}
        return self.add("cluster", about, [], files, command, experts=k)

    def expert(self, k: int, base: "Model", clusters: Step | None) -> Step:
        """Expert k: of its cluster, or of all rows; then each of several takes as many steps as if there were clusters."""
        settings, places = self.settings("expert", ("from_scratch",)), {"model_name_or_path": base.place}
        settings["seed"] += k  # or experts of the same rows would be the same
        files, about = self.validation(settings, places), {**base.about}
        if clusters is not None:
            about["cluster"], places["train_files"] = k, [str(clusters.out / f"{k}.jsonl")]
        else:
            files["train"] = places["train_files"] = self.rows["train"]
            epochs = settings.get("num_train_epochs", 3)
            settings["num_train_epochs"] = epochs / self.config["experts"] if self.shared else epochs
        inputs = [base.step, clusters]
        return self.run_script(
            f"expert-{k}", "train_expert.py", settings, places, inputs, files, about, kind="expert", parallel=True
        )

    def has_centroids(self) -> bool:
        """Whether the mixture has them: a Mixtral has no place for any."""
        compose = self.config["compose"] or {}
        stock = compose.get("routing_policy", "token") == "token" and compose.get("format") != "lexicon"
        stock = stock and compose.get("router_layers") is None and compose.get("router_layers_index") is None
        return self.split and bool(self.config["cluster"].get("embedder")) and not stock

    def mixture(self, base: "Model", clusters: Step | None, experts: list[Step]) -> Step:
        settings = {"seed": self.config["seed"], **self.config["compose"]}
        recipe = {"base_model": base.place, **settings}
        recipe["experts"] = [{"source_model": str(step.out), "name": f"expert-{k}"} for k, step in enumerate(experts)]
        if settings.get("gate_mode") == "centroid":
            if clusters is None:
                raise ValueError(
                    "cluster.method: none has no clusters that gates could be of. Use compose.gate_mode: random."
                )
            for k, expert in enumerate(recipe["experts"]):
                expert["samples"] = str(clusters.out / f"{k}.jsonl")
        about = {"settings": settings, "read": contents_of(settings), "centroids": self.has_centroids(), **base.about}
        if self.has_centroids():
            recipe |= {
                "centroids": str(clusters.out / "centroids.safetensors"),
                "embedder": self.config["cluster"]["embedder"],
            }
            recipe |= {name: settings[name] for name in ("centroids", "embedder") if name in settings}

        def command(folder: Path) -> tuple[list[str], dict]:
            words = ["compose", str(folder / "mixture.yml"), str(folder / "out"), "--resume"]
            return [sys.executable, "-m", "merge_tools.cli", *words], {"mixture.yml": recipe}

        return self.add("mixture", about, [base.step, clusters, *experts], {}, command)

    def router(self, model: Step, clusters: Step | None) -> Step:
        """Tunes the mixture. A domain mixture reads the experts of its rows from their clusters, and validation rows have none."""
        settings = self.settings("router", OF_MODEL)
        places: dict = {"model_name_or_path": str(model.out)}
        by_domain = self.config["compose"].get("routing_policy") == "domain"
        if by_domain and clusters is None:
            raise ValueError("compose.routing_policy: domain needs clusters, and cluster.method is none. Use another.")
        if by_domain:
            places["train_files"] = [str(clusters.out / f"{k}.jsonl") for k in range(self.config["experts"])]
            settings["eval_strategy"], files = "no", {}
        else:
            files = {"train": self.rows["train"], **self.validation(settings, places)}
            places["train_files"] = self.rows["train"]
        inputs = [model, clusters if by_domain else None]
        return self.run_script("router", "tune_router.py", settings, places, inputs, files)

    def dense(self, model: Step) -> Step:
        """In the place of tuning a mixture, as many rows more for the one expert."""
        settings = self.settings("router", ("from_scratch",))
        settings = {name: value for name, value in settings.items() if name not in OF_ROUTER}
        kept = {name: value for name, value in self.settings("expert").items() if name in ("train", "max_length")}
        settings, places = (
            {**kept, **settings},
            {"model_name_or_path": str(model.out), "train_files": self.rows["train"]},
        )
        files = {"train": self.rows["train"], **self.validation(settings, places)}
        return self.run_script("dense", "train_expert.py", settings, places, [model], files)

    def reward(self, model: Step, base: "Model") -> Step:
        settings = self.settings("reward", OF_MODEL)
        places = {"model_name_or_path": str(model.out), "reward_base": base.place, "train_files": self.rows["train"]}
        files = {"train": self.rows["train"], **self.validation(settings, places)}
        return self.run_script("reward", "train_reward.py", settings, places, [model, base.step], files, base.about)

    def generate(self, name: str, model: Step, clusters: Step | None, reward: Step | None) -> Step:
        settings = self.settings(name)
        places: dict = {"model_name_or_path": str(model.out), "test_files": self.rows["test"]}
        if settings.get("scorer", "reward") != "reward":
            reward = None
        if reward is not None:
            places["reward_model"] = str(reward.out)
        elif settings.get("scorer") == "reward" and "reward_model" not in settings:
            raise ValueError(f"{name}.scorer is reward, and there are no settings of 'reward'. Give some.")
        if self.has_centroids():
            places |= {"embedder": self.config["cluster"]["embedder"], "embedding_cache": str(self.work / "embeddings")}
        inputs, files = [model, clusters if self.has_centroids() else None, reward], {"test": self.rows["test"]}
        return self.run_script(name, "generate.py", settings, places, inputs, files, output="output", kind="generate")

    def evaluate(self, plain: Step, best: Step | None = None) -> Step:
        settings = self.settings("evaluate")
        settings = {
            name: value for name, value in settings.items() if name != "seed" or name in self.config["evaluate"]
        }
        files = {"plain": plain.out / DEFINITIONS}
        if best is not None:
            n, curve = self.config["best"].get("best_of", 1), self.config["best"].get("curve") or []
            places = {c: best.out / f"{Path(DEFINITIONS).stem}.best{c}.jsonl" for c in curve} | {
                n: best.out / DEFINITIONS
            }
            files |= {f"best_of_{c}": place for c, place in sorted(places.items())}
            settings.setdefault("baseline", "plain")
        read = {"references": settings["references"]} if settings.get("references") else {}
        return self.run_script(
            "evaluate",
            "evaluate.py",
            settings,
            {"files": [f"{name}={place}" for name, place in files.items()]},
            [plain, best],
            read,
        )


@dataclass
class Model:
    """The base: where it lies, the step that makes it, if one does, and else what tells it from others."""

    place: str
    step: Step | None
    about: dict


def is_behind(step: Step, names: set[str]) -> bool:
    """Whether a step, or one that it depends on, has one of these names or kinds."""
    return bool({step.name, step.kind} & names) or any(is_behind(one, names) for one in step.inputs)
