"""Models whose package holds what training has added to a packaged model: packed, joined with it, and opened."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from modeling_exhird import ExhirdForCausalLM
from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_moesumm import MoeSummForCausalLM
from run_tools import joined, packaged, pretrained
from run_tools.errors import UserError
from run_tools.packaged import PACKAGED_MODELS

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
PACKAGE = "lexperts_trial_smollm2"


def script(monkeypatch):
    """models/pack_smollm2.py."""
    monkeypatch.syspath_prepend(str(ROOT / "models"))
    spec = importlib.util.spec_from_file_location("pack_smollm2", ROOT / "models" / "pack_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backbone(tmp_path, monkeypatch):
    """The unpacked weights of a small Llama in place of SmolLM2's."""
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / f"smollm2-{pretrained.PACKAGED['smollm2'].sha256[:12]}"
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
def package(mixture, tmp_path, monkeypatch):
    """The folder of an installed package with that mixture."""
    folder = tmp_path / "site" / PACKAGE
    script(monkeypatch).pack(mixture, folder)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setitem(PACKAGED_MODELS, "trial", PACKAGE)
    yield folder
    sys.modules.pop(PACKAGE, None)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(60).view(3, 20)).logits


def test_a_packed_model_opens_with_its_backbone_and_computes_what_it_did(package, mixture, backbone):
    stored = load_file(package / "trained.safetensors")
    assert not set(stored) & set(load_of(backbone)) and {array.dtype.name for array in stored.values()} == {
        "int8",
        "float16",
        "float32",
    }
    folder = packaged.find_packaged("trial")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is LexiconForCausalLM and model.config.expert_rank == 5
    expected = logits_of(AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32))
    plain = logits_of(AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32))
    error, effect = (expected - logits_of(model)).norm(), (expected - plain).norm()
    assert error < 0.02 * effect
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert model.generation_config.use_cache  # without it, generation reads all tokens again for each new one


@pytest.mark.parametrize("kind", ["deputies", "adapters"])
def test_a_model_that_has_its_backbone_as_a_part_is_packed_too(kind, backbone, tmp_path, monkeypatch):
    if kind == "deputies":
        options = {"datasets": ["papers", "clinic"], "deputy_intermediate_size": 8, "deputy_init_std": 0.1}
        model = MoeSummForCausalLM.from_backbone(str(backbone), **options)
    else:
        marks = {"separator_token_id": 5, "absent_token_id": 6}
        model = ExhirdForCausalLM.from_backbone(str(backbone), adapter_rank=4, **marks)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "run")
    folder = tmp_path / "site" / PACKAGE
    script(monkeypatch).pack(tmp_path / "run", folder)
    assert not any(
        "embed" in name or "mlp.gate_proj.weight" in name for name in load_file(folder / "trained.safetensors")
    )
    place = joined.joined(folder)
    assert os.path.samefile(place / "backbone.safetensors", backbone / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    ids, call = torch.arange(60).view(3, 20), {"dataset": "clinic"} if kind == "deputies" else {}
    with torch.no_grad():
        expected, found = (one.eval()(ids, **call).logits for one in (model, again))
        plain = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)(ids).logits
    assert type(again) is type(model)
    assert 0 < (expected - found).norm() < 0.02 * (expected - plain).norm()
    again.save_pretrained(tmp_path / "saved")
    assert set(load_of(tmp_path / "saved")) == set(load_of(tmp_path / "run"))


def load_of(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_backbone_is_on_disk_once_and_the_model_saves_a_checkpoint_of_its_own(package, backbone, tmp_path):
    folder = Path(packaged.find_packaged("trial"))
    assert os.path.samefile(folder / "backbone.safetensors", backbone / "model.safetensors")
    assert packaged.find_packaged("trial") == str(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert "model.layers.0.block_sparse_moe.base.w1.weight" in load_of(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(model), logits_of(again))


def test_weights_that_were_changed_are_not_used(package, backbone):
    folder = Path(packaged.find_packaged("trial"))
    with (backbone / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(backbone / "model.safetensors", (1, 1))
    advice = rf"backbone.safetensors is damaged, or not .* Delete the folders {folder} and {backbone}, which are"
    with pytest.raises(UserError, match=advice):  # a hard link: both are damaged
        packaged.find_packaged("trial")
    joined.shutil.rmtree(folder)
    with pytest.raises(
        UserError, match=rf"model.safetensors is damaged, or not .* Delete the folder {backbone}, which is"
    ):
        packaged.find_packaged("trial")


def test_a_damaged_copy_is_named_alone(package, backbone, monkeypatch):
    def no_links(*paths):
        raise OSError

    monkeypatch.setattr(joined.os, "link", no_links)
    folder = Path(packaged.find_packaged("trial"))
    (folder / "backbone.safetensors").write_bytes((backbone / "model.safetensors").read_bytes()[:-1] + b"\x01")
    os.utime(folder / "backbone.safetensors", (1, 1))
    with pytest.raises(UserError, match=rf"Delete the folder {folder}, which is written again"):
        packaged.find_packaged("trial")
    joined.shutil.rmtree(folder)
    assert Path(packaged.find_packaged("trial")) == folder


@pytest.mark.parametrize("name", [joined.INDEX, joined.BACKBONE, joined.TRAINED, "config.json"])
def test_a_file_that_is_missing_is_named_with_the_folder_to_delete(name, package):
    folder = Path(packaged.find_packaged("trial"))
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing. Delete the folder {folder}, which is written again"):
        packaged.find_packaged("trial")
    joined.shutil.rmtree(folder)
    assert (Path(packaged.find_packaged("trial")) / name).is_file()


def test_a_backbone_without_its_weights_is_named_too(package, backbone):
    (backbone / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"model.safetensors is missing. Delete the folder {backbone}"):
        packaged.find_packaged("trial")


def test_a_join_that_was_interrupted_is_done_again(package, monkeypatch):
    write = Path.write_text

    def killed(path, *args, **options):
        if path.name == joined.INDEX:
            raise KeyboardInterrupt
        return write(path, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        packaged.find_packaged("trial")
    folder = Path(packaged.find_packaged("trial"))
    assert json.loads((folder / joined.INDEX).read_text())["weight_map"]
    assert list(folder.parent.glob(f".{PACKAGE}*.new")) == []  # the lock stays


def test_without_the_backbones_package_the_command_is_named(package, backbone, monkeypatch):
    joined.shutil.rmtree(backbone)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="smollm2 needs the package"):
        packaged.find_packaged("trial")


def test_other_changed_weights_cannot_be_packed(mixture, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(mixture)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(SystemExit, match="model.norm.weight was changed"):
        script(monkeypatch).pack(tmp_path / "changed", tmp_path / "package")


@pytest.mark.parametrize("shape, scales", [((3, 40), (3, 1)), ((40, 3), (1, 3)), ((2, 3, 40), (2, 3, 1))])
def test_factors_in_8_bits_are_within_half_a_step(shape, scales):
    factor = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    factor[..., 0] = 0
    steps, scale = joined.quantize(factor)
    assert steps.dtype == np.int8 and scale.shape == scales
    assert (np.abs(steps * scale.astype(np.float32) - factor) <= 0.51 * scale.astype(np.float32) + 1e-7).all()


def test_a_package_with_another_configuration_is_joined_again(package):
    folder = packaged.find_packaged("trial")
    config = json.loads((package / "config.json").read_text())
    (package / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    again = packaged.find_packaged("trial")
    assert again != folder and AutoModelForCausalLM.from_pretrained(again).config.num_experts_per_tok == 1
