# needs: test-all, spacy, serve
"""The code of the pages: each page is one notebook whose blocks run on tiny models, one after the other.

What a page expects (checkpoints, files) is made in a folder of its own. Statements that need more than a test has, such as the
Hub or a cluster, are listed with the reason.
"""

import ast
import contextlib
import importlib
import io
import json
import random
import re
import shutil
import warnings

import pytest
import spacy
import torch
import yaml
from datasets import Dataset
from transformers import BartForConditionalGeneration, BertModel, LlamaForCausalLM, PreTrainedModel, pipeline, set_seed

import merge_tools
from modeling_lexicon import LexiconForCausalLM, LexiconForSequenceClassification
from tests.merge_tools.conftest import save_expert
from tests.modeling_exhird.llamas import llama_tokenizer, tiny_llama
from tests.modeling_lexicon.conftest import tiny_lexicon
from tests.test_docs import PACKAGES, PAGES, ROOT, blocks_of, checkpoints, exists, tiny_tokenizer  # noqa: F401
from tests.tiny_models import decoder_config, encoder_config, make_model, summariser_config

NOT_RUN = {  # part of a statement -> why it does not run here
    "push_to_hub": "the Hub",
    "me/seke-inspec": "the Hub",
    "launch(": "the app; tests/app runs it",
    "exported": "an export takes long; test_export.py runs it",
    "ray.data": "Ray; test_ray.py runs it",
    "keyphrases.write_parquet": "Ray; test_ray.py runs it",
}
PYTHON_PAGES = [page.name for page in PAGES if page.suffix == ".md" and blocks_of(page.name, "python")]
each_python_page = pytest.mark.parametrize("page", PYTHON_PAGES)
TEXTS = ["Graph cuts solve the problem of learning a graph.", "The problem of the cut is a graph."]
ROWS = {
    "train.jsonl": [{"title": "Graph", "text": text, "keyphrases": ["graph", "problem"]} for text in TEXTS * 4],
    "documents.jsonl": [{"title": "Graph", "text": text, "id": str(number)} for number, text in enumerate(TEXTS)],
}
SUMMARIES = [
    {"document": text, "summary": "the graph", "dataset": name}
    for text in TEXTS
    for name in ("cnn_dm", "pubmed", "wikihow")
]


def notebook(page: str) -> str:
    """All Python of a page."""
    return "\n".join(blocks_of(page, "python"))


def statements(page: str) -> list[str]:
    """The statements of a page that run here."""
    parts = [ast.unparse(node) for node in ast.parse(notebook(page)).body]
    return [part for part in parts if not any(name in part for name in NOT_RUN)]


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """A folder with backbones under the names of the pages, with rows to train on."""
    folder = tmp_path_factory.mktemp("backbones")
    summariser, decoder = summariser_config(), decoder_config()
    summariser.max_position_embeddings = decoder.max_position_embeddings = 1024
    for name in ("microsoft/deberta-v3-base", "bert-base-cased", "allenai/scibert_scivocab_uncased"):
        save_model(BertModel(encoder_config()), folder / name)
    save_model(BartForConditionalGeneration(summariser), folder / "facebook/bart-large")
    save_model(LlamaForCausalLM(decoder), folder / "HuggingFaceTB/SmolLM2-135M-Instruct", eos_token="[SEP]")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = map(json.loads, (ROOT / "examples" / "corpus" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:8])
    # of two keyphrases each some are found, as scores that can be calibrated need
    labelled = "".join(json.dumps(row | {"keyphrases": row["keyphrases"][:2]}) + "\n" for row in rows)
    for name in ("validation.jsonl", "test.jsonl", "labelled.jsonl"):
        (folder / name).write_text(labelled, encoding="utf-8")
    return folder


def save_model(model: PreTrainedModel, folder, **tokens) -> None:
    """A checkpoint with a tokenizer, which has these special tokens too."""
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.model_max_length = "[CLS]", 1024
    tokenizer.add_special_tokens(tokens)
    tokenizer.save_pretrained(folder)


