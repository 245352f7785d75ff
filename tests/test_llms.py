"""llms.txt, the page for coding agents: its form, tasks and options, and its first block; test_docs.py checks its names."""

import ast
import re

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

import lexperts  # noqa: F401  registers the pipelines
import merge_tools
from keyphrase_tools.call_options import OPTIONS

from .test_docs import TEXTS, blocks_of

PAGE = TEXTS["llms.txt"]
KEYPHRASES, MERGING, *_ = blocks_of("llms.txt", "python")


def test_it_has_the_form_of_llms_txt():
    lines = PAGE.splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("> ")
    assert not re.search(r"^#{3,} ", PAGE, re.M) and "## Optional" in lines


def test_each_task_exists():
    tasks = set(re.findall(r'pipeline\("([\w-]+)"', PAGE))
    assert len(tasks) == 5 and tasks <= set(PIPELINE_REGISTRY.get_supported_tasks())


def test_the_options_of_a_call_are_all_there_are():
    listed = re.findall(r"`(\w+)`", re.search(r"Options of a call: (.*?)\. There", PAGE, re.S).group(1))
    assert sorted(listed) == sorted([*OPTIONS, "batch_size"])


def test_what_is_imported_exists():
    for block in blocks_of("llms.txt", "python"):
        imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec("\n".join(map(ast.unparse, imports)), {})


def test_the_recipe_is_read():
    names = {}
    exec(MERGING.split("merge_tools.compose")[0], names)
    experts = merge_tools.read_recipe(names["recipe"]).experts
    assert [expert.source_model for expert in experts] == ["llama-law", "llama-medicine"]
    assert issubclass(merge_tools.MergeError, ValueError)


def test_the_first_block_runs():
    pytest.importorskip("lexperts_seke_minilm", reason="the default model is not installed")
    names = {}
    exec(KEYPHRASES, names)
    assert names["first"][0] == "tidal barrage" and len(names["many"]) == 2
    assert [phrase["keyphrase"] for phrase in names["scored"]] == ["graph cut", "maximum flow"]
