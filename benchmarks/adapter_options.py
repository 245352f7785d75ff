"""Which of peft's options give adapters whose weights `merge_tools` computes as peft's `merge_and_unload` does?

    python benchmarks/adapter_options.py

Trains nothing: for every option of LoraConfig, an adapter over a tiny Llama gets random weights, is saved and merged by peft,
and is opened by `merge_tools`, with its check of options left out. `tests/merge_tools/test_adapter_options.py` runs the same
cases with the check, and fails for a field of LoraConfig that no case names.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora as peft_lora
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import LlamaConfig, LlamaForCausalLM

from merge_tools import MergeError, adapters
from merge_tools.averaging import to_float32
from merge_tools.checkpoints import open_source

IDS = torch.arange(3, 43).reshape(2, 20)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = ["gate_proj", "up_proj", "down_proj", *ATTENTION]
BASES = {
    "plain": {},
    "biased": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Case:
    """An option of LoraConfig with a value, and how an adapter with it is made."""

    option: str
    value: Any
    accepted: bool
    others: dict[str, Any] = field(default_factory=dict)  # options
    base: str = "plain"
    before: Callable | None = None  # is called with the base and the configuration
    after: Callable | None = None  # is called with the model with the adapter
    converted: bool = False  # to a plain LoRA when it is saved
    forged: str = ""  # why it cannot be made here: the option is written to the configuration of a plain adapter

    @property
    def label(self) -> str:
        """The option with its value and what else matters."""
        value = (
            self.value
            if isinstance(self.value, str)
            else type(self.value).__name__
            if has_fields(self.value)
            else self.value
        )
        extra = [f"{key}={other!r}" for key, other in self.others.items() if not has_fields(other)]
        extra += [f"{self.base} base"] if self.base != "plain" else []
        extra += ["saved as a plain LoRA"] if self.converted else []
        return f"{self.option}={value!r}" + (f", {', '.join(extra)}" if extra else "")


def has_fields(value) -> bool:
    """Whether the value is a configuration of its own."""
    return hasattr(value, "__dataclass_fields__")


def sample_gradients(model, config):
    """What LoRA-GA needs before the adapter is added."""
    preprocess_loraga(model, config, lambda: model(input_ids=IDS, labels=IDS).loss.backward())


def sample_covariance(model, config):
    """What CorDA needs before the adapter is added."""
    preprocess_corda(model, config, run_model=lambda: model(input_ids=IDS[:1]))


def sample_activations(model):
    """What EVA needs after the adapter was added."""
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}
    initialize_lora_eva_weights(model, [batch] * 4, show_progress_bar=False)


CORDA = {"others": {"corda_config": CordaConfig()}, "before": sample_covariance}
LORA_GA = {"others": {"lora_ga_config": peft_lora.LoraGAConfig()}, "before": sample_gradients}
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}}
CASES = [
    Case("peft_type", "LORA", True, forged="default"),
    Case("task_type", None, True),
    Case("auto_mapping", {"base_model_class": "LlamaForCausalLM"}, True),
    Case("peft_version", "0.1.0", True, forged="set by peft"),
    Case("base_model_name_or_path", None, True, forged="set by peft"),
    Case("revision", "main", True),
    Case("inference_mode", False, True, forged="set by peft"),
    Case("r", 2, True),
    Case("lora_alpha", 3, True),
    Case("lora_dropout", 0.5, True),
    Case("use_rslora", True, True),
    Case("rank_pattern", {"q_proj": 2, r".*layers\.1\.mlp\.[gu]\w+_proj": 6, "^model.layers.0.mlp.down_proj": 3}, True),
    Case("alpha_pattern", {r"layers.\d.self_attn.v_proj": 3, "proj": 5, r".*\.up_proj": 7}, True),
    Case("rank_pattern", {"q_proj": 2}, True, {"use_rslora": True, "alpha_pattern": {"q_proj": 5}}),
    Case("target_modules", r".*layers\.1.*[ud]\w+_proj", True),
    Case("target_modules", "all-linear", True, {"exclude_modules": ["q_proj"]}),
    Case("target_modules", ["q_proj", "lm_head"], True),
    Case("target_modules", ["q_proj", "embed_tokens"], False),
    Case("target_modules", ["q_proj", "lm_head"], False, base="tied"),
    Case("exclude_modules", r".*layers\.0.*", True),
    Case("layers_to_transform", [1], True),
    Case("layers_to_transform", 0, True, {"layers_pattern": "layers"}),
    Case("layers_pattern", "layers", True, {"layers_to_transform": [0]}),
    Case("modules_to_save", ["lm_head", "embed_tokens", "norm"], True),
    Case("modules_to_save", ["mlp"], True, {"target_modules": ATTENTION}),
    Case("modules_to_save", ["embed_tokens"], False, base="tied"),
    Case("modules_to_save", ["lm_head"], False, base="tied"),
    Case("modules_to_save", ["embed_tokens", "lm_head"], False, base="tied"),
    Case("ensure_weight_tying", True, True, {"modules_to_save": ["embed_tokens"]}, base="tied"),
    Case("ensure_weight_tying", True, False, {"target_modules": ["q_proj", "lm_head"]}, base="tied"),
    Case("bias", "all", True),
    Case("bias", "all", True, base="biased"),
    Case("bias", "lora_only", True, base="biased"),
    Case("fan_in_fan_out", True, True),
    *(Case("init_lora_weights", value, True) for value in (True, False, "gaussian", "orthogonal", "mica")),
    Case("init_lora_weights", "eva", True, after=sample_activations),
    *(Case("init_lora_weights", value, False) for value in ("pissa", "pissa_niter_4", "olora")),
    Case("init_lora_weights", "corda", False, **CORDA),
    Case("init_lora_weights", "lora_ga", False, **LORA_GA),
    Case("init_lora_weights", "loftq", False, forged="needs bitsandbytes and CUDA"),
    *(Case("init_lora_weights", value, True, converted=True) for value in ("pissa", "pissa_niter_4", "olora")),
    Case("init_lora_weights", "pissa", True, {"use_rslora": True}, converted=True),
    Case("init_lora_weights", "pissa", True, PATTERNS, converted=True),
    Case("init_lora_weights", "corda", True, converted=True, **CORDA),
    Case("init_lora_weights", "lora_ga", True, converted=True, **LORA_GA),
    Case("eva_config", {"rho": 2.0}, True, forged="acts through init_lora_weights"),
    Case("corda_config", {"corda_method": "ipm"}, True, forged="acts through init_lora_weights"),
    Case("lora_ga_config", {"scale": "stable"}, True, forged="acts through init_lora_weights"),
    Case("loftq_config", {"loftq_bits": 4}, True, forged="acts through init_lora_weights"),
    Case("megatron_core", "megatron.core", True),
    Case("megatron_config", {"hidden_size": 32}, False, forged="needs Megatron"),
    Case("qalora_group_size", 8, True),
    Case("use_qalora", True, False, forged="needs GPTQ"),
    Case("use_dora", True, False),
    Case("velora_config", VeloraConfig(), False),
    Case("kasa_config", KasaConfig(), False),
    Case("monteclora_config", MontecloraConfig(), False),
    Case("use_bdlora", BdLoraConfig(["down_proj", "o_proj"], ["up_proj"], nblocks=2, match_strict=False), False),
    Case("lora_bias", True, False, {"target_modules": ATTENTION[:3]}, base="biased"),
    Case("layer_replication", [(0, 2), (1, 2)], False),
    Case("trainable_token_indices", [3, 4], False),
    Case("target_parameters", ["gate_proj.weight"], True, {"target_modules": ["q_proj"]}),
    Case("alora_invocation_tokens", [3, 4], False, forged="peft cannot merge it"),
    Case("arrow_config", {"top_k": 2}, False, forged="peft cannot merge it"),
]  # fmt: skip


def save_base(folder: Path, **options) -> Path:
    """Saves a Llama with two layers and random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=48, initializer_range=0.2, **options)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p += torch.randn(p.shape) * 0.1
    model.save_pretrained(folder)
    return folder


