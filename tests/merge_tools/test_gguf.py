# needs: gguf
"""GGUF files: every value of the mixture is in it, in llama.cpp's order, and what llama.cpp does not have is refused."""

import json
import os
import re
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from merge_tools import export
from merge_tools.sources import DTYPES
from run_tools.errors import UserError

from .conftest import edit_json, logits_of, open_model, read_tensors, tiny_tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is not installed.")
from .gguf_models import CASES, compose_case  # noqa: E402

RENAMED = {  # in the order in which they are replaced
    "block_sparse_moe": "mlp", ".w1.": ".gate.", ".w2.": ".down.", ".w3.": ".up.", "model.layers": "blk",
    "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "_proj.": ".", "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm", "mlp.gate.": "ffn_gate_inp.", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens": "token_embd",
}  # fmt: skip
TEXTS = ["the owl and the 12345 ships", " two  spaces, it's\nA NEW line", "Möwe 鳥", "the end</s>"]
LLAMA_CPP = """
import json, sys, llama_cpp
path, (ids, texts) = sys.argv[1], json.loads(sys.argv[2])
model = llama_cpp.Llama(path, logits_all=True, n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0)  # 0: float32
model.eval(ids)
print(json.dumps([model.scores[: len(ids)].tolist(), [model.tokenize(t.encode(), special=True) for t in texts]]))
"""


def expected_tensors(folder, config):
    """Name in the file -> tensor; norms, biases and gates in float32."""
    heads, found = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}, {}
    for name, tensor in sorted(read_tensors(folder).items()):
        for stored, renamed in RENAMED.items():
            name = name.replace(stored, renamed)
        name = re.sub(r"mlp\.experts\.\d+\.(\w+)\.", r"ffn_\1_exps.", name)
        if (part := name.split(".")[-2]) in heads and config.model_type != "qwen3_moe":
            first, second = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:]).unbind(1)
            tensor = torch.stack([first, second], 2).reshape(tensor.shape)  # 0, half, 1, half + 1, ...
        found.setdefault(name, []).append(tensor.float() if re.search(r"norm|bias|gate_inp", name) else tensor)
    return {n: torch.stack(t) if "_exps" in n else t[0] for n, t in found.items() if "shared_expert" not in n}


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_every_value_of_the_mixture(case, tmp_path):
    folder, out = compose_case(tmp_path, case), tmp_path / "out.gguf"
    warnings, reader = export(folder, out, "gguf")["warnings"], gguf.GGUFReader(out)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = {t.name: torch.tensor(t.data).view(DTYPES[t.tensor_type.name]) for t in reader.tensors}
    expected = expected_tensors(folder, config)
    if "llama3" in case:
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 8, 2) / 8)
        assert_close(plain / found.pop("rope_freqs.weight"), ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0])
    assert found.keys() == expected.keys() and bool(warnings) == ("window" in case)
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    fields = {key.replace("qwen3moe.", "llama."): field.contents() for key, field in reader.fields.items()}
    sizes = {"expert_count": 4, "expert_used_count": 2, "block_count": 2, "feed_forward_length": 64}
    assert {f"llama.{name}": size for name, size in sizes.items()}.items() <= fields.items()
    assert fields["llama.attention.key_length"] == (getattr(config, "head_dim", None) or 8)
    assert fields["llama.rope.freq_base"] == config.rope_parameters["rope_theta"]
    assert fields.get("llama.rope.scaling.type") == next((kind for kind in ("yarn", "linear") if kind in case), None)
    tokens = [tokenizer.convert_ids_to_tokens(i) or f"[PAD{i}]" for i in range(config.vocab_size)]
    assert fields["tokenizer.ggml.tokens"] == tokens and fields["tokenizer.ggml.pre"] == CASES[case][1]
    if python := os.environ.get("LEXPERTS_LLAMA_CPP"):  # a Python that has llama-cpp-python 0.3.36
        command = [python, "-c", LLAMA_CPP, str(out), json.dumps([list(range(3, 43)), TEXTS])]
        logits, ids = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
        expected = logits_of(open_model(folder, dtype=torch.float32), torch.arange(3, 43)[None])[0]
        assert_close(torch.tensor(logits), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
        assert ids == tokenizer(TEXTS)["input_ids"]


def add_a_token(folder):
    """One whose id is the number of rows of the embeddings."""
    content = json.loads((folder / "tokenizer.json").read_text())
    rows = read_tensors(folder)["model.embed_tokens.weight"].shape[0]
    token = {"id": rows, "content": "<more>", "special": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    edit_json(folder / "tokenizer.json", added_tokens=[*content["added_tokens"], token])


REFUSED = [  # case, fields of config.json or another tensor, part of the message
    ("olmo2", {}, "'flex_olmo', but llama.cpp has mixtral, qwen2_moe, qwen3_moe."),
    ("llama", {"model_type": "lexicon"}, "Export it as one of them first."),
    ("llama", {"model_type": "lexicon", "attention_bias": True}, "qwen3_moe."),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}}, "attention_factor"),
    ("qwen2", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("llama", ("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 128, 32)), "fused"),
    ("llama", ("left.over", torch.ones(2)), "left.over"),
    ("qwen2", ("model.layers.1.mlp.shared_expert.down_proj.weight", torch.ones(32, 32)), "shared_expert.down_proj"),
    ("llama", lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
    ("llama", lambda folder: tiny_tokenizer().save_pretrained(folder), "neither of bytes nor"),
    ("llama", add_a_token, "ids up to"),
]


@pytest.mark.parametrize(("case", "damage", "fragment"), REFUSED)
def test_what_llama_cpp_does_not_have_is_refused(case, damage, fragment, tmp_path):
    folder = compose_case(tmp_path, case, 2)
    if isinstance(damage, dict):
        edit_json(folder / "config.json", **damage)
    elif isinstance(damage, tuple):
        save_file(read_tensors(folder) | dict([damage]), folder / "model.safetensors")
    else:
        damage(folder)
    with pytest.raises(UserError, match=re.escape(fragment)) as error:
        export(folder, tmp_path / "out.gguf", "gguf")
    assert "\n" not in str(error.value) and not list(tmp_path.glob("out*"))


def test_an_existing_file_is_never_touched_and_a_killed_export_leaves_nothing(tmp_path, monkeypatch):
    folder, out = compose_case(tmp_path, "llama", 2), tmp_path / "out.gguf"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists"):
        export(folder, out, "gguf")
    assert out.read_text() == "mine"
    monkeypatch.setattr("merge_tools.gguf_export.raw_bits", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "new.gguf", "gguf")
    assert not list(tmp_path.glob("new*"))
