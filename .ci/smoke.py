"""What an installed wheel can do without its clone. `.ci/release_check.py` runs it in fresh environments.

    python smoke.py lite           # lexperts-lite alone, without PyTorch, finds what the README shows
    python smoke.py lexperts       # no extras: commands start, a tiny model is trained by its loss, saved and opened
    python smoke.py keyphrases     # the default models, with and without PyTorch
    python smoke.py smollm2        # definitions, summaries, tags

Nothing is downloaded.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))
TEXT = Path(__file__).resolve().with_name("paragraph.txt").read_text(encoding="utf-8")  # of examples/corpus
SHOWN = ["Tidal stream turbines", "tidal barrage", "tidal power station"]


def output_of(*command: str) -> str:
    """What one of the installed commands prints; it must succeed."""
    return subprocess.run([SCRIPTS / command[0], *command[1:]], check=True, capture_output=True, text=True).stdout


def check_lite() -> None:
    """lexperts-lite extracts without PyTorch and transformers."""
    assert not find_spec("torch") and not find_spec("transformers")
    Path("tides.txt").write_text(TEXT, encoding="utf-8")
    shown = output_of("lexperts-lite", "extract", "tides.txt", "--top-k", str(len(SHOWN)))
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines()] == SHOWN


def check_lexperts() -> None:
    """Every package is there, the commands start, and a model with random weights is saved and opened."""
    import torch
    from transformers import AutoModelForTokenClassification, BertConfig

    import lexperts  # noqa: F401
    import merge_tools  # noqa: F401
    from modeling_seke import SekeConfig, SekeForTokenClassification

    for group in ("keyphrases", "merge", "define", "summarize", "train", "evaluate"):
        assert "Usage" in output_of("lexperts", group, "--help")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = SekeForTokenClassification(SekeConfig(text_config=BertConfig(vocab_size=64, **sizes)))
    words = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[0, 1, 2]])}
    model(**words).loss.backward()
    model.eval().save_pretrained("saved")
    again = AutoModelForTokenClassification.from_pretrained("saved").eval()
    assert type(again) is type(model), type(again)
    torch.testing.assert_close(model(**words).logits, again(**words).logits)


def check_keyphrases() -> None:
    """The default models need no network, and the first finds what the README shows."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    assert [one["keyphrase"] for one in pipeline("keyphrase-extraction")(TEXT, top_k=3)] == SHOWN
    Path("tides.txt").write_text(TEXT, encoding="utf-8")
    output_of("keyphrases", "extract", "tides.txt", "tides.jsonl", "--model", "tiny")
    assert "tidal" in Path("tides.jsonl").read_text(encoding="utf-8")


def check_smollm2() -> None:
    """Definitions, summaries and tags need no name of a model and no network."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    row = {"term": "bank", "context": "They sat on the bank of the river."}
    assert len(pipeline("definition-modeling")(row)["definition"].split()) > 2
    assert len(pipeline("moe-summarization")(TEXT, dataset="papers")[0]["summary_text"].split()) > 2
    assert pipeline("keyphrase-generation")({"title": "How do I rotate a log file?", "text": "It has 4 GB."})


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        globals()[f"check_{sys.argv[1]}"]()
        os.chdir("/")
