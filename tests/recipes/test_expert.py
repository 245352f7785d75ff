"""`lexperts train expert`: what is trained and saved, texts and chats, adapters, and merging the results."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from lexperts.recipes.expert import texts, train
from lexperts.recipes.lexicon.train_expert import train_tokenizer
from merge_tools import compose, inspect
from run_tools.errors import UserError
from run_tools.packaged import GGUF_SHA256, HUB_IDS
from tests.loopback_hub import LoopbackHub
from tests.merge_tools.conftest import run_python
from tests.recipes.helpers import TINY, fails, run_main, write_rows

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
TEXTS = [{"text": f"the {thing} number {i} is near the {thing}"} for i in range(12) for thing in ("bird", "boat")]
OPTIONS = [
    "--max-steps",
    "2",
    "--per-device-train-batch-size",
    "4",
    "--learning-rate",
    "0.01",
    "--use-cpu",
    "--report-to",
    "none",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.3)).save_pretrained(folder)
    tokenizer = train_tokenizer(
        [{"term": "bird", "context": row["text"], "definition": row["text"]} for row in TEXTS], TINY["vocab_size"]
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", TEXTS)


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def options_on(base, rows, out, *options):
    return ("--model-name-or-path", base, "--train-files", rows, "--output-dir", out, *OPTIONS, *options)


def train_on(base, rows, out, *options):
    done = run_main(train.main, *options_on(base, rows, out, *options))
    assert done.returncode == 0, done.stderr[-2000:]
    return SimpleNamespace(folder=out, printed=done.stdout)


def changed(base, folder):
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(before) == set(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    "options, trained",
    [
        ((), {"mlp"}),
        (("--freeze", "embeddings"), {"mlp", "self_attn", "norm"}),
        (("--freeze", "nothing"), {"mlp", "self_attn", "norm", "embed", "lm_head"}),
    ],
    ids=["shared", "embeddings", "nothing"],
)
def test_only_what_is_not_frozen_changes(options, trained, base, rows, tmp_path):
    run = train_on(base, rows, tmp_path / "out", *options)
    names = changed(base, run.folder)
    found = {part for part in ("mlp", "self_attn", "norm", "embed", "lm_head") if any(part in name for name in names)}
    assert found == trained
    assert not list(run.folder.glob("*.bin"))


def test_experts_of_one_base_merge_without_a_change_of_what_they_share(base, rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"text": row["text"][::-1]} for row in TEXTS])
    one = train_on(base, rows, tmp_path / "one").folder
    two = train_on(base, other, tmp_path / "two").folder
    specs = [{"source_model": str(one), "samples": str(rows)}, {"source_model": str(two), "samples": str(other)}]
    compose({"base_model": str(base), "experts": specs, "gate_mode": "ridge"}, tmp_path / "mixture")
    mixture, dense = load_file(tmp_path / "mixture" / "model.safetensors"), load_file(base / "model.safetensors")
    shared = [name for name in dense if name in mixture]
    assert len(shared) > 10 and all(torch.equal(mixture[name], dense[name]) for name in shared)
    assert inspect(tmp_path / "mixture")["confusion"]


@pytest.mark.parametrize("options, library", [((), "transformers"), (("--lora",), "peft")])
def test_the_card_of_an_expert_has_the_licence_of_its_base_and_a_recipe(options, library, base, rows, tmp_path):
    licensed = shutil.copytree(base, tmp_path / "licensed")
    (licensed / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    folder = train_on(licensed, rows, tmp_path / "expert", *options).folder
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.license == "apache-2.0" and card.data.library_name == library
    recipe = yaml.safe_load(re.search("```yaml\n(.*?)```", card.text, re.DOTALL)[1])
    assert recipe["base_model"] == licensed.name and recipe["experts"][0]["source_model"] == folder.name
    assert str(tmp_path) not in str(card) and "in 2 steps of" in card.text
    recipe["base_model"] = str(licensed)
    for expert in recipe["experts"]:
        expert["source_model"] = str(folder)
        if "samples" in expert:
            expert["samples"] = str(rows)
    recipe["gate_mode"] = "random"
    compose(recipe, tmp_path / "mixture")
    record = json.loads((tmp_path / "mixture/merge_record.json").read_text())
    assert [expert["license"] for expert in record["experts"]] == ["apache-2.0"] * 2


def test_a_card_that_is_there_is_kept(base, rows, tmp_path):
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert/README.md").write_text("mine")
    folder = train_on(base, rows, tmp_path / "expert").folder
    assert (folder / "README.md").read_text() == "mine"


def test_an_adapter_of_the_mlps_is_an_expert(base, rows, tmp_path):
    adapter = train_on(base, rows, tmp_path / "adapter", "--lora", "--lora-r", 2).folder
    assert (adapter / "adapter_config.json").is_file() and not (adapter / "model.safetensors").exists()
    compose({"base_model": str(base), "experts": [str(adapter), str(base)]}, tmp_path / "mixture")
    mixture, dense = load_file(tmp_path / "mixture" / "model.safetensors"), load_file(base / "model.safetensors")
    name, prefix = "model.layers.0.mlp.up_proj.weight", "model.layers.0.block_sparse_moe.experts"
    assert torch.equal(mixture[f"{prefix}.1.w3.weight"], dense[name])
    assert not torch.equal(mixture[f"{prefix}.0.w3.weight"], dense[name])


def test_the_recipe_of_a_card_names_a_packaged_base_and_no_folder_of_this_machine(base, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("LEXPERTS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(base, tmp_path / "cache" / f"smollm2-{GGUF_SHA256[:12]}")
    monkeypatch.chdir(tmp_path)
    expert = train_on("smollm2", rows, tmp_path / "expert").folder
    card = ModelCard((expert / "README.md").read_text())
    assert card.data.base_model == HUB_IDS["smollm2"] and str(tmp_path) not in str(card)
    assert yaml.safe_load(re.search("```yaml\n(.*?)```", card.text, re.DOTALL)[1])["base_model"] == "smollm2"
    experts = [str(expert), {"source_model": "smollm2", "name": "plain"}]
    compose({"base_model": "smollm2", "experts": experts}, tmp_path / "mixture")
    card = (tmp_path / "mixture" / "README.md").read_text()
    assert str(tmp_path) not in card and f"| plain | {HUB_IDS['smollm2']} |" in card


@pytest.mark.parametrize("options", [(), ("--lora",)])
def test_an_expert_is_pushed_with_its_card(options, base, rows, tmp_path):
    pushed = ("--push-to-hub", "--hub-model-id", "tester/birds", *options)
    with LoopbackHub() as hub:
        environment = {**os.environ, **hub.env, "HF_HOME": str(tmp_path / "cache")}
        command = options_on(base, rows, tmp_path / "birds", *pushed)
        run_python("-m", "lexperts", "train", "expert", *command, env=environment)
        repository = hub.repos["model", "tester/birds"]
    card = repository.commits[repository.branches["main"]]["tree"]["README.md"][0]
    assert b"## How to merge it" in card and card == (tmp_path / "birds" / "README.md").read_bytes()


def test_texts_are_joined_and_cut_into_windows(tokenizer, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("the bird\n\nthe boat is near\n")
    windows = texts.make_windows(tokenizer, [path], 4).rows
    joined = [
        i for text in ("the bird", "the boat is near") for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ]
    assert [i for window in windows for i in window["input_ids"]] == joined[
        : len(joined) // 4 * 4 + (len(joined) % 4 > 1) * 4
    ]
    assert all(window["labels"] == window["input_ids"] for window in windows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "ROWS.TXT"])
def test_blank_texts_are_left_out(name, tmp_path):
    lines = ["a bird", " ", "a boat"]
    content = lines if name.lower().endswith(".txt") else [json.dumps({"text": line}) for line in lines]
    (tmp_path / name).write_text("\n".join(content))
    assert [row for _, row in texts.read_rows(tmp_path / name)] == [{"text": "a bird"}, {"text": "a boat"}]


def test_rows_that_are_left_out_are_counted_and_the_first_is_named(tokenizer, tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in ("the bird", "", "the boat is near", " ")])
    train.make_dataset("train", [str(path)], tokenizer, train.DataArguments(train_files=[str(path)]))
    assert f"train: 2 rows are left out, whose text is empty; the first is {path}, line 2\n" in capsys.readouterr().out


def test_columns_that_are_null_are_left_out(tmp_path):
    chat = [{"role": "user", "content": "a bird"}, {"role": "assistant", "content": "near"}]
    rows = [{"text": None, "messages": chat}, {"text": "a bird", "messages": None}, {"text": "a boat", "prompt": "a"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert [row for _, row in texts.read_rows(path)] == [{"messages": chat}, {"text": "a bird"}, {"text": "a boat"}]
    with pytest.raises(UserError, match="line 1: text=None is not a text"):
        list(texts.read_rows(write_rows(path, [{"text": None}])))


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "rows.txt").write_bytes(b"a bird\n\xff\n")
    with pytest.raises(UserError, match="rows.txt is not UTF-8"):
        list(texts.read_rows(tmp_path / "rows.txt"))


def test_a_chat_has_its_loss_on_what_the_assistant_says(tokenizer):
    messages = [
        {"role": "user", "content": "a bird"}, {"role": "assistant", "content": "near"},
        {"role": "user", "content": "a boat"}, {"role": "assistant", "content": "the boat"},
    ]  # fmt: skip
    row = texts.encode(tokenizer, {"messages": messages}, "here")
    learned = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert tokenizer.decode(learned).split() == ["near", "the", "boat"]
    assert all(label in (-100, i) for i, label in zip(row["input_ids"], row["labels"], strict=True))


def test_chats_that_do_not_fit_are_counted(base, tmp_path):
    short, long = (
        {"prompt": "a bird", "completion": " near"},
        {"prompt": "the bird is near the boat " * 9, "completion": " near"},
    )
    cut = {"prompt": "a bird", "completion": " the boat is near the bird" * 9}
    rows = write_rows(tmp_path / "rows.jsonl", [short, long, cut, cut, short])
    printed = train_on(base, rows, tmp_path / "out", "--max-length", 16).printed
    assert "train: 4 windows" in printed and "2 are truncated, and 1 are left out" in printed


def test_a_completion_has_its_loss_on_itself_and_its_end(tokenizer):
    row = texts.encode(tokenizer, {"prompt": "the bird is", "completion": " near"}, "here")
    learned = [label for label in row["labels"] if label != -100]
    assert learned[-1] == tokenizer.eos_token_id and tokenizer.decode(learned[:-1]).strip() == "near"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"words": "a"}, "line 1.*neither a text nor a chat"),
        ({"text": 3}, "line 1.*text=3 is not a text"),
        ({"prompt": "a", "completion": None}, "completion=None is not a text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
        ({"messages": ["a"]}, "do not fit the model's chat template"),
        ({"text": ""}, "no row has a text to learn from"),
    ],
)
def test_rows_that_cannot_be_learned_from(row, message, base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    line = fails(train.main, *options_on(base, rows, tmp_path / "out"))
    assert re.search(message, line), line
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_adapter_cannot_thaw_other_weights(base, rows, tmp_path):
    given = options_on(base, rows, tmp_path / "out", "--lora", "--freeze", "nothing")
    assert "--freeze nothing" in fails(train.main, *given)


def test_a_model_of_another_family_is_refused(rows, tmp_path, tokenizer):
    BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    line = fails(train.main, *options_on(tmp_path / "bert", rows, tmp_path / "out"))
    assert "bert" in line and "llama" in line


def test_held_out_texts_are_scored(base, rows, tmp_path):
    run = train_on(base, rows, tmp_path / "out", "--validation-files", rows)
    assert "perplexity of the held-out texts" in run.printed
    assert json.loads((run.folder / "results.json").read_text())["eval_perplexity"] > 1
