# needs: quantize
"""What every public class keeps, whatever it computes: loading, saving, refusing."""

import copy
import io
import logging
import shutil
from inspect import signature

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BartForConditionalGeneration,
    BertForMaskedLM,
    BertModel,
    LlamaForCausalLM,
)

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_lexicon.cache_lexicon import CACHE
from run_tools.loading import CheckedConfigMixin, CheckedModelMixin

from .tiny_models import (
    CASES,
    VOCABULARY,
    decoder_config,
    encoder_config,
    first_output,
    make_inputs,
    make_model,
    run,
    summariser_config,
)
from .tools import by_day

PACKAGES = ("seke", "hypernet", "exhird", "moesumm", "lexicon")

OVERRIDES = {
    "seke": {"num_experts_per_tok": 9},
    "hypernet": {"pooling": "max"},
    "exhird": {"max_words_per_phrase": 0},
    "moesumm": {"num_deputies": 0},
    "lexicon": {"num_experts_per_tok": 9},
}
# fields of transformers and others, of newer versions, and what from_pretrained passes on
UNKNOWN = ("norm_eps", "pruned_heads", "rope_theta", "num_beams", "sliding_window", "router_jitter_noise", "t2u_bos_token_id",
           "moe_intermediate_size", "unsloth_version", "device_map", "trust_remote_code", "adapter_kwargs")  # fmt: skip
FROM_BACKBONE = [name for name, case in CASES.items() if hasattr(case.cls, "from_backbone")]
# of each package one class by day: `from_backbone` is one function
EVERY_DAY = ("SekeForTokenClassification", "HypernetForTokenClassification", "MoeSummForCausalLM")
each_class = pytest.mark.parametrize("name", CASES)
each_from_backbone = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=by_day(name in EVERY_DAY)) for name in FROM_BACKBONE]
)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Folders of pretrained backbones, in several forms."""
    folder = tmp_path_factory.mktemp("backbones")
    torch.manual_seed(0)
    encoder, summariser = BertForMaskedLM(encoder_config()), BartForConditionalGeneration(summariser_config())
    models = {"encoder": encoder, "summariser": summariser, "decoder": LlamaForCausalLM(decoder_config())}
    for kind, model in models.items():
        model.save_pretrained(folder / kind)
        model.save_pretrained(folder / f"{kind}-variant", variant="fp16")
        base = copy.deepcopy(model.base_model).to(torch.bfloat16)
        base.save_pretrained(folder / f"{kind}-base-bf16")
    return folder


def backbone_of(name):
    """The folder in `backbones` of a class's kind, and one of another kind."""
    if name == "MoeSummForCausalLM":
        return "decoder", "encoder"
    return ("summariser", "encoder") if name.startswith("MoeSumm") else ("encoder", "summariser")


def from_folder(name, folder, **options):
    """`from_backbone` of a class."""
    cls = CASES[name].cls
    if name.startswith("MoeSumm"):
        return cls.from_backbone(folder, ["news"], **{"deputy_intermediate_size": 8, **options})
    if name.startswith("Hypernet"):
        return cls.from_backbone(folder, **{"meta_embedding_size": 4, "hidden_size": 8, **options})
    return cls.from_backbone(folder, **options)


def over_backbone(name, backbones, form="", **options):
    """`from_backbone` of a class on a backbone of its kind."""
    return from_folder(name, backbones / f"{backbone_of(name)[0]}{form}", **options)


def pretrained_weight(model) -> torch.Tensor:
    """A matrix that all backbones here have, in the last layer of the (first) stack."""
    last = ("encoder.layer.1.output.dense", "encoder.layers.1.fc2", "model.layers.1.mlp.down_proj")
    names = tuple(f"{name}.weight" for name in last)
    return next(p for name, p in model.named_parameters() if name.endswith(names))


def test_every_class_has_the_checks_of_the_package():
    """They are imported in `try` blocks, so that a failure of this import would pass in silence."""
    for case in CASES.values():
        assert issubclass(case.cls, CheckedModelMixin) and issubclass(case.cls.config_class, CheckedConfigMixin)


