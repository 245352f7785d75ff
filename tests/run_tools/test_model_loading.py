"""Damaged, incomplete and hostile checkpoints: one line with the file, the key and the value, soon, and nothing allocated."""

import contextlib
import itertools
import json
import os
import resource
import signal
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForTokenClassification,
    BertForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    pipeline,
)
from typer.testing import CliRunner

import lexperts  # noqa: F401  (registers the checks of pipelines)
from lexperts.cli.keyphrases import app
from run_tools.loading import (
    CheckpointError,
    PipelineLoadingError,
    open_config,
    open_model,
    open_pipeline,
    open_tokenizer,
)

from ..tiny_models import CASES, make_model

SEKE = CASES["SekeForTokenClassification"].cls
LIMIT = 20  # seconds
WRONG = (None, "x", -1, 0, 10**10, 10**400, 2.5, True, [], {}, [[1]])
SIZES = [
    "num_labels",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "num_experts",
]
FIELDS = (
    *SIZES,
    "model_type",
    "id2label",
    "label2id",
    "hidden_act",
    "layer_norm_eps",
    "max_position_embeddings",
    "text_config",
    "styles",
)


@contextlib.contextmanager
def limited():
    """Stops after LIMIT seconds; checks that the process has not grown by a gigabyte."""

    def stop(*_):
        raise TimeoutError(f"more than {LIMIT} s")

    before, previous = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


@pytest.fixture
def stock(backbone_config, tiny_tokenizer, tmp_path):
    """A stock token classifier in a folder."""
    torch.manual_seed(0)
    labels = {"id2label": {0: "O", 1: "B", 2: "I"}, "label2id": {"O": 0, "B": 1, "I": 2}}
    BertForTokenClassification(backbone_config(**labels)).save_pretrained(tmp_path / "stock")
    tiny_tokenizer.save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def assert_one_line(error: BaseException, *parts: str):
    assert isinstance(error, (OSError, ValueError)), repr(error)
    message = str(error)
    assert "\n" not in message and len(message) < 1500 and "Traceback" not in message
    assert all(part in message for part in parts), message


def write_header(path, header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)


WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
CONTENTS = {  # of a JSON file, by its content
    "empty": lambda content: b"", "cut": lambda content: content[: len(content) // 2], "binary": lambda content: bytes(range(256)),
    "null": lambda content: b"null", "list": lambda content: b"[]", "number": lambda content: b"3",
    "deep": lambda content: b"[" * 200_000, "UTF-16": lambda content: content.decode().encode("utf-16"),
}  # fmt: skip
CHANGES = {  # of the weights
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 100),
    "no header": lambda path: path.write_bytes(b"\0" * 1000),
    "huge header": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
    "header is no JSON": lambda path: write_header(path, b"{" * 100),
    "header is a list": lambda path: write_header(path, []),
    "huge shape": lambda path: write_header(path, {"a": ENTRY | {"shape": [2**60, 2**60]}}, b"\0" * 4),
    "negative offsets": lambda path: write_header(path, {"a": ENTRY | {"data_offsets": [-4, 0]}}),
    "unknown dtype": lambda path: write_header(path, {"a": ENTRY | {"dtype": "X9"}}, b"\0" * 4),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04K\x03."),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
INDICES = {  # by the names of the tensors
    "a list": lambda names: [],
    "no map": lambda names: {},
    "an empty map": lambda names: {"weight_map": {}},
    "a number": lambda names: {"weight_map": dict.fromkeys(names, 3)},
    "another folder": lambda names: {"weight_map": dict.fromkeys(names, "../other.safetensors")},
    "a pickle": lambda names: {"weight_map": dict.fromkeys(names, "x.bin")},
    "a missing file": lambda names: {"weight_map": dict.fromkeys(names, SHARD) | {"b": "model-2.safetensors"}},
    "a missing tensor": lambda names: {"weight_map": dict.fromkeys(names, SHARD) | {"b": SHARD}},
}
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
DAMAGES = [
    *itertools.product(JSON_FILES, CONTENTS), *((WEIGHTS, name) for name in [*CHANGES, "missing"]), ("config.json", "missing"),
    *((INDEX, name) for name in INDICES),
]  # fmt: skip


@pytest.mark.parametrize("file, name", DAMAGES)
def test_a_damaged_file_is_named_in_one_line(file, name, stock):
    path = stock / file
    if name == "missing":
        path.unlink()
    elif file == INDEX:
        names = list(load_file(stock / WEIGHTS))
        (stock / WEIGHTS).rename(stock / SHARD)
        path.write_text(json.dumps(INDICES[name](names)))
    elif file == WEIGHTS:
        CHANGES[name](path)
    else:
        path.write_bytes(CONTENTS[name](path.read_bytes()))
    with limited(), pytest.raises(Exception) as error:
        open_pipeline("keyphrase-extraction", stock)
    assert_one_line(error.value, *([] if name == "missing" else [file]))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ["stock", "SekeForTokenClassification"])
