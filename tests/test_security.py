"""No configuration fetches or runs code: manipulated checkpoints of every class, and mixtures."""

import json
from itertools import product

import pytest
from transformers import AutoConfig

from merge_tools import compose

from .merge_tools.conftest import edit_json, recipe_of, save_expert
from .tiny_models import CASES, make_inputs, make_model, run

IMPLEMENTATION_KEYS = [
    f"{kind}_implementation{end}" for kind in ("attn", "_attn", "experts", "_experts") for end in ("", "_internal")
]
# Planted beside a checkpoint: leaves a mark where it is run.
PLANTED = (
    "from pathlib import Path\nPath(__file__).with_name('it_ran').touch()\nPath({mark!r}).touch()\nclass Planted: ...\n"
)
AUTO_MAP = dict.fromkeys(
    ("AutoConfig", "AutoModel", "AutoModelForTokenClassification", "AutoModelForSeq2SeqLM", "AutoTokenizer"),
    "planted.Planted",
)


each_package = pytest.mark.parametrize("name", [name for name in CASES if CASES[name].cls.pipelines()])


def saved(name, folder):
    """A checkpoint of a class, and where its configuration may be manipulated: also in that of its backbone."""
    model = make_model(name)
    model.save_pretrained(folder)
    return model, ((False, True) if "text_config" in model.config.sub_configs else (False,))


def manipulate(folder, nested: bool, **changes):
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if nested else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@each_package
def test_a_kernel_that_a_checkpoint_names_is_refused(name, tmp_path):
    _, places = saved(name, tmp_path)
    config = (tmp_path / "config.json").read_text()
    values = ("some-org/some-kernel", {"": "some-org/some-kernel"}, "paged|some-org/some-kernel@main:run")
    for nested, key, value in product(places, IMPLEMENTATION_KEYS, values):
        manipulate(tmp_path, nested, **{key: value})
        for opens in (CASES[name].cls, AutoConfig):
            with pytest.raises(ValueError, match=f"{key}=.*some-org/some-kernel"):
                opens.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(config)


def test_a_kernel_that_the_caller_asks_for_reaches_transformers(tmp_path):
    """The negative control: the caller's own argument is not refused by us."""
    saved("SekeForTokenClassification", tmp_path)
    with pytest.raises(ImportError, match="kernels"):
        CASES["SekeForTokenClassification"].cls.from_pretrained(tmp_path, attn_implementation="some-org/some-kernel")


@each_package
def test_code_that_a_checkpoint_names_is_not_run(name, tmp_path):
    model, places = saved(name, tmp_path / "checkpoint")
    mark = tmp_path / "it_ran"
    (tmp_path / "checkpoint" / "planted.py").write_text(PLANTED.format(mark=str(mark)))
    pipelines = {"some-task": {"impl": "planted.Planted", "pt": ["AutoModel"], "type": "text"}}
    for nested in places:
        manipulate(tmp_path / "checkpoint", nested, auto_map=AUTO_MAP, custom_pipelines=pipelines)
    again = CASES[name].cls.from_pretrained(tmp_path / "checkpoint")
    AutoConfig.from_pretrained(tmp_path / "checkpoint")
    assert type(again) is type(model) and not mark.exists()
    run(again, make_inputs(name))
    again.save_pretrained(tmp_path / "again")
    assert "planted" not in (tmp_path / "again" / "config.json").read_text()
    assert not mark.exists()


@pytest.mark.parametrize("name", ["SekeForTokenClassification", "HypernetModel", "MoeSummForCausalLM"])
def test_a_backbone_of_an_unknown_type_is_refused(name, tmp_path):
    saved(name, tmp_path)
    (tmp_path / "planted.py").write_text(PLANTED.format(mark=str(tmp_path / "it_ran")))
    manipulate(tmp_path, True, model_type="planted", auto_map=AUTO_MAP)
    with pytest.raises((ValueError, KeyError), match="planted"):
        CASES[name].cls.from_pretrained(tmp_path)
    assert not (tmp_path / "it_ran").exists()


def test_a_mixture_does_not_carry_what_its_sources_name(tmp_path):
    folders = [save_expert(tmp_path / f"expert{i}", seed=i) for i in range(2)]
    for folder in folders:
        (folder / "planted.py").write_text(PLANTED.format(mark=str(tmp_path / "it_ran")))
        edit_json(folder / "config.json", auto_map=AUTO_MAP, attn_implementation="some-org/some-kernel")
    compose(recipe_of(folders), tmp_path / "mixture")
    text = (tmp_path / "mixture" / "config.json").read_text()
    assert "planted" not in text and "some-org" not in text
    assert not (tmp_path / "it_ran").exists() and not (tmp_path / "mixture" / "planted.py").exists()