def make_adapter(case: Case, base: Path, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder of an adapter with random weights as peft saves it, and the weights that `merge_and_unload` gives."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "task_type": "CAUSAL_LM", **case.others}
    if not case.forged:
        options[case.option] = case.value
    config, model = LoraConfig(**deepcopy(options)), LlamaForCausalLM.from_pretrained(base).eval()
    if case.before:
        case.before(model, config)
    model = get_peft_model(model, config)
    if case.after:
        case.after(model)
    if case.converted:
        model.save_pretrained(folder / "initial")
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.randn(p.shape) * 0.1
    initial = {"path_initial_model_for_weight_conversion": str(folder / "initial")} if case.converted else {}
    model.save_pretrained(folder / "adapter", **initial)
    if case.forged and case.value is not None:
        file = folder / "adapter" / "adapter_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**config, case.option: case.value}), encoding="utf-8")
    merged = model.merge_and_unload()
    state = {name: weight.float().numpy() for name, weight in merged.state_dict().items()}
    if merged.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return folder / "adapter", state


def largest_difference(adapter: Path, merged: dict[str, np.ndarray]) -> float:
    """The largest difference between the weights of an adapter's model as `merge_tools` computes them and others.

    Raises a `MergeError` if the adapter is refused, or has other weights.
    """
    source = open_source("adapter", str(adapter))
    if missing := sorted(merged.keys() - source.checkpoint.entries):
        raise MergeError(f"{missing[0]!r} is missing")
    largest = 0.0
    for name, expected in merged.items():
        dtype = source.entry(name).dtype
        ours = np.concatenate([to_float32(block, dtype) for block in source.blocks(name, 500)])
        largest = max(largest, float(np.abs(ours.reshape(expected.shape) - expected).max()))
    return largest


def measure(case: Case, base: Path, folder: Path) -> float | str:
    """The largest difference, or why there is none."""
    if case.forged and not case.accepted:
        return case.forged
    adapter, merged = make_adapter(case, base, folder)
    try:
        with mock.patch.object(adapters, "check_options"):
            return largest_difference(adapter, merged)
    except MergeError:
        return (
            "changes one of two tied weights" if case.base == "tied" else "has other weights than A and B of the base"
        )


def main():
    """Measures every case and writes benchmarks/results/adapter_options.json."""
    from common import write

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as root:
        bases = {name: save_base(Path(root) / name, **options) for name, options in BASES.items()}
        for number, case in enumerate(CASES):
            difference = measure(case, bases[case.base], Path(root) / str(number))
            rows.append({"case": case.label, "accepted": case.accepted, "difference": difference})
            print(f"{case.label:90} {'accepted' if case.accepted else 'refused ':10} {difference}", flush=True)
    write("adapter_options", rows)


if __name__ == "__main__":
    main()
