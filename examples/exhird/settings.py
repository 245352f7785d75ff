"""What the scripts have in common: arguments from a YAML file and the command line, errors in words, going on."""

import json
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser


def parse_arguments(kinds: tuple, description: str) -> tuple:
    """Dataclasses -> their values from a YAML file, if the first argument is one, and from the options after it."""
    parser = HfArgumentParser(kinds, description=description.split("\n")[0])
    given = sys.argv[1:]
    if given and given[0].endswith((".yml", ".yaml")):
        from_file = []
        for name, value in yaml.safe_load(Path(given[0]).read_text(encoding="utf-8")).items():
            value = json.dumps(value) if isinstance(value, dict) else value
            values = value if isinstance(value, list) else [] if value is True else [value]
            from_file += [f"--{name}", *map(str, values)]
        given = from_file + given[1:]
    return told(parser.parse_args_into_dataclasses, given)


def told(call, *args, traceback: bool = False):
    """What the call returns; an error that the caller can mend ends the script in words, with the exit status 2."""
    try:
        return call(*args)
    except (OSError, ValueError, ImportError) as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def last_checkpoint(output: str | Path) -> str | None:
    """The newest checkpoint that is whole; one that was being written when the run was killed lacks its state file."""
    whole = [folder for folder in Path(output).glob("checkpoint-*") if (folder / "trainer_state.json").exists()]
    return str(max(whole, key=lambda folder: int(folder.name.split("-")[1]))) if whole else None
