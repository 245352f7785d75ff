"""The generator's examples as a user runs them, on a vocabulary and texts of their own."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import TrainingArguments, pipeline

from modeling_exhird import ExHirdConfig
from modeling_exhird.schedule_exhird import PlateauSchedule, StopAfterRises
from tests.examples.scripts import EXAMPLES, scripts_of

EXHIRD = EXAMPLES / "exhird"
SMALL = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--intermediate_size", "24"]
FAST = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"]
FAST += ["--num_train_epochs", "2", "--learning_rate", "1e-3"]  # nothing of scores: each epoch then


@pytest.fixture(scope="module")
def scripts():
    with scripts_of("exhird", "prepare", "train", "evaluate") as found:
        yield found


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
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(script, *given):
    before, sys.argv = sys.argv, ["script", *map(str, given)]
    try:
        script.main()
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def prepared(scripts, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    run(scripts.prepare, "--train_files", files, "--validation_files", files, "--output_dir", folder)
    return folder


@pytest.mark.parametrize("encoder", ["bigru", "transformer"])
def test_three_commands_prepare_train_and_score(encoder, scripts, prepared, files, tmp_path, capsys):
    given = [*SMALL, *FAST, "--encoder_type", encoder, "--data", prepared, "--output_dir", tmp_path]
    run(scripts.train, *given)
    generate = pipeline("keyphrase-generation", model=str(tmp_path))
    assert isinstance(generate({"title": "graph cuts", "text": "they segment images"}), list)
    run(scripts.train, *given)  # the same again goes on from the last checkpoint, and has nothing to do
    capsys.readouterr()
    run(scripts.evaluate, "--model", tmp_path, "--test_files", f"mine={files}")
    assert capsys.readouterr().out.startswith("mine: present F1@M ")
    scores = json.loads((tmp_path / "scores.json").read_text())["mine"]
    assert scores["documents"] == 12 and {"present", "absent", "total", "repeats"} <= set(scores)
    assert {"F1@M", "F1@5", "#C@M", "#C@5", "#Avg.Len"} == set(scores["absent"])
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 12


def test_one_command_goes_from_documents_to_scores(scripts, files, tmp_path, capsys):
    data = ["--train_files", files, "--validation_files", files, "--test_files", f"mine={files}", "--show", "2"]
    given = [*SMALL, *FAST, "--encoder_type", "bigru", *data, "--output_dir", tmp_path]
    run(scripts.train, *given)
    out = capsys.readouterr().out
    assert "\nmine: present F1@M " in out and out.count("  given    graph cut; image segmentation; networks") == 2
    assert json.loads((tmp_path / "scores.json").read_text())["mine"]["documents"] == 12
    run(scripts.train, *given)  # goes on from what stands: nothing is prepared or trained again
    assert "vocabulary: " not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(scripts.train, *given, "--validation_files", files, files)
    assert "data holds a run with other settings: validation_files=" in capsys.readouterr().err


def test_documents_changed_in_their_place_are_not_those_that_were_prepared(scripts, files, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(Path(files).read_text())
    data = ["--train_files", rows, "--validation_files", rows]
    given = [*SMALL, *FAST, "--encoder_type", "bigru", "--output_dir", tmp_path / "run"]

    def refused(script, *options):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run(script, *options)
        assert end.value.code == 2
        return capsys.readouterr().err

    run(scripts.train, *given, *data)
    run(scripts.prepare, *data, "--output_dir", tmp_path / "data")
    assert "learning_rate=0.001 before, 0.5 now" in refused(scripts.train, *given, *data, "--learning_rate", "0.5")
    assert "hidden_size=16 before, 8 now" in refused(scripts.train, *given, *data, "--hidden_size", "8")
    rows.write_text(rows.read_text().replace("graph", "GRAPH"))
    assert "train_files=[rows.jsonl (" in refused(scripts.train, *given, *data)
    assert "train_files=[rows.jsonl (" in refused(scripts.prepare, *data, "--output_dir", tmp_path / "data")
    assert "vocab_size=50000 before, 99 now" in refused(
        scripts.prepare, *data, "--output_dir", tmp_path / "data", "--vocab_size", "99"
    )
    run(scripts.prepare, *data, "--output_dir", tmp_path / "data", "--overwrite_output_dir", "true")
    assert "data.train_files=" in refused(scripts.train, *given, "--data", tmp_path / "data")
    (tmp_path / "data" / "prepared.json").unlink()  # as where prepare.py was killed
    assert "no record of finished documents" in refused(scripts.train, *given, "--data", tmp_path / "data")
    run(scripts.train, *given, *data, "--overwrite_output_dir", "true")


def test_an_ablation_has_a_folder_of_its_own(scripts, prepared, tmp_path):
    given = [*SMALL, *FAST, "--num_train_epochs", "1", "--encoder_type", "bigru", "--data", prepared]
    run(scripts.train, *given, "--output_dir", tmp_path)
    run(scripts.train, *given, "--output_dir", tmp_path, "--ablation", "exhird_s")
    coefficients = [
        json.loads((folder / "config.json").read_text())["exclusive_loss_coef"]
        for folder in (tmp_path, tmp_path / "exhird_s")
    ]
    assert coefficients == [0.0, 1.0]


def test_a_warm_start_is_prepared_and_trained(scripts, files, backbone_config, tiny_tokenizer, tmp_path):
    from transformers import AutoModel

    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    data = ["--output_dir", tmp_path / "data", "--pieces", tmp_path / "bert"]
    run(scripts.prepare, "--train_files", files, "--validation_files", files, *data)
    given = ["--encoder_type", "pretrained", "--backbone", tmp_path / "bert", "--hidden_size", "16"]
    run(scripts.train, *given, *FAST, "--data", tmp_path / "data", "--output_dir", tmp_path / "out")
    assert isinstance(pipeline("keyphrase-generation", model=str(tmp_path / "out"))("graph cuts"), list)


def test_scores_count_repeats_and_both_kinds(scripts):
    source = ["graph", "cuts", "segment", "images"]
    said = [[["graph", "cut"], ["graph", "cuts"], ["tree"]]]
    found = scripts.evaluate.score(said, [[["graph", "cuts"], ["tree"]]], [source])
    assert found["repeats"] == pytest.approx(1 / 3)
    assert (found["present"]["#C@M"], found["present"]["#Avg.Len"], found["absent"]["#C@M"]) == (1, 1, 1)
    assert found["present"]["F1@M"] == 1 and found["present"]["F1@5"] == pytest.approx(2 * 0.2 / 1.2)


@pytest.mark.parametrize("recipe", sorted(path.name for path in EXHIRD.glob("*.yml") if path.name != "ablations.yml"))
def test_recipes_name_what_there_is(recipe, scripts):
    values = yaml.safe_load((EXHIRD / recipe).read_text())
    kinds = (scripts.train.ModelArguments, scripts.train.DataArguments, TrainingArguments)
    known = {name for kind in kinds for name in kind.__dataclass_fields__}
    assert set(values) <= known


def test_every_ablation_makes_a_model_s_configuration(scripts):
    known = yaml.safe_load((EXHIRD / "ablations.yml").read_text())
    recipe = yaml.safe_load((EXHIRD / "transformer_paper.yml").read_text())
    names = set(ExHirdConfig.__dataclass_fields__)
    for name in known:
        model, training = scripts.train.ModelArguments(), SimpleNamespace(learning_rate=0.0)
        for field, value in recipe.items():
            if hasattr(model, field):
                setattr(model, field, value)
        scripts.train.ablate(name, model, training)
        values = {field: value for field, value in vars(model).items() if field in names}
        values["relative_attention"] = None if model.relative_attention == "off" else model.relative_attention
        ExHirdConfig(vocab_size=100, **values)  # refuses what cannot be
    with pytest.raises(ValueError, match="--ablation 'table9' is not in ablations.yml: table3_bigru, "):
        scripts.train.ablate("table9", scripts.train.ModelArguments())


def test_what_the_caller_can_mend_is_said_in_a_line(scripts, files, tmp_path, capsys):
    cases = (
        (scripts.prepare, ["--output_dir", tmp_path], "There is nothing to prepare. Pass --train_files"),
        (scripts.train, ["--data", tmp_path, "--output_dir", tmp_path], "holds no 'tokenizer'. Make it with"),
        (scripts.train, ["--output_dir", tmp_path], "There is nothing to prepare. Pass --train_files"),
        (scripts.train, ["--output_dir", tmp_path, "--test_files", "x=none"], "'none', and there is no such file"),
        (scripts.evaluate, ["--model", tmp_path, "--test_files", "x"], "pass NAME=FILE"),
    )
    for script, given, message in cases:
        with pytest.raises(SystemExit) as end:
            run(script, *given)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: ") and message in error


def test_the_rate_falls_after_each_rise_and_training_ends_after_three():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = PlateauSchedule(optimizer, min_lr=0.3), []
    for loss in (3.0, 4.0, 3.5, 3.6, 2.0, 2.1):  # compared with the one before, not with the best
        schedule.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.3, 0.3, 0.3]
    again = PlateauSchedule(optimizer, min_lr=0.3)
    again.load_state_dict(schedule.state_dict())
    assert again.before == 2.1
    stop = StopAfterRises(2)
    for losses, ends in (([1.0, 2.0, 3.0], True), ([1.0, 2.0, 1.5], False), ([2.0, 3.0], False)):
        state, control = SimpleNamespace(log_history=[{"eval_loss": x} for x in losses]), SimpleNamespace()
        stop.on_evaluate(None, state, control)
        assert getattr(control, "should_training_stop", False) is ends
