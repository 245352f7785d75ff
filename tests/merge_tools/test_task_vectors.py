"""TIES and DARE: equal to plain references, for any blocks, threads and interruptions, and what a recipe needs for them."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from safetensors.torch import save_file

from merge_tools import MergeError, add, check, compose, inspect, read_recipe, remove, slices, verify
from merge_tools.averages import AVERAGES
from merge_tools.averaging import from_float, to_float32, to_float64
from merge_tools.checkpoints import Checkpoint, Source, open_source
from merge_tools.output_tensors import OutputTensor
from merge_tools.plan import plan_tensors
from merge_tools.slices import Slice
from merge_tools.task_vectors import estimate, largest, magnitudes_of, random_words
from merge_tools.tensor_files import pack_header, read_header

from .conftest import read_tensors, recipe_of, save_expert
from .test_shard_writer import SHARD, interrupted

METHODS = {
    "ties": {"average": "ties", "density": 0.3},
    "ties, weighted": {"average": "ties", "density": 0.6, "weights": [1, 3, 0.5]},
    "ties of all": {"average": "ties", "density": 1},
    "dare": {"average": "dare", "density": 0.4, "seed": 7},
    "dare, weighted": {"average": "dare", "density": 0.8, "weights": [2, 0, 1]},
    "dare_ties": {"average": "dare_ties", "density": 0.5},
}


def recipe(folders, **options):
    """The first folder is the base, the others are experts."""
    return recipe_of(folders[1:]) | {"base_model": str(folders[0]), **options}


def is_kept(seed, name, tensor, count, density):
    """What DARE keeps, from all of the generator's numbers, so that positions within blocks cannot matter."""
    key = hashlib.sha256(repr((seed, name, tensor)).encode()).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)
    numbers = np.stack([(raw >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)], axis=1).ravel()[:count]
    return numbers < round(density * 2**16)


def reference(base, experts, names, tensor, out, average, density=0.5, weights=None, seed=42):
    """The merged elements: whole tensors, sorted magnitudes, float64."""
    x, kept = to_float64(*base), []
    for expert, name, weight in zip(experts, names, weights or [1.0] * len(experts), strict=True):
        vector = to_float32(*expert) - to_float32(*base)
        if average == "ties":
            smallest = np.sort(np.abs(vector))[-max(1, round(density * len(vector)))]
            vector = np.where(np.abs(vector) >= smallest, vector, 0)
        else:
            vector = np.where(is_kept(seed, name, tensor, len(vector), density), vector, 0)
        if weight:
            kept.append((vector.astype(np.float64), weight))
    total = sum(weight for _, weight in kept) if weights or average == "dare" else 1  # equal weights cancel out
    kept = [(vector, weight / total) for vector, weight in kept]
    if average == "dare":
        merged = sum(vector * weight for vector, weight in kept)
    else:
        merged = np.zeros(len(x))
        for i in range(len(x)):
            up = [(vector[i] * weight, weight) for vector, weight in kept if vector[i] > 0]
            down = [(vector[i] * weight, weight) for vector, weight in kept if vector[i] < 0]
            order = sum(v for v, _ in up) + sum(v for v, _ in down)
            elected = up if order > 0 else down if order < 0 else [(0.0, 1.0)]
            merged[i] = sum(v for v, _ in elected) / sum(w for _, w in elected)
    if average != "ties":
        merged = merged / (round(density * 2**16) / 2**16)
    return from_float(x + merged, out)


def raw(folder, tensor):
    entry = open_source("source", str(folder)).entry(tensor)
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        return np.frombuffer(file.read(entry.nbytes), f"<u{entry.nbytes // entry.elements}"), entry.dtype


@pytest.fixture
def planned(tmp_path):
    """Composes and returns the mixture's shared tensors as `{name: (raw, dtype)}`."""

    def run(folders, **options):
        out = tmp_path / "out"
        compose(recipe(folders, **options), out)
        shared = [name for name in open_source("out", str(out)).checkpoint.entries if ".block_sparse_moe." not in name]
        return out, {name: raw(out, name) for name in shared}

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_shared_weights_equal_a_plain_reference(method, dtype, experts, planned):
    folders, options = experts(4, dtype=dtype), METHODS[method]
    out, tensors = planned(folders, **options)
    assert "model.embed_tokens.weight" in tensors and "model.norm.weight" in tensors
    names = [folder.name for folder in folders[1:]]
    for name, (values, written) in tensors.items():
        expected = reference(
            raw(folders[0], name), [raw(f, name) for f in folders[1:]], names, name, written, **options
        )
        assert np.array_equal(values, expected), name
    assert verify(out)["ok"] and verify(out)["compared"]["shared"] == len(tensors)
    assert options["average"] in inspect(out)["shared"]
    assert options["average"] in (out / "README.md").read_text()


