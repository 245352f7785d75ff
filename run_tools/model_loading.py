"""Opens models, tokenizers and configurations that others have made, for every command and every pipeline.

No code of a checkpoint runs, no pickle file is read, no weight is left at random, and what is damaged is named in one line. PyTorch and
transformers are imported by the caller.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import join_names, one_line
from .model_files import (
    CONFIG,
    HUB_OPTIONS,
    CheckpointError,
    check_files,
    find_damage,
    find_file,
    find_tokenizer_damage,
)
from .packaged import resolve_model

# of options that change no shapes
NO_FIELDS = {"dtype", "torch_dtype", "config", "attn_implementation", "experts_implementation", *HUB_OPTIONS}
SLACK = 50_000_000  # values that a model may have beyond twice those of its files, such as a pooler that was not saved
SHOWN = 5


class PipelineLoadingError(Exception):
    """A `CheckpointError` inside `pipeline(...)`, which would catch an `OSError` and open the model by another class."""


@contextmanager
def one_line_errors(
    name: Any,
    find: Callable[..., str | None],
    in_pipeline: bool = False,
    keep: type[Exception] = CheckpointError,
    **options: Any,
) -> Iterator[None]:
    """Turns any error of opening a checkpoint into a `CheckpointError` of one line.

    An `ImportError` names an extra, so it is kept; so are a `ValueError`, an `OSError` and a `keep` if no damage explains them.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ImportError, CheckpointError, PipelineLoadingError) as error:
        if in_pipeline and isinstance(error, CheckpointError):
            raise PipelineLoadingError(str(error)) from error
        raise
    except BaseException as error:  # transformers and tokenizers raise anything for a damaged file, also Rust panics
        names = (*HUB_OPTIONS, "variant", "use_safetensors")
        hub = {key: value for key, value in options.items() if key in names}
        try:
            damage = find(name, **hub)
        except Exception:  # such as no connection, which the first error says
            damage = None
        if damage is None and "contains custom code" in str(error):
            damage = (
                f"{name} needs code of its own (auto_map in config.json), which is not run. If you have read it and trust it, pass "
                "trust_remote_code=True; of the commands, extract, serve and app take --trust-remote-code."
            )
        is_clear = isinstance(error, (ValueError, OSError, keep)) and "\n" not in str(error) and len(str(error)) < 1000
        if damage is None and is_clear and not in_pipeline:
            raise
        message = damage or f"{str(name)!r} cannot be opened: {one_line(error):.400}"
        raise (PipelineLoadingError if in_pipeline else CheckpointError)(message) from error


def open_config(name: Any, **options: Any):
    """`AutoConfig.from_pretrained` without code of the checkpoint, unless `trust_remote_code=True` is passed. Raises a
    `CheckpointError` for files that are damaged.
    """
    from transformers import AutoConfig

    name = resolve_model(name)
    with one_line_errors(name, find_damage, **options):
        check_files(name, weights=os.path.isdir(name), **options)
        return AutoConfig.from_pretrained(name, **{"trust_remote_code": False} | options)


def open_tokenizer(name: Any, **options: Any):
    """`AutoTokenizer.from_pretrained`, as `open_config`: it reads the configuration, too."""
    from transformers import AutoTokenizer

    name = resolve_model(name)
    with one_line_errors(name, find_tokenizer_damage, **options):
        check_files(name, weights=False, **options)
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False} | options)


def open_model(cls: Any, name: Any, *args: Any, new: Sequence[str] = (), **options: Any):
    """`cls.from_pretrained` of a class or an auto class: safetensors only, no code of the checkpoint, and all weights.

    Args:
        cls: such as `AutoModelForTokenClassification`.
        name: folder or Hub id, or the name of a packaged model.
        new: beginnings of the names of weights that the checkpoint may lack, such as "score." for a head that will be trained.
        args, options: of `from_pretrained`.

    Raises:
        CheckpointError: for damaged files, for weights in pickle files, and for weights that are missing or have other shapes.
    """
    options = {"trust_remote_code": False} | options
    return open_checked(cls, cls.from_pretrained, resolve_model(name), *args, new=new, **options)


def open_pipeline(task: str, name: Any, **options: Any):
    """`transformers.pipeline(task, model=name)` without code of the checkpoint, unless `trust_remote_code=True` is passed.
    Raises a `CheckpointError` as in `open_model`.
    """
    from transformers import pipeline

    if find_file(name, CONFIG, **options) is not None:
        hub = {key: options[key] for key in (*HUB_OPTIONS, "trust_remote_code") if key in options}
        open_config(name, **hub)  # names what is damaged
    try:
        with one_line_errors(name, find_damage, keep=TypeError, **options):
            return pipeline(task, model=str(name), **{"trust_remote_code": False} | options)
    except PipelineLoadingError as error:
        raise CheckpointError(str(error)) from error


