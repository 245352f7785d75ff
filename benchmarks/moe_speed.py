"""Speed of LexiconForCausalLM and of stock models with the same weights: Mixtral for tokens, a dense Llama for domains.

    python benchmarks/moe_speed.py                   # on a CPU in float32, 10 to 20 minutes on two cores
    python benchmarks/moe_speed.py --device cuda     # in bfloat16, with larger sizes; writes moe_speed_cuda.json

The token policy is compared with stock Mixtral, with transformers' `grouped_mm` and `eager` experts. The domain policy is compared
with one dense Llama, for rows of one domain and for rows of all domains in turn. Prefill is one forward pass that fills a cache,
decoding is `generate` for one sequence, training is forward and backward. The script first checks that each pair computes the
same.
"""

import functools
from collections.abc import Iterator

import torch
from timing import compare, measure_parts, speed_parser
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from modeling_lexicon import LexiconConfig, LexiconForCausalLM

E, K = 4, 2
VOCABULARY = 2048  # small: the head is the same in all of them
# device: (hidden, intermediate, layers, heads), (sequences, length)
MODELS = {"cpu": [(512, 1408, 8, 8), (1024, 2816, 4, 16)], "cuda": [(1024, 2816, 16, 16), (2048, 5632, 16, 32)]}
BATCHES = {"cpu": [(1, 64), (4, 64), (4, 256)], "cuda": [(1, 128), (8, 128), (8, 512), (16, 1024)]}
PROMPT, WRITTEN = 32, 64


def sizes_of(hidden: int, intermediate: int, layers: int, heads: int) -> dict:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,  # generation runs to its full length
        "pad_token_id": None,
    }


def filled(model, weights: dict[str, torch.Tensor]):
    """The model with these weights; gates that it does not have are left out."""
    report = model.load_state_dict(weights, strict=False)
    if report.missing_keys or any(not key.endswith(".gate.weight") for key in report.unexpected_keys):
        raise RuntimeError(f"{type(model).__name__}: {report}")
    return model


def dense_weights(weights: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
    """A mixture's weights -> the Llama with this expert as its only MLP."""
    found = {}
    for name, value in weights.items():
        place = name.split("experts.")[0]
        if name.endswith("gate_up_proj"):
            found[place + "gate_proj.weight"], found[place + "up_proj.weight"] = value[expert].chunk(2)
        elif name.endswith("experts.down_proj"):
            found[place + "down_proj.weight"] = value[expert]
        elif not name.endswith(".gate.weight"):
            found[name] = value
    return found


def models_of(size: tuple[int, ...], device: str) -> dict[str, torch.nn.Module]:
    """The same weights in five models."""
    torch.manual_seed(0)
    sizes, experts = sizes_of(*size), {"num_local_experts": E, "num_experts_per_tok": K}
    routed = MixtralConfig(**sizes, **experts, sliding_window=None)
    found = {"stock": MixtralForCausalLM(routed)}
    weights = found["stock"].state_dict()
    with torch.no_grad():  # gates of N(0, 0.02) on normed states hardly tell experts apart; these do
        for name, value in weights.items():
            if name.endswith(".gate.weight"):
                value.normal_(std=size[0] ** -0.5)
    found["stock loop"] = filled(MixtralForCausalLM(routed), weights)
    found["stock loop"].set_experts_implementation("eager")
    for policy in ("token", "domain"):
        config = LexiconConfig(**sizes, **experts, routing_policy=policy)
        found[policy] = filled(LexiconForCausalLM(config), weights)
    found["dense"] = filled(LlamaForCausalLM(LlamaConfig(**sizes)), dense_weights(weights, 0))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {name: model.to(device, dtype) for name, model in found.items()}


def groups_of(models: dict, batch: int, device: str) -> dict[str, dict]:
    """The comparisons, the stock model first: title -> {name: a function of the model's arguments}."""

    def of(name, ids=None):
        return functools.partial(models[name], **({} if ids is None else {"domain_ids": ids}))

    one = torch.zeros(batch, dtype=torch.long, device=device)
    token = {"stock": of("stock"), "stock loop": of("stock loop"), "ours": of("token")}
    domain = {"dense": of("dense"), "one domain": of("domain", one)}
    if batch > 1:
        domain["mixed domains"] = of("domain", torch.arange(batch, device=device) % E)
    return {"token": token, "domain": domain}


def check_equal(models: dict, device: str):
    """Token policy = Mixtral, domain 0 = the dense Llama; in float32, for bfloat16 flips routers' near ties, and a mixed batch
    is its rows one by one."""
    dtypes = {name: model.dtype for name, model in models.items()}
    ids = torch.randint(VOCABULARY, (E, 48), device=device)
    for model in models.values():
        model.float()
    with torch.no_grad():
        calls = {title: groups_of(models, E, device)[title] for title in ("token", "domain")}
        pairs = [(call(ids).logits, calls["token"]["stock"](ids).logits) for call in calls["token"].values()]
        pairs.append((calls["domain"]["one domain"](ids).logits, calls["domain"]["dense"](ids).logits))
        mixed = calls["domain"]["mixed domains"](ids).logits
        pairs.append((mixed[:1], calls["domain"]["dense"](ids[:1]).logits))
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
        if torch.allclose(mixed[1:], calls["domain"]["dense"](ids[1:]).logits, atol=1e-3):
            raise RuntimeError("Other domains give the same as domain 0: this comparison sees nothing.")
    for name, model in models.items():
        model.to(dtypes[name])


def prefill(call, ids: torch.Tensor) -> None:
    """One forward pass that fills a cache."""
    with torch.inference_mode():
        call(ids, use_cache=True, logits_to_keep=1)


def decode(call, ids: torch.Tensor) -> None:
    """`generate` for WRITTEN tokens."""
    call.func.generate(ids, do_sample=False, max_new_tokens=WRITTEN, **call.keywords)


def train(call, ids: torch.Tensor) -> None:
    """Forward and backward."""
    call.func.zero_grad(set_to_none=True)
    call(ids, labels=ids, use_cache=False).loss.backward()


WAYS = {"prefill": prefill, "decode": decode, "training": train}


def measure(title: str, options) -> Iterator[dict]:
    """The rows of a comparison, "token" or "domain"; times are compared with the stock model's."""
    for size in MODELS[options.device]:
        models = models_of(size, options.device)
        check_equal(models, options.device)
        shape = dict(zip(("d", "I", "layers"), size, strict=False))
        for way in options.ways:
            for batch, length in [(1, PROMPT)] if way == "decode" else BATCHES[options.device]:
                ids = torch.randint(VOCABULARY, (batch, length), device=options.device)
                candidates = groups_of(models, batch, options.device)[title]
                for call in candidates.values():
                    call.func.train(way == "training")
                calls = {name: functools.partial(WAYS[way], call, ids) for name, call in candidates.items()}
                yield compare(calls, options.rounds, way=way, **shape, sequences=batch, length=length)
                for call in candidates.values():
                    call.func.zero_grad(set_to_none=True)


def main():
    """Times both comparisons at all sizes."""
    parts = {title: lambda options, title=title: measure(title, options) for title in ("token", "domain")}
    parser = speed_parser(__doc__, parts, devices=tuple(MODELS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    options = parser.parse_args()
    measure_parts(options, "moe_speed", parts, experts=E, experts_per_token=K, ways=options.ways, new=WRITTEN)


if __name__ == "__main__":
    main()
