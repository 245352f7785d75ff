"""A small SEKE that imitates a large one: its start, and the Trainer that compares the two   (Hinton et al. 2015).

The student has the teacher's tokenizer, labels and styles. Its embeddings are the teacher's, projected to its width by
their principal components; everything else is new.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig

from modeling_seke import SekeConfig, SekeForTokenClassification

from ..training import RecipeTrainer
from .arguments import ModelArguments
from .data import UNLABELLED


def principal_components(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The projection `(d, size)` of rows `(n, d)` that keeps most of their variance; orthonormal columns."""
    centred = rows.double() - rows.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    return vectors[:, values.argsort(descending=True)[:size]].to(rows.dtype)


def new_student(teacher: SekeForTokenClassification, args: ModelArguments, head: dict) -> SekeForTokenClassification:
    """A new model over a BERT of `--student-layers` layers of `--student-hidden-size`, at most the teacher's."""
    size, source = args.student_hidden_size, teacher.config
    embeddings: Any = teacher.backbone.get_input_embeddings()
    text_config = BertConfig(
        vocab_size=embeddings.num_embeddings, pad_token_id=embeddings.padding_idx, hidden_size=size,
        intermediate_size=4 * size, num_hidden_layers=args.student_layers, num_attention_heads=max(size // 32, 1),
        max_position_embeddings=source.text_config.max_position_embeddings,
        attention_probs_dropout_prob=args.attention_dropout or 0.0,
    )  # fmt: skip
    head = head | {"expert_intermediate_size": args.expert_intermediate_size or 2 * size}
    config = SekeConfig(text_config=text_config, styles=source.styles, id2label=source.id2label, **head)
    student = SekeForTokenClassification(config)
    projection = principal_components(embeddings.weight.detach(), size)
    own = student.backbone.embeddings
    with torch.no_grad():
        own.word_embeddings.weight.copy_(embeddings.weight @ projection)
        positions = getattr(getattr(teacher.backbone, "embeddings", None), "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and len(positions.weight) == len(own.position_embeddings.weight):
            own.position_embeddings.weight.copy_(positions.weight @ projection)
    return student


class DistillationTrainer(RecipeTrainer):
    """L = a KL(p_T || p_S) + (1 - a) CE(labels, p_S)   (Hinton et al. 2015, Sect. 2, at temperature 1)

    A mean over first sub-tokens of words; those without labels have the first term only. p_T are the teacher's
    probabilities, a is `weight`.
    """

    def __init__(self, *args, teacher: SekeForTokenClassification, weight: float = 0.8, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.weight = teacher.eval().requires_grad_(False).to(self.args.device), weight
        self.kept: dict[tuple, torch.Tensor] = {}

    @torch.no_grad()
    def ask_teacher(self, inputs: dict[str, torch.Tensor], words: torch.Tensor) -> torch.Tensor:
        """The teacher's logits `(n, C)` of the n `words` `(B, S)` of a batch, padded on the right; kept in float16."""
        ids, starts = inputs["input_ids"].cpu().numpy(), words.cpu().numpy()
        styles = inputs["style_ids"].tolist() if "style_ids" in inputs else [0] * len(ids)
        columns = zip(styles, inputs["attention_mask"].sum(1).tolist(), ids, starts, strict=True)
        keys = [(style, row[:n].tobytes(), of_row[:n].tobytes()) for style, n, row, of_row in columns]
        if new := [i for i, key in enumerate(keys) if key not in self.kept]:
            logits = self.teacher(**{name: values[new] for name, values in inputs.items()}).logits
            self.kept |= {keys[i]: of_row[words[i]].half() for i, of_row in zip(new, logits, strict=True)}
        return torch.cat([self.kept[key] for key in keys]).float()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in the Trainer; without a teacher on validation rows."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        words = labels != -100
        target = self.ask_teacher(inputs, words).softmax(-1)
        outputs = model(**inputs)
        scores = outputs.logits[words].float().log_softmax(-1)
        error = F.nll_loss(scores, labels[words], ignore_index=UNLABELLED, reduction="sum") / len(scores)
        loss = self.weight * F.kl_div(scores, target, reduction="batchmean") + (1 - self.weight) * error
        return (loss, outputs) if return_outputs else loss
