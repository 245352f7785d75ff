"""A composed mixture in transformers 4: the same logits, without our code.

Needs a second Python, made once, and named by LEXPERTS_TRANSFORMERS4:

    python -m venv tf4 && tf4/bin/pip install torch==2.13.0 && tf4/bin/pip install transformers==4.57.6
    LEXPERTS_TRANSFORMERS4=tf4/bin/python python -m pytest tests/merge_tools/test_old_transformers.py
"""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from merge_tools import compose

from .conftest import ROPES, recipe_of
from .test_families import MODELS, save

OLD_PYTHON = os.environ.get("LEXPERTS_TRANSFORMERS4")
pytestmark = pytest.mark.skipif(
    not OLD_PYTHON,
    reason="LEXPERTS_TRANSFORMERS4 names no Python with transformers 4. Make one: python -m venv tf4 && tf4/bin/pip "
    "install torch==2.13.0 && tf4/bin/pip install transformers==4.57.6; then LEXPERTS_TRANSFORMERS4=tf4/bin/python",
)
IDS = (torch.arange(3, 51) % 45).reshape(2, 24)  # ids of every model
# runs in the old Python: folder, ids as JSON, where to put the logits
OPEN = """
import json, os, sys
import torch, transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, ids, out = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
version, needed = transformers.__version__, json.load(open(folder + "/config.json"))["architectures"][0]
if not hasattr(transformers, needed):
    print(json.dumps({"class": None, "version": version}))
    raise SystemExit
model, info = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, output_loading_info=True)
with torch.no_grad():
    found = {"logits": model.eval()(ids).logits.contiguous()}
    found["generated"] = model.generate(ids, do_sample=False, min_new_tokens=8, max_new_tokens=8, pad_token_id=0)
save_file(found, out)
report = {**info, "class": type(model).__name__, "version": version}
report["scales_rope"] = "rope_scaling" in open(sys.modules[type(model).__module__].__file__).read()
if os.path.exists(folder + "/tokenizer.json") and tuple(map(int, version.split(".")[:2])) >= (4, 45):
    report["tokens"] = AutoTokenizer.from_pretrained(folder)("the owl")["input_ids"]  # earlier: merges as strings only
print(json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in report.items()}))
"""


def open_in_old(folder, out):
    """Returns logits and generated ids, and the old release's loading report."""
    command = [OLD_PYTHON, "-c", OPEN, str(folder), json.dumps(IDS.tolist()), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["version"].startswith("4."), f"LEXPERTS_TRANSFORMERS4 runs transformers {report['version']}, not 4."
    return (load_file(out) if report["class"] else {}), report


def open_in_new(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        generated = model.generate(IDS, do_sample=False, min_new_tokens=8, max_new_tokens=8, pad_token_id=0)
        return model, {"logits": model(IDS).logits, "generated": generated}


def llamas(folder, count, tied, theta):
    """`count` tiny Llamas in bf16, far enough apart that the wrong expert shows."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    for seed in range(count):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / f"expert_{seed}")
    return [str(folder / f"expert_{seed}") for seed in range(count)]


def mixture(folder, count, average="base", tied=False, theta=10000.0):
    experts = llamas(folder, count, tied, theta)
    recipe = {
        "base_model": experts[0], "experts": [{"source_model": expert} for expert in experts], "gate_mode": "random",
        "experts_per_token": 2, "dtype": "bfloat16", "average": average,
    }  # fmt: skip
    compose(recipe, folder / "mixture")
    return folder / "mixture"


# 10,000 is what the old release's Llama takes by default, 1,000,000 its Mixtral; 500,000 neither
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("count, average, tied", [(2, "base", False), (3, "mean", True)])
def test_transformers_4_opens_a_mixture_with_equal_logits(tmp_path, count, average, tied, theta):
    folder = mixture(tmp_path, count, average, tied, theta)
    old, report = open_in_old(folder, tmp_path / "old.safetensors")
    assert report["class"] == "MixtralForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    _, new = open_in_new(folder)
    assert_close(old["logits"], new["logits"], atol=1e-4, rtol=1e-4)
    assert torch.equal(old["generated"], new["generated"])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_4_opens_every_family_with_its_tokenizer(name, tmp_path):
    """Every family whose class the release has."""
    folders = [
        save(tmp_path / expert, name, seed, torch.bfloat16) for seed, expert in enumerate(("birds", "ships", "tools"))
    ]
    compose(recipe_of(folders), tmp_path / "mixture")
    old, report = open_in_old(tmp_path / "mixture", tmp_path / "old.safetensors")
    if report["class"] is None:
        pytest.skip(f"transformers {report['version']} has no such class")
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    _, new = open_in_new(tmp_path / "mixture")
    assert_close(old["logits"], new["logits"], atol=1e-4, rtol=1e-4)
    expected = AutoTokenizer.from_pretrained(tmp_path / "mixture")("the owl")["input_ids"]
    assert report.get("tokens", expected) == expected


def test_llama3_rope_is_read_by_releases_whose_mixtral_scales_it(tmp_path):
    """4.57 does, 4.44 does not: its logits are silently wrong."""
    folders = [
        save(tmp_path / n, "llama", i, rope_parameters=ROPES["llama3"]) for i, n in enumerate(("birds", "ships"))
    ]
    compose(recipe_of(folders), tmp_path / "mixture")
    old, report = open_in_old(tmp_path / "mixture", tmp_path / "old.safetensors")
    difference = (old["logits"] - open_in_new(tmp_path / "mixture")[1]["logits"]).abs().max().item()
    print(f"transformers {report['version']}: logits differ by at most {difference:.2g}")
    assert (difference < 1e-3) is report["scales_rope"]


def test_the_comparison_detects_the_fused_layout_and_another_rope_base(tmp_path):
    """Negative controls: the layout that transformers 5 saves by default, and a configuration without rope_theta."""
    folder = mixture(tmp_path, 2)
    model, new = open_in_new(folder)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    old, report = open_in_old(tmp_path / "fused", tmp_path / "fused.safetensors")
    assert any("experts" in key for key in report["missing_keys"])
    assert not torch.allclose(old["logits"], new["logits"], atol=1e-2)

    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "rope_theta"}))
    old, report = open_in_old(folder, tmp_path / "lost.safetensors")
    assert not report["missing_keys"]
    assert not torch.allclose(old["logits"], new["logits"], atol=1e-2)