def test_mixed_dtypes_are_merged_exactly(experts, planned):
    folders = [experts(4)[0], experts(4, dtype="bfloat16")[1], experts(4, dtype="float16")[2], experts(4)[3]]
    out, tensors = planned(folders, **METHODS["ties"], dtype="float32")
    names = [folder.name for folder in folders[1:]]
    for name, (values, _) in tensors.items():
        expected = reference(
            raw(folders[0], name), [raw(f, name) for f in folders[1:]], names, name, "F32", **METHODS["ties"]
        )
        assert np.array_equal(values, expected), name


def test_tied_embeddings_are_one_tensor(experts, planned):
    folders = experts(3, tied=True)
    _, tensors = planned(folders, **METHODS["dare"])
    assert "lm_head.weight" not in tensors
    name = "model.embed_tokens.weight"
    expected = reference(
        raw(folders[0], name),
        [raw(f, name) for f in folders[1:]],
        [f.name for f in folders[1:]],
        name,
        "F32",
        **METHODS["dare"],
    )
    assert np.array_equal(tensors[name][0], expected)


def blocks_of(folders, options):
    checked = read_recipe(recipe(folders, **options, gate_mode="zeros"))
    base = open_source("base", str(folders[0]))
    sources = [open_source(f.name, str(f)) for f in folders[1:]]
    tensors = plan_tensors(checked, base, sources)
    return {t.name: np.concatenate(list(t.blocks())) for t in tensors if t.slices and "layers.1." not in t.name}


@pytest.mark.parametrize("method", ["ties", "dare", "dare_ties"])
@pytest.mark.parametrize("chunk", [13, 1000])
def test_blocks_of_any_size_give_the_same_tensors(method, chunk, experts, monkeypatch):
    folders = experts(4)
    expected = blocks_of(folders, METHODS[method])
    monkeypatch.setattr(slices, "CHUNK", chunk)
    for name, values in blocks_of(folders, METHODS[method]).items():
        assert np.array_equal(values, expected[name]), name


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_an_interrupted_run_resumes_to_the_same_bytes(method, experts, tmp_path):
    content = recipe(experts(4), **METHODS[method])
    compose(content, tmp_path / "whole", shard_bytes=SHARD)
    interrupted(content, tmp_path / "out")
    for change in ({"density": 0.5}, {"average": "dare_ties"}, {"seed": 8} if method == "dare" else {"density": 0.31}):
        with pytest.raises(MergeError, match="another recipe"):
            compose(content | change, tmp_path / "out", shard_bytes=SHARD, resume=True)
    compose(content, tmp_path / "out", shard_bytes=SHARD, resume=True)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_rows_of_a_longer_vocabulary_are_merged_where_the_base_has_them(tmp_path):
    extra = ("<owl>", "<mast>")
    folders = [
        save_expert(tmp_path / name, seed, extra_tokens=extra[:count])
        for seed, (name, count) in enumerate({"base": 1, "birds": 2, "ships": 1, "tools": 0}.items())
    ]
    out, name = tmp_path / "out", "model.embed_tokens.weight"
    compose(recipe(folders, **METHODS["dare"]), out, allow=["vocab"])
    merged, dense = read_tensors(out)[name], [read_tensors(folder)[name] for folder in folders]
    last = len(dense[0]) - 1  # the row that base, birds and ships have
    count, width = last * 32, 32

    def part(k, start, stop):
        values, dtype = raw(folders[k], name)
        return values[start * width : stop * width], dtype

    names = [folder.name for folder in folders[1:]]
    common = reference(part(0, 0, last), [part(k, 0, last) for k in (1, 2, 3)], names, name, "F32", **METHODS["dare"])
    assert np.array_equal(merged[:last].numpy().ravel().view("<u4"), common)
    masks = [is_kept(7, n, name, count + width, 0.4)[count:] for n in names[:2]]
    vectors = [
        np.where(mask, (dense[k][last] - dense[0][last]).numpy(), 0) for k, mask in zip((1, 2), masks, strict=True)
    ]
    merged_vectors = sum(vector.astype(np.float64) * 0.5 for vector in vectors) / (round(0.4 * 2**16) / 2**16)
    both = dense[0][last].numpy().astype(np.float64) + merged_vectors
    assert np.array_equal(merged[last].numpy(), both.astype(np.float32))
    assert np.array_equal(merged[last + 1].numpy(), dense[1][last + 1].numpy())  # the base has no such row
    assert verify(out)["ok"]


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_edits_with_recompose_equal_a_new_compose(method, experts, tmp_path):
    folders = experts(4)
    options = METHODS[method] | {"gate_mode": "zeros"}
    compose(recipe(folders[:3], **options), tmp_path / "two")
    compose(recipe(folders, **options), tmp_path / "three")
    add(tmp_path / "two", folders[3], tmp_path / "added", recompose=True)
    add(tmp_path / "two", folders[3], tmp_path / "kept")
    remove(tmp_path / "three", folders[3].name, tmp_path / "removed", recompose=True)
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("two", "three", "added", "removed")
    }
    assert weights["added"] == weights["three"] and weights["removed"] == weights["two"]
    kept, two = read_tensors(tmp_path / "kept"), read_tensors(tmp_path / "two")
    assert all((kept[name] == two[name]).all() for name in two if ".block_sparse_moe." not in name)
    assert verify(tmp_path / "kept")["ok"] and verify(tmp_path / "added")["ok"]


