"""A small SEKE that imitates a large one: what it starts from, and the Trainer that compares the two   (Hinton et al. 2015).

The student has the teacher's tokenizer, labels and styles. Its embeddings are the teacher's, projected to its width by their
principal components; everything else is new.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig

from keyphrase_tools.exported_model import ExportedModel
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import full_text
from modeling_seke import SekeConfig, SekeForTokenClassification
from run_tools.errors import UserError
from run_tools.fingerprints import hash_weights
from run_tools.jsonl import read_jsonl

from ..common.training import RecipeTrainer
from .arguments import DataArguments, ModelArguments
from .data import source_name

EXAMPLE = '{"text": "..."}'
LARGEST_CACHE = 2**31
UNLABELLED = -101  # label of a word without one; -100 is for sub-tokens that begin no word


def principal_components(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The projection `(d, size)` of rows `(n, d)` that keeps most of their variance; orthonormal columns."""
    centred = rows.double() - rows.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    return vectors[:, values.argsort(descending=True)[:size]].to(rows.dtype)


def new_student(teacher: SekeForTokenClassification, args: ModelArguments, options: dict) -> SekeForTokenClassification:
    """A new model with a BERT of `--student-layers` layers of `--student-hidden-size`, and the options of its head.

    Raises:
        UserError: if the width is not a multiple of 32, that of an attention head, or exceeds the teacher's, or if the teacher's
            embeddings are not of one vocabulary.
    """
    size, source = args.student_hidden_size, teacher.config
    embeddings: Any = teacher.backbone.get_input_embeddings()
    if size % 32 or size > embeddings.weight.shape[1]:
        raise UserError(
            f"--student-hidden-size {size} is not a multiple of 32 from 32 to {embeddings.weight.shape[1]}, the teacher's width."
        )
    text_config = BertConfig(
        vocab_size=embeddings.num_embeddings,
        hidden_size=size,
        num_hidden_layers=args.student_layers,
        num_attention_heads=size // 32,
        intermediate_size=4 * size,
        max_position_embeddings=source.text_config.max_position_embeddings,
        attention_probs_dropout_prob=args.attention_dropout or 0.0,
        pad_token_id=embeddings.padding_idx,
    )
    if args.expert_intermediate_size is None:
        options = options | {"expert_intermediate_size": 2 * size}
    config = SekeConfig(text_config=text_config, styles=source.styles, id2label=source.id2label, **options)
    student = SekeForTokenClassification(config)
    projection = principal_components(embeddings.weight.detach(), size)
    own = student.backbone.embeddings
    with torch.no_grad():
        own.word_embeddings.weight.copy_(embeddings.weight @ projection)
        positions = getattr(getattr(teacher.backbone, "embeddings", None), "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and positions.weight.shape[0] == own.position_embeddings.num_embeddings:
            own.position_embeddings.weight.copy_(positions.weight @ projection)
    return student


def open_graph_of(teacher: SekeForTokenClassification, tokenizer, folder: str) -> ExportedModel:
    """The exported teacher in a folder.

    Raises:
        UserError: if there is none, if it cannot be opened, or if it is an export of another model.
    """
    try:
        graph = ExportedModel(folder).open(tokenizer=tokenizer)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--teacher-graph {folder}: {error}") from error
    if graph.config.exported[str(graph.backend)]["weights"] != hash_weights(teacher):
        raise UserError(f"--teacher-graph {folder} is an export of another model than --teacher. Export that one.")
    return graph


class Teacher:
    """The logits of a model at the first sub-tokens of words. Those of a row are kept, in float16, up to `LARGEST_CACHE` bytes, since
    a student reads a row several times.
    """

    def __init__(self, model: SekeForTokenClassification | ExportedModel, device: torch.device):
        self.model = model.eval().requires_grad_(False).to(device)
        self.kept: dict[tuple, torch.Tensor] = {}
        self.room = LARGEST_CACHE

    @torch.no_grad()
    def __call__(self, inputs: dict[str, torch.Tensor], words: torch.Tensor) -> torch.Tensor:
        """Logits `(n, C)` of the n words of a batch, in order.

        Args:
            inputs: of the model, without labels.
            words (`(B, S)`): true at first sub-tokens.
        """
        styles = inputs["style_ids"].tolist() if "style_ids" in inputs else [0] * len(words)
        ids = (inputs["input_ids"] * inputs["attention_mask"]).cpu().numpy()
        columns = zip(styles, ids, words.cpu().numpy(), strict=True)
        keys = [(style, row.tobytes().rstrip(b"\0"), starts.tobytes().rstrip(b"\0")) for style, row, starts in columns]
        found = [self.kept.get(key) for key in keys]
        if new := [i for i, logits in enumerate(found) if logits is None]:
            rows = torch.tensor(new, device=words.device)
            logits = self.model(**{name: values[rows] for name, values in inputs.items()}).logits
            for i, of_row in zip(new, logits, strict=True):
                found[i] = of_row[words[i]].half()
                if (size := found[i].nbytes) <= self.room:
                    self.room -= size
                    self.kept[keys[i]] = found[i]
        return torch.cat(found).float()


class DistillationTrainer(RecipeTrainer):
    """L = a KL(p_T || p_S) + (1 - a) CE(labels, p_S), over the first sub-tokens of words   (Hinton et al. 2015, Sect. 2, at temperature 1)

    Rows without labels have the first term only.

    Args:
        teacher: the model whose probabilities p_T are imitated.
        weight: a.
    """

    def __init__(self, *args, teacher: SekeForTokenClassification | ExportedModel, weight: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.weight = Teacher(teacher, self.args.device), weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in the Trainer; without a teacher on validation rows."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        words = labels != -100
        target = self.teacher(inputs, words).softmax(-1)
        outputs = model(**inputs)
        scores = outputs.logits[words].float().log_softmax(-1)
        loss = self.weight * F.kl_div(scores, target, reduction="batchmean")
        own, labelled = labels[words], labels[words] >= 0
        if labelled.any():
            error = F.nll_loss(scores[labelled], own[labelled], reduction="sum") / len(own)
            loss = loss + (1 - self.weight) * error
        return (loss, outputs) if return_outputs else loss


def add_unlabelled(
    windows: dict[str, list], files: list[int], args: DataArguments, tokenizer, language, num_styles: int, seed: int
) -> dict:
    """Adds the windows of the texts of `--unlabelled-files`, without labels, and the number of each text's file. Each window has a
    style at random, of `num_styles` with 0 for none. Returns what results.json says of them.
    """
    texts, first = [], len(files)
    for path in args.unlabelled_files or []:
        rows = read_jsonl(path, (args.text_column,))
        texts += [full_text(row, args.text_column, args.title_column) for row in rows]
        files += [1 + max(files)] * len(rows)
    batch = {"text": texts, "keyphrases": [[]] * len(texts)}
    found = tokenize_documents(batch, tokenizer, rules=args.rules, language=language)
    labels = [[label if label == -100 else UNLABELLED for label in row] for row in found["labels"]]
    found |= {"labels": labels, "document": [first + document for document in found["document"]]}
    if "style_ids" in windows:
        found["style_ids"] = np.random.default_rng(seed).integers(num_styles, size=len(labels)).tolist()
    print(f"without labels: {len(texts):,} documents in {len(labels):,} windows")
    for name, rows in windows.items():
        rows += found[name]
    numbers = [str(files[first:].count(number)) for number in sorted(set(files[first:]))]
    names = zip(map(source_name, args.unlabelled_files or []), numbers, strict=True)
    return {
        "source": ", ".join(f"{name} ({number})" for name, number in names),
        "documents": len(texts),
        "windows": len(labels),
    }