def prepare(page: str, folder) -> None:
    """Adds what only this page expects."""
    if page.startswith("exhird"):
        for part in (tiny_llama(), llama_tokenizer()):
            part.save_pretrained(folder / "HuggingFaceTB/SmolLM2-135M")
    if page.startswith("definitions"):
        sizes = {"max_position_embeddings": 256}
        save_model(tiny_lexicon(LexiconForCausalLM, **sizes), folder / "mixture")
        save_model(tiny_lexicon(LexiconForSequenceClassification, **sizes, num_labels=1), folder / "reward")
    if page.startswith("merging"):
        (recipe,) = (block for block in blocks_of("README.md", "yaml") if "experts:" in block)
        for seed, name in enumerate(("llama-base", "llama-law", "llama-medicine")):
            save_expert(folder / name, seed)
        (folder / "mixture.yml").write_text(recipe, encoding="utf-8")
        merge_tools.compose("mixture.yml", "mixture")
    if page.startswith("summarization"):
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMMARIES), encoding="utf-8")
        rows = [row | {"dataset": name} for row in SUMMARIES[::3] for name in ("papers", "clinic")]
        (folder / "summaries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if page == "many_documents.md":
        (folder / "documents").mkdir()
        Dataset.from_list(ROWS["documents.jsonl"]).to_parquet(folder / "documents" / "0.parquet")
    for name in ("runs/seke-minilm", "runs/seke-german", "runs/mine", "runs/seke"):
        save_model(make_model("SekeForTokenClassification"), folder / name)


@pytest.mark.nightly
@each_python_page
def test_every_page_runs(page, checkpoints, backbones, tmp_path, monkeypatch):  # noqa: F811
    for source in (checkpoints, backbones):
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spacy, "load", lambda name: spacy.blank("en"))  # models of spaCy are downloads
    prepare(page, tmp_path)
    torch.manual_seed(0)
    space = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for part in statements(page):
            exec(compile(part, f"{page}: {part[:60]}", "exec"), space)


def labelled_documents(number: int, seed: int) -> str:
    """JSON Lines of random words, some of which are always keyphrases."""
    draw, keys = random.Random(seed), ("graph", "problem", "cut")
    words = (*keys, "the", "of", "a", "is", "learning", "solve")
    rows = [[draw.choice(words) for _ in range(12)] for _ in range(number)]
    rows = [{"text": ". ".join(row), "keyphrases": sorted(set(row) & set(keys))} for row in rows]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.nightly
def test_the_script_of_the_training_page_trains_a_model_that_finds_keyphrases(tmp_path, monkeypatch):
    """The base, the checkpoints and the final folder open, and the last checkpoint is the final model."""
    set_seed(0)
    config = encoder_config()
    config.update({"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64})
    save_model(BertModel(config), tmp_path / "microsoft/deberta-v3-base")
    monkeypatch.chdir(tmp_path)
    for seed, (name, number) in enumerate({"train.jsonl": 160, "test.jsonl": 40}.items()):
        (tmp_path / name).write_text(labelled_documents(number, seed), encoding="utf-8")
    (code,) = (block for block in blocks_of("training.md", "python") if "Trainer(" in block)
    arguments = 'TrainingArguments("runs/seke"'
    assert arguments in code
    space = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*records its base")
        exec(compile(code.replace(arguments, arguments + ", save_steps=50"), "training.md", "exec"), space)
    assert space["scores"]["f1@5"] > 0.9  # without its learning rate, 0.0
    assert f"F1@5 {100 * space['scores']['f1@5']:.1f}" in printed.getvalue()
    assert set(space["rows"].column_names) >= {"input_ids", "labels", "num_present"}
    found = {}
    for name in ("base", "checkpoint-100", "final"):
        extract = pipeline("keyphrase-extraction", model=f"runs/seke/{name}")
        found[name] = [phrase["keyphrase"] for phrase in extract("the graph is a problem of learning to cut")]
    assert found["base"] != found["checkpoint-100"] == found["final"] != []  # adapter and head are really loaded


def test_every_statement_that_does_not_run_has_a_reason():
    everything = "\n".join(map(notebook, PYTHON_PAGES))
    assert [name for name in NOT_RUN if name not in everything] == []
    named = re.findall(r"test_\w+\.py", " ".join(NOT_RUN.values()))
    assert [name for name in named if not list((ROOT / "tests").rglob(name))] == []


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_every_yaml_and_json_block_is_valid(page):
    for block in blocks_of(page, "yaml|yml"):
        assert isinstance(yaml.safe_load(block), dict)
        if "experts:" in block:
            merge_tools.read_recipe(yaml.safe_load(block))
    for block in blocks_of(page, "json"):
        json.loads(block)


def test_the_reference_lists_every_public_name():
    folder = ROOT / "docs" / "reference"
    listed = set(re.findall(r"^::: (\S+)", "\n".join(page.read_text("utf-8") for page in folder.glob("*.md")), re.M))
    packages = [folder.name for folder in ROOT.glob("modeling_*")] + ["merge_tools", "keyphrase_tools"]
    public = {f"{name}.{item}" for name in packages for item in importlib.import_module(name).__all__}
    assert sorted(public - listed) == [] and [name for name in listed if not exists(name)] == []
