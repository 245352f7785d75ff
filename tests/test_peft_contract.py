"""What peft's tuners do with every model class: adapters train, are saved, loaded and merged.

Each class is tried with LoRA on its linear layers, and, where it has stacked experts, on these (`target_parameters`); with
the other tuners at night.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch.testing import assert_close

from modeling_hypernet import HypernetModel

from .modeling_hypernet.conftest import tiny_hypernet  # noqa: F401  (a fixture)
from .modeling_lexicon.conftest import tiny_lexicon
from .modeling_moesumm.conftest import tiny_moesumm
from .tiny_models import ONE_LAYER, Trainable, make_trainable
from .tools import by_day


@dataclass
class Case:
    """A model with two rows for it, and what adapters may target."""

    trainable: Trainable
    task: str | None
    linears: list[str]
    experts: list[str] = field(default_factory=list)  # stacked parameters
    heads: list[str] | None = None  # trained and saved whole
    options: dict = field(default_factory=dict)  # of the model
    bare: type | None = None  # the class without a head, which has no loss

    def model(self):
        model = self.trainable.make(**self.options)
        if self.bare is None:
            return model
        torch.manual_seed(0)
        return self.bare(model.config).eval()

    def outputs(self, model):
        without = ("labels", "word_start_mask") if self.bare else ()
        return model(**{name: x for name, x in self.trainable.batch(2).items() if name not in without})

    def read(self, model) -> torch.Tensor:
        with torch.no_grad():
            return self.outputs(model)["last_hidden_state" if self.bare else self.trainable.output].clone()

    def targets(self, on: str) -> dict:
        return {"target_modules": self.linears} if on == "linears" else {"target_parameters": self.experts, "r": 2}


ENCODER = ["query", "value", "intermediate.dense"]
TO_SAVE = ["reader", "meta_encoder"]
LEXICON = {"linears": ["q_proj", "v_proj"], "experts": ["experts.gate_up_proj", "experts.down_proj"]}
LEXICON |= {"options": ONE_LAYER["Lexicon"]}
DEPUTIES = ["experts.up_proj", "experts.down_proj"]
CASES = {
    "SEKE bert": {
        "task": "TOKEN_CLS",
        "linears": [*ENCODER, "gate"],
        "experts": ["moe.experts.up_proj", "moe.experts.down_proj", "moe.experts.out_proj"],
        "heads": ["rnn"],
    },
    "hypernet bare": {"task": None, "linears": ENCODER, "heads": TO_SAVE, "bare": HypernetModel},
    "hypernet tags": {"task": "TOKEN_CLS", "linears": ENCODER, "heads": [*TO_SAVE, "crf"]},
    "hypernet classes": {"task": "SEQ_CLS", "linears": ["query_proj", "value_proj"], "heads": TO_SAVE},
    "hypernet answers": {"task": "QUESTION_ANS", "linears": ["Wqkv", "Wi"], "heads": TO_SAVE},
    "MoeSumm bart": {
        "task": "SEQ_2_SEQ_LM",
        "linears": ["q_proj", "v_proj", "fc1", "fc2"],
        "experts": DEPUTIES,
        "options": ONE_LAYER["MoeSumm"],
    },
    "MoeSummCausal llama": {
        "task": "CAUSAL_LM",
        "linears": ["q_proj", "v_proj", "gate_proj", "down_proj"],
        "experts": DEPUTIES,
        "options": ONE_LAYER["MoeSummCausal"],
    },
    "Lexicon token": {"task": "CAUSAL_LM", **LEXICON},
    "Lexicon classes": {"task": "SEQ_CLS", **LEXICON},
    "ExHiRD transformer": {"task": None, "linears": ["query", "value", "word_state"], "heads": ["generator"]},
}
TUNERS = {
    "LoRA": lambda case, **common: LoraConfig(**case.targets("linears"), **common),
    "LoRA on experts": lambda case, **common: LoraConfig(**case.targets("experts"), **common),
    "DoRA": lambda case, **common: LoraConfig(**case.targets("linears"), use_dora=True, **common),
    "AdaLoRA": lambda case, **common: AdaLoraConfig(**case.targets("linears"), init_r=3, total_step=9, **common),
    "IA3": lambda case, **common: IA3Config(**case.targets("linears"), feedforward_modules=[], **common),
    "LoHa": lambda case, **common: LoHaConfig(**case.targets("linears"), r=2, **common),
}


@pytest.fixture
def case(request):
    name = request.param
    return Case(make_trainable(name.replace("bare", "tags"), request.getfixturevalue), **CASES[name])


# each case with each of the tuners, of which those on experts need a case that has some
PAIRS = [
    pytest.param(case, tuner, marks=by_day(tuner.startswith("LoRA") or case == "SEKE bert"))
    for case in CASES
    for tuner in TUNERS
    if "experts" in CASES[case] or "experts" not in tuner
]


def adapted(case, tuner):
    """The model with a new adapter, which has moved: until it is trained, one changes nothing."""
    config = TUNERS[tuner](case, task_type=case.task, modules_to_save=case.heads)
    model = get_peft_model(case.model(), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("case, tuner", PAIRS, indirect=["case"])
def test_an_adapter_learns_opens_again_and_is_merged_into_a_model_of_its_class(case, tuner, tmp_path):
    if tuner in ("IA3", "LoHa"):  # LoRA's own merging knows heads of several layers
        case = replace(case, heads=None)
    model, before, kind = adapted(case, tuner), case.read(case.model()), type(case.model())
    outputs = case.outputs(model)
    (outputs.loss if "loss" in outputs else outputs.last_hidden_state.square().mean()).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert any(p.grad.abs().max() > 0 for name, p in trained.items() if "modules_to_save" not in name)
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained)
    expected = case.read(model)
    assert not torch.allclose(expected, before, atol=1e-4)
    with model.disable_adapter():
        assert_close(case.read(model), before, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(case.model(), tmp_path, is_trainable=True)  # or AdaLoRA has no trainable adapter
    assert_close(case.read(again.eval()), expected, rtol=0, atol=1e-6)
    merged = model.merge_and_unload()
    assert type(merged) is kind and set(merged.state_dict()) == set(case.model().state_dict())
    assert_close(case.read(merged), expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(case.read(kind.from_pretrained(tmp_path / "merged").eval()), expected, rtol=1e-4, atol=1e-4)


PROMPTS = {
    "prefix": PrefixTuningConfig,
    "prompt": PromptTuningConfig,
    "p-tuning": lambda **options: PromptEncoderConfig(encoder_hidden_size=8, **options),
}


@pytest.mark.parametrize("kind", [*list(PROMPTS)[:2], pytest.param("p-tuning", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "family", ["token", "sequence_soft", "sequence_hard", "domain", "summaries", "causal summaries"]
)
def test_learned_prompts_train_and_are_read_once_in_generation(family, kind):
    """The text is the most likely one of the forward pass that training uses, with and without a cache."""
    seq2seq, ids = family == "summaries", torch.randint(3, 48, (2, 10), generator=torch.Generator().manual_seed(0))
    inputs, options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {}
    if family.endswith("summaries"):
        options = {"dataset_ids": torch.tensor([0, 1])}
        sizes = ONE_LAYER["MoeSumm" if seq2seq else "MoeSummCausal"]
        model = tiny_moesumm("bart" if seq2seq else "llama", margin_loss_coef=0.0, **sizes)
    else:
        model = tiny_lexicon(policy=family, domain_gate=family == "domain")
        options = {"domain_ids": torch.tensor([0, 1])} if family == "domain" else {}
    task = "SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM"
    tuned = get_peft_model(model.eval(), PROMPTS[kind](task_type=task, num_virtual_tokens=3)).eval()
    learned = [p for p in tuned.parameters() if p.requires_grad]
    for p in learned:
        torch.nn.init.normal_(p, std=0.5)
    tuned(**inputs, **options, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in learned)

    calls = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    calls |= {"eos_token_id": None, "forced_eos_token_id": None}
    text = tuned.generate(**inputs, **options, **calls)
    for beams in (1, 2):
        both = [tuned.generate(**inputs, **options, **calls, num_beams=beams, use_cache=use) for use in (True, False)]
        assert torch.equal(*both)
    T = inputs["input_ids"].shape[1]
    first = 1 if seq2seq else T
    with torch.no_grad():
        if seq2seq:
            logits = tuned(**inputs, **options, decoder_input_ids=text).logits
        else:  # what is generated is no prompt
            prompt = torch.nn.functional.pad(inputs["attention_mask"], (0, text.shape[1] - T))
            options |= {} if family == "causal summaries" else {"prompt_mask": prompt}
            logits = tuned(text, torch.ones_like(text), **options).logits[:, -text.shape[1] :]
    assert torch.equal(logits[:, first - 1 : -1].argmax(-1), text[:, first:])
