"""The commands of ExHiRD as a user runs them, on a vocabulary and texts of their own."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, pipeline

from lexperts.recipes.exhird import prepare, train
from lexperts.recipes.exhird.schedule import PlateauSchedule, StopAfterRises
from tests.recipes.helpers import fails, write_rows

FOLDER = Path(train.__file__).parent
SMALL = ["--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "24"]
FAST = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--per-device-train-batch-size", "4"]
FAST += ["--num-train-epochs", "2", "--learning-rate", "1e-3"]  # evaluates after each epoch by default


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve documents, for training, validation and testing."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [
        {
            "title": ["graph cuts", "", "networks"][i % 3],
            "text": f"graph cuts segment images and learning networks number {i} do so too",
            "keyphrases": ["graph cut", "image segmentation", "networks"],
        }
        for i in range(12)
    ]
    return str(write_rows(folder / "rows.jsonl", rows))


def run(command, *argv):
    command.main([str(argument) for argument in argv])


@pytest.fixture(scope="module")
def prepared(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    run(prepare, "--train-files", files, "--validation-files", files, "--output-dir", folder)
    return folder


@pytest.mark.parametrize("encoder", ["bigru", "transformer"])
def test_two_commands_prepare_and_train(encoder, prepared, tmp_path):
    argv = [*SMALL, *FAST, "--encoder-type", encoder, "--data", prepared, "--output-dir", tmp_path]
    run(train, *argv)
    generate = pipeline("keyphrase-generation", model=str(tmp_path))
    assert isinstance(generate({"title": "graph cuts", "text": "they segment images"}), list)


def test_one_command_goes_from_documents_to_scores(files, tmp_path, capsys):
    data = ["--train-files", files, "--validation-files", files, "--test-files", f"mine={files}", "--show", "2"]
    argv = [*SMALL, *FAST, "--encoder-type", "bigru", *data, "--output-dir", tmp_path]
    run(train, *argv)
    out = capsys.readouterr().out
    assert "\nmine: present F1@M " in out and out.count("  gold     graph cut; image segmentation; networks") == 2
    assert json.loads((tmp_path / "scores.json").read_text())["mine"]["documents"] == 12
    run(train, *argv)  # nothing is prepared or trained again
    assert "vocabulary: " not in capsys.readouterr().out
    assert "validation_files=" in fails(train.main, *argv, "--validation-files", files, files)


def test_phrases_replace_only_those_of_an_evaluation(prepared, files, tmp_path):
    shutil.copy(files, tmp_path / "mine.jsonl")
    own = ["--test-files", f"mine={tmp_path / 'mine.jsonl'}"]
    argv = [*SMALL, *FAST, "--num-train-epochs", "1", "--encoder-type", "bigru", "--data", prepared]
    argv += ["--output-dir", tmp_path]
    assert f"would replace {tmp_path / 'mine.jsonl'}" in fails(train.main, *argv, *own)
    assert not (tmp_path / "config.json").exists()
    other = ["--test-files", f"other={files}"]
    for more in ([], ["--overwrite-output-dir", "true"]):  # its own phrases may be replaced
        run(train, *argv, *other, *more)
    assert Path(files).read_bytes() == (tmp_path / "mine.jsonl").read_bytes()


def test_texts_and_titles_of_test_sets_may_be_lists_of_words(files, tmp_path, capsys):
    rows = [json.loads(line) for line in Path(files).read_text().splitlines()]
    words = [row | {name: row[name].split() for name in ("title", "text")} for row in rows]
    tests = ["--test-files", f"texts={files}", f"words={write_rows(tmp_path / 'words.jsonl', words)}"]
    argv = [*SMALL, *FAST, "--encoder-type", "bigru", "--train-files", files, "--validation-files", files]
    run(train, *argv, *tests, "--output-dir", tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert scores["words"] == scores["texts"]
    assert (tmp_path / "run" / "words.jsonl").read_text() == (tmp_path / "run" / "texts.jsonl").read_text()
    capsys.readouterr()
    train.print_examples(pipeline("keyphrase-generation", model=str(tmp_path / "run")), tmp_path / "words.jsonl", 1)
    assert "\ngraph cuts\n" in capsys.readouterr().out
    odd = write_rows(tmp_path / "odd.jsonl", [rows[0], rows[0] | {"title": 5}])
    message = fails(train.main, *argv, "--test-files", f"odd={odd}", "--output-dir", tmp_path / "odd")
    assert "odd.jsonl, row 2: title=5 is not a title" in message


def test_documents_changed_in_their_place_are_not_those_that_were_prepared(files, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(Path(files).read_text())
    argv = [*SMALL, *FAST, "--encoder-type", "bigru", "--output-dir", tmp_path / "run", "--data", tmp_path / "data"]
    data = ["--train-files", rows, "--validation-files", rows, "--output-dir", tmp_path / "data"]
    run(prepare, *data)
    run(train, *argv)
    rows.write_text(rows.read_text().replace("graph", "GRAPH"))
    assert "train_files=[rows.jsonl (" in fails(prepare.main, *data)
    assert "vocab_size=50000 before, 99 now" in fails(prepare.main, *data, "--vocab-size", "99")
    run(prepare, *data, "--overwrite-output-dir", "true")
    assert "data.train_files=" in fails(train.main, *argv)
    (tmp_path / "data" / "prepared.json").unlink()  # as if preparation had been killed
    assert "prepared.json" in fails(train.main, *argv)


def test_a_warm_start_is_prepared_and_trained(files, backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    backbone = ["--backbone", tmp_path / "bert"]
    run(prepare, "--train-files", files, "--validation-files", files, "--output-dir", tmp_path / "data", *backbone)
    argv = ["--encoder-type", "pretrained", *backbone, "--hidden-size", "16", *FAST, "--data", tmp_path / "data"]
    run(train, *argv, "--output-dir", tmp_path / "out")
    assert isinstance(pipeline("keyphrase-generation", model=str(tmp_path / "out"))("graph cuts"), list)
    stock = AutoModel.from_pretrained(tmp_path / "bert").state_dict()
    for schedule in ("true", "false"):  # both keep an encoder whose learning rate is 0
        rates = ["--backbone-lr", "0", "--plateau-schedule", schedule]
        run(train, *argv, *rates, "--output-dir", tmp_path / schedule)
        model = pipeline("keyphrase-generation", model=str(tmp_path / schedule)).model
        trained = model.encoder.word_encoder.backbone.state_dict()
        assert all(torch.equal(trained[name], weights) for name, weights in stock.items() if name in trained)


def test_errors_that_the_user_can_fix_are_one_line(tmp_path):
    for name, value in (("useless", [" "]), ("pairs", [["graph", "cut"]])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "graph cut", "keyphrases": value}))
    long = {"text": "graph cut " * 300, "keyphrases": ["graph cut"]}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    (tmp_path / "good.jsonl").write_text(json.dumps(long | {"text": "graph cut"}))
    split = lambda train, validation: [  # noqa: E731
        *("--output-dir", tmp_path / train / validation),
        *("--train-files", tmp_path / f"{train}.jsonl", "--validation-files", tmp_path / f"{validation}.jsonl"),
    ]
    file = {
        name: ["--output-dir", tmp_path, "--test-files", f"x={tmp_path / name}.jsonl"] for name in ("useless", "pairs")
    }
    cases = (
        (train, file["useless"], "None of the 1 documents"),
        (train, file["pairs"], "line 1: keyphrases[0]="),
        (prepare, ["--output-dir", tmp_path], "--train-files"),
        (prepare, split("useless", "good"), "--train-files: None of the 1 documents"),
        (prepare, split("good", "useless"), "--validation-files: None of the 1 documents"),
        (train, split("good", "long"), "--validation-files: None of the 1 documents"),
        (train, ["--data", tmp_path, "--output-dir", tmp_path], "'tokenizer'"),
        (train, ["--output-dir", tmp_path], "--train-files"),
    )
    for command, argv, name in cases:
        assert name in fails(command.main, *argv)


def test_the_rate_falls_after_each_rise_and_training_ends_after_n():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = PlateauSchedule(optimizer, min_lr=0.3), []
    for loss in (3.0, 4.0, 3.5, 3.6, 2.0, 2.1):  # compared with the previous one, not with the best
        schedule.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.3, 0.3, 0.3]
    again = PlateauSchedule(optimizer, min_lr=0.3)
    again.load_state_dict(schedule.state_dict())
    assert again.previous_loss == 2.1
    stop = StopAfterRises(2)
    for losses, ends in (([1.0, 2.0, 3.0], True), ([1.0, 2.0, 1.5], False), ([2.0, 3.0], False)):
        state, control = SimpleNamespace(log_history=[{"eval_loss": x} for x in losses]), SimpleNamespace()
        stop.on_evaluate(None, state, control)
        assert getattr(control, "should_training_stop", False) is ends


@pytest.mark.parametrize(
    "option, owner",
    [
        (("--backbone-lr", "0.01"), "--encoder-type pretrained"),
        (("--freeze-backbone", "true"), "--encoder-type pretrained"),
        (("--attention-dropout", "0.1"), "--encoder-type pretrained"),
        (("--max-length", "99"), "decoders"),
        (("--max-source-length", "99"), "decoders"),
    ],
)
def test_options_without_effect_are_named(option, owner, files, tmp_path):
    argv = [*SMALL, *FAST, "--encoder-type", "bigru", "--train-files", files, "--validation-files", files]
    error = fails(train.main, *argv, "--output-dir", tmp_path / "run", *option)
    assert f"{' '.join(option)} is for {owner}" in error
    assert not (tmp_path / "run").exists()