def test_a_mean_of_identical_experts_is_the_expert(experts, tmp_path):
    folders = experts(3, identical=True)
    compose(recipe([experts(4)[3], *folders], average="ties", density=1, dtype="float32"), tmp_path / "out")
    ours, dense = read_tensors(tmp_path / "out"), read_tensors(folders[0])
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(ours[name].numpy(), dense[name].numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "dtype, scale, message", [("float16", 1e5, "float16's maximum"), ("float32", 1e38, "overflows float32")]
)
def test_an_overflow_is_an_error(dtype, scale, message, experts, tmp_path):
    own = save_expert(tmp_path / "own", 3)
    tensors = read_tensors(own)
    save_file({name: t * scale if "q_proj" in name else t for name, t in tensors.items()}, own / "model.safetensors")
    with pytest.raises(MergeError, match=message):
        compose(
            recipe([experts(3)[0], experts(3)[1], own], average="dare", density=0.05, dtype=dtype), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "method, count",
    [("dare_ties", 1 << 19), ("ties", 1 << 19), ("ties", 1 << 21)],  # the cutoffs of the last are estimated first
)
def test_memory_does_not_grow_with_the_size_and_the_number_of_experts(method, count, tmp_path):
    raws = np.random.default_rng(0).integers(0, 1 << 14, count, dtype=np.uint16)
    header, _ = pack_header([("w", "BF16", (count,))])
    checkpoints = []
    for name, values in (("base", raws), ("expert", np.roll(raws, 1))):
        (tmp_path / name).write_bytes(header + values.tobytes())
        checkpoints.append(Checkpoint(tmp_path, {}, {"w": read_header(tmp_path / name)[0]}))
    sources = [Source(f"expert {i}", str(tmp_path), checkpoints[i > 0]) for i in range(40)]
    part = Slice("w", tuple(sources[1:]), (1 / 39,) * 39, 0, count, AVERAGES[method], sources[0], 0.5, 1)
    tensor = OutputTensor("w", "BF16", (count,), (part,))
    tracemalloc.start()
    try:
        assert all(np.array_equal(block, block) for block in tensor.blocks())
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # the experts have 40 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["random", "few values", "zeros"])
def test_the_cutoff_is_the_exact_rank(kind):
    generator = np.random.default_rng(0)
    values = {
        "random": np.abs(generator.standard_normal(5000, np.float32)),
        "few values": generator.integers(0, 5, 5000).astype(np.float32) * 2**-20,
        "zeros": np.zeros(5000, np.float32),
    }[kind]
    bits = values.view(np.uint32)
    for rank in (1, 2, 499, 2500, 5000):
        found = largest(lambda: iter(np.split(bits, 5)), rank)
        assert np.sort(bits)[-rank] == found


