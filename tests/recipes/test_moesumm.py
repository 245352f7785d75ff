"""The MoeSumm recipe as a user runs it, on a tiny BART and synthetic texts."""

import json
import random
import re
import shutil

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartForConditionalGeneration,
    LlamaForCausalLM,
    Seq2SeqTrainingArguments,
    pipeline,
)

from lexperts.recipes.moesumm import train
from lexperts.recipes.moesumm.arguments import DataArguments, ModelArguments
from modeling_moesumm import MoeSummForCausalLM, MoeSummForConditionalGeneration
from tests.recipes.helpers import fails, save_tiny_bart, save_tiny_llama, write_rows

THINGS = ("bird", "boat", "bell", "barn", "book")
SETS = ("mail", "news", "papers")
FAST = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--eval-strategy", "no"]
SHORT = ["--summary-length", "12", "--num-beams", "2"]


def run(command, *given):
    """A command's main() with these arguments."""
    command.main(list(map(str, given)))


def some_rows(number: int, kind: str) -> list[dict]:
    rng = random.Random(f"{kind}{number}")
    rows = []
    for i in range(number):
        one, other = rng.sample(THINGS, 2)
        text = f"The old {one} of {kind} {i} met a {other}. It was number {i}. Then the {other} went away."
        rows.append({"document": text, "summary": f"A {one} met a {other}."})
    return rows


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Arguments of --datasets for three data sets; the columns of one have other names."""
    base = tmp_path_factory.mktemp("data")
    for name in (*SETS, "chat"):
        for split, number in (("train", 20), ("validation", 6), ("test", 5)):
            rows = some_rows(number, f"{name} {split}")
            if name == "news":
                rows = [{"id": 1, "article": row["document"], "highlights": [row["summary"], ""]} for row in rows]
            write_rows(base / name / f"{split}.jsonl", rows)
    return {name: f"{name}={base / name}" for name in (*SETS, "chat")}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    save_tiny_bart(folder, [text for name in SETS for row in some_rows(20, name) for text in row.values()])
    return folder


def train_arguments(places, backbone, output, *more, sets=SETS):
    given = ["--datasets", *(places[name] for name in sets), "--model-name-or-path", backbone, "--output-dir", output]
    batches = ["--per-device-train-batch-size", 8, "--learning-rate", 0.01, "--deputy-intermediate-size", 8]
    return [*given, *batches, *FAST, *SHORT, *more]


@pytest.fixture(scope="module")
def trained(places, backbone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(train, *train_arguments(places, backbone, folder, "--max-steps", 6, "--save-steps", 3))
    return folder


def test_three_datasets_by_one_command_then_the_pipeline(trained, places):
    summarize = pipeline("moe-summarization", model=str(trained))
    assert summarize.model.config.datasets == list(SETS)
    for name in SETS:
        text = some_rows(1, name)[0]["document"]
        assert summarize(text, dataset=name)[0]["summary_text"] == summarize([text], dataset=name)[0]["summary_text"]
    assert summarize.model.generation_config.max_length == 12
    assert json.loads((trained / "log.json").read_text())[-1]["step"] == 6


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("no_dataset", {"dataset_aware": False, "margin_loss_coef": 1.0}),
        ("no_margin", {"dataset_aware": True, "margin_loss_coef": 0.0}),
        ("flat_moe", {"main_expert": False, "margin_loss_coef": 0.0}),
        ("backbone", {"model_type": "bart"}),
    ],
)
def test_every_variant_trains_and_opens_again(places, backbone, tmp_path, variant, expected):
    run(train, *train_arguments(places, backbone, tmp_path, "--variant", variant, "--max-steps", 1))
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in expected} == expected
    assert pipeline("moe-summarization", model=str(tmp_path))("A bird met a boat.")[0].keys() == {"summary_text"}


@pytest.mark.parametrize("variant", ["moesumm", "backbone"])
def test_the_authors_recipe_trains_and_writes_as_their_code_does(places, backbone, tmp_path, variant):
    given = train_arguments(places, backbone, tmp_path, "--max-steps", 2, "--variant", variant, "--bf16", "false")
    given += ["--save-strategy", "no", "--load-best-model-at-end", "false"]
    run(train, "bart_large_authors", *given, "--max-source-length", 64, "--max-target-length", 40)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    written |= json.loads((tmp_path / "config.json").read_text())
    wanted = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "length_penalty": 0.8, "num_beams": 2}
    if variant == "moesumm":
        wanted |= {"margin_loss_coef": 10.0, "label_smoothing": 0.1, "deputy_init_std": 0.02}
    assert {name: written[name] for name in wanted} == wanted


def test_label_smoothing_reaches_the_loss_of_ours_and_of_the_stock_model(places, backbone, tmp_path):
    losses = {}
    for variant in ("moesumm", "backbone"):
        for smoothing in (0, 0.3):
            folder = tmp_path / f"{variant}-{smoothing}"
            given = ["--variant", variant, "--max-steps", 1, "--margin-loss-coef", 0, "--logging-steps", 1]
            given += ["--label-smoothing-factor", smoothing]
            run(train, *train_arguments(places, backbone, folder, *given))
            losses[variant, smoothing] = json.loads((folder / "log.json").read_text())[0]["loss"]
    for smoothing in (0, 0.3):  # a new MoeSumm starts as its backbone
        assert losses["moesumm", smoothing] == pytest.approx(losses["backbone", smoothing], rel=0.02)
    assert losses["moesumm", 0.3] != pytest.approx(losses["moesumm", 0], rel=1e-4)


def test_few_shot_trains_deputies_and_selectors_alone_and_writes_each_draw(places, trained, tmp_path, capsys):
    given = ["--setting", "few_shot", "--few-shot-rows", 4, 8, "--draws", 2, "--max-steps", 2, "--save-models"]
    given = train_arguments(places, trained, tmp_path, *given, sets=["chat"])

    def weights_of(folder):
        model = MoeSummForConditionalGeneration.from_pretrained(folder)
        assert model.config.datasets == [*SETS, *["chat"] * (folder != trained)]
        return model.state_dict()

    run(train, *given)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("draw_*/*.jsonl"))
    assert files == [f"draw_{draw}/chat-{rows}.jsonl" for draw in (0, 1) for rows in (4, 8)]
    start, first, second = map(weights_of, (trained, *(tmp_path / f"draw_{i}" / "chat-4-model" for i in (0, 1))))
    assert all(torch.equal(first[name], weight) for name, weight in start.items() if ".deputies." not in name)
    changed = "backbone.model.encoder.layers.0.deputies.experts.down_proj"
    assert not torch.equal(first[changed], start[changed]) and not torch.equal(first[changed], second[changed])

    (tmp_path / "draw_1" / "chat-8.jsonl").unlink()  # what is written is not written again
    times = {path: (tmp_path / path).stat().st_mtime_ns for path in files[:3]}
    capsys.readouterr()
    run(train, *given)
    assert "chat, 8 rows, draw 1" in capsys.readouterr().out
    assert times == {path: (tmp_path / path).stat().st_mtime_ns for path in files[:3]}

    # another recipe would be another summary: it does not pass for this one
    assert "learning_rate=0.01 before, 0.5 now" in fails(train.main, *given, "--learning-rate", 0.5)
    batches = "--per-device-train-batch-size"
    assert "per_device_train_batch_size=8 before, 4 now" in fails(train.main, *given, batches, 4)
    shutil.rmtree(tmp_path / "draw_1" / "chat-8-model")
    run(train, *given)
    assert (tmp_path / "draw_1" / "chat-8-model" / "model.safetensors").exists()
    every = [one if one != tmp_path else tmp_path / "all" for one in given]
    run(train, *every, "--few-shot-rows", 4, "--draws", 1, "--deputies-only", "false")
    name = "backbone.model.encoder.layers.0.fc1.weight"
    assert not torch.equal(weights_of(tmp_path / "all" / "draw_0" / "chat-4-model")[name], start[name])


@pytest.mark.parametrize(
    "given, message",
    [
        (["--num-deputies", 2], "--num-deputies 2 is not for .* with num_deputies=3"),
        (["--gate-position", "ffn_output"], "--gate-position ffn_output is not for"),
        (["--variant", "flat_moe"], "--variant flat_moe is not for .* with main_expert=True"),
        (["--variant", "no_dataset"], "--variant no_dataset is not for .* with dataset_aware=True"),
        (["--variant", "backbone"], "--variant backbone is not for"),
    ],
)
def test_few_shot_refuses_what_a_trained_model_cannot_follow(given, message, places, trained, tmp_path):
    given = ["--setting", "few_shot", "--few-shot-rows", 4, *given]
    given = train_arguments(places, trained, tmp_path, *given, sets=["chat"])
    assert re.search(message, fails(train.main, *given))
    assert not any(tmp_path.rglob("*.jsonl"))


def test_few_shot_changes_the_losses_and_trains_in_float32(places, trained, tmp_path):
    half = tmp_path / "half"
    MoeSummForConditionalGeneration.from_pretrained(trained, dtype="bfloat16").save_pretrained(half)
    AutoTokenizer.from_pretrained(trained).save_pretrained(half)
    losses = {
        "no_margin": ["--variant", "no_margin"],
        "margin": ["--margin-loss-coef", 3, "--margin-main", "last_layer"],
    }
    for name, given in losses.items():
        given += ["--setting", "few_shot", "--few-shot-rows", 4, "--draws", 1, "--max-steps", 1, "--save-models"]
        run(train, *train_arguments(places, half, tmp_path / name, *given, sets=["chat"]))
        model = MoeSummForConditionalGeneration.from_pretrained(tmp_path / name / "draw_0" / "chat-4-model")
        config = model.config
        found = (config.margin_loss_coef, config.margin_main)
        assert found == ((0, "model") if name == "no_margin" else (3, "last_layer"))
        assert model.dtype == torch.float32


def test_names_of_data_sets_become_files(places, trained, tmp_path):
    place = places["chat"].partition("=")[2]
    given = ["--datasets", f"cnn/dm={place}", "--model-name-or-path", trained, "--output-dir", tmp_path / "run", *FAST]
    message = "the name 'cnn/dm' cannot become the name of a file"
    assert f"--datasets: {message}" in fails(train.main, *given, "--setting", "few_shot")
    assert not any(tmp_path.rglob("*.jsonl"))


def test_a_stock_models_step_counts_every_token_alike(backbone, tmp_path):
    rows = [{**row, "dataset": "mail"} for row in some_rows(8, "unlike")]
    for i, row in enumerate(rows):
        row["summary"] = " ".join([row["summary"]] * (1 + i % 3))  # so that the small batches have unlike lengths
    weights = {}
    for small in (2, 8):
        model = BartForConditionalGeneration.from_pretrained(backbone, dropout=0.0)
        settings = Seq2SeqTrainingArguments(
            tmp_path / str(small), per_device_train_batch_size=small, gradient_accumulation_steps=8 // small, max_steps=1,
            learning_rate=0.1, optim="sgd", max_grad_norm=0, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        args = ModelArguments(str(backbone), variant="backbone")
        data = DataArguments(datasets=["mail=nowhere"])
        tokenizer = AutoTokenizer.from_pretrained(backbone)
        train.make_trainer(model, tokenizer, args, data, settings, Dataset.from_list(rows)).train()
        weights[small] = model.state_dict()
    start = BartForConditionalGeneration.from_pretrained(backbone).state_dict()
    name = "model.decoder.layers.0.fc1.weight"
    assert not torch.allclose(weights[8][name], start[name])
    for name, weight in weights[8].items():
        torch.testing.assert_close(weights[2][name], weight, atol=1e-6, rtol=1e-4)


def test_deputies_learn_at_a_rate_of_their_own(backbone, tmp_path):
    args = ModelArguments(str(backbone), deputy_intermediate_size=8, deputy_lr_factor=5.0)
    model, tokenizer = train.load_model(args, list(SETS))
    settings = Seq2SeqTrainingArguments(tmp_path, learning_rate=0.001, use_cpu=True, report_to="none", max_steps=1)
    data = DataArguments(datasets=["mail=nowhere"])
    rows = Dataset.from_list([{**row, "dataset": "mail"} for row in some_rows(4, "mail")])
    trainer = train.make_trainer(model, tokenizer, args, data, settings, rows)
    trainer.create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            assert group["lr"] == pytest.approx(0.005 if ".deputies." in names.pop(id(p)) else 0.001)
    assert not names


def test_a_model_of_another_backbone_is_not_taken(backbone, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(backbone, model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 5}))
    train_rows = write_rows(tmp_path / "data" / "train.jsonl", some_rows(12, "train"))
    given = train_arguments(
        {"mail": f"mail={train_rows.parent}"}, model, tmp_path / "out", "--max-steps", 1, sets=["mail"]
    )
    run(train, *given)
    shutil.copytree(backbone, model, dirs_exist_ok=True)
    assert "model_name_or_path=model (" in fails(train.main, *given)


def test_errors_name_the_value(places, backbone, trained, tmp_path):
    arguments = train_arguments(places, backbone, tmp_path / "x")
    empty = write_rows(tmp_path / "empty.jsonl", [{"document": " ", "summary": "b"}])
    test = write_rows(tmp_path / "mail" / "test.jsonl", some_rows(2, "test")).parent
    for sets, expected in (
        ([places["mail"]] * 2, "a name occurs twice"),
        ([f"mail={empty}"], "no rows in train"),
        ([f"mail={test}"], "mail has no train split, only test"),
    ):
        assert expected in fails(train.main, *arguments, "--datasets", *sets)
    few = ["--setting", "few_shot", "--few-shot-rows", 50]
    assert "--few-shot-rows 50 exceeds the 20 rows" in fails(train.main, *arguments, *few)


# --- decoders -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("decoder")
    save_tiny_llama(folder)
    return folder


DECODER = ["--deputy-intermediate-size", "8", "--max-length", "160", "--max-target-length", "40", *FAST]


@pytest.mark.parametrize(
    "options", [["--train", "deputies"], ["--train", "deputies", "--lora-r", "2"], ["--train", "all"]]
)
def test_a_decoder_is_trained_by_the_same_command(options, places, decoder, tmp_path):
    data, steps = [places[name] for name in SETS[:2]], ["--max-steps", "2", "--learning-rate", "0.01"]
    run(train, "--model-name-or-path", decoder, "--datasets", *data, *options, *DECODER, *steps, *SHORT,
        "--output-dir", tmp_path / "made")  # fmt: skip
    model = MoeSummForCausalLM.from_pretrained(tmp_path / "made")
    assert model.config.datasets == list(SETS[:2]) and model.generation_config.max_new_tokens == 11
    stock = LlamaForCausalLM.from_pretrained(decoder, dtype="float32").state_dict()
    kept = all(torch.equal(model.backbone.get_parameter(name), p) for name, p in stock.items() if name in stock)
    assert kept == (options == ["--train", "deputies"])
    assert any(deputies.experts.down_proj.abs().max() > 0 for deputies in model.deputies())
    if "all" in options:
        return
    summarize = pipeline("moe-summarization", model=str(tmp_path / "made"), device="cpu")
    assert len(summarize(["The bird met a boat."], dataset="mail")) == 1


@pytest.mark.parametrize("lora", [[], ["--lora-r", "2", "--train-sampling-strategy", "group_by_length"]])
def test_a_stock_decoder_is_a_baseline(lora, places, decoder, tmp_path):
    given = [
        "--variant",
        "backbone",
        "--label-smoothing",
        "0.1",
        *FAST,
        "--max-length",
        "160",
        "--max-steps",
        "2",
        *lora,
    ]
    run(train, "--model-name-or-path", decoder, "--datasets", places["mail"], *given, "--output-dir", tmp_path / "made")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="float32")
    assert type(made) is LlamaForCausalLM
    before = LlamaForCausalLM.from_pretrained(decoder, dtype="float32").state_dict()
    changed = {name for name, weight in made.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed and all("_proj" in name for name in changed) == bool(lora)


def test_options_of_the_other_kind_are_refused(places, backbone, decoder, tmp_path):
    def failure(model, *given):
        return fails(
            train.main,
            "--model-name-or-path",
            model,
            "--datasets",
            places["mail"],
            *FAST,
            "--output-dir",
            tmp_path,
            *given,
        )

    assert "--max-source-length 9" in (line := failure(decoder, "--max-source-length", "9")) and "--max-length" in line
    assert "--max-length 9" in (line := failure(backbone, "--max-length", "9")) and "--max-source-length" in line
    assert "--lora-r 2 cannot be combined with --train all" in failure(decoder, "--lora-r", "2")
    assert "--setting few_shot" in failure(decoder, "--train", "deputies", "--setting", "few_shot")
    assert "--setting few_shot" in failure(decoder, "--variant", "backbone", "--lora-r", "2", "--setting", "few_shot")
    assert "--variant backbone" in failure(decoder, "--train", "deputies", "--variant", "backbone")
