"""llms.txt, the page for coding agents: its commands, names, options and links exist, and its first block runs."""

import re
import shlex
from pathlib import Path

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

import lexperts  # noqa: F401  registers the pipelines
import merge_tools
from keyphrase_tools.call_options import OPTIONS

from .test_docs import exists, missing_names, problem_of, unknown_names

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "llms.txt").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("python", "bash")}


def test_it_has_the_form_of_llms_txt():
    lines = PAGE.splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("> ")
    assert not re.search(r"^#{3,} ", PAGE, re.M) and "## Optional" in lines


def test_each_command_exists():
    commands = [shlex.split(line) for block in BLOCKS["bash"] for line in block.splitlines()]
    assert len(commands) > 5
    assert [(words, problem) for words in commands if (problem := problem_of(words))] == []


@pytest.mark.parametrize("code", BLOCKS["python"])
def test_each_name_exists(code):
    assert unknown_names(code) == set() and missing_names(code) == []


def test_names_in_prose_exist():
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    dotted = re.findall(r"`((?:keyphrase_tools|merge_tools|lexperts)(?:\.\w+)+)`", prose)
    assert dotted and [name for name in dotted if not exists(name)] == []
    tasks = set(re.findall(r'pipeline\("([\w-]+)"', PAGE))
    assert len(tasks) == 5 and tasks <= set(PIPELINE_REGISTRY.get_supported_tasks())


def test_the_options_of_a_call_are_all_there_are():
    listed = re.findall(r"`(\w+)`", re.search(r"Options of a call: (.*?)\. There", PAGE, re.S).group(1))
    assert sorted(listed) == sorted([*OPTIONS, "batch_size"])


def test_the_recipe_is_read_and_links_lead_to_files(tmp_path):
    names = {}
    exec(BLOCKS["python"][1].split("merge_tools.compose")[0], names)
    assert [expert.source_model for expert in merge_tools.read_recipe(names["recipe"]).experts] == [
        "llama-law",
        "llama-medicine",
    ]
    links = re.findall(r"github\.com/lexperts/lexperts/(?:blob|tree)/main/([^)]+)\)", PAGE)
    assert len(links) > 10 and [link for link in links if not (ROOT / link).exists()] == []
    assert issubclass(merge_tools.MergeError, ValueError)


def test_the_first_block_runs():
    pytest.importorskip("lexperts_seke_minilm", reason="the default model is not installed")
    names = {}
    exec(BLOCKS["python"][0], names)
    assert names["first"][0] == "tidal barrage" and len(names["many"]) == 2
    assert [phrase["keyphrase"] for phrase in names["scored"]] == ["graph cut", "maximum flow"]
