"""Every average and every gate mode without texts: equal to a plain reference, repeated by `verify`, kept when an expert is added."""

import numpy as np
import pytest

from merge_tools import MergeError, add, compose, inspect, read_recipe, verify
from merge_tools.averages import AVERAGES, slerp_factors
from merge_tools.gate_modes import GATE_MODES, GATE_STD, DrawnMode

from .conftest import read_tensors, recipe_of
from .test_task_vectors import METHODS


def slerp(base, one, two, t):
    """As in mergekit: the angle is that of the unit vectors."""
    a = np.arccos(np.sum(one / np.linalg.norm(one) * (two / np.linalg.norm(two))))
    return (np.sin((1 - t) * a) * one + np.sin(t * a) * two) / np.sin(a)


# average -> the merged tensor, given the base, two experts, and the weight of the second
REFERENCES = {
    "mean": lambda base, one, two, t: (1 - t) * one + t * two,
    "base": lambda base, one, two, t: base,
    "slerp": slerp,
}
# gate mode -> whether rows `(E, d)` are what they should be
ROWS = {
    "random": lambda rows: abs(rows.std() - GATE_STD) < 0.3 * GATE_STD,
    "zeros": lambda rows: not rows.any(),
    "orthogonal": lambda rows: np.allclose(rows @ rows.T, np.eye(len(rows)) * rows.shape[1] * GATE_STD**2, atol=1e-6),
}


def test_every_average_and_gate_mode_is_tested():
    assert {*REFERENCES, *(options["average"] for options in METHODS.values())} == set(AVERAGES)
    assert {*ROWS, "none"} == {name for name, mode in GATE_MODES.items() if isinstance(mode, DrawnMode)}


@pytest.mark.parametrize("average", REFERENCES)
def test_shared_weights_equal_the_formula(average, experts, tmp_path):
    base, *folders = experts(3)
    recipe = recipe_of(folders, base_model=str(base), average=average, weights=[1, 3])
    compose(recipe, tmp_path / "out")
    sources, merged = [read_tensors(folder) for folder in (base, *folders)], read_tensors(tmp_path / "out")
    shared = [name for name in sources[0] if name in merged]
    assert len(shared) > 5
    for name in shared:
        inputs = [source[name].double().numpy() for source in sources]
        expected = REFERENCES[average](*inputs, 0.75)
        np.testing.assert_allclose(merged[name].double().numpy(), expected, rtol=2e-6, atol=1e-8, err_msg=name)
    assert verify(tmp_path / "out")["ok"] and verify(tmp_path / "out")["compared"]["shared"] == len(shared)
    assert average in inspect(tmp_path / "out")["shared"] and average in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "products, expected",
    [([[4, 0], [0, 9]], [np.sqrt(0.5)] * 2), ([[4, 6], [6, 9]], [0.5] * 2), ([[0, 0], [0, 9]], [0.5] * 2)],
    ids=["at right angles", "parallel", "of zero"],
)
def test_factors_of_slerp(products, expected):
    assert slerp_factors(np.array(products, float), 0.5) == pytest.approx(expected, abs=1e-7)


def test_slerp_is_for_two_experts():
    with pytest.raises(MergeError, match="slerp is for 2 experts, but the recipe has 3"):
        read_recipe({"experts": ["a", "b", "c"], "average": "slerp"})


@pytest.mark.parametrize("gate_mode", ROWS)
def test_gates_without_texts(gate_mode, experts, tmp_path):
    """A new expert gets the row of a new compose, and the other rows do not change."""
    folders = experts(4)
    compose(recipe_of(folders[:3], gate_mode=gate_mode), tmp_path / "three")
    compose(recipe_of(folders, gate_mode=gate_mode), tmp_path / "four")
    add(tmp_path / "three", folders[3], tmp_path / "added")
    three, four, added = (read_tensors(tmp_path / name) for name in ("three", "four", "added"))
    gates = [name for name in four if name.endswith(".gate.weight")]
    assert len(gates) == 2
    for name in gates:
        assert ROWS[gate_mode](four[name].double().numpy()), name
        assert np.array_equal(four[name], added[name]) and four[name].shape == (4, 32)
        assert np.array_equal(four[name][:3], three[name])
    for folder in ("four", "added"):
        assert verify(tmp_path / folder)["ok"] and verify(tmp_path / folder)["compared"]["gates"] == len(gates)
