"""Model cards of all families: a checkpoint without a card gets one, and no card is replaced by a blank one."""

import pytest
from huggingface_hub import ModelCard, ModelCardData

import keyphrase_tools  # noqa: F401  (registers the pipelines)
import modeling_hypernet
from run_tools.cards import is_blank, write_model_card
from tests.hub_process import BASE
from tests.tiny_models import make_model

TASKS = {
    "seke": ("SekeForTokenClassification", "keyphrase-extraction"),
    "hypernet": ("HypernetForTokenClassification", "keyphrase-extraction"),
    "hypernet-qa": ("HypernetForQuestionAnswering", "extractive-qa"),
    "exhird": ("ExhirdForKeyphraseGeneration", "keyphrase-generation"),
    "moesumm": ("MoeSummForConditionalGeneration", "moe-summarization"),
    "moesumm-causal": ("MoeSummForCausalLM", "moe-summarization"),
    "lexicon": ("LexiconForCausalLM", "definition-modeling"),
}


def tiny_model(kind):
    """A model of the family, over a backbone of the Hub where it has one."""
    model = make_model(TASKS[kind][0])
    if getattr(model.config, "text_config", None):
        model.config.text_config.name_or_path = BASE
    return model


def blank_card(**data):
    about = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
    return ModelCard.from_template(ModelCardData(**data), model_description=about)


@pytest.mark.parametrize("kind", TASKS)
def test_a_model_without_a_card_gets_one_that_says_what_it_is(kind, tmp_path):
    model, task = tiny_model(kind), TASKS[kind][1]
    path = model.write_model_card(tmp_path, license="mit", language=["en", "de"], datasets=["a/b"])
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["license"] == "mit" and data["language"] == ["en", "de"]
    assert {"lexperts", model.config.model_type, task} <= set(data["tags"]) and data["datasets"] == ["a/b"]
    assert data.get("base_model") == (None if kind in ("exhird", "lexicon") else BASE)
    assert f'pipeline("{task}"' in card.text and "trust_remote_code=True" in card.text
    assert f"{model.num_parameters():,} parameters" in card.text and "None are recorded" in card.text
    compile(card.text.split("```python\n")[1].split("```")[0], "README.md", "exec")
    assert not is_blank(card) and "Before you publish it" not in card.text
    assert model.write_model_card(tmp_path) is None and ModelCard.load(path).data.license == "mit"


def test_classes_without_a_pipeline_say_how_they_open(tmp_path):
    config = tiny_model("hypernet-qa").config
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
    model = tiny_model("seke")
    path = model.write_model_card(tmp_path, license="a: b", license_name="#1 'of' them")
    assert ModelCard.load(path).data.license == "a: b" and ModelCard.load(path).data.license_name == "#1 'of' them"


def test_a_blank_card_is_no_card_and_its_tags_are_kept(tmp_path):
    model = tiny_model("seke")
    blank = blank_card(tags=["mine", "seke"], library_name="transformers")
    edited = ModelCard(str(blank).replace("[More Information Needed]", "Measured: F1 0.5", 1))
    assert is_blank(blank) and not is_blank(edited)
    for text in (str(edited), "---\nlicense: a: b\n---\n# Mine", "# No metadata"):
        (tmp_path / "README.md").write_text(text, encoding="utf-8")
        assert model.write_model_card(tmp_path) is None
    blank.save(tmp_path / "README.md")
    model.write_model_card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["lexperts", "seke", "keyphrase-extraction", "mine"]


def test_a_folder_is_no_base_model(tmp_path):
    model = tiny_model("seke")
    for name in (str(tmp_path), "./a", "a/b/c", "minilm", ""):
        model.config.text_config.name_or_path = name
        assert "base_model" not in ModelCard.load(write_model_card(model, tmp_path)).data.to_dict(), name
        (tmp_path / "README.md").unlink()
