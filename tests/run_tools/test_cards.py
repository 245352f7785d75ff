"""A checkpoint without a model card gets a small one, and no card is replaced."""

import pytest
from huggingface_hub import ModelCard, ModelCardData

import lexperts  # noqa: F401
from run_tools.cards import BLANK, is_blank, make_table
from tests.hub_process import BASE
from tests.tiny_models import CASES, make_model


def tiny_model(name):
    """A model over a backbone of the Hub, where it has one."""
    model = make_model(name)
    if getattr(model.config, "text_config", None):
        model.config.text_config.name_or_path = BASE
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_card_says_what_a_model_is_and_how_to_open_it(name, tmp_path):
    model = tiny_model(name)
    model.config.name_or_path = str(tmp_path)  # a folder is not the name of a base model
    use = getattr(model, "card_use", {})
    given = {"license": "a: b", "language": ["en", "de"], "datasets": ["a/b"]}
    card = ModelCard.load(model.write_model_card(tmp_path, **given))
    data = card.data.to_dict()
    assert given.items() <= data.items() and data["library_name"] == "transformers" and data["pipeline_tag"]
    assert {"lexperts", model.config.model_type} <= set(data["tags"]) and use.get("task", "lexperts") in data["tags"]
    assert data.get("base_model") == (BASE if getattr(model.config, "text_config", None) else None)
    opens = f'pipeline("{use["task"]}", model="PATH")' if "task" in use else 'from_pretrained("PATH")'
    assert opens in card.text and f"{model.num_parameters():,} parameters" in card.text
    compile(card.text.split("```python\n")[1].split("```")[0], "README.md", "exec")
    assert not is_blank(card.content) and model.write_model_card(tmp_path) is None
    (other := tmp_path / "other").mkdir()
    assert "# two\n" in model.write_model_card(other, repo_id="one/two").read_text(encoding="utf-8")


def test_a_table_has_a_head_and_escapes_bars():
    assert make_table(("a|b", "c"), [(1, "<i>")]) == "| a\\|b | c |\n| --- | --- |\n| 1 | <i> |"
    assert make_table(("a",), []) == ""


def test_a_blank_card_is_no_card_and_its_tags_are_kept(tmp_path):
    model = tiny_model("SekeForTokenClassification")
    blank = ModelCard.from_template(ModelCardData(tags=["mine", "seke"]), model_description=BLANK)
    edited = ModelCard(str(blank).replace("[More Information Needed]", "Measured: F1 0.5", 1))
    for text in (str(edited), f"{blank}\nF1 0.5", "---\nlicense: a: b\n---\n# Mine", "# No metadata"):
        (tmp_path / "README.md").write_text(text, encoding="utf-8")
        assert model.write_model_card(tmp_path) is None and (tmp_path / "README.md").read_text("utf-8") == text
    blank.save(tmp_path / "README.md")
    model.write_model_card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["lexperts", "seke", "keyphrase-extraction", "mine"]