@each_class
def test_an_override_out_of_range_is_refused_and_so_is_a_meta_device(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    override = OVERRIDES[model.config.model_type]
    field, value = next(iter(override.items()))
    for opens in (CASES[name].cls, type(model.config), AutoConfig):
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            opens.from_pretrained(tmp_path, **override)
    with torch.device("meta"):  # a model is built there, and not opened
        assert all(p.is_meta for p in make_model(name).parameters())
        with pytest.raises(RuntimeError, match="meta device"):  # transformers' own error
            CASES[name].cls.from_pretrained(tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_fields_are_kept(package, tmp_path):
    config = next(case.config() for name, case in CASES.items() if name.lower().startswith(package))
    cls, values = type(config), config.to_dict()
    for name in UNKNOWN:
        cls.from_dict({**values, name: None}).save_pretrained(tmp_path)
        assert name in ("num_beams", "rope_theta") or hasattr(cls.from_pretrained(tmp_path), name)


@each_from_backbone
def test_from_backbone_takes_the_weights_of_every_form(name, backbones, tmp_path, monkeypatch):
    logger, stream = logging.getLogger("transformers"), io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    model = over_backbone(name, backbones)
    assert "MISSING" not in stream.getvalue()  # new modules, in a table that looks like an error
    assert model.dtype == torch.float32 and not model.training and model.config.name_or_path == ""
    model.save_pretrained(tmp_path)  # under its own names
    saved = dict(CASES[name].cls.from_pretrained(tmp_path).named_parameters())
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(saved[key], p) for key, p in model.named_parameters())
    assert str(backbones) not in (tmp_path / "config.json").read_text()
    expected, inside = pretrained_weight(model), model.get_submodule(model.backbone_path).base_model.state_dict()
    for key, p in AutoModel.from_pretrained(backbones / backbone_of(name)[0]).state_dict().items():
        assert "pooler" in key or torch.equal(inside[key], p), key
    assert not any("pooler" in key for key in inside) and model.config.text_config.name_or_path == ""
    half = over_backbone(name, backbones, "-base-bf16", dtype="auto")  # without the prefix of a model with a head
    assert half.dtype == torch.bfloat16
    assert torch.equal(pretrained_weight(half), expected.bfloat16())
    assert over_backbone(name, backbones, dtype="bfloat16").dtype == torch.bfloat16
    for options in ({"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        assert torch.equal(pretrained_weight(over_backbone(name, backbones, **options)), expected)
    assert torch.equal(pretrained_weight(over_backbone(name, backbones, "-variant", variant="fp16")), expected)
    dropout = over_backbone(name, backbones, attention_dropout=0.25).config.text_config.to_dict()
    assert 0.25 in (dropout.get("attention_dropout"), dropout.get("attention_probs_dropout_prob"))
    with pytest.raises(TypeError, match="devise_map"):
        over_backbone(name, backbones, devise_map="cpu")


@pytest.mark.parametrize("name", ["SekeForTokenClassification", "HypernetForQuestionAnswering"])  # with a new head
@pytest.mark.parametrize("rows", [None, 3], ids=["same shapes", "other shapes"])
def test_no_weight_of_a_checkpoint_is_taken_for_a_new_module_of_its_name(name, rows, backbones, tmp_path):
    """Such as the `classifier` of a token classifier, which is the name of SEKE's head."""
    model, source = over_backbone(name, backbones), backbones / backbone_of(name)[0]
    new = {key: p for key, p in model.named_parameters() if not key.startswith(f"{model.backbone_path}.")}
    assert new
    shutil.copytree(source, tmp_path / "with_heads")
    state = load_file(source / "model.safetensors")
    state |= {key: torch.full(p.shape if rows is None else (rows,), 7.0) for key, p in new.items()}
    save_file(state, tmp_path / "with_heads" / "model.safetensors", {"format": "pt"})
    made = from_folder(name, tmp_path / "with_heads")
    assert torch.equal(pretrained_weight(made), pretrained_weight(model))
    assert not any((made.get_parameter(key) == 7).all() for key in new)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FROM_BACKBONE)
def test_from_backbone_quantises_the_backbone_alone(name, backbones, tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed: make test-all does it")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = over_backbone(name, backbones, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    linears = {n: m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    quantized = [n for n, weight in linears.items() if type(weight) is not torch.nn.Parameter]
    assert quantized and all(n.startswith(model.backbone_path) for n in quantized)
    model.save_pretrained(tmp_path)
    again = CASES[name].cls.from_pretrained(tmp_path)
    inputs = make_inputs(name)
    inputs |= {"dataset_ids": torch.tensor([0, -1])} if "dataset_ids" in inputs else {}
    torch.testing.assert_close(run(again, inputs), run(model, inputs), rtol=0, atol=1e-6)


def test_a_backbone_that_lacks_its_own_weights_is_refused(backbones, tmp_path):
    weights = BertModel(encoder_config()).state_dict()
    broken = BertModel(encoder_config())
    broken.save_pretrained(tmp_path, state_dict={k: v for k, v in weights.items() if "layer.1" not in k})
    with pytest.raises(ValueError, match="layer.1"):
        CASES["SekeForTokenClassification"].cls.from_backbone(tmp_path)


@each_from_backbone
def test_what_is_no_backbone_is_named(name, backbones, tmp_path):
    cls, (own, other) = CASES[name].cls, (backbones / kind for kind in backbone_of(name))
    model = make_model(name)
    model.save_pretrained(tmp_path)
    is_encoder = backbone_of(name)[1] == "encoder"
    unsupported = "model_type='bert'" if is_encoder else "'bart' is an encoder with a decoder"
    for folder, message in (
        ("nowhere/at-all", "'nowhere/at-all' cannot be opened"),
        (tmp_path, f"'{model.config.model_type}' model already.*from_pretrained"),
        (other, unsupported),
    ):
        with pytest.raises(OSError, match=message):
            from_folder(name, folder)
    for opens in (cls, type(model.config)):
        with pytest.raises(ValueError, match=r"model_type='(b\w+t|llama)'.*from_backbone"):
            opens.from_pretrained(own)
    option = next(iter(OVERRIDES[model.config.model_type]))
    with pytest.raises(TypeError, match=f"{option[:-1]}'"):
        from_folder(name, own, **{option[:-1]: 1})


@each_class
def test_embeddings_are_resized_and_saved(name, tmp_path):
    model, inputs = make_model(name), make_inputs(name)
    if name.startswith("Exhird"):  # its vocabulary is its own tokenizer's
        assert model.resize_token_embeddings(VOCABULARY) is model.get_input_embeddings()
        with pytest.raises(ValueError, match=f"{VOCABULARY:,} words .* {VOCABULARY + 8:,}"):
            model.resize_token_embeddings(VOCABULARY + 8)
        return
    expected = run(model, inputs)
    model.resize_token_embeddings(VOCABULARY + 8)
    model.save_pretrained(tmp_path)
    again = CASES[name].cls.from_pretrained(tmp_path)
    assert len(again.get_input_embeddings().weight) == again.config.get_text_config().vocab_size == VOCABULARY + 8
    torch.testing.assert_close(run(again, inputs)[..., : expected.shape[-1]], expected, rtol=0, atol=1e-5)


def values_and_gradients(model, inputs):
    model.zero_grad()
    output = first_output(model(**inputs))
    output.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


@each_class
def test_experts_implementations_have_the_names_of_transformers(name, tmp_path):
    model, inputs = make_model(name), make_inputs(name)
    if model.config.model_type in ("hypernet", "exhird"):  # no experts: as a stock BERT
        model.set_experts_implementation("eager")
        with pytest.raises(ValueError, match="experts"):
            model.set_experts_implementation("grouped_mm")
        return
    cls, config = CASES[name].cls, CASES[name].config
    model.save_pretrained(tmp_path)
    values, gradients = values_and_gradients(model, inputs)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        opened = cls.from_pretrained(tmp_path, experts_implementation=implementation)
        built = cls(type(config())(**config().to_diff_dict(), experts_implementation=implementation))
        model.set_experts_implementation(implementation)
        for each in (model, opened, built):
            assert each.config._experts_implementation == implementation
            assert implementation not in each.config.to_json_string()
        found = values_and_gradients(model, inputs)
        torch.testing.assert_close(found[0], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], gradients, rtol=1e-3, atol=1e-4)
    for call in (
        model.set_experts_implementation,
        lambda unknown: cls.from_pretrained(tmp_path, experts_implementation=unknown),
        lambda unknown: cls(type(config())(**config().to_diff_dict(), experts_implementation=unknown)),
    ):
        with pytest.raises(ValueError, match="grouped"):
            call("grouped")
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("name", [name for name in CASES if "cache" in signature(CASES[name].cls.forward).parameters])
def test_a_cache_can_be_passed_by_both_names(name):
    """`cache` is transformers' name since 5.24, `past_key_values` the one before, which many scripts have."""
    model, inputs = make_model(name), {key: x for key, x in make_inputs(name).items() if key != "labels"}
    ids = "decoder_input_ids" if "decoder_input_ids" in signature(model.forward).parameters else "input_ids"
    end = {**inputs, "attention_mask": None, ids: torch.tensor([[9], [11]])}
    with torch.no_grad():
        outputs = [model(**end, **{given: model(**inputs)[CACHE]}) for given in ("cache", "past_key_values")]
        assert torch.equal(*map(first_output, outputs))
        assert not torch.equal(first_output(outputs[0]), first_output(model(**end)))
        with pytest.raises(ValueError, match="`past_key_values` and `cache` are set"):
            model(**inputs, cache=outputs[0][CACHE], past_key_values=outputs[0][CACHE])


@pytest.mark.parametrize("name", ["LexiconForCausalLM", "MoeSummForCausalLM"])
def test_labels_that_are_shifted_already_are_the_targets(name):
    """The Trainer passes them where a sequence lies on several devices."""
    model, inputs = make_model(name), make_inputs(name)
    ids = inputs["input_ids"]
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    found = model(**inputs, labels=ids.flip(1), shift_labels=shifted).loss
    torch.testing.assert_close(found, model(**inputs, labels=ids).loss, rtol=0, atol=0)