def test_a_wrong_value_of_a_configuration_is_named_or_harmless(name, field, stock, tiny_tokenizer, tmp_path):
    folder = stock
    if name != "stock":
        folder = tmp_path / name
        make_model(name).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
    original = (folder / "config.json").read_text()
    for value in WRONG:
        for nested in (False, True):
            config = json.loads(original)
            place = config.get("text_config") if nested else config
            if place is None:
                continue
            place[field] = value
            (folder / "config.json").write_text(json.dumps(config))
            with limited():
                try:
                    open_pipeline("keyphrase-extraction", folder)
                except ImportError:
                    raise
                except Exception as error:
                    assert_one_line(error)


@pytest.mark.parametrize("opens", [open_config, open_tokenizer, SEKE.from_backbone])
def test_whatever_reads_a_configuration_names_its_damage(opens, stock):
    config = json.loads((stock / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    labels = json.dumps(config | {"num_labels": 10**10}).encode()
    for content, part in ((labels, "num_labels=10000000000"), (CONTENTS["deep"](b""), "nested")):
        (stock / "config.json").write_bytes(content)
        with limited(), pytest.raises(OSError) as error:
            opens(stock)
        assert_one_line(error.value, "config.json", part)


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_compared_with_the_weights_before_anything_is_allocated(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    place = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    sizes = [
        key
        for key, value in place.items()
        if key in (*SIZES, "d_model", "encoder_layers", "embedding_size") and isinstance(value, int)
    ]
    assert sizes
    for key in sizes:
        place[key], kept = 10**9, place[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with limited(), pytest.raises((OSError, ValueError)) as error:
            CASES[name].cls.from_pretrained(tmp_path)
        assert_one_line(error.value, key, "1000000000")
        place[key] = kept


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_missing_are_an_error(name, tmp_path):
    cls = CASES[name].cls
    make_model(name).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = sorted(weights)[-1]
    save_file(
        {key: value for key, value in weights.items() if key != lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match="lack"):
        open_model(cls, tmp_path)
    model, info = cls.from_pretrained(tmp_path, output_loading_info=True)  # the caller looks
    assert info["missing_keys"] and isinstance(model, cls)
    assert isinstance(cls.from_pretrained(tmp_path), cls)  # as transformers does, to train a new part


def test_weights_that_are_missing_are_an_error_in_stock_models_and_commands(stock, tmp_path):
    weights = load_file(stock / "model.safetensors")
    save_file(
        {key: value for key, value in weights.items() if "classifier" not in key},
        stock / "model.safetensors",
        {"format": "pt"},
    )
    for opens in (
        lambda: open_model(AutoModelForTokenClassification, stock),
        lambda: open_pipeline("keyphrase-extraction", stock),
    ):
        with pytest.raises(CheckpointError, match="classifier.bias"):
            opens()
    with pytest.raises(PipelineLoadingError, match="classifier.bias"):
        pipeline("keyphrase-extraction", model=str(stock))
    assert open_model(AutoModelForTokenClassification, stock, new=("classifier.",)).config.num_labels == 3
    (tmp_path / "a.txt").write_text("A graph cut.")
    done = CliRunner().invoke(app, ["extract", str(tmp_path / "a.txt"), str(tmp_path / "o.jsonl"), "-m", str(stock)])
    assert done.exit_code == 2 and "classifier.bias" in done.output and not (tmp_path / "o.jsonl").exists()


def test_pickle_files_are_not_read(stock, tmp_path):
    torch.save(load_file(stock / "model.safetensors"), stock / "pytorch_model.bin")
    (stock / "model.safetensors").unlink()
    for opens in (
        lambda: open_model(AutoModelForTokenClassification, stock),
        lambda: open_pipeline("keyphrase-extraction", stock),
        lambda: SEKE.from_backbone(stock),
    ):
        with pytest.raises(OSError, match="use_safetensors=False"):
            opens()
    with pytest.raises(PipelineLoadingError, match="pytorch_model.bin"):
        pipeline("keyphrase-extraction", model=str(stock))
    model = AutoModelForTokenClassification.from_pretrained(stock, use_safetensors=False)  # as the message says
    model.save_pretrained(stock)
    assert open_pipeline("keyphrase-extraction", stock)("A graph cut.") is not None


def test_a_kernel_that_a_stock_model_names_is_refused(stock):
    edit(stock / "config.json", _attn_implementation="some-org/some-kernel")
    with pytest.raises(CheckpointError, match="_attn_implementation='some-org/some-kernel'"):
        open_pipeline("keyphrase-extraction", stock)
    with pytest.raises(PipelineLoadingError, match="some-org/some-kernel"):
        pipeline("keyphrase-extraction", model=str(stock))


def plant(folder, code):
    """Gives a checkpoint a model_type that only its own code has."""
    (folder / "planted.py").write_text(code)
    auto_map = {"AutoConfig": "planted.C", "AutoModelForTokenClassification": "planted.M"}
    edit(folder / "config.json", model_type="planted", auto_map=auto_map)


def test_a_backbone_with_code_of_its_own_is_refused_and_not_asked_for(stock, monkeypatch):
    plant(stock, "raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises(OSError, match="part of transformers"):
            SEKE.from_backbone(stock, **options)


@pytest.mark.parametrize("command", ["extract", "serve", "export"])
def test_no_command_asks_for_code_of_a_checkpoint(command, stock, tmp_path, monkeypatch):
    """An unknown model_type with auto_map: transformers asks on the standard input by default."""
    plant(stock, "raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "a.txt").write_text("A graph cut.")
    out = str(tmp_path / "o.jsonl")
    words = {
        "extract": [str(tmp_path / "a.txt"), out, "-m", str(stock)],
        "serve": [str(stock), "--port", "0"],
        "export": [str(stock), out],
    }[command]
    done = CliRunner().invoke(app, [command, *words], input="n\n")
    assert done.exit_code == 2 and "it ran" not in done.output and "trust" in done.output.splitlines()[-1], done.output
    with pytest.raises(CheckpointError, match="auto_map"):
        open_config(stock)
    assert open_tokenizer(stock).is_fast  # needs no code


def test_code_of_a_checkpoint_runs_with_the_flag(stock, tmp_path):
    plant(
        stock,
        "from transformers import BertConfig, BertForTokenClassification\n"
        "class C(BertConfig):\n    model_type = 'planted'\n"
        "class M(BertForTokenClassification):\n    config_class = C\n",
    )
    (tmp_path / "a.txt").write_text("A graph cut.")
    words = ["extract", str(tmp_path / "a.txt"), str(tmp_path / "o.jsonl"), "-m", str(stock), "--trust-remote-code"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_the_checks_change_nothing_for_a_sound_checkpoint(stock):
    """Also a class that declares what its files may lack."""

    class Config(PreTrainedConfig):
        model_type = "optional"

    class Optional(PreTrainedModel):
        config_class = Config
        _keys_to_ignore_on_load_missing = ["extra"]

        def __init__(self, config):
            super().__init__(config)
            self.kept, self.extra = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.post_init()

    model = Optional(Config())
    model.save_pretrained(stock / "optional")
    weights = load_file(stock / "optional" / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "kept" in k}, stock / "optional" / "model.safetensors", {"format": "pt"}
    )
    assert torch.equal(open_model(Optional, stock / "optional").kept.weight, model.kept.weight)
    plain, checked = (
        f(stock)
        for f in (
            AutoModelForTokenClassification.from_pretrained,
            lambda s: open_model(AutoModelForTokenClassification, s),
        )
    )
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), checked.state_dict().values(), strict=True)
    )
