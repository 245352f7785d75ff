"""GGUF files: every value of the mixture is in it, in llama.cpp's order, and what llama.cpp does not have is refused."""

import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from lexperts.cli.merge import app
from merge_tools import MergeError, compose, export
from merge_tools.families import FAMILIES, MIXTURES

from .conftest import edit_json, read_tensors, recipe_of, tiny_tokenizer
from .gguf_models import CASES, byte_level, compose_case
from .test_families import MODELS, save

gguf = pytest.importorskip("gguf", reason="gguf is not installed. Install it with: pip install 'lexperts[gguf]'")

PARTS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
PARTS |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
PARTS |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
TOP |= {"output.weight": "lm_head.weight"}


def expected_tensors(folder, mixture, heads):
    """Name in the file -> tensor. `heads`: those of q and k if llama.cpp rotates neighbouring values, else None."""
    state, found = read_tensors(folder), {}
    for name, stored in TOP.items():
        if stored in state:
            found[name] = state[stored]
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for part, module in PARTS.items():
            for suffix in ("weight", "bias"):
                tensor = state.get(f"{prefix}.{module}.{suffix}")
                if tensor is None:
                    continue
                if heads and part in heads:
                    first, second = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:]).unbind(1)
                    tensor = torch.stack([first, second], 2).reshape(tensor.shape)  # 0, half, 1, half + 1, ...
                found[f"blk.{layer}.{part}.{suffix}"] = tensor
        found[f"blk.{layer}.ffn_gate_inp.weight"] = state[f"{prefix}.{mixture.block}.gate.weight"]
        for linear, stored in mixture.names.items():
            experts = [state[f"{prefix}.{mixture.block}.experts.{e}.{stored}.weight"] for e in range(4)]
            found[f"blk.{layer}.ffn_{linear.removesuffix('_proj')}_exps.weight"] = torch.stack(experts)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_every_value_of_the_mixture(case, tmp_path):
    folder = compose_case(tmp_path, case)
    result = export(folder, tmp_path / "out.gguf", "gguf")
    reader, config = gguf.GGUFReader(tmp_path / "out.gguf"), AutoConfig.from_pretrained(folder)
    mixture = MIXTURES[config.model_type]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    expected = expected_tensors(folder, mixture, heads if mixture.gguf == "LLAMA" else None)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    factors = found.pop("rope_freqs.weight", None)
    assert found.keys() == expected.keys() and result["bytes"] == (tmp_path / "out.gguf").stat().st_size
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.numpy()), name
    fields = {key: field.contents() for key, field in reader.fields.items()}
    arch = fields["general.architecture"]
    assert fields[f"{arch}.expert_count"] == 4 and fields[f"{arch}.expert_used_count"] == 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert fields[f"{arch}.attention.key_length"] == fields[f"{arch}.rope.dimension_count"] == head_dim
    if config.rope_parameters["rope_type"] == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
        np.testing.assert_allclose(factors, (plain / frequencies).numpy(), rtol=1e-5)
    else:
        assert factors is None


def test_weights_keep_bfloat16_and_norms_and_gates_are_float32(tmp_path):
    tokenizer = byte_level("gpt-2")
    folders = [save(tmp_path / n, "qwen2", i, torch.bfloat16, tokenizer) for i, n in enumerate(("birds", "ships"))]
    compose(recipe_of(folders), tmp_path / "mixture")
    export(tmp_path / "mixture", tmp_path / "out.gguf", "gguf")
    kinds, state = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}, {}
    for name, kind in kinds.items():
        state.setdefault(kind, set()).add(name.split(".", 2)[-1])
    assert state["BF16"] >= {"attn_q.weight", "ffn_down_exps.weight"} and "attn_q.weight" not in state["F32"]
    assert state["F32"] >= {"attn_norm.weight", "attn_q.bias", "ffn_gate_inp.weight"} and state.keys() == {
        "BF16",
        "F32",
    }


