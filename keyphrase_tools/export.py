"""Exports keyphrase models to ONNX, in float32 or int8, for `lexperts_lite.KeyphraseExtractor` and the commands.

The folder that is written holds the graph (`onnx/model.onnx` or `onnx/model_int8.onnx`), the tokenizer, and the configuration with
labels, rankers, threshold and temperature.
"""

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lexperts_lite.runtime import GRAPHS, open_graph
from modeling_seke import SekeForTokenClassification
from modeling_seke.padded_seke import OPSET, PaddedSeke
from run_tools.cards import join_card
from run_tools.errors import UserError
from run_tools.files import fingerprint
from run_tools.loading import open_pipeline
from run_tools.packaged import published_name

from .token_classifiers import known_limit

MAX_DIFFERENCE = 1e-3  # of a float32 graph's logits
SENSITIVE = ("router", "classifier")  # stay in float32: a small error chooses another expert or label
WORDS = "keyphrases of a document that is longer than the others, to which it is padded"
CARD = """# {name}, exported

A graph of the keyphrase model {name} in {precision}, `{file}`, for onnxruntime on CPUs.

```python
from lexperts_lite import KeyphraseExtractor

extract = KeyphraseExtractor("this folder")
```"""


class PaddedClassifier(nn.Module):
    """A token classifier of transformers, from tensors to tensors; see `PaddedSeke`."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        types = getattr(model.config, "type_vocab_size", 0)
        self.inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if types > 1 else [])]

    def forward(self, input_ids, attention_mask, *others):
        """(B, S) each -> logits (B, S, C) and the last states (B, S, d)."""
        options = dict(zip(self.inputs[2:], others, strict=True))
        outputs = self.model(input_ids, attention_mask=attention_mask, output_hidden_states=True, **options)
        return outputs.logits, outputs.hidden_states[-1]


def export_model(model: str, output: str | Path, *, precision: str = "fp32") -> dict[str, Any]:
    """Writes a graph of a keyphrase model, complete with tokenizer and configuration.

    Args:
        model: folder or Hub id of a token classifier.
        output: the folder to write, which must be new or empty.
        precision: "fp32" or "int8", weights and activations of eight bits, which changes some keyphrases.

    Returns:
        `precision`, `opset`, `size` in bytes, `weights` (a hash of the model's) and `difference`, the largest of the logits of real
        tokens.

    Raises:
        ImportError: if onnx, onnxscript or onnxruntime is missing.
        ValueError: for a model that cannot be exported, an unknown precision, an output that holds files, or a float32 graph whose
            logits differ by more than 1e-3. Nothing is written then.
    """
    if precision not in GRAPHS:
        raise UserError(f"precision={precision!r} is not one of {', '.join(GRAPHS)}.")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime is imported, see `open_graph`
    output = Path(output)
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty.")
    extract = open_pipeline("keyphrase-extraction", model, device="cpu")
    wrapped, tokenizer, config = wrap(extract.model), extract.tokenizer, extract.model.config
    if limit := known_limit(tokenizer, extract.model):  # positions are not seen in a graph
        tokenizer.model_max_length = limit
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        folder = Path(temporary) / "complete"  # with the usual permissions, which a temporary folder has not
        graph = folder / GRAPHS[precision]
        graph.parent.mkdir(parents=True)
        inputs = example_inputs(tokenizer, wrapped.inputs)
        plain = graph if precision == "fp32" else Path(temporary) / "plain.onnx"
        write_graph(wrapped, inputs, min(limit or 1 << 16, 1 << 16), plain)
        if precision == "int8":
            quantise(plain, graph)
        size = sum(file.stat().st_size for file in graph.parent.iterdir())
        report: dict[str, Any] = {"precision": precision, "opset": OPSET, "size": size, "weights": fingerprint(model)}
        config.exported = {"onnx": report}
        report["difference"] = compare_logits(extract.model, inputs, *open_graph(folder, config, 1))
        if precision == "fp32" and not report["difference"] <= MAX_DIFFERENCE:
            raise ValueError(f"The graph's logits differ from the model's by {report['difference']:.2g}.")
        config.to_json_file(folder / "config.json")  # save_pretrained would add the code of the PyTorch model
        tokenizer.save_pretrained(folder)
        text = CARD.format(name=published_name(model), precision=precision, file=GRAPHS[precision])
        tags = ["onnx", "token-classification", "keyphrase-extraction"]
        (folder / "README.md").write_text(join_card({"library_name": "lexperts", "tags": tags}, text), encoding="utf-8")
        folder.rename(output)
    return report


def wrap(model) -> nn.Module:
    """The model as a module from tensors to tensors.

    Raises:
        ValueError: for a model whose labels are decoded together, or that reads titles: its forward pass is not enough.
    """
    model.eval().float()
    if callable(getattr(model, "decode", None)) or "meta_mask" in model.forward.__code__.co_varnames:
        raise UserError(f"{type(model).__name__} cannot be exported: each document has weights of its own.")
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # a smaller graph than that of fused attention
    return PaddedSeke(model) if isinstance(model, SekeForTokenClassification) else PaddedClassifier(model)


def example_inputs(tokenizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch of three rows of different lengths."""
    options = {"padding": True, "truncation": True, "max_length": min(24, tokenizer.model_max_length)}
    batch = tokenizer([WORDS, "keyphrases of a text", "one"], **options, return_tensors="pt")
    rows = {**batch, "style_ids": torch.zeros(3, dtype=torch.long)}
    return {name: rows.get(name, torch.zeros_like(batch["input_ids"])) for name in names}


def write_graph(wrapped: nn.Module, inputs: dict[str, torch.Tensor], limit: int, path: Path) -> None:
    """Writes the float32 graph, with any number of rows and any length up to the limit."""
    batch, length = torch.export.Dim("batch", min=1, max=1 << 16), torch.export.Dim("length", min=1, max=limit)
    shapes = [{0: batch} if name == "style_ids" else {0: batch, 1: length} for name in inputs]
    others = [tuple(shapes[2:])] if shapes[2:] else []  # an argument list that is empty has no shapes
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                wrapped,
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=(*shapes[:2], *others),
                input_names=list(inputs),
                output_names=["logits", "last_hidden_state"],
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        encoder = type(getattr(wrapped.model, "backbone", wrapped.model)).__name__
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{encoder} cannot be exported to ONNX: {cause:.300}") from error
    program.save(path)


def quantise(plain: Path, graph: Path) -> None:
    """int8 weights, one scale per column, and activations that are quantised as they come (onnxruntime's dynamic quantiser)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = plain.with_name("prepared.onnx")
    quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)
    options = {"weight_type": QuantType.QInt8, "per_channel": True, "nodes_to_exclude": sensitive_nodes(prepared)}
    # seven bits per weight: with eight, sums of products overflow on processors without VNNI
    quantize_dynamic(prepared, graph, reduce_range=True, **options)


def sensitive_nodes(path: Path) -> list[str]:
    """Names of the products of SENSITIVE layers in an ONNX graph."""
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    maker = {value: node for node in nodes for value in node.output}
    found = [node for node in nodes if any(word in value for value in node.input for word in SENSITIVE)]
    # a bias keeps its layer's name; its weight, which is transposed, does not
    found += [maker[value] for node in found for value in node.input if value in maker]
    return sorted({node.name for node in found if node.op_type in ("MatMul", "Gemm")})


def compare_logits(model, inputs: dict[str, torch.Tensor], run, names: Sequence[str]) -> float:
    """The largest difference between the logits of real tokens, by the model and by `run` of `open_graph`."""
    with torch.no_grad():
        expected = model(**inputs).logits.numpy()
    found, _ = run({name: inputs[name].numpy() for name in names}, False)
    return float(np.abs(expected - found)[inputs["attention_mask"].numpy() != 0].max())
