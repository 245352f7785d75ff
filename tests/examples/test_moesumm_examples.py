"""MoeSumm's examples as a user runs them, on a tiny BART and texts of their own."""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoTokenizer,
    RobertaConfig,
    RobertaModel,
    RobertaTokenizer,
    Seq2SeqTrainingArguments,
    pipeline,
)

from modeling_moesumm import MoeSummForConditionalGeneration
from tests.examples.scripts import scripts_of

THINGS = ("bird", "boat", "bell", "barn", "book")
SETS = ("mail", "news", "papers")
FAST = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--eval_strategy", "no"]
SHORT = ["--summary_length", "12", "--num_beams", "2"]


@pytest.fixture(scope="module")
def scripts():
    with scripts_of("moesumm", "pretrain", "train", "evaluate", "scores", "sources", "summaries") as found:
        yield found


def run(script, *given):
    """A script's main() with these arguments."""
    before, sys.argv = sys.argv, ["script", *map(str, given)]
    try:
        script.main()
    finally:
        sys.argv = before


def fails(script, capsys, *given) -> str:
    """The one message of a script that ends with the status 2."""
    with pytest.raises(SystemExit) as end:
        run(script, *given)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def some_rows(number: int, kind: str) -> list[dict]:
    rng = random.Random(f"{kind}{number}")
    rows = []
    for i in range(number):
        one, other = rng.sample(THINGS, 2)
        text = f"The old {one} of {kind} {i} met a {other}. It was number {i}. Then the {other} went away."
        rows.append({"document": text, "summary": f"A {one} met a {other}."})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
def backbone(scripts, places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    sizes = ["--vocab_size", 320, "--d_model", 16, "--layers", 1, "--heads", 2, "--ffn_dim", 32, "--positions", 96]
    given = [*sizes, "--piece", 12, "--max_steps", 4, "--learning_rate", 0.01, "--logging_steps", 1, *FAST]
    run(scripts.pretrain, "--datasets", *(places[name] for name in SETS), "--output_dir", folder, *given)
    return folder


def train_arguments(places, backbone, output, *more, sets=SETS):
    given = ["--datasets", *(places[name] for name in sets), "--model_name_or_path", backbone, "--output_dir", output]
    batches = ["--per_device_train_batch_size", 8, "--learning_rate", 0.01, "--deputy_size", 8]
    return [*given, *batches, *FAST, *SHORT, *more]


@pytest.fixture(scope="module")
def trained(scripts, places, backbone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(scripts.train, *train_arguments(places, backbone, folder, "--max_steps", 6, "--save_steps", 3))
    return folder


def test_a_small_bart_learns_to_denoise(backbone):
    losses = [entry["loss"] for entry in json.loads((backbone / "losses.json").read_text())]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert AutoTokenizer.from_pretrained(backbone)("A bird met a boat.").input_ids[-1] == 2


def test_a_new_decoder_looks_at_the_place_where_it_writes(scripts):
    torch.manual_seed(0)
    args = scripts.pretrain.PretrainingArguments(d_model=64, layers=2, heads=4, ffn_dim=64, positions=64)
    config = scripts.pretrain.configuration(args, 300)
    config._attn_implementation = "eager"
    ids, there = torch.randint(5, 300, (2, 12)), []
    for start in (lambda model: model, scripts.pretrain.begin_by_copying):
        model = start(scripts.pretrain.BartForConditionalGeneration(config)).eval()
        attention = model(input_ids=ids, decoder_input_ids=ids, output_attentions=True).cross_attentions[0]
        there.append(attention.mean(1).diagonal(dim1=1, dim2=2).mean().item())
    assert there[0] < 0.1 and there[1] > 0.5


def test_pieces_are_whole_sentences_and_lose_nothing(scripts):
    text = "One two three. Four five. " + " ".join(f"W{i}" for i in range(12)) + ". Six."
    pieces = scripts.pretrain.pieces_of(text, 5)
    assert pieces == ["One two three. Four five.", "W0 W1 W2 W3 W4", "W5 W6 W7 W8 W9", "W10 W11. Six."]


def test_noise_hides_about_the_share_of_words_that_was_asked_for(scripts):
    words = [str(i) for i in range(20_000)]
    found = scripts.pretrain.hide(words, 0.3, 3.0, random.Random(0))
    hidden = len(words) - sum(word != "<mask>" for word in found)
    assert abs(hidden / len(words) - 0.3) < 0.02 and abs(hidden / found.count("<mask>") - 3) < 0.2
    assert [word for word in found if word != "<mask>"] == sorted((w for w in found if w != "<mask>"), key=int)


def test_three_datasets_by_one_command_then_the_pipeline(trained, places):
    summarize = pipeline("moe-summarization", model=str(trained))
    assert summarize.model.config.datasets == list(SETS)
    for name in SETS:
        text = some_rows(1, name)[0]["document"]
        assert summarize(text, dataset=name)[0]["summary_text"] == summarize([text], dataset=name)[0]["summary_text"]
    assert summarize.model.generation_config.max_length == 12
    assert json.loads((trained / "log.json").read_text())[-1]["step"] == 6


def test_an_interrupted_training_goes_on_to_the_same_weights(scripts, places, backbone, trained, tmp_path):
    halfway = sorted(trained.glob("checkpoint-3"))[0]
    target = tmp_path / "again" / "checkpoint-3"
    target.parent.mkdir()
    target.symlink_to(halfway)
    shutil.copy(trained / "run_settings.json", target.parent)
    run(scripts.train, *train_arguments(places, backbone, tmp_path / "again", "--max_steps", 6, "--save_steps", 3))
    whole, again = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "again"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("no_dataset", {"dataset_aware": False, "margin_loss_coef": 1.0}),
        ("no_margin", {"dataset_aware": True, "margin_loss_coef": 0.0}),
        ("flat_moe", {"main_expert": False, "margin_loss_coef": 0.0}),
        ("backbone", {"model_type": "bart"}),
    ],
)
def test_every_variant_trains_and_opens_again(scripts, places, backbone, tmp_path, variant, expected):
    run(scripts.train, *train_arguments(places, backbone, tmp_path, "--variant", variant, "--max_steps", 1))
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in expected} == expected
    assert pipeline("moe-summarization", model=str(tmp_path))("A bird met a boat.")[0].keys() == {"summary_text"}


