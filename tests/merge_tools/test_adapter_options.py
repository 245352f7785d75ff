"""Every option of peft: an adapter is composed as peft's `merge_and_unload` does, or it is refused with the option's name."""

import importlib.util
import json
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig, PeftType

from merge_tools import MergeError
from merge_tools.checkpoints import open_source

from .conftest import edit_json

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("adapter_options", ROOT / "benchmarks" / "adapter_options.py")
options = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(options)
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, of its experimental options


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {name: options.save_base(root / name, **settings) for name, settings in options.BASES.items()}


@pytest.fixture(scope="module")
def plain(bases, tmp_path_factory):
    """An adapter with default options, and its weights merged by peft."""
    return options.make_adapter(options.Case("r", 4, True), bases["plain"], tmp_path_factory.mktemp("plain"))


def test_every_field_of_peft_has_a_case():
    named = {case.option for case in options.CASES} | {"runtime_config"}  # which peft does not save
    assert {field.name for field in fields(LoraConfig)} == named


@pytest.mark.parametrize("case", options.CASES, ids=lambda case: case.label)
def test_an_adapter_equals_peft_or_is_refused(case, bases, tmp_path):
    adapter, merged = options.make_adapter(case, bases[case.base], tmp_path)
    if case.accepted:
        assert options.largest_difference(adapter, merged) < 1e-6
        return
    with pytest.raises(MergeError) as error:
        open_source("adapter", str(adapter))
    weights = {"target_modules": ["lora_embedding", "lm_head.weight"], "modules_to_save": ["embed_tokens", "lm_head"]}
    assert any(name in str(error.value) for name in [case.option, *weights.get(case.option, []), "lora_embedding"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "lora_ga", "new", 3, ["eva"]])
def test_a_refusal_names_the_value(plain, tmp_path, value):
    adapter = copied_adapter(plain, tmp_path, init_lora_weights=value)
    with pytest.raises(MergeError) as error:
        open_source("adapter", str(adapter))
    assert f"'init_lora_weights'={value!r}" in str(error.value)


def copied_adapter(plain, tmp_path, **changes) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in plain[0].glob("adapter_*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_an_unknown_option_is_accepted_if_its_value_is_neutral(plain, tmp_path, value):
    adapter = copied_adapter(plain, tmp_path, some_new_option=value)
    assert options.largest_difference(adapter, plain[1]) == 0


@pytest.mark.parametrize("value", [True, 1, "x", [0], {"a": 0}, float("nan")])
def test_an_unknown_option_with_a_value_is_refused(plain, tmp_path, value):
    adapter = copied_adapter(plain, tmp_path, some_new_option=value)
    with pytest.raises(MergeError, match="some_new_option"):
        open_source("adapter", str(adapter))


def test_every_other_method_of_peft_is_refused(plain, tmp_path):
    adapter = copied_adapter(plain, tmp_path)
    for method in PeftType:
        edit_json(adapter / "adapter_config.json", peft_type=method.value)
        if method is PeftType.LORA:
            assert open_source("adapter", str(adapter)).adapter
        else:
            with pytest.raises(MergeError, match=f"peft_type='{method.value}'"):
                open_source("adapter", str(adapter))


def test_another_alpha_gives_other_weights(plain, tmp_path):
    """Negative control for the comparison."""
    adapter = copied_adapter(plain, tmp_path, lora_alpha=9)
    assert options.largest_difference(adapter, plain[1]) > 0.01
