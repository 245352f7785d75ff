"""What every public class keeps, whatever it computes: pickling, threads, loading, saving, refusing."""

import copy
import io
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import AutoConfig, BartForConditionalGeneration, BertForMaskedLM, BertModel

import keyphrase_tools  # noqa: F401  (registers the pipelines)

from .tiny_models import CASES, encoder_config, first_output, make_inputs, make_model, run, summariser_config

OVERRIDES = {
    "seke": {"num_experts_per_tok": 9},
    "hypernet": {"pooling": "max"},
    "exhird": {"max_words_per_phrase": 0},
    "moesumm": {"num_deputies": 0},
    "lexicon": {"num_experts_per_tok": 9},
}
FROM_BACKBONE = [name for name, case in CASES.items() if hasattr(case.cls, "from_backbone")]


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Folders of pretrained backbones, in several forms."""
    folder = tmp_path_factory.mktemp("backbones")
    torch.manual_seed(0)
    encoder, summariser = BertForMaskedLM(encoder_config()), BartForConditionalGeneration(summariser_config())
    for kind, model in (("encoder", encoder), ("summariser", summariser)):
        model.save_pretrained(folder / kind)
        model.save_pretrained(folder / f"{kind}-variant", variant="fp16")
        base = copy.deepcopy(model.base_model).to(torch.bfloat16)
        base.save_pretrained(folder / f"{kind}-base-bf16")
    return folder


def over_backbone(name, backbones, form="", **options):
    """`from_backbone` of a class on a backbone of its kind."""
    cls = CASES[name].cls
    if name.startswith("MoeSumm"):
        return cls.from_backbone(backbones / f"summariser{form}", ["news"], deputy_intermediate_size=8, **options)
    if name.startswith("Exhird"):
        return cls.from_backbone(backbones / f"encoder{form}", exhird_tokenizer(), hidden_size=8, **options)
    return (
        cls.from_backbone(backbones / f"encoder{form}", meta_embedding_size=4, hidden_size=8, **options)
        if (name.startswith("Hypernet"))
        else cls.from_backbone(backbones / f"encoder{form}", **options)
    )


def exhird_tokenizer():
    from modeling_exhird import ExhirdTokenizer

    return ExhirdTokenizer.from_texts(["graph cuts segment images", "tides move water"])


def pretrained_weight(model) -> torch.Tensor:
    """A matrix that all backbones here have, in the last layer of the (first) stack."""
    names = ("encoder.layer.1.output.dense.weight", "encoder.layers.1.fc2.weight")
    return next(p for name, p in model.named_parameters() if name.endswith(names))


@pytest.mark.parametrize("name", CASES)
def test_a_pickled_model_computes_the_same_and_shares_nothing(name):
    model, inputs = make_model(name), make_inputs(name)
    expected, file = run(model, inputs), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model) and again.config is not model.config
        assert torch.equal(run(again, inputs), expected)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        again.config.name_or_path = "changed"
        assert not torch.equal(run(again, inputs), expected)
    assert torch.equal(run(model, inputs), expected) and model.config.name_or_path != "changed"


def spawned(names, queue):
    queue.put({name: run(make_model(name), make_inputs(name)).numpy() for name in names})


def spawned_with_models(models, queue):
    torch.set_num_threads(1)
    queue.put({name: run(model, make_inputs(name)).numpy() for name, model in models.items()})


def test_models_are_sent_to_a_spawned_process():
    """Every class at once: a new process imports for some seconds."""
    context = multiprocessing.get_context("spawn")
    models, queue = {name: make_model(name) for name in CASES}, context.Queue()
    expected = {name: run(model, make_inputs(name)) for name, model in models.items()}
    process = context.Process(target=spawned_with_models, args=(models, queue))
    process.start()
    found = queue.get(timeout=120)
    process.join(60)
    for name, logits in found.items():
        torch.testing.assert_close(torch.from_numpy(logits), expected[name], rtol=1e-5, atol=1e-6)
    assert set(found) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_threads_share_a_model_that_reads_or_trains(name):
    model, batches = make_model(name), [make_inputs(name, seed) for seed in (1, 2)]
    if "dataset_ids" in batches[0]:
        batches[0]["dataset_ids"], batches[1]["dataset_ids"] = torch.tensor([0, 0]), torch.tensor([1, -1])
    expected = [run(model, batch) for batch in batches]

    def repeat(i):
        return sum(not torch.equal(run(model, batches[i]), expected[i]) for _ in range(50))

    def train(_):
        for _ in range(20):
            first_output(model(**batches[0])).square().sum().backward()
        return 0

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(repeat, [0, 1])) == [0, 0]
        assert list(pool.map(lambda call: call(1), [repeat, train])) == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_a_truncated_weights_file_is_named(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for opens in (type(model), getattr(transformers, model._auto_class)):
        with pytest.raises(OSError, match=f"{tmp_path}.*truncated or damaged"):
            opens.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_an_override_out_of_range_is_refused(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    override = OVERRIDES[model.config.model_type]
    field, value = next(iter(override.items()))
    for opens in (CASES[name].cls, type(model.config), AutoConfig):
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            opens.from_pretrained(tmp_path, **override)


@pytest.mark.parametrize("name", FROM_BACKBONE)
def test_from_backbone_takes_the_weights_of_every_form(name, backbones):
    model = over_backbone(name, backbones)
    assert model.dtype == torch.float32 and not model.training and model.config.name_or_path == ""
    expected = pretrained_weight(model)
    half = over_backbone(name, backbones, "-base-bf16", dtype="auto")  # without the prefix of a model with a head
    assert half.dtype == torch.bfloat16
    assert torch.equal(pretrained_weight(half), expected.bfloat16())
    assert over_backbone(name, backbones, dtype="bfloat16").dtype == torch.bfloat16
    for options in ({"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        assert torch.equal(pretrained_weight(over_backbone(name, backbones, **options)), expected)
    assert torch.equal(pretrained_weight(over_backbone(name, backbones, "-variant", variant="fp16")), expected)
    with pytest.raises(ValueError, match="'devise_map'.*'device_map'"):
        over_backbone(name, backbones, devise_map="cpu")


@pytest.mark.parametrize("name", FROM_BACKBONE)
def test_what_from_backbone_made_is_saved_under_its_own_names(name, backbones, tmp_path):
    model = over_backbone(name, backbones)
    model.save_pretrained(tmp_path)
    again = CASES[name].cls.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    assert str(backbones) not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("name", FROM_BACKBONE)
def test_from_backbone_quantises_the_backbone_alone(name, backbones, tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed: make test does it")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = over_backbone(name, backbones, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    quantized = {
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and type(m.weight) is not torch.nn.Parameter
    }
    assert quantized and all(n.startswith(model.backbone_path) for n in quantized)
    model.save_pretrained(tmp_path)
    again = CASES[name].cls.from_pretrained(tmp_path)
    if not name.startswith("Exhird"):
        inputs = make_inputs(name)
        inputs |= {"dataset_ids": torch.tensor([0, -1])} if "dataset_ids" in inputs else {}
        assert torch.equal(run(again, inputs), run(model, inputs))


def test_a_backbone_that_lacks_its_own_weights_is_refused(backbones, tmp_path):
    weights = BertModel(encoder_config()).state_dict()
    broken = BertModel(encoder_config())
    broken.save_pretrained(tmp_path, state_dict={k: v for k, v in weights.items() if "layer.1" not in k})
    with pytest.raises(ValueError, match="layer.1"):
        CASES["SekeForTokenClassification"].cls.from_backbone(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_experts_implementations_have_the_names_of_transformers(name):
    model, inputs = make_model(name), make_inputs(name)
    expected = run(model, inputs)
    if model.config.model_type in ("hypernet", "exhird"):  # no experts: as a stock BERT
        model.set_experts_implementation("eager")
        with pytest.raises(ValueError, match="experts"):
            model.set_experts_implementation("grouped_mm")
        return
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="loop"):
        model.set_experts_implementation("loop")