@pytest.mark.parametrize("variant", ["moesumm", "backbone"])
def test_the_authors_recipe_trains_and_writes_as_their_code_does(scripts, places, backbone, tmp_path, variant):
    recipe = Path(scripts.train.__file__).with_name("bart_large_authors.yml")
    given = train_arguments(places, backbone, tmp_path, "--max_steps", 2, "--variant", variant, "--bf16", "false")
    given += ["--save_strategy", "no", "--load_best_model_at_end", "false"]
    given += ["--max_source_length", 64, "--max_target_length", 40]
    run(scripts.train, recipe, *given)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    wanted = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "length_penalty": 0.8, "num_beams": 2}
    assert {name: written[name] for name in wanted} == wanted
    if variant == "moesumm":
        config = json.loads((tmp_path / "config.json").read_text())
        wanted = {"margin_loss_coef": 10.0, "label_smoothing": 0.1, "deputy_output_std": 0.02}
        assert {name: config[name] for name in wanted} == wanted


def test_label_smoothing_reaches_the_loss_of_ours_and_of_the_stock_model(scripts, places, backbone, tmp_path):
    losses = {}
    for variant in ("moesumm", "backbone"):
        for smoothing in (0, 0.3):
            folder = tmp_path / f"{variant}-{smoothing}"
            given = ["--variant", variant, "--max_steps", 1, "--margin_loss_coef", 0, "--logging_steps", 1]
            given += ["--label_smoothing_factor", smoothing]
            run(scripts.train, *train_arguments(places, backbone, folder, *given))
            losses[variant, smoothing] = json.loads((folder / "log.json").read_text())[0]["loss"]
    for smoothing in (0, 0.3):  # a new MoeSumm starts as its backbone
        assert losses["moesumm", smoothing] == pytest.approx(losses["backbone", smoothing], rel=0.02)
    assert losses["moesumm", 0.3] != pytest.approx(losses["moesumm", 0], rel=1e-4)


