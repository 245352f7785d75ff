"""Files, folders and models that options name: they are checked before the first of them is read or written."""

from collections.abc import Callable
from pathlib import Path

from run_tools import loading
from run_tools.errors import UserError, did_you_mean, repr_path, short_repr
from run_tools.fingerprints import parse_named_path
from run_tools.option_paths import check_file, check_folder, check_new_file, check_new_folder
from run_tools.options import parse_name_place
from run_tools.packaged import is_packaged, is_path


def check_path(option: str, text: str) -> None:
    """Raises a `UserError` for a text that is neither a file nor a folder, but looks like one; it may be a Hub id."""
    if is_path(text) and not Path(text).exists():
        raise UserError(f"{option} {repr_path(text)} does not exist. Pass a file, a folder or a Hub id.")


def check_model(option: str, text: str) -> None:
    """Raises an `OSError` for a text that is neither the folder of a model nor a Hub id of one that can be reached."""
    if text != "minilm" and not is_packaged(text):
        loading.check_model(option, text)


def check_embedder(option: str, text: str) -> None:
    """Raises an `OSError` for a text that is neither a folder nor a Hub id of a sentence embedder that can be reached."""
    if Path(text).is_dir() and (Path(text) / "modules.json").is_file():  # it may have no configuration
        return
    check_model(option, text)


def named(check: Callable[[str, str], None], optional: bool = False) -> Callable[[str, str], None]:
    """A check of NAME=PLACE, or of PLACE or NAME=PLACE if names are optional."""

    def check_named(option: str, text: str) -> None:
        place = parse_named_path(text)[1] if optional else parse_name_place(text, option)[1]
        check(option, place)

    return check_named


def check_stemmer(option: str, text: str) -> None:
    """Raises a `ValueError` for a language without a stemmer."""
    from keyphrase_tools.words import check_language

    check_language(None if text == "none" else text)


def check_checkpoint(option: str, text: str) -> None:
    """Raises a `UserError` for a text that is neither true nor false nor the folder of a checkpoint."""
    if text.lower() not in ("true", "false"):
        check_folder(option, text)


def check_tracker(option: str, text: str) -> None:
    """Raises a `UserError` for a text that is none of the trackers of experiments that transformers knows."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    known = (*INTEGRATION_TO_CALLBACK, "all", "none")
    if text not in known:
        raise UserError(f"{option} {short_repr(text)} is not known.{did_you_mean(text, known)}")


def check_repository(option: str, text: str) -> None:
    """Raises a `UserError` for a text that cannot be the name of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise UserError(f"{option} {short_repr(text)} is not a repository's name. Use owner/name.") from error


# of an option -> raises an error if the text does not name what is needed
KINDS: dict[str, Callable[[str, str], None]] = {
    "file": check_file,
    "named file": named(check_file, optional=True),  # FILE or NAME=FILE
    "NAME=FILE": named(check_file),
    "NAME=PLACE": named(check_path),  # a file, a folder or a Hub id
    "folder": check_folder,
    "place": check_path,
    "model": check_model,
    "embedder": check_embedder,
    "output folder": check_new_folder,
    "output file": check_new_file,
    "checkpoint": check_checkpoint,
    "tracker": check_tracker,
    "repository": check_repository,
    "language": check_stemmer,
    "json": lambda option, text: None,  # checked with the model that it configures
}
