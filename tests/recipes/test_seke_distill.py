"""A small SEKE that imitates a large one: `train seke distill`."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import pipeline

from keyphrase_tools.cards import build_card, read_record
from keyphrase_tools.export import export_model
from lexperts.recipes.seke.arguments import ModelArguments
from lexperts.recipes.seke.distill import (
    UNLABELLED,
    DistillationTrainer,
    Teacher,
    new_student,
    open_graph_of,
    principal_components,
)
from modeling_seke import SekeForTokenClassification
from run_tools.errors import UserError
from run_tools.packaged import find_packaged
from tests.recipes.test_seke import CORPUS, run_main
from tests.recipes.test_seke import main as train_seke

STYLES = ["phrases", "tags"]


@pytest.fixture(scope="module")
def teacher(tiny_seke):
    model = tiny_seke("bert", styles=STYLES)
    model.classifier.weight.data *= 30
    return model


@pytest.fixture(scope="module")
def teacher_folder(teacher, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    teacher.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def arguments(**options):
    return ModelArguments(**{"teacher": "t", "lora": False, "student_hidden_size": 32, "student_layers": 1, **options})


def batch_of(teacher, rows=3, length=9):
    torch.manual_seed(1)
    ids = torch.randint(5, teacher.config.text_config.vocab_size, (rows, length))
    mask, labels = torch.ones_like(ids), torch.randint(3, ids.shape)
    mask[1, 6:], labels[1, 6:], labels[:, ::4] = 0, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "style_ids": torch.tensor([0, 1, 2])[:rows], "labels": labels}


def test_a_projection_of_full_width_keeps_all_distances():
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 13)
    whole, half = (rows @ principal_components(rows, size) for size in (12, 6))
    assert torch.allclose(torch.cdist(whole, whole), torch.cdist(rows, rows), atol=1e-3)
    by_svd = torch.linalg.svd(rows - rows.mean(0)).S[:6]
    assert torch.allclose((half - half.mean(0)).norm(dim=0), by_svd, rtol=1e-3)


def test_the_student_has_the_teachers_labels_styles_and_embeddings(teacher):
    student = new_student(teacher, arguments(), {"use_moe": True, "rnn_num_layers": 1})
    own, theirs = (model.backbone.get_input_embeddings().weight for model in (student, teacher))
    assert own.shape == (len(theirs), 32) and student.config.styles == STYLES
    assert student.config.id2label == teacher.config.id2label and len(student.backbone.encoder.layer) == 1
    assert torch.allclose(own @ own.T, theirs @ theirs.T, atol=1e-4)  # of the same width: a rotation
    with pytest.raises(UserError, match="--student-hidden-size 48 is not a multiple of 32"):
        new_student(teacher, arguments(student_hidden_size=48), {})
    with pytest.raises(UserError, match="--student-hidden-size 64 is not a multiple of 32 from 32 to 32"):
        new_student(teacher, arguments(student_hidden_size=64), {})


def test_the_teacher_answers_as_the_model_and_remembers(teacher, monkeypatch):
    inputs = batch_of(teacher)
    words = inputs.pop("labels") != -100
    with torch.no_grad():
        expected = teacher(**inputs).logits[words]
    remembering = Teacher(teacher, torch.device("cpu"))
    assert torch.allclose(remembering(inputs, words), expected, atol=0.05)  # float16
    room = remembering.room
    monkeypatch.setattr(teacher, "forward", None)  # is not called again
    wider = {name: torch.nn.functional.pad(rows, (0, 4)) if rows.ndim == 2 else rows for name, rows in inputs.items()}
    again = remembering(
        {name: rows.flip(0) for name, rows in wider.items()}, torch.nn.functional.pad(words, (0, 4)).flip(0)
    )
    sizes = words.sum(1).tolist()
    parts = zip(again.split(sizes[::-1]), reversed(expected.split(sizes)), strict=True)
    assert all(torch.allclose(one, other, atol=0.05) for one, other in parts) and remembering.room == room


def test_a_teacher_without_room_forgets(teacher):
    inputs = batch_of(teacher)
    words = inputs.pop("labels") != -100
    forgetful = Teacher(teacher, torch.device("cpu"))
    forgetful.room = 0
    assert torch.equal(forgetful(inputs, words), forgetful(inputs, words)) and not forgetful.kept


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_loss_by_hand(teacher, weight):
    """a KL + (1 - a) CE; a row without labels has the first only."""
    student = new_student(teacher, arguments(), {"use_rnn": False, "use_moe": False}).train()
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = batch_of(teacher)
    inputs["labels"][2][inputs["labels"][2] >= 0] = UNLABELLED
    labels = inputs["labels"].clone()
    trainer = DistillationTrainer.__new__(DistillationTrainer)
    trainer.teacher, trainer.weight = Teacher(teacher, torch.device("cpu")), weight
    found = trainer.compute_loss(student, dict(inputs))
    given = {name: rows for name, rows in inputs.items() if name != "labels"}
    p, q = (model(**given).logits.softmax(-1) for model in (teacher.eval(), student))
    total, number = 0.0, 0
    for row in range(3):
        for token in range(labels.shape[1]):
            if labels[row, token] == -100:
                continue
            number += 1
            total += weight * (p[row, token] * (p[row, token] / q[row, token]).log()).sum()
            if labels[row, token] >= 0:
                total -= (1 - weight) * q[row, token, labels[row, token]].log()
    assert found.item() == pytest.approx(total.item() / number, abs=2e-3)


def distill(teacher_folder, output, *options):
    return run_main(
        train_seke, "distill", "--teacher", teacher_folder, "--output-dir", output, "--max-length", 64,
        "--train-files", f"phrases={CORPUS / 'test.jsonl'}", f"tags={CORPUS / 'test.jsonl'}",
        "--validation-files", f"phrases={CORPUS / 'test.jsonl'}", f"tags={CORPUS / 'test.jsonl'}",
        "--student-hidden-size", 32, "--student-layers", 1, "--rows-per-epoch", 64, "--num-train-epochs", 1,
        "--bf16", "false", "--validation-limit", 20, "--show", 0, *options,
    )  # fmt: skip


def test_the_command_gives_a_small_model_that_reads_styles(teacher_folder, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"The grey owls of the north, number {i}, sleep."}) + "\n" for i in range(20))
    )
    done = distill(teacher_folder, tmp_path / "out", "--unlabelled-files", texts)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "without labels: 20 documents in 20 windows" in done.stdout
    extract = pipeline("keyphrase-extraction", model=str(tmp_path / "out"))
    assert isinstance(extract.model, SekeForTokenClassification) and extract.model.rnn.recurrent.num_layers == 1
    assert extract.model.config.styles == STYLES and set(extract.model.config.style_rankers) == set(STYLES)
    scores = [phrase["score"] for phrase in extract("The grey owls sleep.", style="tags", min_score=0.0)]
    assert scores and np.isfinite(scores).all()
    record = read_record(tmp_path / "out")
    assert record["unlabelled"] == {"source": "texts.jsonl (20)", "documents": 20, "windows": 20}
    card = build_card(read_record(tmp_path / "out"), "tiny", "me/tiny")
    assert "over a BERT of 1 layer of width 32, which imitates" in str(card)
    again = distill(teacher_folder, tmp_path / "out", "--unlabelled-files", texts)
    assert again.returncode == 0
    texts.write_text(texts.read_text() + '{"text": "One more text."}\n')
    other = distill(teacher_folder, tmp_path / "out", "--unlabelled-files", texts)
    assert other.returncode == 2 and "unlabelled_files" in other.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start-from", "{teacher}"], "exclude each other"),
        (["--lora", "true"], "--teacher and --lora true exclude each other"),
        (["--unlabelled-files", "{empty}"], "There are no documents"),
        (["--student-hidden-size", "40"], "--student-hidden-size 40 is not a multiple of 32"),
        (["--teacher-weight", "1.5"], "--teacher-weight"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_options_that_do_not_fit_are_told_before_training(teacher_folder, tmp_path, options, message):
    (tmp_path / "empty.jsonl").write_text("")
    options = [option.format(teacher=teacher_folder, empty=tmp_path / "empty.jsonl") for option in options]
    done = distill(teacher_folder, tmp_path / "out", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_options_of_a_student_need_a_teacher():
    with pytest.raises(UserError, match="--student-layers 3 needs --teacher"):
        ModelArguments(student_layers=3)
    args = ModelArguments(teacher="default", lora=False)
    assert args.teacher == find_packaged("default")
    assert (args.teacher_weight, args.student_hidden_size, args.student_layers) == (0.8, 128, 2)


def test_the_export_of_the_teacher_answers(teacher, teacher_folder, tiny_tokenizer, tmp_path):
    export_model(str(teacher_folder), tmp_path / "graph")
    graph = open_graph_of(teacher, tiny_tokenizer, str(tmp_path / "graph"))
    inputs = batch_of(teacher)
    words = inputs.pop("labels") != -100
    expected, found = (Teacher(model, torch.device("cpu"))(inputs, words) for model in (teacher, graph))
    assert torch.allclose(found, expected, atol=0.01)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, model: model.classifier.weight.data.mul_(2), "is an export of another model than --teacher"),
        (lambda folder, model: (folder / "onnx" / "model.onnx").unlink(), "cannot be opened"),
        (lambda folder, model: (folder / "config.json").unlink(), "no"),
    ],
)
def test_a_graph_that_is_not_the_teachers_is_an_error(
    teacher, teacher_folder, tiny_tokenizer, tmp_path, spoil, message
):
    export_model(str(teacher_folder), tmp_path / "graph")
    model = copy.deepcopy(teacher)
    spoil(tmp_path / "graph", model)
    with pytest.raises(UserError, match=f"--teacher-graph .*graph.*{message}"):
        open_graph_of(model, tiny_tokenizer, str(tmp_path / "graph"))
