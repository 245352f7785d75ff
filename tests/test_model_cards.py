"""Model cards of all families: a checkpoint without a card gets one, and no card is replaced by a blank one."""

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

import modeling_exhird
import modeling_hypernet
import modeling_seke
from modeling_seke.card import is_blank, write_model_card
from tests.loopback_hub import LoopbackHub
from tests.modeling_exhird.conftest import VOCABULARY
from tests.modeling_lexicon.conftest import tiny_lexicon
from tests.modeling_moesumm.conftest import tiny_moesumm

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("seke", "hypernet", "exhird", "moesumm", "lexicon")
BASE = "tester/backbone"
TASKS = {
    "seke": "keyphrase-extraction",
    "hypernet": "keyphrase-extraction",
    "hypernet-qa": "extractive-qa",
    "exhird": "keyphrase-generation",
    "moesumm": "moe-summarization",
    "lexicon": "definition-modeling",
}


def tiny_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *["the", "graph", "cut", "is", "a", "problem", "of", "learning"]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, eos_token="[SEP]", **special)


def tiny_model(kind):
    """-> a model of the family, and a tokenizer for its pipeline."""
    torch.manual_seed(0)
    tokenizer, labels = tiny_tokenizer(), {0: "O", 1: "B-KEY", 2: "I-KEY"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes)
    encoder.name_or_path = BASE
    if kind == "seke":
        return modeling_seke.SekeForTokenClassification(modeling_seke.SekeConfig(text_config=encoder)), tokenizer
    if kind in ("hypernet", "hypernet-qa"):
        small = {"meta_size": 4, "meta_hidden_size": 8, "hidden_size": 8, "cls_token_id": 2, "sep_token_id": 3}
        if kind == "hypernet":
            config = modeling_hypernet.HypernetConfig(text_config=encoder, id2label=labels, **small)
            return modeling_hypernet.HypernetForTokenClassification(config), tokenizer
        config = modeling_hypernet.HypernetConfig(text_config=encoder, **small)
        return modeling_hypernet.HypernetForQuestionAnswering(config), tokenizer
    if kind == "exhird":
        tokenizer = modeling_exhird.ExHirdTokenizer.from_texts(VOCABULARY)
        options = {"encoder_type": "bigru", "hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 1}
        config = modeling_exhird.ExHirdConfig.for_tokenizer(tokenizer, **options)
        return modeling_exhird.ExHirdForKeyphraseGeneration(config), tokenizer
    if kind == "moesumm":
        model = tiny_moesumm()
        model.config.text_config.name_or_path = BASE
        return model, tokenizer
    return tiny_lexicon(), tokenizer


def blank_card(**data):
    about = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
    return ModelCard.from_template(ModelCardData(**data), model_description=about)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_card_writer_is_the_same_file_in_each_package(package):
    copies = (ROOT / "modeling_seke" / "card.py", ROOT / f"modeling_{package}" / "card.py")
    assert filecmp.cmp(*copies, shallow=False), f"cp {' '.join(map(str, copies))}"


@pytest.mark.parametrize("kind", TASKS)
def test_a_model_without_a_card_gets_one_that_says_what_it_is(kind, tmp_path):
    model, _ = tiny_model(kind)
    path = model.write_model_card(tmp_path, license="mit", language=["en", "de"], datasets=["a/b"])
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["license"] == "mit" and data["language"] == ["en", "de"]
    assert {"lexperts", model.config.model_type, TASKS[kind]} <= set(data["tags"]) and data["datasets"] == ["a/b"]
    assert data.get("base_model") == (None if kind in ("exhird", "lexicon") else BASE)
    assert f'pipeline("{TASKS[kind]}"' in card.text and "trust_remote_code=True" in card.text
    assert f"{model.num_parameters():,} parameters" in card.text and "None are recorded" in card.text
    compile(card.text.split("```python\n")[1].split("```")[0], "README.md", "exec")
    assert not is_blank(card) and "Before you publish it" not in card.text
    assert model.write_model_card(tmp_path) is None and ModelCard.load(path).data.license == "mit"


def test_classes_without_a_pipeline_say_how_they_open(tmp_path):
    config = tiny_model("hypernet-qa")[0].config
    own = type("Mine", (modeling_hypernet.HypernetForSequenceClassification,), {})  # a user's subclass
    assert ModelCard.load(own(config).write_model_card(tmp_path)).data.pipeline_tag == "text-classification"
    (tmp_path / "README.md").unlink()
    for kind in (modeling_hypernet.HypernetForSequenceClassification, modeling_hypernet.HypernetModel):
        (path := kind(config).write_model_card(tmp_path)).rename(tmp_path / f"{kind.__name__}.md")
        text = (tmp_path / f"{kind.__name__}.md").read_text(encoding="utf-8")
        name = "AutoModel" if kind.__name__ == "HypernetModel" else kind.__name__
        assert f'{name}.from_pretrained("PATH")' in text and "import modeling_hypernet" in text
        assert "license, language" in text  # what is to be added
        assert path == tmp_path / "README.md"


def test_metadata_is_valid_yaml_whatever_it_holds(tmp_path):
    model, _ = tiny_model("seke")
    path = model.write_model_card(tmp_path, license="a: b", license_name="#1 'of' them")
    assert ModelCard.load(path).data.license == "a: b" and ModelCard.load(path).data.license_name == "#1 'of' them"


def test_a_blank_card_is_no_card_and_its_tags_are_kept(tmp_path):
    model, _ = tiny_model("seke")
    blank = blank_card(tags=["mine", "seke"], library_name="transformers")
    edited = ModelCard(str(blank).replace("[More Information Needed]", "Measured: F1 0.5", 1))
    assert is_blank(blank) and not is_blank(edited)
    for text in (str(edited), "---\nlicense: a: b\n---\n# Mine", "# No metadata"):
        (tmp_path / "README.md").write_text(text, encoding="utf-8")
        assert model.write_model_card(tmp_path) is None
    blank.save(tmp_path / "README.md")
    model.write_model_card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["lexperts", "seke", "keyphrase-extraction", "mine"]


def test_a_folder_is_no_base_model(tmp_path, monkeypatch):
    model, _ = tiny_model("seke")
    for name in (str(tmp_path), "./a", "a/b/c", "minilm", ""):
        model.config.text_config.name_or_path = name
        assert "base_model" not in ModelCard.load(write_model_card(model, tmp_path)).data.to_dict(), name
        (tmp_path / "README.md").unlink()


PUSH = """
import sys
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForTokenClassification, pipeline
import keyphrase_tools
from transformers import BertConfig, BertForTokenClassification
from tests.test_model_cards import BASE, TASKS, tiny_model, tiny_tokenizer

api, text = HfApi(), "# Backbone"
api.create_repo(BASE)
ModelCard("---\\nlicense: bsd-3-clause\\nlanguage: sl\\n---\\n" + text).push_to_hub(BASE)
for kind, task in TASKS.items():
    model, tokenizer = tiny_model(kind)
    pipeline(task, model=model, tokenizer=tokenizer).push_to_hub(f"tester/{kind}", tags=["mine"])
    model.push_to_hub(f"tester/{kind}-model")

# a folder with a card of its own: it travels with the same weights, and not with others
extract = pipeline("keyphrase-extraction", model="trained", device="cpu")
extract.push_to_hub("tester/trained")
torch.nn.init.zeros_(extract.model.classifier.weight)
extract.push_to_hub("tester/changed")
api.create_repo("tester/request")
extract.push_to_hub("tester/request", create_pr=True)

# a card on the Hub stays, also if it was written there after a first push
ModelCard("---\\nlicense: mit\\n---\\n# Written by hand").push_to_hub("tester/changed")
extract.push_to_hub("tester/changed")
extract.model.push_to_hub("tester/changed")

# a model of another library: as transformers does it
labels = {0: "O", 1: "B", 2: "I"}
bert = BertForTokenClassification(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                                             intermediate_size=8, id2label=labels, label2id={v: k for k, v in labels.items()}))
pipeline("keyphrase-extraction", model=bert, tokenizer=tiny_tokenizer()).push_to_hub("tester/bert")
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """{repository: its card}, and the repositories' objects."""
    folder = tmp_path_factory.mktemp("push")
    model, tokenizer = tiny_model("seke")
    model.save_pretrained(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    card = '---\nlicense: apache-2.0\n---\n# Trained\nF1@10 61.2\n```python\npipeline("keyphrase-extraction", model="trained")\n```'
    (folder / "trained" / "README.md").write_text(card, encoding="utf-8")
    places = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with LoopbackHub() as hub:
        environment = {**os.environ, **places, **hub.env, "TRANSFORMERS_OFFLINE": "0"}
        command = [
            sys.executable,
            "-c",
            PUSH.replace("import sys", f"import os, sys; sys.path.insert(0, {str(ROOT)!r})", 1),
        ]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert hub.unknown == []
        repositories = {name: repo for (_, name), repo in hub.repos.items()}
    return {name: card_on(repo, "main") for name, repo in repositories.items() if "request" not in name}, repositories


def card_on(repository, branch):
    return ModelCard(repository.commits[repository.branches[branch]]["tree"]["README.md"][0].decode())


@pytest.mark.parametrize("kind", TASKS)
def test_a_pushed_pipeline_and_a_pushed_model_bring_a_card(kind, pushed):
    cards, repositories = pushed
    for name in (f"tester/{kind}", f"tester/{kind}-model"):
        card = cards[name]
        assert not is_blank(card) and f'model="{name}"' in card.text
        base = (
            {} if kind in ("exhird", "lexicon") else {"base_model": BASE, "license": "bsd-3-clause", "language": "sl"}
        )
        assert {key: card.data.get(key) for key in base} == base
        assert card.data.pipeline_tag and ("mine" in card.data.tags) == (not name.endswith("model"))
        assert len(repositories[name].commits) <= 3  # the card comes in the same commit
    config = json.loads(
        repositories[f"tester/{kind}"].commits[repositories[f"tester/{kind}"].branches["main"]]["tree"]["config.json"][
            0
        ]
    )
    assert config["architectures"]


def test_the_card_of_training_travels_with_its_weights_and_with_no_others(pushed):
    cards, repositories = pushed
    trained = cards["tester/trained"]
    assert "F1@10 61.2" in trained.text and trained.data.license == "apache-2.0"
    assert 'model="tester/trained"' in trained.text and 'model="trained"' not in trained.text
    request = card_on(repositories["tester/request"], "refs/pr/1")
    assert "61.2" not in request.text and "None are recorded" in request.text


def test_a_card_on_the_hub_stays(pushed):
    card = pushed[0]["tester/changed"]
    assert card.text.strip() == "# Written by hand" and card.data.license == "mit"


def test_a_model_of_others_is_pushed_as_transformers_does_it(pushed):
    assert is_blank(pushed[0]["tester/bert"])
