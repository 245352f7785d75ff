"""The tensor names and configuration keys of every mixture are those that llama.cpp, vLLM and transformers 4 and 5 read.

For llama.cpp by the name maps of the `gguf` package, for the others by `engines.json`, data with their source and version.
"""

import json
import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


ENGINES = json.loads(Path(__file__).with_name("engines.json").read_text())
del ENGINES["about"]
READS = [(engine, name) for engine in ENGINES for name in MODELS]
# What the class of vLLM does not have.
MISSING = {("vLLM", "qwen3 with biases"): "model.layers.N.self_attn.o_proj.bias"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name in MODELS -> names of the tensors with N for numbers, and config.json; each composed once."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("contract")
            experts = [save(folder / expert, name, seed) for seed, expert in enumerate(("birds", "ships"))]
            compose(recipe_of(experts), folder / "out")
            names = {re.sub(r"\.\d+\.", ".N.", tensor) for tensor in read_tensors(folder / "out")}
            made[name] = names, json.loads((folder / "out" / "config.json").read_text())
        return made[name]

    return make


@pytest.mark.parametrize("engine, name", READS)
def test_every_engine_finds_the_tensors_and_keys_that_it_reads(engine, name, written):
    tensors, config = written(name)
    reads = ENGINES[engine]["classes"].get(config["architectures"][0])
    if reads is None:
        pytest.skip(f"{engine} is left out for {config['architectures'][0]}: {ENGINES[engine]['source']}")
    assert not set(reads["config"]) - config.keys()
    if "tensors" not in reads:  # of llama.cpp: above
        return
    optional = {tensor for tensor in reads["tensors"] if tensor.endswith(".bias") or tensor == "lm_head.weight"}
    missing = {MISSING[engine, name]} if (engine, name) in MISSING else set()
    assert tensors - set(reads["tensors"]) == missing
    assert set(reads["tensors"]) - tensors <= optional
    assert ("lm_head.weight" in tensors) is not config["tie_word_embeddings"]


def test_keys_that_are_written_are_known_to_transformers(written):
    """A key that neither release knows would be a misspelling; both spellings of dtype and RoPE settings are written."""
    for name in MODELS:
        _, config = written(name)
        known = {"architectures", "model_type", "dtype", "torch_dtype", "rope_scaling", "rope_theta", "rope_parameters"}
        known |= {"head_dim", "output_router_logits", "router_aux_loss_coef", "initializer_range", "use_cache"}
        known |= {"attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "num_local_experts"}
        for engine in ("transformers 4", "transformers 5"):
            known |= set(ENGINES[engine]["classes"][config["architectures"][0]]["config"])
        assert not config.keys() - known, name


def test_the_contract_of_transformers_5_is_that_of_the_installed_release():
    """The data name the release that they describe; here the fields are looked up again."""
    for kind in MIXTURES.values():
        reads = ENGINES["transformers 5"]["classes"][kind.architecture]["config"]
        config = CONFIG_MAPPING[kind.model_type]()
        assert not [field for field in reads if not hasattr(config, field)], kind.model_type
