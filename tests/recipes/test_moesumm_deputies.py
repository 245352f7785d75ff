"""The benchmark of a MoeSumm model's deputies, on tiny models with random weights and synthetic texts."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.modeling_moesumm.summaries import POSITIONS, small_tokenizer, story, summaries_by, writing_moesumm
from tests.recipes.helpers import write_rows

SPEC = importlib.util.spec_from_file_location(
    "moesumm_deputies", Path(__file__).parents[2] / "benchmarks" / "moesumm_deputies.py"
)
deputies = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(deputies)

SETS = ("news", "letters", "papers")
KINDS = {"moesumm": {}, "no_dataset": {"dataset_aware": False}, "flat_moe": {"main_expert": False}}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def some_rows(name: str) -> list[dict]:
    """Five texts, one of them longer than the encoder reads, and one summary longer than the decoder writes."""
    sizes = zip((12, 60, 5, 20, 9), (4, 6, 50, 3, 8), strict=True)
    seed = SETS.index(name) * 100
    return [
        {"document": story(long, seed + i), "summary": story(short, seed + i + 50), "dataset": name}
        for i, (long, short) in enumerate(sizes)
    ]


def counted_alone(model, tokenizer, rows: list[dict]) -> dict:
    """(side, layer, deputy) -> tokens and their gates' sum, by a pass with labels for each row alone."""
    found: dict = {}
    cut = {"truncation": True, "max_length": POSITIONS, "return_tensors": "pt"}
    for row in rows:
        ids, labels = (tokenizer(row[name], **cut).input_ids for name in ("document", "summary"))
        with torch.no_grad():
            outputs = model(input_ids=ids, labels=labels, dataset=row["dataset"], output_router_indices=True)
        assert (
            outputs.encoder_expert_indices[0].shape == ids.shape
            and outputs.decoder_expert_indices[0].shape == labels.shape
        )
        for side in ("encoder", "decoder"):
            for layer, pair in enumerate(
                zip(outputs[f"{side}_expert_indices"], outputs[f"{side}_expert_weights"], strict=True)
            ):
                for deputy, gate in zip(*(x[0].tolist() for x in pair), strict=True):
                    tokens, gates = found.get((side, layer, deputy), (0, 0.0))
                    found[side, layer, deputy] = (tokens + 1, gates + gate)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_each_row_alone_whatever_the_batch(kind, tokenizer):
    model = writing_moesumm(tokenizer, **KINDS[kind])
    rows = some_rows("letters")
    alone = counted_alone(model, tokenizer, rows)
    for batch_size in (1, 2, 5):
        counts = deputies.count_tokens("letters", rows, model, tokenizer, batch_size)
        assert len(counts) == 2 * 2 * 3
        for row in counts.itertuples():
            tokens, gates = alone.get((row.side, row.layer, row.deputy), (0, 0.0))
            assert row.tokens == tokens and row.gates == pytest.approx(gates, rel=1e-5)
    read = {
        side: sum(tokens for (s, layer, _), (tokens, _) in alone.items() if (s, layer) == (side, 0))
        for side, *_ in alone
    }
    shares = deputies.deputy_shares(counts, ["data set", "side", "layer"])
    for (_, side, _), own in shares.groupby(["data set", "side", "layer"]):
        assert own["share"].sum() == pytest.approx(100) and own["tokens"].sum() == read[side]
    gates = shares["mean gate"].dropna()
    assert (gates == 1).all() if kind == "flat_moe" else gates.between(1 / 3, 1).all()
    assert shares["share"].nunique() > 4  # the deputies are used, and not all alike


def test_shares_of_several_layers_and_data_sets_count_each_token_once():
    counts = pd.DataFrame(
        [("a", "e", 0, 0, 30, 15.0), ("a", "e", 0, 1, 10, 9.0), ("b", "e", 0, 0, 0, 0.0), ("b", "e", 0, 1, 60, 30.0)],
        columns=["data set", "side", "layer", "deputy", "tokens", "gates"],
    )
    shares = deputies.deputy_shares(counts, ["data set"])
    assert shares["share"].tolist() == [75, 25, 0, 100] and np.isnan(shares["mean gate"][2])
    assert shares["mean gate"].tolist()[:2] == [0.5, 0.9]
    (layer,) = deputies.unevenness(counts).to_dict("records")
    assert layer["largest share"] == 70 and layer["of deputy"] == 1 and 0.7 < layer["Cramer's V"] < 0.8


@pytest.fixture
def run(tokenizer, tmp_path, monkeypatch):
    """run(kind, rows) -> the summaries of two data sets' first rows in the work folder."""

    def call(kind: str, rows: int) -> dict[str, list[str]]:
        model = writing_moesumm(tokenizer, **KINDS[kind])
        model.generation_config.max_length = 20
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        for name in SETS[:2]:
            write_rows(tmp_path / name / "test.jsonl", some_rows(name))
        places = [f"{name}={tmp_path / name}" for name in SETS[:2]]
        argv = [
            "x",
            "--model",
            tmp_path / "model",
            "--datasets",
            *places,
            "--work",
            tmp_path / "work",
            "--num-beams",
            2,
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, [*argv, "--max-rows", rows])))
        deputies.main()
        return {
            path.stem: [json.loads(line)["prediction"] for line in path.read_text().splitlines()]
            for path in (tmp_path / "work").glob("*.jsonl")
        }

    return call


def test_flat_moe_has_no_summaries_by_a_main_expert(run):
    names = {
        f"{name}-{routing}" for name in SETS[:2] for routing in ("own_routing", *(f"deputy_{i}" for i in range(3)))
    }
    assert {name: len(texts) for name, texts in run("flat_moe", 2).items()} == dict.fromkeys(names, 2)


def test_each_deputy_writes_its_own_summaries(run, tokenizer, tmp_path, capsys):
    written = {name: texts for name, texts in run("moesumm", 5).items() if name.startswith("letters")}
    out = capsys.readouterr().out
    assert "Cramer's V" in out and out.count("| own routing") == 2 and out.count("| deputy 2") == 2
    assert len({tuple(texts) for texts in written.values()}) == 5
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    text = some_rows("letters")[2]["document"]
    options = {"max_length": 20, "num_beams": 2}
    alone = summaries_by(model, text, tokenizer, dataset="letters", deputy_id=1, **options)
    assert alone == written["letters-deputy_1"][2]
    assert summaries_by(model, text, tokenizer, dataset=None, **options) == written["letters-main_expert"][2]
