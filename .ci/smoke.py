"""What an installed lexperts can do without its clone. `.ci/release_check.py` runs it in fresh environments.

    python smoke.py bare     # no extras: commands start, three pipelines run, missing extras are named
    python smoke.py merge    # with the extra merge: two Llamas become a mixture
    python smoke.py full     # with the extras keyphrases, merge, serve and train: extract, train, serve
    python smoke.py smollm2  # with the extra smollm2: definitions, summaries, tags
    python smoke.py lite     # lexperts-lite alone, without PyTorch

Every model is made here, tiny and with random weights. Nothing is downloaded.
"""

import json
import os
import re
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = "Tidal power is a renewable energy. A tidal barrage holds back the water of the tide."
PARAGRAPH = (
    Path(__file__).resolve().with_name("paragraph.txt")
)  # of examples/corpus, with the keyphrases that the README shows
SHOWN = ["tidal barrage", "tidal power station", "Tidal stream turbines"]
COMMANDS = ("keyphrases", "merge", "define", "summarize", "train", "evaluate")
SERVER_SECONDS = 120
# an extra, and a command, or code, that needs it
NEEDS = (
    ("train", "lexperts train seke minilm_cpu --train-files rows.jsonl --backbone encoder --output-dir needs"),
    ("summaries", "lexperts evaluate moesumm in_domain --output-dir needs"),
    (
        "definitions",
        "lexperts evaluate definitions --files plain=definitions.jsonl --metrics bleu rouge --output-dir needs",
    ),
    ("serve", "lexperts keyphrases serve keyphrases"),
    ("parquet", "lexperts keyphrases extract rows.jsonl out.parquet --model keyphrases"),
    ("ray", "lexperts keyphrases extract rows.jsonl out.jsonl --model keyphrases --engine ray"),
    ("onnx", "lexperts keyphrases export keyphrases exported --format onnx"),
    ("openvino", "lexperts keyphrases export keyphrases exported --format openvino"),
    ("cluster", "from merge_tools import cluster; cluster('definitions.jsonl', 'out', k=2, embedder='encoder')"),
    ("merge", "lexperts merge compose mixture.yml mixture"),
    ("merge", "from merge_tools import plot; plot([], 'plot.png')"),
    ("offline", "from modeling_seke import SekeForTokenClassification as M; M.from_backbone('minilm')"),
)


