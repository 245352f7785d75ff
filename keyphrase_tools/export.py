"""Exports keyphrase models to ONNX and OpenVINO, in float32 or int8, and refuses files that lose quality.

The folder that is written holds a graph for each format (`onnx/model.onnx`, `onnx/model_int8.onnx`, `openvino/openvino_model.xml`,
...), the tokenizer, and the configuration with labels, ranker, threshold and temperature. `pipeline("keyphrase-extraction",
model=folder)` opens it, with all options of the pipeline.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lexperts_lite.graphs import BACKENDS, PRECISIONS, disable_telemetry, graph_file
from modeling_seke import SekeForTokenClassification
from modeling_seke.padded_seke import OPSET, PaddedSeke
from run_tools.cards import join_card, make_table
from run_tools.files import fingerprint
from run_tools.loading import open_pipeline

from .evaluation import gold_phrases, score_phrases
from .exported_model import ExportedModel
from .token_classifiers import length_limit

MAX_DIFFERENCE = 1e-3  # of a float32 graph's logits
SENSITIVE = ("router", "classifier")  # stay in float32: a small error chooses another expert or label
WORDS = "keyphrases of a document that is longer than the others, to which it is padded"
HOW_TO_OPEN = """```python
import lexperts
from transformers import pipeline

extract = pipeline("keyphrase-extraction", model="this folder", backend="{format}")
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


def export_model(
    model: str,
    output: str | Path,
    *,
    format: str = "onnx",
    precision: str = "fp32",
    calibration: Sequence[str] | None = None,
    evaluation: Sequence[Mapping] | None = None,
    max_loss: float | None = 0.5,
    batch_size: int = 16,
) -> dict:
    """Writes a graph of a keyphrase model, complete with tokenizer and configuration.

    Args:
        model: folder or Hub id of a token classifier.
        output: the folder to write; it may hold a graph of another format of the same model.
        format: "onnx" or "openvino".
        precision: "fp32" or "int8".
        calibration: texts by which OpenVINO's quantiser chooses ranges; by default those of `evaluation`.
        evaluation: rows with `text` and `keyphrases`, in the forms of `phrase_lists.read_phrases`, on which the graph must keep
            its quality. Needed for int8 and a limit.
        max_loss: F1@10 in points that the graph may lose on them; `None` for no limit.
        batch_size: windows per batch of the evaluation.

    Returns:
        `precision`, `opset`, `size` in bytes, `difference` (the largest of the logits of real tokens) and, with an evaluation,
        `f1@10` of both and `agreement`, the mean share of keyphrases that both return.

    Raises:
        ImportError: if an exporter is missing; the message names the extra.
        ValueError: for a model that cannot be exported, an unknown format or precision, an output of another model, int8 with a
            limit and without evaluation, an evaluation without a gold keyphrase that occurs in its text, or a graph that loses
            more than `max_loss`. Nothing is written then.
    """
    check_options(format, precision, evaluation, max_loss)
    check_installed(format, precision)
    extract = open_pipeline("keyphrase-extraction", model, device="cpu")
    if evaluation:
        gold_phrases([row["text"] for row in evaluation], [row["keyphrases"] for row in evaluation], where="evaluation")
    weights, output = fingerprint(model), Path(output)
    wrapped = wrap(extract.model, format)
    exported = check_output(output, weights, format)
    limit = length_limit(extract.tokenizer, extract.model)
    # positions are not seen in a graph
    extract.tokenizer.model_max_length = min(limit, extract.tokenizer.model_max_length)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        folder = Path(temporary) / "complete"  # with the usual permissions, which a temporary folder has not
        graph = folder / graph_file(format, precision)
        graph.parent.mkdir(parents=True)
        inputs = example_inputs(extract.tokenizer, wrapped.inputs)
        plain = write_onnx(wrapped, inputs, min(limit, 1 << 16), folder / "plain.onnx")
        texts = list(calibration or [row["text"] for row in evaluation or []])
        quantise = {("onnx", "fp32"): copy_onnx, ("onnx", "int8"): quantise_onnx}.get(
            (format, precision), write_openvino
        )
        quantise(plain, graph, precision, lambda: calibration_inputs(extract, texts, wrapped.inputs))
        report: dict[str, Any] = {
            "precision": precision,
            "opset": OPSET,
            "size": sum(f.stat().st_size for f in graph.parent.iterdir()),
        }
        entry = {**report, "weights": weights}
        extract.model.config.exported = {format: entry}
        save_folder(extract, folder)
        reopened = open_pipeline("keyphrase-extraction", str(folder), backend=format)
        report["difference"] = largest_difference(extract.model, reopened.model, inputs, wrapped.inputs)
        if precision == "fp32" and not report["difference"] <= MAX_DIFFERENCE:
            raise ValueError(f"The graph differs from the model by {report['difference']:.2g}. It is not written.")
        if evaluation:
            report |= compare(extract, reopened, evaluation, batch_size)
            check_quality(report["f1@10"], precision, max_loss)
        entry |= {name: report[name] for name in ("documents", "f1@10", "agreement") if name in report}
        extract.model.config.exported = {**exported, format: entry}
        save_folder(extract, folder)
        write_card(folder, model, extract.model.config.exported)
        (folder / "plain.onnx").unlink()
        shutil.rmtree(output / format, ignore_errors=True)  # a graph of the other precision
        shutil.copytree(folder, output, dirs_exist_ok=True)
    return report


def check_quality(f1: dict[str, float], precision: str, max_loss: float | None) -> None:
    """Raises a `ValueError` if the graph loses more than `max_loss` points of F1@10."""
    loss = 100 * (f1["model"] - f1["exported"])
    if max_loss is not None and not loss <= max_loss:  # NaN is not a score
        raise ValueError(
            f"The {precision} graph loses {loss:.2f} points of F1@10, more than {max_loss:g}: it is not written. Use other "
            "calibration texts, fp32, or a higher max_loss."
        )


def check_options(format: str, precision: str, evaluation, max_loss: float | None) -> None:
    """Raises a `ValueError` for an unknown option, or int8 with a limit and without evaluation."""
    for name, value, known in (("format", format, BACKENDS), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known. Use {' or '.join(map(repr, known))}.")
    check_max_loss(max_loss)
    if precision == "int8" and not evaluation and max_loss is not None:
        raise ValueError(
            "precision='int8' can lose quality and needs labelled texts to measure it: pass evaluation, rows with text and "
            "keyphrases, or max_loss=None to do without."
        )


def check_max_loss(max_loss: float | None) -> None:
    """Raises a `ValueError` unless it is a number of points from 0 to 100, or `None`."""
    is_number = isinstance(max_loss, (int, float)) and not isinstance(max_loss, bool)
    if max_loss is not None and not (is_number and 0 <= max_loss <= 100):
        raise ValueError(
            f"max_loss={max_loss!r} is not a number of points from 0 to 100. Use 0.5, or None for no limit."
        )


def check_installed(format: str, precision: str) -> None:
    """Raises an `ImportError` that names the extra if an exporter is missing."""
    runtime = ["onnxruntime"] if format == "onnx" else ["openvino", "nncf"][: 2 if precision == "int8" else 1]
    needed = ["onnx", "onnxscript", *runtime]
    for name in needed:
        try:
            __import__(name)
        except ImportError as error:
            raise ImportError(f"export needs {name}. Install it with: pip install 'lexperts[{format}]'") from error


def wrap(model, format: str) -> nn.Module:
    """The model as a module from tensors to tensors.

    Raises:
        ValueError: for a model whose labels are decoded together, or that reads titles: its forward pass is not enough.
    """
    model.eval().float()
    if callable(getattr(model, "decode", None)) or "meta_mask" in model.forward.__code__.co_varnames:
        raise ValueError(
            f"{type(model).__name__} cannot be exported: its labels are decoded with weights that each document generates. "
            "Export a SekeForTokenClassification, or a token classifier of transformers."
        )
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # a smaller graph than that of fused attention
    if isinstance(model, SekeForTokenClassification):
        return PaddedSeke(model, reads_lengths=format == "onnx")
    return PaddedClassifier(model)


def check_output(output: Path, weights: str, format: str) -> dict:
    """The graphs of other formats that the folder holds.

    Raises:
        ValueError: if it holds anything else, or graphs of another model.
    """
    if not output.exists() or not any(output.iterdir()):
        return {}
    if not (output / "config.json").exists():
        raise ValueError(f"{output} is not empty and holds no exported model. Name another folder.")
    exported = ExportedModel(str(output)).config.exported
    if (foreign := find_foreign_graph(output / format, exported.get(format))) is not None:
        raise ValueError(f"{foreign} is not of an export, and would be removed. Move it away, or name another folder.")
    if any(entry["weights"] != weights for entry in exported.values()):
        raise ValueError(f"{output} holds graphs of another model. Name another folder, or delete it.")
    return {name: entry for name, entry in exported.items() if name != format}


def find_foreign_graph(folder: Path, entry: Mapping | None) -> Path | None:
    """The first path in the folder of a format that no export has written, by its name and the entry in the configuration."""
    names = {Path(graph_file(folder.name, precision)).stem for precision in PRECISIONS}
    suffixes = (".onnx", ".onnx.data", ".xml", ".bin")
    known = {f"{name}{suffix}" for name in names for suffix in suffixes} if entry else set()
    return next((path for path in sorted(folder.glob("*")) if path.name not in known or not path.is_file()), None)


def example_inputs(tokenizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch of three rows of different lengths."""
    options = {"padding": True, "truncation": True, "max_length": min(24, tokenizer.model_max_length)}
    batch = tokenizer([WORDS, "keyphrases of a text", "one"], **options, return_tensors="pt")
    rows = {**batch, "style_ids": torch.zeros(3, dtype=torch.long)}
    return {name: rows.get(name, torch.zeros_like(batch["input_ids"])) for name in names}


def write_onnx(wrapped: nn.Module, inputs: dict[str, torch.Tensor], limit: int, path: Path) -> Path:
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
    return path


def copy_onnx(plain: Path, graph: Path, precision: str, inputs: Callable) -> None:
    """Copies the float32 graph."""
    shutil.copyfile(plain, graph)


def quantise_onnx(plain: Path, graph: Path, precision: str, inputs: Callable) -> None:
    """int8 weights, one scale per column, and activations that are quantised as they come (onnxruntime's dynamic quantiser)."""
    disable_telemetry()
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = plain.with_name("prepared.onnx")
    quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)
    options = {"weight_type": QuantType.QInt8, "per_channel": True, "nodes_to_exclude": sensitive_nodes(prepared)}
    # seven bits per weight: with eight, sums of products overflow on processors without VNNI
    quantize_dynamic(prepared, graph, reduce_range=True, **options)
    prepared.unlink()


def sensitive_nodes(path: Path) -> list[str]:
    """Names of the products of SENSITIVE layers in an ONNX graph."""
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    maker = {value: node for node in nodes for value in node.output}
    found = [node for node in nodes if any(word in value for value in node.input for word in SENSITIVE)]
    # a bias keeps its layer's name; its weight, which is transposed, does not
    found += [maker[value] for node in found for value in node.input if value in maker]
    return sorted({node.name for node in found if node.op_type in ("MatMul", "Gemm")})


def write_openvino(plain: Path, graph: Path, precision: str, inputs: Callable) -> None:
    """OpenVINO's graph; in int8 with ranges from calibration texts (nncf), the recurrent layers in float32."""
    import openvino

    model = openvino.Core().read_model(plain)
    if precision == "int8":
        import nncf

        recurrent = ["LSTMSequence", "GRUSequence"]
        scope = nncf.IgnoredScope(types=recurrent, names=sensitive_nodes(plain), validate=False)
        rows = inputs()
        data = nncf.Dataset(rows)
        model = nncf.quantize(
            model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows), ignored_scope=scope
        )
    openvino.save_model(model, graph, compress_to_fp16=False)


def calibration_inputs(extract, texts: Sequence[str], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """One batch for each of at most 300 texts."""
    rows = []
    for text in texts[:300]:
        batch = extract.tokenizer(text, truncation=True, return_tensors="np")
        values = {**batch, "style_ids": np.zeros(1)}
        rows.append({name: values.get(name, np.zeros_like(batch["input_ids"])).astype(np.int64) for name in names})
    return rows


def save_folder(extract, folder: Path) -> None:
    """Writes tokenizer and configuration."""
    extract.model.config.to_json_file(folder / "config.json")  # save_pretrained would add the code of the PyTorch model
    extract.tokenizer.save_pretrained(folder)


def write_card(folder: Path, model: str, exported: Mapping[str, Mapping]) -> None:
    """Writes README.md: what the folder holds, how to open it, and what was measured."""
    is_local = Path(model).exists()
    name = Path(model).resolve().name if is_local else model
    rows = []
    for format, entry in exported.items():
        f1 = entry.get("f1@10")
        scores = "not measured" if f1 is None else f"{100 * f1['model']:.1f} -> {100 * f1['exported']:.1f}"
        documents = f"{entry['documents']:,}" if f1 else ""
        file = graph_file(format, entry["precision"])
        rows.append((f"`{file}`", entry["precision"], f"{entry['size'] / 1e6:.1f} MB", scores, documents))
    tags = [*exported, "token-classification", "keyphrase-extraction"]
    text = join_card(
        {"base_model": None if is_local else name, "library_name": "lexperts", "tags": tags},
        f"# {name}, exported",
        f"Graphs of the keyphrase model {name} for CPUs. F1@10 in per cent is that of the model and of its graph on labelled documents.",
        make_table(("file", "precision", "size", "F1@10", "documents"), rows),
        HOW_TO_OPEN.format(format=next(iter(exported))),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def largest_difference(model, exported: ExportedModel, inputs: dict, names: Sequence[str]) -> float:
    """The largest difference between the logits of real tokens."""
    with torch.no_grad():
        expected, found = model(**inputs).logits, exported(**inputs).logits
    return float((expected - found)[inputs["attention_mask"] != 0].abs().max())


def compare(extract, reopened, rows: Sequence[Mapping], batch_size: int) -> dict:
    """F1@10 of the model and of its graph on labelled rows, and how many keyphrases they share."""
    texts, language = [row["text"] for row in rows], extract.language
    gold = gold_phrases(texts, [row["keyphrases"] for row in rows], language=language)
    options = {"batch_size": batch_size, "top_k": 10}
    found = {"model": extract(texts, **options), "exported": reopened(texts, **options)}
    sets = [[{phrase["keyphrase"] for phrase in document} for document in phrases] for phrases in found.values()]
    shares = [len(a & b) / len(a | b) if a | b else 1.0 for a, b in zip(*sets, strict=True)]
    f1 = {name: score_phrases(phrases, gold, k=10, language=language)["f1@10"] for name, phrases in found.items()}
    return {"documents": len(texts), "f1@10": f1, "agreement": float(np.mean(shares))}