def test_few_shot_trains_deputies_and_selectors_alone_and_writes_each_draw(scripts, places, trained, tmp_path, capsys):
    given = ["--setting", "few_shot", "--few_shot_rows", 4, 8, "--draws", 2, "--max_steps", 2, "--save_models"]
    given = train_arguments(places, trained, tmp_path, *given, sets=["chat"])
    run(scripts.train, *given)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("draw_*/*.jsonl"))
    assert files == [f"draw_{draw}/chat-{rows}.jsonl" for draw in (0, 1) for rows in (4, 8)]
    before = MoeSummForConditionalGeneration.from_pretrained(trained)
    models = [MoeSummForConditionalGeneration.from_pretrained(tmp_path / f"draw_{i}" / "chat-4-model") for i in (0, 1)]
    assert models[0].config.datasets == [*SETS, "chat"]
    weights = before.state_dict()
    for name, weight in models[0].state_dict().items():
        if ".deputies." not in name:
            assert torch.equal(weight, weights[name]), name
    changed = "backbone.model.encoder.layers.0.deputies.experts.down_proj"
    assert not torch.equal(models[0].state_dict()[changed], weights[changed])
    assert not torch.equal(models[0].state_dict()[changed], models[1].state_dict()[changed])  # other rows

    (tmp_path / "draw_1" / "chat-8.jsonl").unlink()  # what is written is not written again
    times = {path: (tmp_path / path).stat().st_mtime_ns for path in files[:3]}
    capsys.readouterr()
    run(scripts.train, *given)
    assert "chat, 8 rows, draw 1" in capsys.readouterr().out
    assert times == {path: (tmp_path / path).stat().st_mtime_ns for path in files[:3]}

    with pytest.raises(SystemExit):  # another recipe would be another summary: it does not pass for this one
        run(scripts.train, *given, "--learning_rate", "0.5")
    assert "learning_rate=0.01 before, 0.5 now" in capsys.readouterr().err
    assert "per_device_train_batch_size=8 before, 4 now" in fails(
        scripts.train, capsys, *given, "--per_device_train_batch_size", 4
    )
    shutil.rmtree(tmp_path / "draw_1" / "chat-8-model")
    run(scripts.train, *given)
    assert (tmp_path / "draw_1" / "chat-8-model" / "model.safetensors").exists()
    every = [one if one != tmp_path else tmp_path / "all" for one in given]
    every[every.index("--draws") + 1] = 1
    run(scripts.train, *every, "--deputies_only", "false")
    found = MoeSummForConditionalGeneration.from_pretrained(tmp_path / "all" / "draw_0" / "chat-4-model").state_dict()
    assert not torch.equal(
        found["backbone.model.encoder.layers.0.fc1.weight"], weights["backbone.model.encoder.layers.0.fc1.weight"]
    )