def run(line: str, code: int = 0) -> str:
    """The output of one of the installed commands, or of a line of Python, which must end with this exit status."""
    words = line.split()
    is_command = (SCRIPTS / words[0]).exists()
    command = [str(SCRIPTS / words[0]), *words[1:]] if is_command else [sys.executable, "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    if done.returncode != code and code != -1:
        raise SystemExit(f"{line!r} ended with {done.returncode}, not {code}:\n{output[-3000:]}")
    return output


def save_models() -> None:
    """Writes a tiny encoder, extractor, reader, summariser and two Llamas, each with a tokenizer, and some rows."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BartConfig, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from modeling_hypernet import HypernetConfig, HypernetForQuestionAnswering
    from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
    from modeling_seke import SekeConfig, SekeForTokenClassification

    torch.manual_seed(0)
    signs = string.ascii_lowercase + string.digits
    pieces = {piece: i for i, piece in enumerate((*SPECIAL, *signs, *string.punctuation, *(f"##{s}" for s in signs)))}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)
    encoder = BertConfig(vocab_size=len(fast), max_position_embeddings=128, **SIZES)
    halves = {f"{half}_{name}": 24 if name == "ffn_dim" else 2 for half in ("encoder", "decoder") for name in
              ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    ids = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": 3,
    }
    bart = BartConfig(vocab_size=len(fast), d_model=16, max_position_embeddings=128, **halves, **ids)
    meta = {"meta_embedding_size": 4, "meta_hidden_size": 8, "hidden_size": 8, "cls_token_id": 2, "sep_token_id": 3}
    llama = LlamaConfig(vocab_size=len(fast), max_position_embeddings=64, pad_token_id=0, **SIZES)
    made = {
        "encoder": BertModel(encoder),
        "keyphrases": SekeForTokenClassification(SekeConfig(text_config=encoder)),
        "reader": HypernetForQuestionAnswering(HypernetConfig(text_config=encoder, **meta)),
        "summariser": MoeSummForConditionalGeneration(MoeSummConfig(text_config=bart, datasets=["news", "mail"])),
        "llama-law": LlamaForCausalLM(llama),
        "llama-medicine": LlamaForCausalLM(llama),
    }
    for name, model in made.items():
        model.save_pretrained(name)
        fast.save_pretrained(name)
    rows = [{"id": str(i), "text": TEXT, "keyphrases": ["tidal power", "tidal barrage"]} for i in range(16)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    row = {"term": "tide", "context": TEXT, "definition": "the rise of the sea", "generated": "a rise of the sea"}
    Path("definitions.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    experts = "".join(f"  - source_model: llama-{name}\n" for name in ("law", "medicine"))
    Path("mixture.yml").write_text(f"base_model: llama-law\ngate_mode: random\nexperts:\n{experts}", encoding="utf-8")


def check_start() -> None:
    """The package is the installed one, and its commands start."""
    import lexperts

    assert Path(lexperts.__file__).is_relative_to(sysconfig.get_path("purelib")), lexperts.__file__
    assert lexperts.__version__ == version("lexperts")
    for name in ("lexperts", "keyphrases", "merge-experts", *(f"lexperts {group}" for group in COMMANDS)):
        assert "Usage:" in run(f"{name} --help"), name
    assert "num_train_epochs" in run("lexperts train seke --show-config minilm_cpu")


def check_pipelines() -> None:
    """`pipeline()` knows our tasks after `import lexperts`, and they run."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    found = pipeline("keyphrase-extraction", model="keyphrases")(TEXT, top_k=3, threshold=0.01)
    assert found and all(TEXT[one["start"] : one["end"]] == one["keyphrase"] for one in found), found
    answer = pipeline("extractive-qa", model="reader")(question="What holds the water?", context=TEXT)
    assert TEXT[answer["start"] : answer["end"]] == answer["answer"], answer
    summary = pipeline("moe-summarization", model="summariser")(TEXT, dataset="news", max_length=12)
    assert isinstance(summary[0]["summary_text"], str), summary


def check_merge() -> None:
    """Two Llamas become a mixture that opens as a stock Mixtral."""
    import torch
    from transformers import AutoModelForCausalLM

    run("lexperts merge compose mixture.yml mixture")
    run("lexperts merge verify mixture")
    model, info = AutoModelForCausalLM.from_pretrained("mixture", output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM" and not info["missing_keys"], info
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


def check_extras() -> None:
    """Whatever needs an extra that is not installed names it."""
    wrong = []
    for extra, line in NEEDS:
        output = run(line, code=-1)
        if not re.search(rf"lexperts\[[a-z,]*\b{extra}\b", output) or (
            "Traceback" in output and line.startswith("lexperts ")
        ):
            wrong.append(f"{extra}: {line}\n{output[-800:]}")
    if wrong:
        raise SystemExit("Errors that do not name the extra, or show a traceback:\n\n" + "\n\n".join(wrong))


def check_train() -> None:
    """SEKE trains for a few steps, and the pipeline opens the result."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    run("lexperts train seke minilm_cpu --backbone encoder --train-files rows.jsonl --test-files rows.jsonl --max-length 64 "
        "--output-dir trained --max-steps 3 --eval-strategy no --save-strategy no --show 0 --lora false")  # fmt: skip
    assert isinstance(pipeline("keyphrase-extraction", model="trained")(TEXT), list)


def check_default_model() -> None:
    """The default model needs no name and no network, and finds what the README shows."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    text = PARAGRAPH.read_text(encoding="utf-8")
    found = [one["keyphrase"] for one in pipeline("keyphrase-extraction")(text, top_k=3)]
    assert found == SHOWN, found


def check_server() -> None:
    """The server answers with the same keyphrases."""
    command = [str(SCRIPTS / "lexperts"), "keyphrases", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = (
                server.stdout.readline().split()[2].rstrip(",")
            )  # serving on http://127.0.0.1:41234, documentation ...
            text = PARAGRAPH.read_text(encoding="utf-8")
            body, head = json.dumps({"inputs": text}).encode(), {"Content-Type": "application/json"}
            give_up = time.monotonic() + SERVER_SECONDS
            while True:
                try:
                    with urllib.request.urlopen(urllib.request.Request(f"{url}/keyphrases", body, head)) as answer:
                        (found,) = json.load(answer)["results"]
                        assert [one["keyphrase"] for one in found["keyphrases"][:3]] == SHOWN, found
                        return
                except urllib.error.URLError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.5)
        finally:
            server.terminate()


def check_smollm2() -> None:
    """Definitions, summaries and tags need no name of a model and no network."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    row = {"term": "bank", "context": "They sat on the bank of the river."}
    assert len(pipeline("definition-modeling")(row)["definition"].split()) > 2
    assert len(pipeline("moe-summarization")(TEXT, dataset="papers")[0]["summary_text"].split()) > 2
    assert pipeline("keyphrase-generation")({"title": "How do I rotate a log file?", "text": "It has 4 GB."})


def check_lite() -> None:
    """lexperts-lite extracts without PyTorch and transformers."""
    from importlib.util import find_spec

    from lexperts_lite import extract_keyphrases

    assert not find_spec("torch") and not find_spec("transformers")
    assert "tidal" in extract_keyphrases(PARAGRAPH.read_text(encoding="utf-8"), top_k=3)[0]["keyphrase"].lower()
    Path("tides.txt").write_text(TEXT, encoding="utf-8")
    assert "idal" in run("lexperts-lite extract tides.txt")


CHECKS = {
    "bare": (check_start, check_pipelines, check_extras),
    "merge": (check_merge,),
    "full": (check_start, check_pipelines, check_merge, check_train, check_default_model, check_server),
    "smollm2": (check_smollm2,),
    "lite": (check_lite,),
}


def main() -> None:
    """Runs the checks of one environment in a temporary folder."""
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if sys.argv[1] != "lite":
            save_models()
        for check in CHECKS[sys.argv[1]]:
            start = time.monotonic()
            check()
            print(f"  {check.__doc__.split('.')[0]:78} {time.monotonic() - start:5.0f} s", flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
