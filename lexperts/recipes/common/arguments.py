"""The arguments of a recipe's command: a YAML file, then options on the command line; all are checked before the work."""

import ast
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from run_tools.errors import REPEAT, RESUME, UserError, user_errors
from run_tools.option_values import LARGEST_SEED, Limits
from run_tools.options import Option, Parser, hyphenate, list_options, option
from run_tools.yaml_files import read_yaml

from .configurations import config_names, find_config, read_config
from .interruptions import describe_resuming
from .option_kinds import KINDS

TRAINING = "transformers.TrainingArguments"  # a name in place of the class, whose import takes seconds
COUNT, NUMBER, SHARE = Limits(least=1), Limits(least=0), Limits(least=0, below=1)
STEPS, SEED = Limits(above=0), Limits(least=0, most=LARGEST_SEED)  # of steps, below 1 the fraction of all steps
# the valid values of TrainingArguments, which declares none, and what its options name
TRAINING_LIMITS = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
            "eval_accumulation_steps", "torch_empty_cache_steps", "dataloader_prefetch_factor", "ddp_timeout",
            "ddp_bucket_cap_mb",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "warmup_steps", "eval_delay",
            "neftune_noise_alpha", "save_total_limit", "dataloader_num_workers",
        ),
        NUMBER,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor", "warmup_ratio"), SHARE),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), STEPS),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    **dict.fromkeys(("max_steps", "local_rank"), Limits(least=-1)),
    "num_train_epochs": Limits(least=0, most=1e6),
}  # fmt: skip
TRAINING_KINDS = {
    "output_dir": "output folder", "resume_from_checkpoint": "checkpoint", "report_to": "tracker",
    "hub_model_id": "repository",
}  # fmt: skip
RESUMES = (
    "Repeat the same command after an interruption: it resumes from the last checkpoint, if --save-strategy had one saved. If\n"
    "settings, data or models differ, it stops and names the difference; then use another --output-dir, or\n"
    "--overwrite-output-dir true.\n\n"
)
TRAINING_ABOUT = {name: {"limits": limits} for name, limits in TRAINING_LIMITS.items()}
TRAINING_ABOUT |= {name: {"kind": kind} for name, kind in TRAINING_KINDS.items()}


@dataclass
class RunFolderArguments:
    """What may happen to an earlier run in the output folder."""

    overwrite_output_dir: bool = option(False, "remove what an earlier run left in output_dir, and start from scratch")


@dataclass
class SplitArguments:
    """Where the rows of training and validation come from."""

    dataset_name: str | None = option(None, "data set on the Hub, instead of files", kind="place")
    train_files: list[str] | None = option(None, "training files, JSON Lines", kind="file")
    validation_files: list[str] | None = option(None, "validation files, same format", kind="file")


@dataclass
class ColumnArguments:
    """The columns of documents with keyphrases."""

    text_column: str = option("text", "column of texts, or of lists of words")
    title_column: str = option("title", "column of titles, which may be empty")
    keyphrases_column: str = option("keyphrases", "column of lists of keyphrases, or of texts with ; between them")


def load_classes(recipe: str, module: str, with_training: bool = True) -> list[type]:
    """The dataclasses of a command's arguments, with those of transformers, whose import takes seconds, or without."""
    classes = import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
    if TRAINING in classes and with_training:
        from transformers import TrainingArguments

        return [TrainingArguments if cls == TRAINING else cls for cls in classes]
    return [cls for cls in classes if cls != TRAINING]


@lru_cache
def make_parser(recipe: str, module: str) -> Parser:
    """The parser of a command."""
    return Parser(one for cls in load_classes(recipe, module) for one in list_options(cls, TRAINING_ABOUT))