def test_eight_bits_are_near_the_stored_weights_and_norms_and_gates_stay(tmp_path):
    folder = compose_case(tmp_path, "llama, gpt-2")
    export(folder, tmp_path / "stored.gguf", "gguf")
    export(folder, tmp_path / "small.gguf", "gguf", quantize="q8_0")
    stored, small = (
        {t.name: t for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("stored", "small")
    )
    assert stored.keys() == small.keys()
    kinds = set()
    for name, tensor in small.items():
        expected, kind = stored[name].data, tensor.tensor_type
        kinds.add((len(expected.shape) > 1 and "ffn_gate_inp" not in name, kind.name))
        found = gguf.dequantize(tensor.data, kind) if kind.name == "Q8_0" else tensor.data
        if kind.name == "F32":
            assert np.array_equal(expected, found), name
            continue
        groups, errors = expected.reshape(-1, 32), np.abs(expected - found).reshape(-1, 32)
        steps = np.abs(groups).max(1, keepdims=True) / 127
        assert (errors <= (0.5 + 127 * 2**-11) * steps).all(), name  # the scale is a float16
    assert kinds == {(True, "Q8_0"), (False, "F32")}


def test_other_quantizations_and_odd_rows_are_refused(tmp_path):
    folder = compose_case(tmp_path, "llama, gpt-2")
    with pytest.raises(MergeError, match="Invalid quantize: 'q4_k'. Use q8_0"):
        export(folder, tmp_path / "out.gguf", "gguf", quantize="q4_k")
    with pytest.raises(MergeError, match="A converter does not quantize"):
        export(folder, tmp_path / "out.gguf", "gguf", quantize="q8_0", converter=tmp_path / "convert.py")
    with pytest.raises(MergeError, match="quantize is for the format gguf alone"):
        export(folder, tmp_path / "out", "lexicon", quantize="q8_0")
    assert not (tmp_path / "out.gguf").exists() and not (tmp_path / "out").exists()


def lexicon(tmp_path):
    return compose_case(tmp_path, "llama, gpt-2", 2, format="lexicon")


def flex_olmo(tmp_path):
    folders = [save(tmp_path / n, "olmo2", i, tokenizer=byte_level("gpt-2")) for i, n in enumerate(("birds", "ships"))]
    compose(recipe_of(folders), tmp_path / "mixture")
    return tmp_path / "mixture"


def changed(case, **changes):
    def make(tmp_path):
        folder = compose_case(tmp_path, case, 2)
        edit_json(folder / "config.json", **changes)
        return folder

    return make


def with_tokenizer(change):
    def make(tmp_path):
        folder = compose_case(tmp_path, "llama, gpt-2", 2)
        change(folder)
        return folder

    return make


REFUSED = {
    "lexicon": (lexicon, "model_type 'lexicon', which llama.cpp does not have"),
    "flex_olmo": (
        flex_olmo,
        f"model_type 'flex_olmo', .*: {', '.join(kind for kind, about in MIXTURES.items() if about.gguf)}",
    ),
    "dynamic rope": (
        changed("llama, gpt-2", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type is 'dynamic'",
    ),
    "llama3 rope in qwen3": (
        changed("qwen3, qwen2", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type is 'llama3'; this architecture has default, linear, yarn",
    ),
    "weights of experts as they are": (changed("qwen2, qwen2", norm_topk_prob=False), "norm_topk_prob is not true"),
    "another activation": (changed("llama, gpt-2", hidden_act="gelu"), "hidden_act is 'gelu'"),
    "biases of qwen3": (changed("qwen3, qwen2", attention_bias=True), "attention_bias is true"),
    "no tokenizer": (with_tokenizer(lambda folder: (folder / "tokenizer.json").unlink()), "has no tokenizer that can"),
    "a tokenizer that is not of bytes": (
        with_tokenizer(lambda folder: tiny_tokenizer().save_pretrained(folder)),
        "neither of bytes nor with byte fallback",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_does_not_have_is_refused(name, tmp_path):
    make, pattern = REFUSED[name]
    folder = make(tmp_path)
    with pytest.raises(MergeError, match=pattern):
        export(folder, tmp_path / "out.gguf", "gguf")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".gguf", ".partial"))]


def test_a_window_is_warned_about(tmp_path):
    tokenizer = byte_level("gpt-2")
    folders = [save(tmp_path / n, "mistral with a window", 3, tokenizer=tokenizer) for n in ("birds", "ships")]
    compose(recipe_of(folders), tmp_path / "mixture")
    assert "more than 8 tokens" in export(tmp_path / "mixture", tmp_path / "out.gguf", "gguf")["warnings"][0]


def test_an_existing_file_and_a_source_are_never_touched(tmp_path):
    folder = compose_case(tmp_path, "llama, gpt-2", 2)
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(MergeError, match="exists. Choose another file"):
        export(folder, tmp_path / "out.gguf", "gguf")
    assert (tmp_path / "out.gguf").read_text() == "mine"
    with pytest.raises(MergeError, match="inside the source"):
        export(folder, folder / "out.gguf", "gguf")


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    from merge_tools import gguf_export

    folder = compose_case(tmp_path, "llama, gpt-2", 2)
    monkeypatch.setattr(gguf_export, "write_data", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "out.gguf", "gguf")
    assert not [path for path in tmp_path.iterdir() if "gguf" in path.name]


def test_a_converter_is_run_instead(tmp_path, monkeypatch):
    folder = compose_case(tmp_path, "llama, gpt-2", 2)
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write(' '.join(sys.argv[1:]))")
    run = CliRunner().invoke(
        app, ["export", str(folder), str(tmp_path / "out.gguf"), "--format", "gguf", "--converter", str(script)]
    )
    assert run.exit_code == 0, run.output
    assert (tmp_path / "out.gguf").read_text().startswith(f"{folder} --outfile")
    script.write_text("raise ValueError('Can not map tensor')")
    monkeypatch.setenv("LLAMA_CPP_CONVERTER", str(script))
    with pytest.raises(MergeError, match="status 1: ValueError: Can not map tensor"):
        export(folder, tmp_path / "other.gguf", "gguf")
    qwen = compose_case(tmp_path / "qwen", "qwen2, qwen2", 2)
    assert export(qwen, tmp_path / "qwen.gguf", "gguf")["architecture"] == "LLAMA"  # the variable has no effect on it
    with pytest.raises(MergeError, match="qwen2_moe does not normalise"):
        export(qwen, tmp_path / "third.gguf", "gguf", converter=script)


def test_without_gguf_the_extra_is_named(tmp_path, monkeypatch):
    folder = compose_case(tmp_path, "llama, gpt-2", 2)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"lexperts\[gguf\]"):
        export(folder, tmp_path / "out.gguf", "gguf")


def test_every_family_that_llama_cpp_has_is_among_the_cases():
    tested = {FAMILIES[MODELS[name][0]].mixture for name, _, _ in CASES.values()}
    assert tested == {name for name, kind in MIXTURES.items() if kind.gguf}
