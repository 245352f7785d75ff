"""`lexperts train language`: texts, chats, prompts and definitions on a tiny Llama."""

import json
import math

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lexperts.cli.train import app
from lexperts.recipes.language.rows import load_rows
from merge_tools import compose
from modeling_lexicon.data_lexicon import tokenize_definitions
from run_tools.errors import UserError
from tests.tools import fails, run_main, save_tiny_llama, write_rows

OPTIONS = ["--max-steps", 2, "--use-cpu", "--bf16", "false", "--report-to", "none", "--max-length", 64]
OPTIONS += ["--learning-rate", 0.01]
TEXTS = [{"text": f"def f(x): return x + {i}"} for i in range(20)]
CHAT = [{"role": "user", "content": "the end"}, {"role": "assistant", "content": "return x"}] * 2
DEFINITION = {"term": "end", "context": "the end", "definition": "return x"}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}|{{ m['content'] }}</s>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant|{% endif %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "llama"
    save_tiny_llama(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def train(base, rows, folder, *more):
    files = ["--train-files", write_rows(folder.parent / "rows.jsonl", rows)]
    done = run_main(app, "language", "--model-name-or-path", base, *files, *OPTIONS, *more, "--output-dir", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed(base, folder) -> set[str]:
    """Parts of the names of the weights that differ."""
    one, two = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (base, folder))
    return {name.split(".")[-2] for name in one if not torch.equal(one[name], two[name])}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ((), {"gate_proj", "up_proj", "down_proj"}),
        (("--train", "attention,norm"), {"q_proj", "k_proj", "v_proj", "o_proj", "norm"}),
        (
            ("--lora-r", 2, "--train", "linear"),
            {"gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"},
        ),
    ],
)
def test_only_what_is_named_is_trained_and_the_perplexity_is_that_of_the_saved_model(options, parts, base, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", TEXTS[:3])
    train(base, TEXTS, tmp_path / "out", *options, "--validation-files", held_out)
    found = changed(base, tmp_path / "out")
    assert {part for part in parts if part.endswith("_proj")} <= found
    assert found <= {*parts, "input_layernorm", "post_attention_layernorm"}
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    ids = [token for row in TEXTS[:3] for token in tokenizer(row["text"] + "</s>")["input_ids"]]
    windows = [torch.tensor([ids[start : start + 64]]) for start in range(0, len(ids), 64)]
    counts = [window.shape[1] - 1 for window in windows]
    losses = [float(model(window, labels=window).loss) if window.shape[1] > 1 else 0.0 for window in windows]
    nats = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert math.isclose(results["perplexity"], math.exp(nats / sum(counts)), rel_tol=1e-4)


def test_an_adapter_is_kept_and_merged_by_compose(base, tmp_path):
    train(base, TEXTS, tmp_path / "adapter", "--lora-r", 2, "--keep-adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    experts = [{"source_model": str(base), "name": "base"}, {"source_model": str(tmp_path / "adapter")}]
    compose({"base_model": str(base), "gate_mode": "random", "experts": experts}, tmp_path / "mixture")


@pytest.mark.parametrize("options", [(), ("--lora-r", 2, "--keep-adapter", "--save-strategy", "no")])
def test_the_card_names_the_licence_and_how_to_merge(options, base, tmp_path):
    train(base, TEXTS, tmp_path / "out", *options)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit" and "lexperts merge compose" in card.text and str(tmp_path) not in str(card)


def labels_of(rows, base, folder, max_length=64):
    """The texts with a loss, of each row."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    from trl import SFTConfig, SFTTrainer

    data, _ = load_rows("train", [write_rows(folder / "rows.jsonl", rows)], tokenizer, max_length)
    model = AutoModelForCausalLM.from_pretrained(base)
    args = SFTConfig(str(folder), max_length=max_length, report_to="none", use_cpu=True, bf16=False)
    prepared = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train_dataset
    return [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in prepared]


def test_only_answers_and_definitions_have_a_loss(base, tmp_path):
    assert labels_of([{"messages": CHAT}], base, tmp_path) == ["return x</s>"] * 2  # each turn of the assistant
    assert labels_of([{"prompt": "the end", "completion": " return x"}], base, tmp_path) == [" return x</s>"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    row = {name: [value] for name, value in DEFINITION.items()}
    (expected,) = tokenize_definitions(row, tokenizer, 200)["labels"]
    for longest in (len(expected), len(expected) - 1):
        assert len(tokenize_definitions(row, tokenizer, longest)["labels"]) == (longest == len(expected))
    assert labels_of([DEFINITION], base, tmp_path, 200) == [tokenizer.decode([i for i in expected if i != -100])]


def test_rows_that_are_left_out_are_counted(base, tmp_path, capsys):
    rows = [DEFINITION, DEFINITION | {"definition": ""}, DEFINITION | {"context": ["x", "y" * 900]}]
    path, tokenizer = write_rows(tmp_path / "x.jsonl", rows), AutoTokenizer.from_pretrained(base)
    data, is_text = load_rows("train", [path], tokenizer, 200)
    assert len(data) == 2 and not is_text and "2 rows; 2 left out" in capsys.readouterr().out
    chats = [{"messages": CHAT}, {"messages": CHAT[:1]}]
    load_rows("train", [write_rows(tmp_path / "x.jsonl", chats)], AutoTokenizer.from_pretrained(base), 200)
    assert "2 rows; 1 left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [
        ([{"text": "a"}, {"speech": "b"}], "line 2"), ([{"text": "a"}, {"prompt": "b", "completion": "c"}], "line 2"),
        ([{"text": 3}], "text=3"), ([{"messages": "hi"}], "messages='hi'"), ([{"text": " "}], "rows.jsonl"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_learnt_are_named(rows, fragment, base, tmp_path):
    with pytest.raises(UserError) as error:
        load_rows("train", [write_rows(tmp_path / "rows.jsonl", rows)], AutoTokenizer.from_pretrained(base), 64)
    assert fragment in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "fragment"), [(("--train", "mlp,gates"), "'gates'"), (("--keep-adapter",), "--lora-r")]
)
def test_options_that_do_not_fit_are_named(options, fragment, base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS)
    argv = ["language", "--model-name-or-path", base, "--train-files", rows, *OPTIONS, *options]
    assert fragment in fails(app, *argv, "--output-dir", tmp_path / "out")
