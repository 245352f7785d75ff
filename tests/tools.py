"""Commands, files of rows, tiny models on disk, two processes: what the tests of several rooms use."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


def by_day(is_fast: bool):
    """The marks of a test that runs every time, or at night."""
    return () if is_fast else pytest.mark.nightly


def run_main(main, *argv) -> SimpleNamespace:
    """Calls a command's main() -> its exit status and what it printed, as `subprocess.run` gives them."""
    code = 0
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        try:
            main([str(argument) for argument in argv])
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(returncode=code, stdout=printed.getvalue(), stderr=errors.getvalue())


def fails(main, *argv) -> str:
    """The one error line of a command that ends with exit status 2."""
    done = run_main(main, *argv)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def as_rows(columns) -> list[dict]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def train_bpe(texts, vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, of which the first are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": vocab_size, "special_tokens": special}
    options["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options, show_progress=False))
    return tokenizer


def train_tokenizer(texts, vocab_size: int) -> PreTrainedTokenizerFast:
    """A Llama's tokenizer of these texts."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(texts, vocab_size, list(names.values())), **names)


def save_tiny_llama(folder: Path) -> None:
    """Saves a Llama of a few thousand random weights with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["def f(x): return x", "the end"] * 9, 300)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder)


def save_tiny_bart(folder: Path, texts: list[str]) -> None:
    """Saves a BART of a few thousand random weights with a tokenizer of these texts."""
    torch.manual_seed(0)
    bpe = train_bpe(texts, 320, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])  # the first four with BART's ids
    bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")} | {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=96, **names).save_pretrained(folder)
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder")
             for name, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    config = BartConfig(vocab_size=bpe.get_vocab_size(), d_model=16, max_position_embeddings=96, **sizes)
    BartForConditionalGeneration(config).save_pretrained(folder)


def run_in_child(function) -> None:
    """Calls a function in another process, which may be killed, and otherwise ends without an error."""
    if (child := os.fork()) == 0:
        try:  # tqdm shares a lock with this process, and keeps it after an error of the standard error
            with open(os.devnull, "w", encoding="utf-8") as sys.stderr:
                function()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, -signal.SIGKILL)


# Gloo's worker threads outlive destroy_process_group, and one that is not done when Python shuts down aborts its process.
WITHOUT_SHUTDOWN = "\nimport os\nos._exit(0)\n"


def run_by_torchrun(code: str, folder: Path) -> None:
    """Runs code in two processes on the CPU, with the folder in sys.argv; what fails in one fails the test."""
    (folder / "script.py").write_text(code + WITHOUT_SHUTDOWN)
    options = ["--standalone", "--nproc_per_node", "2", str(folder / "script.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
