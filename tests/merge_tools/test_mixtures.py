"""Mixtures as models, compared with the dense experts and with a Mixtral built by hand."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoTokenizer, MixtralForCausalLM

from merge_tools import compose

from .conftest import contents, logits_of, open_model, read_tensors, recipe_of, run_python

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = {
    "mlp": {"router_layers": "mlp"},
    "mlp of one layer": {"router_layers_index": [1]},
    "two linears": {"router_layers": ["q_proj", "up_proj"]},
    "all linears": {"router_layers": ALL_LINEARS},
    "attention and mlp": {"router_layers": ["mlp", "o_proj", "k_proj"], "router_layers_index": [0]},
}
POLICIES = {
    "token, top 1": {"experts_per_token": 1},
    "token, top 2": {"experts_per_token": 2},
    "token, all": {"experts_per_token": 3},
    "sequence_soft": {"routing_policy": "sequence_soft"},
    "sequence_hard": {"routing_policy": "sequence_hard"},
    "domain": {"routing_policy": "domain"},
    "domain with a gate": {"routing_policy": "domain", "gate_mode": "router_input"},
}
PROMPTS = {"birds": ["owl owl owl", "wing"], "ships": ["mast mast mast", "the sea"], "tools": ["saw saw", "axe axe"]}
TEXTS = ["owl owl", "a mast is in the wind of the sea", "saw", "axe axe axe axe axe"]
DOMAINS = torch.tensor([0, 1, 2, 1])
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_layers = pytest.mark.parametrize("layers", LAYERS)


def with_prompts(folders):
    """Experts for a recipe; the other experts' prompts are negative prompts, so the gates separate the texts."""
    others = {name: [text for n, texts in PROMPTS.items() if n != name for text in texts] for name in PROMPTS}
    return [
        {"source_model": str(f), "positive_prompts": PROMPTS[f.name], "negative_prompts": others[f.name]}
        for f in folders
    ]


@pytest.fixture(scope="module")
def mixture(experts, tmp_path_factory):
    """mixture(identical, dtype, **recipe) -> folder with three experts and gates of their prompts; each made once."""
    made = {}

    def make(identical=False, dtype="float32", **options):
        options = {"gate_mode": None if options.get("routing_policy") == "domain" else "router_input", **options}
        key = json.dumps([identical, dtype, options])
        if key not in made:
            folders = experts(3, identical=identical, dtype=dtype)
            made[key] = tmp_path_factory.mktemp("mixture") / "out"
            compose(recipe_of(with_prompts(folders), **options), made[key])
        return made[key]

    return make


@pytest.fixture(scope="module")
def texts(mixture):
    """Four texts of different lengths, padded on the left."""
    return AutoTokenizer.from_pretrained(mixture())(
        TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False
    )


def routed_by(policy):
    """The inputs that select the experts: with the domain policy, each row's expert."""
    return {"domain_ids": DOMAINS} if policy == "domain" else {}


@each_policy
@each_layers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identical_experts_are_the_dense_model(experts, mixture, texts, dtype, layers, policy):
    dense = logits_of(open_model(experts(3, identical=True, dtype=dtype)[0]), **texts)
    options = {**LAYERS[layers], **POLICIES[policy]}
    result = logits_of(open_model(mixture(True, dtype, **options)), **texts, **routed_by(policy))
    real = texts.attention_mask.bool()
    if dtype == "bfloat16":  # as the dense model against itself
        assert torch.equal(result[real], dense[real])
    else:
        assert_close(result[real], dense[real], atol=1e-5, rtol=1e-5)
    if dtype == "float32":  # negative control: experts that differ
        other = logits_of(open_model(mixture(False, dtype, **options)), **texts, **routed_by(policy))
        assert (other - dense)[real].abs().max() > 0.5


def mixtral_by_hand(folders, gates, config):
    """Transformers' Mixtral filled with the dense experts' tensors, without our code."""
    model, dense = MixtralForCausalLM(config).eval(), [open_model(folder) for folder in folders]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".mlp." not in name:
                p.copy_(sum(dict(d.named_parameters())[name].double() for d in dense) / len(dense))
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.weight.copy_(gates[layer])
            for e, d in enumerate(dense):
                mlp = d.model.layers[layer].mlp
                block.mlp.experts.gate_up_proj[e] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
                block.mlp.experts.down_proj[e] = mlp.down_proj.weight
    return model


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_mixture_equals_a_mixtral_built_by_hand(experts, mixture, texts, k):
    folder, folders = mixture(experts_per_token=k), experts(3)
    tensors, config = read_tensors(folder), AutoConfig.from_pretrained(folder)
    gates = [tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(2)]
    result = logits_of(open_model(folder), **texts)
    assert torch.equal(result, logits_of(mixtral_by_hand(folders, gates, config), **texts))
    lexicon = logits_of(open_model(mixture(experts_per_token=k, format="lexicon")), **texts)
    real = texts.attention_mask.bool()
    assert_close(lexicon[real], result[real], atol=1e-5, rtol=1e-5)
    rolled = mixtral_by_hand([*folders[1:], folders[0]], gates, config)  # negative control: experts in another order
    assert (logits_of(rolled, **texts) - result)[real].abs().max() > 0.1


OPEN = """
import json, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_lexicon", "merge_tools"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
for name in ("modeling_lexicon", "merge_tools"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} could be imported")
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

out, ids, *folders = sys.argv[1:]
ids, found, classes = torch.tensor(json.loads(ids)), {}, []
for i, folder in enumerate(folders):
    options = {} if folder.endswith("stock") else {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        found[f"logits {i}"] = model(ids).logits
    found[f"text {i}"] = model.generate(ids, do_sample=False, min_new_tokens=6, max_new_tokens=6)
    classes.append(f"{type(model).__module__}.{type(model).__name__}")
    body = AutoModel.from_pretrained(folder, **options).eval()
    assert all(torch.equal(p, model.model.state_dict()[name]) for name, p in body.state_dict().items())
save_file(found, out)
print("FOUND" + json.dumps(classes))
"""


def test_a_process_without_this_package_opens_both_formats(experts, tmp_path):
    """A Mixtral opens without our code, a lexicon with the code saved next to its weights."""
    recipes = {
        "stock": {},
        "soft": {"routing_policy": "sequence_soft", "router_layers": ["mlp", "q_proj"]},
        "domain": {"routing_policy": "domain", "gate_mode": "random"},
    }
    for name, options in recipes.items():
        compose(recipe_of(experts(3, dtype="bfloat16", tied=True, rope="llama3"), **options), tmp_path / name)
    before = {name: contents(tmp_path / name) for name in recipes}
    ids = torch.arange(3, 27).reshape(2, 12)
    home = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    arguments = [tmp_path / "found", json.dumps(ids.tolist()), *(tmp_path / name for name in recipes)]
    ran = run_python("-P", "-c", OPEN, *arguments, cwd=tmp_path, env={**os.environ, **home})
    classes = json.loads(ran.stdout.split("FOUND")[1])
    assert classes[0] == "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM"
    assert all(c.startswith("transformers_modules.") and c.endswith("LexiconForCausalLM") for c in classes[1:])
    result = load_file(tmp_path / "found")
    for i, name in enumerate(recipes):
        model = open_model(tmp_path / name)
        assert_close(result[f"logits {i}"].float(), logits_of(model, ids), atol=0, rtol=0)
        expected = model.generate(ids, do_sample=False, min_new_tokens=6, max_new_tokens=6)
        assert torch.equal(result[f"text {i}"], expected)
    assert not torch.equal(result["logits 0"], result["logits 1"])
    assert {name: contents(tmp_path / name) for name in recipes} == before