def format_help(command: str, recipe: str, module: str, with_training: bool = False) -> str:
    """What `COMMAND --help` prints: the module's docstring, its options, its configurations. The module is not imported."""
    source = (files(f"lexperts.recipes.{recipe}") / f"{module}.py").read_text(encoding="utf-8")
    names, accepted = config_names(recipe, module), ""
    is_training = TRAINING in import_module(f"lexperts.recipes.{recipe}.arguments").ARGUMENTS[module]
    if is_training and not with_training:
        accepted = (
            "All options of transformers.TrainingArguments are accepted too, such as --output-dir, --learning-rate,\n"
            "--num-train-epochs, --per-device-train-batch-size. --help-all lists them.\n\n"
        )
    known = f", or one of: {', '.join(names)}" if names else ""
    options = [one for cls in load_classes(recipe, module, with_training) for one in list_options(cls, TRAINING_ABOUT)]
    parser = Parser(
        [one for one in options if one.name != "debug"],  # of transformers, in a YAML file alone: here it is a switch
        usage=f"{command} [CONFIG] [OPTIONS]",
        description=ast.get_docstring(ast.parse(source)),
        epilog=f"{RESUMES if is_training else ''}{accepted}CONFIG is a YAML file of options{known}. Options on the command line win.",
    )
    group = parser.add_argument_group("Also")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if names:
        group.add_argument("--show-config", metavar="NAME", help="print a configuration, to save and edit it")
    group.add_argument("-h", "--help", action="store_true", help="show this message")
    return parser.format_help()


def print_help_or_config(command: str, recipe: str, module: str, given: list[str]) -> bool:
    """Answers `--help`, `--help-all` and `--show-config NAME`, without importing the command's module -> whether one was asked for."""
    if asked := {"-h", "--help", "--help-all"} & set(given):
        print(format_help(command, recipe, module, "--help-all" in asked), end="")
    elif "--show-config" in given:
        name = given[(given.index("--show-config") + 1) :][:1] or [""]
        print(read_config(recipe, module, name[0]), end="")
    return bool(asked) or "--show-config" in given


def parse_command(recipe: str, module: str, argv: list[str] | None = None) -> tuple:
    """The arguments of a recipe's command: an instance of each class of `ARGUMENTS[module]` in its `arguments.py`.

    The first argument may be a YAML file, or the name of one that comes with the recipe; there `null` means "not set": the default
    holds. `--help`, `--help-all` and `--show-config` print and end the process.

    Raises:
        UserError: for an unknown option or an invalid value.
    """
    given = list(map(hyphenate, sys.argv[1:] if argv is None else argv))
    if print_help_or_config(f"lexperts.recipes.{recipe}.{module}", recipe, module, given):
        sys.exit(0)
    parser, settings, where = make_parser(recipe, module), {}, ""
    given = [word for word in given if word != "--debug"]
    if given and not given[0].startswith("-"):
        path = find_config(given.pop(0), recipe, module)
        settings, where = read_yaml(path), f"{path}: "
    values = parser.read_settings(settings, where) | parser.read_command_line(given)
    try:
        return parser.make_groups(load_classes(recipe, module), values)
    except ValueError as error:
        if "need to assign use_cpu" not in str(error):
            raise
        raise UserError(
            "bf16: true needs a GPU that computes in bfloat16. To train on the CPU, add --use-cpu true."
        ) from error


def command(recipe: str, module: str, call: Callable, resume: str = REPEAT) -> Callable:
    """The `main(argv)` of a recipe's command, which calls a function with the groups of arguments (see `parse_command`).

    Any error ends it in one line, see `run_tools.errors.user_errors`; after Ctrl-C `resume` says how to resume. A training that has
    saved nothing yet starts again, whatever `resume` is.
    """

    def main(argv: list[str] | None = None) -> Any:
        given = sys.argv[1:] if argv is None else list(argv)
        groups: tuple = ()

        def advice() -> str:
            return describe_resuming(groups) if resume == RESUME else resume

        with user_errors("--debug" in given, interrupted=advice, full=advice):
            groups = parse_command(recipe, module, given)
            check_places(make_parser(recipe, module).options, groups)
            return call(*groups)

    return main


def check_places(options: Mapping[str, Option], groups: Iterable) -> None:
    """Raises an error for a file, folder or model among the options that does not exist, or cannot be written."""
    for group in groups:
        for name, value in vars(group).items():
            kind = options[name].kind if name in options else ""
            for text in value if isinstance(value, list) else [value]:
                if kind and text is not None:
                    KINDS[kind](options[name].flag, text)
