"""The tensor names of every mixture are those that llama.cpp reads, by the name maps of the `gguf` package."""

import re

import pytest

from merge_tools import compose
from merge_tools.families import FAMILIES, MIXTURES

from .conftest import read_tensors, recipe_of
from .test_families import MODELS, save

gguf = pytest.importorskip("gguf", reason="gguf is not installed. Install it with: pip install gguf")

# model_type of the mixture -> (architecture of gguf 0.19.0, how convert_hf_to_gguf.py names the experts that it stacks).
# The converter has no class for FlexOlmo.
READERS = {
    "mixtral": ("LLAMA", r"layers.\1.feed_forward.experts.\2"),
    "qwen2_moe": ("QWEN2MOE", r"model.layers.\1.mlp.experts.\2"),
    "qwen3_moe": ("QWEN3MOE", r"model.layers.\1.mlp.experts.\2"),
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.\d+\.(\w+)\.weight")


def gguf_name(name, architecture, stacked):
    """The name in a GGUF file, or None if the converter cannot map the tensor."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 2)
    if match := EXPERT.fullmatch(name):
        name = match.expand(stacked) + ".weight"
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


@pytest.mark.parametrize("name", [name for name, (kind, _) in MODELS.items() if FAMILIES[kind].mixture in READERS])
def test_llama_cpp_reads_every_tensor(name, tmp_path):
    folders = [save(tmp_path / expert, name, seed) for seed, expert in enumerate(("birds", "ships"))]
    compose(recipe_of(folders), tmp_path / "out")
    reader, found = READERS[FAMILIES[MODELS[name][0]].mixture], {}
    for tensor in read_tensors(tmp_path / "out"):
        found.setdefault(gguf_name(tensor, *reader), []).append(tensor)
    assert None not in found, found[None]
    stacked = {name: tensors for name, tensors in found.items() if len(tensors) > 1}
    assert all("_exps." in name and len(tensors) == 2 for name, tensors in stacked.items())
    assert len(stacked) == 3 * 2  # gate, up and down in two layers


def test_the_fused_names_of_mergekit_are_not_among_them():
    """The negative control: what `repair` is for."""
    assert gguf_name("model.layers.0.mlp.experts.gate_up_proj", *READERS["mixtral"]) is None


def test_every_mixture_that_the_converter_lacks_is_known():
    assert set(MIXTURES) - set(READERS) == {"flex_olmo"}
