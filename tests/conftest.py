"""Shared by all tests: no network, two cores, and tiny models whose tokenizer reads any ASCII word."""

import copy
import gc
import importlib
import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_worker_niceness="0",  # by default Ray's workers give way to everything else that runs
    OMP_WAIT_POLICY="PASSIVE",  # threads that wait do not spin: on busy cores a tiny model is a hundred times faster
)
if os.environ.get("TEST_CUDA") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a pipeline takes a GPU by itself; the same tests everywhere
os.environ.pop("COLUMNS", None)  # of a test worker's terminal: tables are as wide as in a pipe

import string
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, DebertaV2Config, ModernBertConfig, PreTrainedTokenizerFast

from modeling_seke import SekeConfig, SekeForTokenClassification

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # a core for each of two workers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WHOLE_WORDS = ("the", "of", "in", "and", "for", "is", "graph", "cut", "cuts", "network", "networks", "learning")
MAX_LENGTH = 64
# the longest, of day and night: with two workers these come first, so that none of them runs alone at the end
SLOW_FILES = (
    "test_export", "test_serving", "test_lite", "test_run_over", "test_training_contract", "test_generation", "test_training", "test_app",
    "test_hub_contract", "test_ray", "test_smollm2_models", "test_docs_code", "test_notebooks",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in SLOW_FILES)  # stable
    gc.freeze()  # what is imported stays: the garbage collector need not read it again and again
    gc.set_threshold(50_000, 20)


@pytest.fixture
def benchmark_module(monkeypatch):
    """benchmark_module("common") -> benchmarks/common.py, which the others import by this name, too."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A BERT-like WordPiece tokenizer: some whole words, and every letter and digit at a word's start and inside it."""
    signs = string.ascii_lowercase + string.digits
    pieces = [*SPECIAL, *signs, *string.punctuation, *(f"##{sign}" for sign in signs), *WHOLE_WORDS]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names)


@pytest.fixture(scope="session")
def backbone_config(tiny_tokenizer):
    """backbone_config("bert" | "deberta-v2" | "modernbert", **changes) -> a new configuration of a tiny encoder."""
    sizes = {
        "vocab_size": len(tiny_tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": tiny_tokenizer.pad_token_id,
    }
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    local = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "mlp_dropout": 0.1, "local_attention": 8}
    first = dict.fromkeys(("cls_token_id", "bos_token_id"), tiny_tokenizer.cls_token_id)
    last = dict.fromkeys(("sep_token_id", "eos_token_id"), tiny_tokenizer.sep_token_id)
    kinds = {
        "bert": (BertConfig, dropout),
        "deberta-v2": (DebertaV2Config, dropout | relative),
        "modernbert": (ModernBertConfig, local | first | last),
    }

    def build(name="bert", **changes):
        kind, its_own = kinds[name]
        return kind(**{**sizes, **its_own, **changes})

    return build


@pytest.fixture(scope="session")
def tiny_seke(backbone_config):
    """tiny_seke("bert" | "deberta-v2" | "modernbert", **head) -> a new SEKE model in eval mode, always the same weights."""

    def build(name="bert", **head):
        torch.manual_seed(0)
        return SekeForTokenClassification(SekeConfig(**{"text_config": backbone_config(name), **head})).eval()

    return build


@pytest.fixture(scope="session")
def folder(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """A saved model that finds keyphrases, which no test may change."""
    folder = tmp_path_factory.mktemp("model")
    for part in (tiny_seke("bert", keyphrase_threshold=0.4), tiny_tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def same_on_cuda():
    """same_on_cuda(model, batch) -> losses and gradients of both devices agree, and those in bfloat16 are finite.

    Needs a CUDA device. In float64, for which CUDA lacks grouped products: `dtype=torch.float32`.
    """
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or not asked for: make cuda")
    torch.backends.cudnn.allow_tf32 = False  # recurrent networks would read float32 with ten bits

    def run(model, batch, device):
        model = copy.deepcopy(model).to(device)
        for module in model.modules():  # cuDNN goes back through a network that is in training only
            if isinstance(module, torch.nn.RNNBase):
                module.train().dropout = 0.0
        outputs = model(**{name: x.to(device) for name, x in batch.items()})
        outputs.loss.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        return outputs.loss.detach().cpu(), gradients

    def check(model, batch, dtype=torch.float64):
        exact = copy.deepcopy(model).to(dtype)
        (loss, gradients), (expected, of_cpu) = (run(exact, batch, device) for device in ("cuda", "cpu"))
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(loss, expected, **close)
        torch.testing.assert_close(gradients, of_cpu, **close)
        with torch.autocast("cuda", torch.bfloat16):
            loss, gradients = run(model, batch, "cuda")
        assert loss.isfinite() and all(g.isfinite().all() for g in gradients.values())
        assert loss.item() == pytest.approx(expected.item(), rel=0.2)

    return check
