"""The same recipes in mergekit 0.1.5 and in merge_tools: the same experts and shared weights, and the same gates to rounding.

Needs a second Python, made once, and named by LEXPERTS_MERGEKIT:

    python -m venv mergekit && mergekit/bin/pip install mergekit==0.1.5
    LEXPERTS_MERGEKIT=mergekit/bin/python python -m pytest tests/merge_tools/test_mergekit_differential.py

With LLAMA_CPP_CONVERTER, llama.cpp's convert_hf_to_gguf.py, that one is run on mergekit's mixture before and after its repair.
"""

import os
import subprocess
import sys

import pytest
import torch
import yaml
from torch.testing import assert_close

from merge_tools import MergeError, compose, export, split_fused_experts

from .conftest import read_tensors
from .gguf_models import sentencepiece
from .test_families import save

PYTHON, CONVERTER = os.environ.get("LEXPERTS_MERGEKIT"), os.environ.get("LLAMA_CPP_CONVERTER")
pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="LEXPERTS_MERGEKIT names no Python with mergekit. Make one: python -m venv mergekit && mergekit/bin/pip install "
    "mergekit==0.1.5; then LEXPERTS_MERGEKIT=mergekit/bin/python",
)


@pytest.fixture(autouse=True)
def no_converter(monkeypatch):
    """Exports are our own, unless a converter is passed."""
    monkeypatch.delenv("LLAMA_CPP_CONVERTER", raising=False)


PROMPTS = {
    "hermes": ["<|im_start|>user\nHello, who are you?<|im_end|>", "<|im_start|>user\nI need help with"],
    "medicine": ["As a doctor of medicine,"],
    "adventure": ["[Genres: Science Fiction]\n[Tags: humor, old school, sci fi]", "> get ye flask"],
    "german": ["<|im_start|>user\nWie geht es dir?<|im_end|>", "Das ist ein Satz auf Deutsch."],
}
# As the examples in mergekit's docs/moe.md, with other models.
RECIPES = {
    "several models of one family": {"gate_mode": "hidden", "dtype": "bfloat16"},
    "without a gate mode, negative prompts": {"negative": True, "dtype": "float32", "experts_per_token": 3},
    "embeddings": {"gate_mode": "cheap_embed", "negative": True},
    "upcycling": {"gate_mode": "random", "dtype": "bfloat16"},
}


def recipe_file(folder, name, family):
    """A recipe with its models in `folder`."""
    options, tokenizer = dict(RECIPES[name]), sentencepiece()
    base = save(folder / "base", family, 10, torch.bfloat16, tokenizer)
    experts, negative = [], options.pop("negative", False)
    for seed, (expert, prompts) in enumerate(PROMPTS.items()):
        source = base if name == "upcycling" else save(folder / expert, family, seed, torch.bfloat16, tokenizer)
        experts.append({"source_model": str(source)} | ({} if name == "upcycling" else {"positive_prompts": prompts}))
        if negative and expert in ("hermes", "german"):
            experts[-1]["negative_prompts"] = PROMPTS["medicine"]
    path = folder / "recipe.yml"
    path.write_text(yaml.safe_dump({"base_model": str(base), "experts": experts, **options}))
    return path


def by_mergekit(recipe, out):
    command = [PYTHON, "-m", "mergekit.scripts.moe", str(recipe), str(out), "--device", "cpu"]
    command += ["--i-understand-this-is-not-useful-without-training"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return out


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_means_the_same(name, family, tmp_path):
    recipe = recipe_file(tmp_path, name, family)
    compose(recipe, tmp_path / "ours")
    split_fused_experts(by_mergekit(recipe, tmp_path / "fused"), tmp_path / "theirs")
    ours, theirs = read_tensors(tmp_path / "ours"), read_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    gates = [key for key in ours if key.endswith("gate.weight")]
    for key in ours:
        assert ours[key].dtype == theirs[key].dtype
        assert key in gates or torch.equal(ours[key], theirs[key]), key
    for key in gates if name != "upcycling" else ():
        one, two = ours[key].float(), theirs[key].float()
        print(f"{family}, {name}: {key} differs by at most {(one - two).abs().max():.2g}")
        assert_close(one, two, atol=0.01, rtol=0.01)  # states in bfloat16, rows of length 1


@pytest.mark.skipif(not CONVERTER, reason="LLAMA_CPP_CONVERTER does not name llama.cpp's convert_hf_to_gguf.py")
def test_llama_cpp_reads_a_mixture_of_mergekit_after_its_repair_only(tmp_path):
    fused = by_mergekit(recipe_file(tmp_path, "embeddings", "llama"), tmp_path / "fused")
    command = [sys.executable, CONVERTER, str(fused), "--outfile", str(tmp_path / "fused.gguf")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode and "Can not map tensor 'model.layers.0.mlp.experts.gate_up_proj" in ran.stderr
    with pytest.raises(MergeError, match="--from-mergekit"):
        export(fused, tmp_path / "fused.gguf", "gguf")
    split_fused_experts(fused, tmp_path / "repaired")
    export(tmp_path / "repaired", tmp_path / "theirs.gguf", "gguf", converter=CONVERTER)
    export(tmp_path / "repaired", tmp_path / "ours.gguf", "gguf")
    assert (tmp_path / "theirs.gguf").stat().st_size > 100_000 and (tmp_path / "ours.gguf").stat().st_size > 100_000