def test_systems_are_scored_and_compared(scripts, places, backbone, trained, tmp_path, capsys):
    given = ["--systems", f"ours={trained}", f"stock={backbone}", "--baseline", "stock", "--output_dir", tmp_path]
    given += ["--datasets", *(places[name] for name in SETS), *SHORT]
    run(scripts.evaluate, *given)
    found = json.loads((tmp_path / "scores.json").read_text())
    rows = {(row["data set"], row["system"]): row for row in found["scores"]}
    assert len(rows) == 8 and len(found["tests"]) == 4 and {row["system"] for row in found["tests"]} == {"ours"}
    for system in ("ours", "stock"):
        means = [rows[name, system]["mean R"] for name in SETS]
        assert rows["mean of all", system]["mean R"] == pytest.approx(np.mean(means))
    for row in found["tests"]:
        difference = rows[row["data set"], "ours"]["mean R"] - rows[row["data set"], "stock"]["mean R"]
        assert row["difference"] == pytest.approx(difference) and row["low"] <= row["difference"] <= row["high"]
    assert "against stock" in (tmp_path / "scores.md").read_text()

    cut = tmp_path / "ours" / "mail.jsonl"  # killed in the middle of a line
    lines = cut.read_text()
    cut.rename(cut.with_suffix(".part")).write_text(lines[: len(lines) * 2 // 3])
    run(scripts.evaluate, *given)
    assert cut.read_text() == lines and json.loads((tmp_path / "scores.json").read_text()) == found

    # the files of summaries are a system as well; two runs are a mean and a spread
    capsys.readouterr()
    run(scripts.evaluate, "--systems", f"both={tmp_path}/[os]*[sk]", "--output_dir", tmp_path / "both")
    assert "± runs" in capsys.readouterr().out


def test_a_difference_is_one_only_where_it_is_more_than_chance(scripts):
    rng = np.random.default_rng(0)
    noise = rng.normal(30, 10, 400)
    for sets in (1, 3):
        base = [noise[i * 100 : 200 + i * 100] for i in range(sets)]
        better = scripts.scores.compare([values + 1 + rng.normal(0, 2, 200) for values in base], base)
        tie = scripts.scores.compare([values + rng.normal(0, 2, 200) for values in base], base)
        assert better["low"] > 0 and better["p"] < 0.01 and tie["low"] < 0 < tie["high"] and tie["p"] > 0.05
        assert better["low"] < better["difference"] < better["high"]
        assert scripts.scores.compare(base, base) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    # one large and one small data set count alike
    assert scripts.scores.compare([noise + 2, noise[:10]], [noise, noise[:10]])["difference"] == pytest.approx(1)


def test_rouge_is_that_of_hand_counting(scripts):
    found = scripts.scores.rouge(["the cat sat down. a dog ran."], ["A dog ran. The cats sat up."])
    # 7 words each, 6 of them common once "cats" is stemmed; the longest common sequence is "the cat sat" of 3 words
    assert found["rouge1"][0] == pytest.approx(100 * 6 / 7) and found["rougeL"][0] == pytest.approx(100 * 3 / 7)
    assert found["rougeLsum"][0] == pytest.approx(100 * 6 / 7)  # a sentence at a time, order does not matter
    assert scripts.scores.rouge(["the cats"], ["the cat"], stemming=False)["rouge1"][0] == pytest.approx(50)


def test_bertscore_reads_robertas_first_word_with_its_space(scripts, tmp_path):
    alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {sign: i for i, sign in enumerate(alphabet)}
    RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=60).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    RobertaModel(RobertaConfig(vocab_size=len(alphabet), max_position_embeddings=66, **sizes)).save_pretrained(tmp_path)
    tokenizer = scripts.scores.open_bertscore(str(tmp_path), 1)._tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a a")) == ["<s>", "\u0120", "a", "\u0120", "a", "</s>"]
    assert tokenizer.model_max_length == 60


def test_a_stock_models_step_counts_every_token_alike(scripts, backbone, tmp_path):
    from transformers import BartForConditionalGeneration

    rows = [{**row, "dataset": "mail"} for row in some_rows(8, "unlike")]
    for i, row in enumerate(rows):
        row["summary"] = " ".join([row["summary"]] * (1 + i % 3))  # so that the small batches have unlike lengths
    weights = {}
    for small in (2, 8):
        model = BartForConditionalGeneration.from_pretrained(backbone, dropout=0.0)
        settings = Seq2SeqTrainingArguments(
            tmp_path / str(small),
            per_device_train_batch_size=small,
            gradient_accumulation_steps=8 // small,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        args = scripts.train.ModelArguments(str(backbone), variant="backbone")
        data = scripts.sources.DataArguments(["mail=nowhere"])
        tokenizer = AutoTokenizer.from_pretrained(backbone)
        scripts.train.trainer_of(model, tokenizer, args, data, settings, Dataset.from_list(rows)).train()
        weights[small] = model.state_dict()
    start = BartForConditionalGeneration.from_pretrained(backbone).state_dict()
    name = "model.decoder.layers.0.fc1.weight"
    assert not torch.allclose(weights[8][name], start[name])
    for name, weight in weights[8].items():
        torch.testing.assert_close(weights[2][name], weight, atol=1e-6, rtol=1e-4)


def test_deputies_learn_at_a_rate_of_their_own(scripts, backbone, tmp_path):
    args = scripts.train.ModelArguments(str(backbone), deputy_size=8, deputy_lr_factor=5.0)
    model, tokenizer = scripts.train.open_model(args, list(SETS))
    settings = Seq2SeqTrainingArguments(tmp_path, learning_rate=0.001, use_cpu=True, report_to="none", max_steps=1)
    data = scripts.sources.DataArguments(["mail=nowhere"])
    rows = Dataset.from_list([{**row, "dataset": "mail"} for row in some_rows(4, "mail")])
    trainer = scripts.train.trainer_of(model, tokenizer, args, data, settings, rows)
    trainer.create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            assert group["lr"] == pytest.approx(0.005 if ".deputies." in names.pop(id(p)) else 0.001)
    assert not names


def test_runs_and_summaries_of_other_settings_texts_or_models_are_not_taken(
    scripts, backbone, trained, tmp_path, capsys
):
    for split, number in (("train", 12), ("test", 3)):
        write_rows(tmp_path / "data" / f"{split}.jsonl", some_rows(number, split))
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(backbone, model)
    places = {"mail": f"mail={tmp_path / 'data'}"}
    given = train_arguments(places, model, out, "--max_steps", 1, "--save_steps", 1, sets=["mail"])
    scored = ["--systems", f"x={model}", "--datasets", places["mail"], "--output_dir", tmp_path / "scores", *SHORT]
    run(scripts.train, *given)
    run(scripts.evaluate, *scored)
    capsys.readouterr()
    assert "num_deputies=3 before, 2 now" in fails(scripts.train, capsys, *given, "--num_deputies", 2)
    assert "max_source_length=None before, 8 now" in fails(scripts.train, capsys, *given, "--max_source_length", 8)
    sizes = ["--vocab_size", 320, "--d_model", 16, "--layers", 1, "--heads", 2, "--ffn_dim", 32, "--positions", 96]
    small = [*sizes, "--piece", 12, "--learning_rate", 0.01, "--logging_steps", 1, *FAST, "--output_dir", model]
    error = fails(scripts.pretrain, capsys, "--datasets", places["mail"], *small, "--max_steps", 9)
    assert "max_steps=4 before, 9 now" in error and "datasets=[" in error

    write_rows(tmp_path / "data" / "test.jsonl", some_rows(3, "other test"))  # as many rows
    assert "texts=mail (" in fails(scripts.evaluate, capsys, *scored)
    write_rows(tmp_path / "data" / "test.jsonl", some_rows(3, "test"))
    run(scripts.evaluate, *scored)
    capsys.readouterr()
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 5}))
    assert "model=model (" in fails(scripts.evaluate, capsys, *scored)
    assert "model_name_or_path=model (" in fails(scripts.train, capsys, *given)
    (tmp_path / "scores" / "x" / "mail.settings.json").unlink()
    assert "has no record of its settings" in fails(scripts.evaluate, capsys, *scored)
    write_rows(tmp_path / "data" / "train.jsonl", some_rows(12, "other train"))
    shutil.copytree(backbone, model, dirs_exist_ok=True)
    assert "datasets=[mail=train.jsonl (" in fails(scripts.train, capsys, *given)
    run(scripts.train, *given, "--overwrite_output_dir", "true")


