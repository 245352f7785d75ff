# needs: smollm2
"""Models that are packages: found by name, packed, completed once in the cache, and opened."""

import importlib.util
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from merge_tools.sources import locate
from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_moesumm import MoeSummForCausalLM
from run_tools import packaged
from run_tools.errors import UserError
from run_tools.packaged import GGUF_SHA256, PACKAGED_MODELS, find_packaged

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
PACKAGE = "lexperts_trial_smollm2"


@pytest.fixture
def script(monkeypatch):
    """models/pack_smollm2.py."""
    monkeypatch.syspath_prepend(str(ROOT / "models"))
    spec = importlib.util.spec_from_file_location("pack_smollm2", ROOT / "models" / "pack_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backbone(tmp_path, monkeypatch):
    """A small Llama in the cache, in place of SmolLM2."""
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / f"smollm2-{GGUF_SHA256[:12]}"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def mixture(backbone, tmp_path):
    """A mixture over it, whose experts share a difference of rank 3 and have their own of rank 2."""
    generator = torch.Generator().manual_seed(1)
    thin = lambda *shape: 0.1 * torch.randn(*shape, generator=generator)  # noqa: E731
    llama = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    config = LexiconConfig(**SIZES, tie_word_embeddings=True, num_local_experts=3, expert_rank=2)
    model = LexiconForCausalLM(config)
    model.load_state_dict(llama.state_dict(), strict=False)
    with torch.no_grad():
        for layer, dense in zip(model.model.layers, llama.model.layers, strict=True):
            experts, mlp = layer.mlp.experts, dense.mlp
            shared = torch.cat([w + thin(64, 3) @ thin(3, 48) for w in (mlp.gate_proj.weight, mlp.up_proj.weight)])
            experts.shared_gate_up.copy_(shared)
            experts.shared_down.copy_(mlp.down_proj.weight + thin(48, 3) @ thin(3, 64))
            for name in experts.FACTORS:
                parameter = getattr(experts, name)
                parameter.copy_(thin(*parameter.shape))
    model.config.use_cache = False  # as transformers' Trainer leaves it
    model.save_pretrained(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def install(script, tmp_path, monkeypatch):
    """install(run) -> the folder of an installed package with a model, called "trial"."""

    def pack(run):
        folder = tmp_path / "site" / PACKAGE
        script.pack(run, folder)
        (folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.setitem(PACKAGED_MODELS, "trial", PACKAGE)
        return folder

    yield pack
    sys.modules.pop(PACKAGE, None)


def logits_of(folder, **call) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.arange(60).view(3, 20), **call).logits


def check_effect(folder, run, backbone, **call):
    """What training has added is there, up to its rounding, by which a token whose experts nearly tie may get another one."""
    expected = logits_of(run, **call)
    found = (logits_of(folder, **call), logits_of(backbone))
    error, effect = ((expected - logits).norm(dim=-1).median() for logits in found)
    assert 0 < error < 0.02 * effect


def test_a_packed_mixture_opens_with_its_backbone_and_saves_the_same_checkpoint(install, mixture, backbone, tmp_path):
    stored = load_file(install(mixture) / "trained.safetensors")
    assert not set(stored) & set(load_file(backbone / "model.safetensors"))
    assert {tensor.dtype for tensor in stored.values()} == {torch.int8, torch.float16, torch.float32}
    folder = Path(find_packaged("trial"))
    check_effect(folder, mixture, backbone)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LexiconForCausalLM and model.config.expert_rank == 5 and model.dtype == torch.float32
    assert model.generation_config.use_cache  # without it, generation reads all tokens again for each new one
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    names = [set(load_file(place / "model.safetensors")) for place in (folder, tmp_path / "saved", mixture)]
    assert names[0] == names[1] == names[2]


@pytest.mark.parametrize("kind", ["deputies", "adapter"])
def test_other_models_are_packed_too(kind, install, backbone, tmp_path):
    """One that has its backbone as a part, and a stock one with an adapter in its weights."""
    if kind == "deputies":
        options = {"datasets": ["papers", "clinic"], "deputy_intermediate_size": 8, "deputy_init_std": 0.1}
        model = MoeSummForCausalLM.from_backbone(str(backbone), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                m, n = parameter.shape
                parameter.data += 0.1 * torch.randn(m, 4) @ torch.randn(4, n) / n**0.5
    model.save_pretrained(tmp_path / "run")
    names = load_file(install(tmp_path / "run") / "trained.safetensors")
    assert not any("embed" in name or "mlp.gate_proj.weight" in name for name in names)
    assert kind == "deputies" or all(4 in tensor.shape for name, tensor in names.items() if "lora_" in name)
    folder = Path(find_packaged("trial"))
    check_effect(folder, tmp_path / "run", backbone, **({"dataset": "clinic"} if kind == "deputies" else {}))
    assert set(load_file(folder / "model.safetensors")) == set(load_file(tmp_path / "run" / "model.safetensors"))


def test_a_model_is_completed_once_for_each_content_of_its_package(install, mixture, monkeypatch):
    package, complete = install(mixture), packaged.complete

    def killed(*args):
        complete(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packaged, "complete", killed)
        find_packaged("trial")
    folder = Path(find_packaged("trial"))
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "complete", lambda *args: pytest.fail("written twice"))
        assert find_packaged("trial") == str(folder)
    config = json.loads((package / "config.json").read_text())
    (package / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    again = find_packaged("trial")
    assert again != str(folder) and AutoModelForCausalLM.from_pretrained(again).config.num_experts_per_tok == 1
    assert not list(folder.parent.glob(".*.new"))


def test_other_changed_weights_cannot_be_packed(script, mixture, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(mixture)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(SystemExit, match="model.norm.weight was changed"):
        script.pack(tmp_path / "changed", tmp_path / "package")


def test_processes_that_need_a_folder_at_the_same_time_wait_for_the_one_that_writes_it(tmp_path):
    started, release, writers = threading.Event(), threading.Event(), []

    def write(folder):
        writers.append(threading.get_ident())
        started.set()
        assert release.wait(20)
        (folder / "model").write_text("complete")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(packaged.write_once, tmp_path / "model-1", write)
        assert started.wait(20)
        others = [pool.submit(packaged.write_once, tmp_path / "model-1", write) for _ in range(2)]
        time.sleep(0.2)  # both are at the lock
        release.set()
        folders = {future.result(20) for future in (first, *others)}
    assert folders == {tmp_path / "model-1"} and (tmp_path / "model-1" / "model").read_text() == "complete"
    assert len(writers) == 1 and {path.name for path in tmp_path.iterdir()} == {".model-1.lock", "model-1"}


def test_smollm2_is_found_in_the_cache_and_a_folder_of_its_name_comes_first(backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)  # not read again
    assert packaged.locate_model("smollm2") == str(backbone) == str(locate("smollm2"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert packaged.locate_model("smollm2") == "smollm2" == str(locate("smollm2"))
    assert packaged.locate_model("org/other") == "org/other"


def test_a_package_that_is_damaged_or_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "package_folder", lambda name: tmp_path)
    (tmp_path / packaged.GGUF).write_bytes(b"GGUF weightz")
    with pytest.raises(UserError, match=packaged.GGUF):
        find_packaged("smollm2")
    monkeypatch.undo()
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install ./models/smollm2"):
        find_packaged("smollm2")
    assert not list((tmp_path / "cache").glob("smollm2*"))


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("lexperts_smollm2") is None, reason="SmolLM2 is not installed: make test does it")
def test_smollm2_opens_in_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path))
    folder = Path(find_packaged("smollm2"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118  (not a dict)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0])
    assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_a_card_names_no_place_on_this_machine():
    shown = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "org/model": "org/model", "gpt2": "gpt2"}
    shown |= {"/home/me/words/": "words", "./words/../birds": "birds", "~/words": "words", "./a": "a", "a/b/c": "c"}
    assert {name: packaged.published_name(name) for name in shown} == shown