def checked_class(*auto_classes: Any) -> Any:
    """A subclass of an auto class for the registry of pipelines, which opens models with the checks of `open_model`. Of several
    auto classes it takes the one for the checkpoint's architecture: transformers would try one after the other, and report the
    errors of all.
    """

    def from_pretrained(cls, name, *args, **options):
        chosen = auto_classes[0]
        if len(auto_classes) > 1:
            from transformers import AutoConfig

            hub = {key: options[key] for key in (*HUB_OPTIONS, "trust_remote_code") if key in options}
            with one_line_errors(name, find_damage, "_from_pipeline" in options, **hub):
                config = AutoConfig.from_pretrained(name, **{"trust_remote_code": False} | hub)
            chosen = fitting_class(config, auto_classes)
        return open_checked(chosen, chosen.from_pretrained, name, *args, **options)

    first = auto_classes[0]
    return type(first.__name__, (first,), {"from_pretrained": classmethod(from_pretrained)})


def fitting_class(config: Any, auto_classes: Sequence[Any]) -> Any:
    """The auto class for a configuration's architecture, or else for its type; the first if there is none."""
    own_code = getattr(config, "auto_map", None) or {}
    known = [each for each in auto_classes if type(config) in each._model_mapping]
    named = [each for each in known if each._model_mapping[type(config)].__name__ in (config.architectures or ())]
    return [*named, *known, *(each for each in auto_classes if each.__name__ in own_code), *auto_classes][0]


def open_checked(
    cls: Any,
    load: Callable[..., Any],
    name: Any,
    *args: Any,
    new: Sequence[str] = (),
    complete: bool = True,
    **options: Any,
):
    """`load(name, *args, **options)`, which is `cls.from_pretrained`, with the checks of `open_model`.

    With `complete=False` weights may be missing, of which transformers warns, as for a new head that will be trained.

    There are no checks if the caller asks for `output_loading_info` and so makes them, and if the weights are not in files.
    """
    given = ("state_dict", "gguf_file", "output_loading_info")
    if not isinstance(name, (str, os.PathLike)) or any(options.get(key) for key in given):
        return load(name, *args, **options)
    if options.get("use_safetensors") is None:
        options["use_safetensors"] = True
    with one_line_errors(name, find_damage, "_from_pipeline" in options, **options):
        shapes = check_files(name, **options)
        skeleton = None if shapes is None or args else build_skeleton(cls, name, options)
        if shapes is not None and skeleton is not None:
            check_amount(name, skeleton, shapes)
        try:
            model, info = load(name, *args, output_loading_info=True, **options)
        except RuntimeError as error:
            if shapes is not None and skeleton is not None:
                check_shapes(name, skeleton, shapes, error)
            raise
        if complete:
            check_all_loaded(name, info, new)
    return model


def build_skeleton(cls: Any, name: Any, options: dict[str, Any]):
    """The model that the configuration describes, on the meta device; `None` for quantised weights and for code of a checkpoint."""
    import copy

    import torch
    from transformers import AutoConfig, PreTrainedConfig

    is_auto = hasattr(cls, "from_config")
    if options.get("trust_remote_code") or options.get("quantization_config") is not None:
        return None
    config = options.get("config")
    if config is None:
        hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
        hub |= {"trust_remote_code": False} if is_auto else {}
        config = (AutoConfig if is_auto else cls.config_class).from_pretrained(name, **hub)
        for key in options.keys() - NO_FIELDS:
            if hasattr(config, key):
                setattr(config, key, options[key])
    if not isinstance(config, PreTrainedConfig) or getattr(config, "quantization_config", None) is not None:
        return None
    config = copy.deepcopy(config)  # building sets fields
    with torch.device("meta"):
        return cls.from_config(config, trust_remote_code=False) if is_auto else cls(config)


def check_amount(name: Any, skeleton: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises a `CheckpointError` for a model that is much larger than its files, before memory is allocated."""
    wanted, has = sum(p.numel() for p in skeleton.parameters()), sum(map(math.prod, shapes.values()))
    if wanted > 2 * has + SLACK:
        check_shapes(name, skeleton, shapes)
        raise CheckpointError(
            f"{name}: config.json describes a model of {wanted:,} values, but the weights have {has:,}. Correct or copy it again."
        )


def check_shapes(name: Any, skeleton: Any, shapes: dict[str, tuple[int, ...]], cause: Exception | None = None) -> None:
    """Raises a `CheckpointError` for the first tensor whose shape in the model is not that in the files."""
    for key, tensor in skeleton.state_dict().items():
        ours, theirs = tuple(tensor.shape), shapes.get(key)
        if theirs not in (None, ours):
            sizes = skeleton.config.to_dict().items()
            field = next(
                (f"{k}={v}" for k, v in sizes if v in ours and v not in theirs and not isinstance(v, bool)), "it"
            )
            raise CheckpointError(
                f"{name}: config.json does not match the weights: with {field}, {key} has the shape {ours}, but in the file "
                f"{theirs}. Correct config.json, or copy the weights again."
            ) from cause


def check_all_loaded(name: Any, info: dict[str, Any], new: Sequence[str] = ()) -> None:
    """Raises a `CheckpointError` for weights that the files lack: transformers only warns, and leaves them at random.

    Args:
        info: the loading info of `from_pretrained`, without the weights that the model's class declares as optional.
        new: beginnings of the names of weights that may be missing.
    """
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(tuple(new)))
    if missing:
        unknown = sorted(info["unexpected_keys"])[:1]
        instead = f" They have {unknown[0]!r} and others instead." if unknown else ""
        raise CheckpointError(
            f"{name}: the weights lack {join_names(missing, SHOWN)}, which would stay at random values.{instead} Pass a checkpoint of this kind of model, or "
            "save or copy it again."
        )
