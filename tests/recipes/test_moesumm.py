"""MoeSumm's training as a user runs it, on a tiny BART, a tiny Llama and synthetic texts."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BartForConditionalGeneration, Trainer, TrainingArguments
from transformers.pipelines import pipeline

from lexperts.cli.train import app
from modeling_moesumm import DataCollatorForMoeSumm, MoeSummForConditionalGeneration, TemperatureSampler
from tests.recipes.trainings import some_rows
from tests.tools import fails, save_tiny_bart, save_tiny_llama, write_rows

FAST = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--eval-strategy", "no", "--logging-steps", 1]
FAST += ["--save-strategy", "no", "--load-best-model-at-end", "false", "--learning-rate", 0.01, "--max-steps", 2]
FAST += ["--deputy-intermediate-size", 8, "--per-device-train-batch-size", 8]


def options(model, folder, datasets, *more, config=()) -> list[str]:
    """The command line of a run of two steps."""
    given = ["moesumm", *config, "--model-name-or-path", model, "--output-dir", folder, "--datasets", *datasets]
    return [str(word) for word in (*given, *FAST, *more)]


def run(model, folder, *given, **named) -> dict:
    """Trains -> the results."""
    app(options(model, folder, *given, **named), standalone_mode=False)
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """Data sets, one of which has other columns and a row without a text; models; a trained MoeSumm over two data sets."""
    folder = tmp_path_factory.mktemp("inputs")
    at = SimpleNamespace(**{name: folder / name for name in ("bart", "llama", "trained")})
    for name in ("mail", "news", "chat"):
        rows = some_rows(20)
        if name == "news":
            rows = [{"id": 1, "article": row["document"], "highlights": [row["summary"], ""]} for row in rows[:5]]
            rows.append({"id": "2", "article": "A text.", "highlights": None})
        write_rows(folder / name / "train.jsonl", rows)
        setattr(at, name, f"{name}={folder / name}")
    save_tiny_bart(at.bart, [row[name] for row in some_rows() for name in ("document", "summary")])
    BartForConditionalGeneration.from_pretrained(at.bart, dropout=0.0).save_pretrained(at.bart)
    save_tiny_llama(at.llama)
    lengths = ["--summary-length", 12, "--num-beams", 2, "--max-length", 10, "--margin-loss-coef", 2]
    run(at.bart, at.trained, [at.mail, at.news], *lengths)
    return at


def test_a_run_is_that_of_the_plain_trainer(at, tmp_path, capsys):
    run(at.bart, tmp_path, [at.mail, at.news], "--mixing", "temperature", "--max-length", 10)
    printed = capsys.readouterr().out
    assert (
        "news: 5 train rows (1 without a text were dropped)" in printed and "documents were truncated to 10" in printed
    )

    class Mixed(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return TemperatureSampler(self.train_dataset["dataset"], "temperature", seed=42)

    torch.manual_seed(42)
    options = {"datasets": ["mail", "news"], "deputy_intermediate_size": 8}
    model = MoeSummForConditionalGeneration.from_backbone(at.bart, **options)
    arguments = TrainingArguments(
        tmp_path / "plain", max_steps=2, learning_rate=0.01, per_device_train_batch_size=8, use_cpu=True, report_to="none",
        remove_unused_columns=False, save_strategy="no",
    )  # fmt: skip
    collator = DataCollatorForMoeSumm(AutoTokenizer.from_pretrained(at.bart), model, 10, on_long="truncate")
    rows = [row | {"dataset": name} for name, count in (("mail", 20), ("news", 5)) for row in some_rows(20)[:count]]
    Mixed(model, arguments, collator, Dataset.from_list(rows)).train()
    weights = MoeSummForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(weights, model.state_dict(), rtol=0, atol=0)


def test_the_model_opens_with_the_settings_of_the_run(at):
    summarize = pipeline("moe-summarization", model=str(at.trained))
    generation, limit = summarize.model.generation_config, summarize.tokenizer.model_max_length
    assert (generation.max_length, generation.num_beams, generation.do_sample, limit) == (12, 2, False, 10)
    assert summarize("A bird met a boat.", dataset="news")[0].keys() == {"summary_text"}


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("no_dataset", {"dataset_aware": False, "margin_loss_coef": 10.0, "label_smoothing": 0.1}),
        ("no_margin", {"dataset_aware": True, "margin_loss_coef": 0.0, "deputy_init_std": 0.02}),
        ("flat_moe", {"main_expert": False, "margin_loss_coef": 0.0}),
        ("backbone", {"model_type": "bart"}),
    ],
)
def test_every_variant_trains_with_the_authors_options(at, tmp_path, variant, expected):
    more = ["--variant", variant, "--bf16", "false", "--max-length", 64, "--max-target-length", 40]
    run(at.bart, tmp_path, [at.mail], *more, config=["bart_large_authors"])
    expected |= {"repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "length_penalty": 0.8, "num_beams": 4}
    written = json.loads((tmp_path / "generation_config.json").read_text())
    written |= json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in expected} == expected


def test_the_stock_model_has_the_loss_of_a_new_moesumm_and_counts_every_token_alike(at, tmp_path):
    rows = [row | {"summary": row["summary"] * (1 + i % 3)} for i, row in enumerate(some_rows())]
    data = [f"mail={write_rows(tmp_path / 'rows.jsonl', rows)}"]  # of unlike lengths
    losses = []
    for smoothing in (0, 0.3):
        steps = []
        for variant, size in (("no_margin", 8), ("backbone", 8), ("backbone", 2)):
            more = ["--per-device-train-batch-size", size, "--gradient-accumulation-steps", 8 // size]
            more += ["--variant", variant, "--label-smoothing", smoothing]
            steps.append(run(at.bart, tmp_path / f"{variant}-{size}-{smoothing}", data, *more)["log"][0])
        losses.append([step["loss"] for step in steps])
        assert losses[-1] == pytest.approx([losses[-1][0]] * 3, rel=1e-6)
        assert steps[1]["grad_norm"] == pytest.approx(steps[2]["grad_norm"], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[1][0], rel=1e-6)


def test_few_rows_of_a_new_data_set_train_deputies_and_selectors_of_a_trained_model_alone(at, tmp_path):
    half = tmp_path / "half"
    MoeSummForConditionalGeneration.from_pretrained(at.trained, dtype="bfloat16").save_pretrained(half)
    AutoTokenizer.from_pretrained(at.trained).save_pretrained(half)
    models = []
    for seed, more in enumerate(([], ["--variant", "no_margin"], ["--train", "all"])):
        run(half, tmp_path / str(seed), [at.chat], "--few-shot-rows", 4, "--seed", seed, *more)
        models.append(MoeSummForConditionalGeneration.from_pretrained(tmp_path / str(seed)))
        assert models[-1].config.datasets == ["mail", "news", "chat"] and models[-1].dtype == torch.float32
    found = [(model.config.margin_loss_coef, model.generation_config.num_beams) for model in models]
    assert found == [(2, 2), (0, 2), (2, 2)]
    start = MoeSummForConditionalGeneration.from_pretrained(half, dtype="float32").state_dict()
    one, other, every = (model.state_dict() for model in models)
    assert all(torch.equal(one[name], w) for name, w in start.items() if ".deputies." not in name)
    deputies, main = (
        f"backbone.model.encoder.layers.0.{name}" for name in ("deputies.experts.down_proj", "fc1.weight")
    )
    assert not torch.equal(one[deputies], start[deputies]) and not torch.equal(one[deputies], other[deputies])
    assert not torch.equal(every[main], start[main])


REFUSALS = [
    ("trained", ["--num-deputies", 2], "'num_deputies': 2"),
    ("trained", ["--variant", "flat_moe"], "'main_expert': False"),
    ("trained", ["--variant", "backbone"], "'num_deputies': 0"),
    ("trained", ["--margin-loss-coef", -1], "margin_loss_coef=-1"),
    ("trained", ["--few-shot-rows", 21], "--few-shot-rows 21"),
    ("bart", ["--label-smoothing-factor", 0.1], "--label-smoothing-factor"),
    ("bart", ["--document-column", "body"], "body"),
    ("bart", ["--train", "all", "--lora-r", 2], "--lora-r 2"),
    ("bart", ["--datasets", "mail=a", "mail=b"], "mail=a"),
    ("llama", ["--train", "deputies", "--variant", "backbone"], "--variant backbone"),
]


@pytest.mark.parametrize("model, more, named", REFUSALS)
def test_refusals(model, more, named, at, tmp_path):
    assert named in fails(app, *options(getattr(at, model), tmp_path, [at.chat], *more))
    assert not list(tmp_path.glob("*.safetensors"))


# with an option, the weights of the backbone that change, and whether the deputies do
DECODERS = [
    (["--train", "deputies"], "nothing", True),
    (["--train", "deputies", "--lora-r", 2], "[qv]_proj", True),
    ([], "", True),
    (["--variant", "backbone", "--lora-r", 2, "--train-sampling-strategy", "group_by_length"], "_proj", None),
]


@pytest.mark.parametrize("more, changes, moved", DECODERS)
def test_a_decoder_is_trained_by_the_same_command(more, changes, moved, at, tmp_path):
    lengths = ["--max-length", 160, "--max-target-length", 40, "--summary-length", 12]
    run(at.llama, tmp_path, [at.mail, at.news], *lengths, *more)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (at.llama, tmp_path))
    assert after.generation_config.max_new_tokens == 11
    weights = {name.removeprefix("backbone."): weight for name, weight in after.state_dict().items()}
    changed = {name for name, weight in before.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed == {name for name in before.state_dict() if re.search(changes, name)}
    deputies = {bool(weight.any()) for name, weight in weights.items() if "experts.down_proj" in name}
    assert deputies == ({moved} if moved is not None else set())