def test_errors_name_the_value_and_the_mend(scripts, places, backbone, trained, tmp_path, capsys):
    train, evaluate = scripts.train, scripts.evaluate
    arguments = train_arguments(places, backbone, tmp_path / "x")
    broken = write_rows(tmp_path / "broken.jsonl", [{"document": "a", "summary": "b"}])
    broken.write_text(broken.read_text() + "{oops\n")
    odd = write_rows(tmp_path / "odd.jsonl", [{"speech": "a", "summary": "b"}])
    empty = write_rows(tmp_path / "empty.jsonl", [{"document": " ", "summary": "b"}])

    def with_datasets(*sets):
        return ["--datasets", *sets, *arguments[1 + len(SETS) :]]

    assert "write name=PLACE" in fails(train, capsys, *with_datasets("data/mail"))
    assert "two have one name" in fails(train, capsys, *with_datasets(places["mail"], places["mail"]))
    assert "nowhere.jsonl is not there" in fails(train, capsys, *with_datasets("mail=nowhere.jsonl"))
    assert "broken.jsonl, line 2" in fails(train, capsys, *with_datasets(f"mail={broken}"))
    assert "'speech', 'summary'. Name the one" in fails(train, capsys, *with_datasets(f"mail={odd}"))
    assert "no row in train" in fails(train, capsys, *with_datasets(f"mail={empty}"))
    assert "'nowhere' could not be opened" in fails(train, capsys, *arguments, "--model_name_or_path", "nowhere")
    assert "variant='moe' is not known" in fails(train, capsys, *arguments, "--variant", "moe")
    few = ["--setting", "few_shot", "--few_shot_rows", 50]
    assert "50 rows were asked for, and there are 20" in fails(train, capsys, *arguments, *few)

    ours = ["--systems", f"ours={trained}", "--output_dir", tmp_path / "scores"]
    assert "does not know 'chat'" in fails(evaluate, capsys, *ours, "--datasets", places["chat"])
    assert "pass --datasets" in fails(evaluate, capsys, *ours)
    assert "none of the systems ours" in fails(evaluate, capsys, *ours, "--baseline", "mix")
    assert "nothing matches" in fails(evaluate, capsys, "--systems", f"a={tmp_path}/no*")
    run(evaluate, *ours, "--datasets", places["chat"], "--zero_shot", *SHORT)
    capsys.readouterr()
    other = [*ours, "--datasets", places["chat"], "--zero_shot", *SHORT, "--num_beams", 1]
    assert "num_beams=2 before, 1 now" in fails(evaluate, capsys, *other)
