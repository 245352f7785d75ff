"""The analysis of a MoeSumm model's deputies, on tiny models with random weights and synthetic texts."""

import itertools
import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoModelForSeq2SeqLM

from lexperts.recipes.moesumm import analyse, attributes
from tests.modeling_moesumm.conftest import tiny_backbone
from tests.modeling_moesumm.summaries import POSITIONS, small_tokenizer, story, summaries_by, writing_moesumm
from tests.recipes.helpers import fails, run_main, write_rows

SETS = ("news", "letters", "papers")
SHORT = ("--num-beams", 2, "--summary-length", 20)
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


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Arguments of --datasets."""
    base = tmp_path_factory.mktemp("data")
    for name in SETS:
        write_rows(base / name / "test.jsonl", some_rows(name))
    return {name: f"{name}={base / name}" for name in SETS}


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """kind -> the folder of a model with its tokenizer."""
    base = tmp_path_factory.mktemp("models")
    models = {kind: writing_moesumm(tokenizer, **options) for kind, options in KINDS.items()}
    for kind, model in {**models, "bart": tiny_backbone()}.items():
        model.save_pretrained(base / kind)
        tokenizer.save_pretrained(base / kind)
    return {kind: base / kind for kind in (*KINDS, "bart")}


def run(*given) -> str:
    """What the command prints with these arguments."""
    done = run_main(analyse.main, *given)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- shares ---


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
        counts = analyse.count_tokens("letters", rows, model, tokenizer, batch_size)
        assert len(counts) == 2 * 2 * 3
        for row in counts.itertuples():
            tokens, gates = alone.get((row.side, row.layer, row.deputy), (0, 0.0))
            assert row.tokens == tokens and row.gates == pytest.approx(gates, rel=1e-5)
    read = {
        side: sum(tokens for (s, layer, _), (tokens, _) in alone.items() if (s, layer) == (side, 0))
        for side, *_ in alone
    }
    shares = attributes.deputy_shares(counts, ["data set", "side", "layer"])
    for (_, side, _), own in shares.groupby(["data set", "side", "layer"]):
        assert own["share"].sum() == pytest.approx(1) and own["tokens"].sum() == read[side]
    gates = shares["mean gate"].dropna()
    assert (gates == 1).all() if kind == "flat_moe" else gates.between(1 / 3, 1).all()
    assert shares["share"].nunique() > 4  # the deputies are used, and not all alike


def test_shares_of_several_layers_and_data_sets_count_each_token_once():
    counts = pd.DataFrame(
        [("a", 0, 0, 30, 15.0), ("a", 0, 1, 10, 9.0), ("b", 0, 0, 0, 0.0), ("b", 0, 1, 60, 30.0)],
        columns=["data set", "layer", "deputy", "tokens", "gates"],
    )
    sets, overall = (attributes.deputy_shares(counts, by) for by in (["data set"], []))
    assert sets["share"].tolist() == [0.75, 0.25, 0, 1] and overall["share"].tolist() == [0.3, 0.7]
    assert overall["mean gate"].tolist() == [0.5, 39 / 70] and np.isnan(sets["mean gate"][2])


def test_cramers_v_is_0_for_data_sets_alike_1_for_data_sets_apart_and_without_bias():
    v = attributes.cramers_v
    assert v(np.array([[30, 20, 50], [60, 40, 100]])) == 0
    assert v(np.array([[50, 0, 0], [0, 50, 0], [0, 0, 50]])) == pytest.approx(1)
    assert v(np.array([[50, 0], [70, 0]])) == 0 and np.isnan(v(np.array([[50, 3]])))
    # 40 tokens: phi^2 = 0.1 less (2 - 1)(2 - 1) / 39, over 1 - 1 / 39
    by_hand = ((0.1 - 1 / 39) / (1 - 1 / 39)) ** 0.5
    low, high = 10 - 10**0.5, 10 + 10**0.5
    assert v(np.array([[low, high], [high, low]])) == pytest.approx(by_hand)
    rng = np.random.default_rng(0)
    by_chance = [v(rng.multinomial(30, [0.2, 0.3, 0.5], size=4)) for _ in range(100)]
    assert np.mean(by_chance) < 0.1


def test_a_deputy_that_takes_nearly_all_is_warned_of():
    def description(tokens):
        columns = ["data set", "side", "layer", "deputy"]
        places = itertools.product(("a", "b"), ("encoder", "decoder"), (0, 1), (0, 1))
        counts = pd.DataFrame(places, columns=columns).assign(tokens=np.tile(tokens, 4), gates=1.0)
        both = pd.concat([counts, counts.assign(side="both")])
        overall = attributes.deputy_shares(both, ["side"])
        return attributes.describe_unevenness(overall, attributes.unevenness(counts))

    assert "warning" not in description([50, 50, 60, 40])
    assert "warning: one deputy receives 90% of all tokens" in description([90, 10, 90, 10])
    text = description([90, 10, 10, 90])  # even together, and one-sided in each
    assert "one deputy receives 50%" not in text and "in 4 of 4 layers one deputy receives more than 80%" in text


# --- the script ---


@pytest.fixture(scope="module")
def analysed(places, saved, tmp_path_factory):
    """Output folder and what was printed, with all parts."""
    output = tmp_path_factory.mktemp("analysis")
    given = ["--model", saved["moesumm"], "--datasets", *places.values(), "--output-dir", output, *SHORT]
    return output, run(*given)


def test_one_command_writes_all_tables_and_plots(analysed):
    output, text = analysed
    tables = {"shares", "shares_by_data_set", "shares_overall", "unevenness", "forced", "lengths", "attributes"}
    plots = {"shares", "shares_by_layer", "forced", "lengths", "attributes"}
    assert {path.stem for path in output.glob("*.csv")} == tables
    assert {path.stem for path in output.glob("*.png")} == plots
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.glob("*.png"))
    for part in ("Per cent of the tokens", "Cramer's V", "Summaries by each deputy", "decoding limit", "Attributes"):
        assert part in text
    shares = pd.read_csv(output / "shares_by_data_set.csv")
    assert set(shares["side"]) == {"encoder", "decoder", "both"} and set(shares["data set"]) == set(SETS)
    assert shares.groupby(["data set", "side"])["share"].sum().to_numpy() == pytest.approx(1)
    frame = pd.read_csv(output / "attributes.csv")
    assert frame[[f"share of deputy {i}" for i in range(3)]].sum(axis=1).to_numpy() == pytest.approx(1)
    assert "shares, component 2" in frame


def test_each_deputy_writes_its_own_summaries(analysed, saved, tokenizer):
    frame = pd.read_csv(analysed[0] / "forced.csv")
    assert len(frame) == 3 * (1 + 3 + 1 + 1) and (frame["texts"] == 5).all()
    written = {
        who: [json.loads(line)["prediction"] for line in path.read_text().splitlines()]
        for who in ("own_choice", "deputy_0", "deputy_1", "deputy_2", "main_expert_alone")
        if (path := analysed[0] / "summaries" / f"letters-{who}.jsonl")
    }
    assert len({tuple(texts) for texts in written.values()}) == 5
    model = AutoModelForSeq2SeqLM.from_pretrained(saved["moesumm"])
    text = some_rows("letters")[2]["document"]
    options = {"dataset": "letters", "max_length": 20, "num_beams": 2}
    assert summaries_by(model, text, tokenizer, deputy_id=1, **options) == written["deputy_1"][2]
    assert summaries_by(model, text, tokenizer, **{**options, "dataset": None}) == written["main_expert_alone"][2]
    row = frame[(frame["data set"] == "letters") & (frame["summaries by"] == "deputy 1")].iloc[0]
    assert row["words a summary"] == np.mean([len(text.split()) for text in written["deputy_1"]])
    references = frame[frame["summaries by"] == "reference"]
    assert references["words a summary"].tolist() == [71 / 5] * 3 and references["ROUGE-1"].isna().all()
    assert frame.loc[frame["summaries by"] != "reference", ["ROUGE-1", "ROUGE-L"]].notna().all(axis=None)


def test_lengths_are_those_that_were_written_up_to_the_limit(analysed, saved, tokenizer):
    frame = pd.read_csv(analysed[0] / "lengths.csv")
    assert sorted(set(frame["limit in tokens"])) == [16, 20] and len(frame) == 3 * 2 * 2
    assert frame["words a reference"].tolist() == [71 / 5] * len(frame)
    model = AutoModelForSeq2SeqLM.from_pretrained(saved["moesumm"])
    for who, options in (("own choice", {"dataset": "papers"}), ("main expert alone", {})):
        words, stopped = [], 0
        for row in some_rows("papers"):
            inputs = tokenizer(row["document"], truncation=True, max_length=POSITIONS, return_tensors="pt")
            ids = model.generate(**inputs, num_beams=2, max_length=16, **options)[0].tolist()
            stopped += len(ids) == 16
            words.append(len(tokenizer.decode(ids, skip_special_tokens=True).split()))
        own = frame[(frame["data set"] == "papers") & (frame["summaries by"] == who)].iloc[0]
        assert own["words a summary"] == np.mean(words) and own["share stopped by the limit"] == stopped / 5
    assert analyse.limits_up_to(100) == [16, 32, 64, 100] and analyse.limits_up_to(12) == [12]


def test_flat_moe_has_no_main_expert_and_two_data_sets_no_projection(places, saved, tmp_path):
    given = ("--model", saved["flat_moe"], "--datasets", places["news"], places["papers"], "--output-dir", tmp_path)
    text = run(*given, *SHORT, "--max-rows", 2, "--parts", "forced", "lengths", "attributes")
    assert "at least three data sets" in text and not (tmp_path / "attributes.png").exists()
    frame = pd.read_csv(tmp_path / "forced.csv")
    assert set(frame["summaries by"]) == {"own choice", "deputy 0", "deputy 1", "deputy 2", "reference"}
    assert (frame["texts"] == 2).all()
    assert set(pd.read_csv(tmp_path / "lengths.csv")["summaries by"]) == {"own choice"}


def test_invalid_arguments_are_refused(places, saved, tmp_path):
    def error(kind, *given):
        return fails(analyse.main, "--model", saved[kind], "--output-dir", tmp_path / "out", *given)

    assert "is a 'bart' model, which has no deputies" in error("bart", "--datasets", places["news"])
    other = places["news"].replace("news=", "novels=")
    assert "no datasets 'novels', only 'news', 'letters', 'papers'" in error("moesumm", "--datasets", other)
    assert "--parts 'share'" in error("moesumm", "--datasets", places["news"], "--parts", "share")
    long = ("--datasets", places["news"], "--summary-length", 41)
    assert "max_length=41 exceeds the decoder's 40 positions" in error("moesumm", *long)
    assert "news has no train split" in error("moesumm", "--datasets", places["news"], "--split", "train")
    assert not (tmp_path / "out").exists()


# --- attributes ---


def literal(A: list[str], S: list[str]) -> list[int]:
    """Grusky et al. 2018, Figure 3, line by line, with indices from 0."""
    F, i, j = [], 0, 0
    while i < len(S):
        f: list[str] = []
        while j < len(A):
            if S[i] == A[j]:
                i2, j2 = i, j
                while i2 < len(S) and j2 < len(A) and S[i2] == A[j2]:
                    i2, j2 = i2 + 1, j2 + 1
                if len(f) < i2 - i:
                    f = S[i:i2]
                j = j2
            else:
                j += 1
        i, j = i + max(len(f), 1), 0
        F.append(len(f))
    return [size for size in F if size]


def test_attributes_are_those_worked_out_by_hand():
    document = "The quick brown fox jumps over the lazy dog."
    # the quick | fox | over the lazy | and a word that is not there
    found = attributes.attributes(document, "The quick FOX, over the lazy cat!")
    assert found == pytest.approx((6 / 7, (4 + 1 + 9) / 7, 9 / 7))
    assert attributes.attributes(document, document) == (1, 9, 1)
    assert attributes.attributes(document, "Nothing here") == (0, 0, 4.5)
    assert attributes.attributes(document, "...") is None
    assert attributes.fragments(list("aaab"), list("aab")) == [2, 1]  # a b begins inside the first match
    rows = [{"document": document, "summary": text} for text in (document, "Nothing here", "?")]
    means = attributes.mean_attributes("news", rows)
    assert means == {"texts": 2, "coverage": 0.5, "density": 4.5, "compression": 2.75}
    with pytest.raises(ValueError, match="news has no summaries with words"):
        attributes.mean_attributes("news", rows[2:])


def test_fragments_are_those_of_the_published_algorithm():
    rng = random.Random(0)
    for _ in range(300):
        letters = "abcdefgh"[: rng.randint(1, 8)]
        A, S = ([rng.choice(letters) for _ in range(rng.randint(0, longest))] for longest in (30, 12))
        assert attributes.fragments(A, S) == literal(A, S), (A, S)


def test_projections_keep_distances_and_accept_equal_rows():
    features = np.array([[0.0, 0, 5], [3, 4, 5], [6, 8, 5], [0, 1, 5]])
    points, explained = attributes.project(features)
    distances = (np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (features, points))
    assert next(distances) == pytest.approx(next(distances)) and explained.sum() == pytest.approx(1)
    points, explained = attributes.project(np.ones((3, 4)))
    assert not points.any() and not explained.any()
    even = attributes.standardised(features)
    assert even.mean(0) == pytest.approx(0) and even.std(0) == pytest.approx([1, 1, 0])


def test_names_of_points_stand_apart():
    rng = np.random.default_rng(0)
    figure = Figure(figsize=(5, 4.8))
    FigureCanvasAgg(figure)
    for points in (np.zeros((6, 2)), rng.normal(0, 0.02, (6, 2)), rng.normal(size=(6, 2))):
        figure.clear()
        axis = figure.subplots()
        axis.scatter(*points.T)
        axis.margins(0.3)
        figure.draw_without_rendering()
        boxes = attributes.label_points(axis, points, [f"radiology_reports_{i}" for i in range(6)])
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        frame = axis.get_window_extent()
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
