"""Mixtures in llama.cpp: the same logits, greedy tokens and token ids as in transformers.

Needs a second Python, made once, and named by LEXPERTS_LLAMA_CPP:

    python -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36
    LEXPERTS_LLAMA_CPP=llama/bin/python python -m pytest tests/merge_tools/test_llama_cpp.py

With LLAMA_CPP_CONVERTER, llama.cpp's convert_hf_to_gguf.py, its files are compared too.
"""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from merge_tools import export

from .conftest import open_model
from .gguf_models import CASES, TEXTS, compose_case

PYTHON, CONVERTER = os.environ.get("LEXPERTS_LLAMA_CPP"), os.environ.get("LLAMA_CPP_CONVERTER")
pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="LEXPERTS_LLAMA_CPP names no Python with llama-cpp-python. Make one: python -m venv llama && llama/bin/pip "
    "install llama-cpp-python==0.3.36; then LEXPERTS_LLAMA_CPP=llama/bin/python",
)


@pytest.fixture(autouse=True)
def no_converter(monkeypatch):
    """Exports are our own, unless a converter is passed."""
    monkeypatch.delenv("LLAMA_CPP_CONVERTER", raising=False)


IDS = [(7 * i) % 250 + 3 for i in range(40)]
STEPS = 30
# runs in the other Python: file, ids, steps and texts as JSON, where to put the logits
OPEN = """
import json, sys
import numpy as np
from llama_cpp import Llama

path, (ids, steps, texts), out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
options = {"n_ctx": 128, "n_threads": 1, "verbose": False, "type_k": 0, "type_v": 0}  # 0: float32
model = Llama(path, logits_all=True, **options)
model.eval(ids)
logits, generated = np.array(model.scores[: len(ids)]), []
for _ in range(steps):
    generated.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval(generated[-1:])
np.save(out, logits)
tokens = [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
print(json.dumps({"generated": generated, "tokens": tokens}))
"""


def in_llama_cpp(path, out):
    command = [PYTHON, "-c", OPEN, str(path), json.dumps([IDS, STEPS, TEXTS]), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return np.load(out), json.loads(ran.stdout.splitlines()[-1])


def in_transformers(folder):
    model, ids = open_model(folder, dtype=torch.float32), torch.tensor([IDS])
    options = {"do_sample": False, "min_new_tokens": STEPS, "max_new_tokens": STEPS, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        return model(ids).logits[0].numpy(), model.generate(ids, **options)[0, len(IDS) :].tolist()


def compare(folder, case, whole, tmp_path):
    """Compares a mixture in transformers with its file for llama.cpp, which is made from the folder `whole`."""
    export(whole, tmp_path / "out.gguf", "gguf")
    logits, found = in_llama_cpp(tmp_path / "out.gguf", tmp_path / "logits.npy")
    expected, generated = in_transformers(folder)
    difference = float(np.abs(logits - expected).max())
    print(f"{case}: logits differ by at most {difference:.2g} of {np.abs(expected).max():.2g}")
    assert difference < 2e-3 * np.abs(expected).max()
    assert found["generated"] == generated
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_what_transformers_computes(case, tmp_path):
    folder = compose_case(tmp_path, case)
    compare(folder, case, folder, tmp_path)


def test_experts_of_low_rank_compute_the_same_as_whole_ones_in_llama_cpp(tmp_path):
    case, options = "llama, gpt-2", {"base_model": str(tmp_path / "expert 0"), "average": "base", "rank": 4}
    folder = compose_case(tmp_path, case, **options)
    export(folder, tmp_path / "whole", "mixtral")
    compare(folder, case, tmp_path / "whole", tmp_path)


def test_another_expert_is_detected(tmp_path):
    """The negative control: one expert more or less, and the logits differ."""
    case = "llama, gpt-2"
    export(compose_case(tmp_path / "four", case), tmp_path / "four.gguf", "gguf")
    expected, _ = in_transformers(compose_case(tmp_path / "three", case, count=3))
    logits, _ = in_llama_cpp(tmp_path / "four.gguf", tmp_path / "logits.npy")
    assert np.abs(logits - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.skipif(not CONVERTER, reason="LLAMA_CPP_CONVERTER does not name llama.cpp's convert_hf_to_gguf.py")
@pytest.mark.parametrize("case", [case for case in CASES if "sentencepiece" in case])
def test_llama_cpps_own_converter_gives_the_same_logits(case, tmp_path):
    """It recognises byte-level tokenizers by the ids of a text, so only the others can be tiny."""
    folder = compose_case(tmp_path, case)
    export(folder, tmp_path / "out.gguf", "gguf", converter=CONVERTER)
    logits, _ = in_llama_cpp(tmp_path / "out.gguf", tmp_path / "logits.npy")
    expected, _ = in_transformers(folder)
    assert np.abs(logits - expected).max() < 2e-3 * np.abs(expected).max()