@pytest.mark.parametrize("kind", ["random", "few values", "zeros", "sorted", "outliers"])
@pytest.mark.parametrize("density", [1e-5, 0.2, 0.5, 0.99])
def test_the_cutoff_is_exact_with_an_estimate_right_or_wrong(kind, density):
    generator, count = np.random.default_rng(0), 700_001
    values = {
        "random": generator.standard_normal(count, np.float32),
        "few values": generator.integers(0, 5, count).astype(np.float32) * 2**-20,
        "zeros": np.zeros(count, np.float32),
        "sorted": np.sort(generator.standard_normal(count, np.float32)),
        "outliers": np.where(np.arange(count) % 3000 < 400, generator.standard_normal(count, np.float32), 0),
    }[kind]
    bits, rank, readings = magnitudes_of(values.astype(np.float32)), max(1, round(density * count)), []

    def read(start=0, stop=count):
        readings.append(stop - start)
        yield from np.array_split(bits[start:stop], 5)

    near = estimate(read, count, rank)
    assert near is not None
    assert sum(readings) < count / 32
    for place in (near, (0, 1), (1, 2), (near[1], near[1] + 9), (0, 1 << 30)):
        readings.clear()
        assert largest(read, rank, place) == np.sort(bits)[-rank]
        if kind == "random" and place == near and 0.1 < density < 0.9:
            assert readings == [count]


def test_dare_keeps_the_given_share_and_differs_by_seed_expert_and_tensor():
    kinds = [(1, "a", "x"), (2, "a", "x"), (1, "b", "x"), (1, "a", "y")]
    kept = [random_words(*kind, 5, 100_005) < 0.3 * 2**16 for kind in kinds]
    for i, mask in enumerate(kept):
        assert abs(mask.mean() - 0.3) < 0.01
        for other in kept[:i]:
            assert abs((mask & other).mean() - 0.09) < 0.01


@pytest.mark.parametrize(
    "options, message",
    [
        ({"average": "ties"}, "average: ties needs base_model"),
        ({"average": "dare", "base_model": "b", "density": 0}, "density in the recipe must be a number above 0"),
        ({"average": "dare", "base_model": "b", "density": 1.5}, "density in the recipe must be a number above 0"),
        ({"average": "mean", "density": 0.5}, "density is for average: ties, dare, dare_ties, but average is mean"),
        ({"average": "tie", "base_model": "b"}, "Did you mean 'ties'"),
    ],
)
def test_a_recipe_that_cannot_be_merged_is_refused(options, message):
    with pytest.raises(MergeError, match=message):
        read_recipe({"experts": ["a", "c"], **options})


def test_names_of_mergekit_are_read():
    for name, ours in (("dare_linear", "dare"), ("linear", "mean")):
        assert read_recipe({"experts": ["a", "c"], "base_model": "b", "average": name}).average == ours


def test_attention_is_routed_by_one_key(experts, tmp_path):
    folders = experts(3)
    compose(recipe_of(folders, attention="routed"), tmp_path / "short")
    compose(recipe_of(folders, router_layers=["q_proj", "k_proj", "v_proj", "o_proj", "mlp"]), tmp_path / "long")
    for file in ("model.safetensors", "config.json", "merge_record.json"):
        assert (tmp_path / "short" / file).read_bytes() == (tmp_path / "long" / file).read_bytes()
    assert verify(tmp_path / "short")["ok"]
    with pytest.raises(MergeError, match="attention"):
        read_recipe(recipe_of(folders, attention="routed", format="mixtral"))


def test_an_expert_that_is_the_base_is_a_warning(experts):
    folders = experts(3)
    report = check(recipe_of(folders) | {"base_model": str(folders[0]), "average": "dare"})
    assert report.ok and any("its task vector is zero" in warning.message for warning in report.warnings)
    report = check(recipe_of(folders) | {"base_model": str(folders[0]), "average": "mean"})
    assert not any("task vector" in warning.message for warning in report.warnings)
