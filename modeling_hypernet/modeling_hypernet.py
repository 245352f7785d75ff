"""The hypernetwork on any encoder: titles and questions write the weights of the layer that reads the text.

Letters: B pairs, S tokens of a padded pair, C labels, d the backbone's hidden size, D size of the main text's states (N_h,
or 2 N_h where it is read both ways); u meta-text, v main text.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import can_return_tuple

from .backbone_hypernet import build_encoder
from .base_hypernet import HypernetPreTrainedModel
from .configuration_hypernet import HypernetConfig
from .crf_hypernet import LinearChainCrf
from .labels_hypernet import allowed_steps, outside_label
from .lstm_hypernet import GeneratedLstm, MetaEncoder, WeightGenerator
from .outputs_hypernet import (
    HypernetModelOutput,
    HypernetQuestionAnsweringOutput,
    HypernetSequenceClassifierOutput,
    HypernetTokenClassifierOutput,
)
from .segments_hypernet import cut, find_segments, read_out
from .word_starts_hypernet import WordStarts, WordStartsMixin

IMPOSSIBLE = -1e4  # as a logarithm: finite in half precision too, and 0 as a probability


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Converts half precisions to float32 and leaves float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class HypernetModel(HypernetPreTrainedModel):
    """H^S = LSTM_{W(z)}(H^v) with z from H^u, H^u and H^v from the backbone's reading of the pair   (Duan et al. 2021, Sect. 2)

    Example:

    ```python
    >>> from modeling_hypernet import HypernetModel
    >>> model = HypernetModel.from_backbone("allenai/scibert_scivocab_uncased")
    >>> states = model(**tokenizer(titles, texts, padding=True, return_tensors="pt")).last_hidden_state
    ```
    """  # fmt: skip

    backbone_path = "backbone"

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.backbone = build_encoder(config.text_config)
        self._takes_token_type_ids = "token_type_ids" in inspect.signature(self.backbone.forward).parameters
        self.build_reader(config)
        self.post_init()

    def build_reader(self, config: HypernetConfig):
        """All that `read` needs."""
        self.meta_encoder = MetaEncoder(
            config.input_size, config.meta_size, config.meta_hidden_size, config.normalize_meta
        )
        self.reader = GeneratedLstm(
            config.meta_size, config.input_size, config.hidden_size, config.bidirectional, config.base_weights
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.backbone.set_input_embeddings(value)

    def train(self, mode: bool = True):
        """As in PyTorch; a frozen backbone stays in eval mode, without dropout."""
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

    @torch.no_grad()
    def scale_generators(self, texts: int = 32, length: int = 12):
        """Scales the generators so that the weights they write have the variance 1 / N_h, whatever z's scale is: by z of
        random texts, always the same ones.
        """
        generators = [module for module in self.modules() if isinstance(module, WeightGenerator)]
        if self.config.normalize_meta or not generators:
            return
        draw = torch.Generator().manual_seed(0)
        size = self.get_input_embeddings().num_embeddings
        ids = torch.randint(size, (texts, length), generator=draw).to(self.device)
        z = self.meta_encoder(self.encode(ids).last_hidden_state, torch.full((texts,), length, device=self.device))
        scale = at_least_float32(z).square().sum(-1).mean().rsqrt()
        for generator in generators:
            for weight in (generator.hidden, generator.input, generator.bias):
                weight.mul_(scale.to(weight.dtype))

    def encode(self, input_ids=None, attention_mask=None, token_type_ids=None, **kwargs):
        """The backbone's output; without gradients where it is frozen. Arguments as in `forward`.

        Raises:
            ValueError: where it is frozen and yet has parameters to train, such as an adapter's.
        """
        if token_type_ids is not None and self._takes_token_type_ids:
            kwargs["token_type_ids"] = token_type_ids
        frozen = self.config.freeze_backbone
        if frozen and self.training:
            trained = [name for name, p in self.backbone.named_parameters() if p.requires_grad]
            if trained:
                raise ValueError(
                    f"freeze_backbone=True, but {len(trained)} parameters of the backbone are to be trained, such as "
                    f"{trained[0]}: they would get no gradient. Set config.freeze_backbone = False, or freeze them."
                )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return self.backbone(input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)

    def read(self, u, u_lengths, v, v_lengths) -> tuple[torch.Tensor, torch.Tensor]:
        """H^u (B, U, d), H^v (B, L, d), left-aligned, and their lengths (B,) -> H^S (B, L, D), z (B, N_z)."""
        z = F.dropout(self.meta_encoder(u, u_lengths), self.config.meta_dropout, self.training)
        return self.reader(v, v_lengths, z, self.config.lstm_implementation).to(z.dtype), z

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        backbone_states: torch.Tensor | None = None,
        first_in_main: bool = False,
        **kwargs,
    ) -> HypernetModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids (`(B, S)`), inputs_embeds (`(B, S, d)`): a tokenizer's
                pairs (meta-text, main text), as the backbone takes them; single texts are main texts.
            meta_mask, main_mask (`(B, S)`): 1 at the tokens of H^u and of H^v, as `HypernetCollator` makes them. Without
                them `token_type_ids` tell the two apart, or else the separators.
            backbone_states (`(B, S, d)`): the backbone's, computed before; it is not run then.
            first_in_main: whether the first token is read before the main text, as the place of "no answer".
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`.

        Raises:
            ValueError: for masks of another shape, a pair without a separator in between, or inputs that do not tell
                which part is which.
        """
        tokens = next((x for x in (backbone_states, input_ids, inputs_embeds) if x is not None), None)
        if tokens is None:
            raise ValueError("There is nothing to read. Pass input_ids, inputs_embeds or backbone_states.")
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.dim()} dimensions: one value a token is needed. "
                "Pass it as (batch, length)."
            )
        meta, main = find_segments(self.config, input_ids, attention_mask, token_type_ids, meta_mask, main_mask)
        u, v = cut(meta, main)
        if first_in_main:
            real = attention_mask != 0
            main = main | (real & (real.cumsum(1) == 1))
            v = type(v)(main, v.index.shape[1] + 1)
        outputs = None
        if backbone_states is None:
            if position_ids is not None:
                kwargs["position_ids"] = position_ids
            outputs = self.encode(input_ids, attention_mask, token_type_ids, inputs_embeds=inputs_embeds, **kwargs)
            backbone_states = outputs.last_hidden_state
        with torch.autocast(backbone_states.device.type, enabled=False):  # states of 400 steps need float32
            states, z = self.read(u.gather(backbone_states), u.lengths, v.gather(backbone_states), v.lengths)
        return HypernetModelOutput(
            last_hidden_state=v.scatter(states),
            meta_embedding=z,
            main_mask=main,
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )


class HypernetForTokenClassification(WordStartsMixin, HypernetPreTrainedModel):
    """Labels the main text's words: the hypernetwork, a linear layer, a linear-chain CRF   (Duan et al. 2021, Sect. 3.3)

    The CRF runs over the first token of each word. `word_start_mask` says which tokens those are; without it a table by
    token ids does (`word_starts_hypernet`), which `from_backbone` fills from the backbone's tokenizer and a checkpoint keeps.

    Example:

    ```python
    >>> from modeling_hypernet import HypernetForTokenClassification
    >>> model = HypernetForTokenClassification.from_backbone("allenai/scibert_scivocab_uncased")  # labels O, B-KEY, I-KEY
    >>> model.decode(**tokenizer(title, text, return_tensors="pt"))  # the most likely labels; -1 where no word begins
    ```
    """  # fmt: skip

    model_class = HypernetModel
    lora_task = "TOKEN_CLS"
    default_labels = ("O", "B-KEY", "I-KEY")
    pipeline_requirements = ("nltk", "regex")

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        return {"keyphrase-extraction": "keyphrase_tools.pipeline_keyphrase_extraction.KeyphraseExtractionPipeline"}

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = self.model_class(config)
        self.dropout = nn.Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.output_size, config.num_labels)
        self.crf = LinearChainCrf(config.num_labels)
        self.word_starts = WordStarts(config.text_config.vocab_size) if config.has_word_starts else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        backbone_states: torch.Tensor | None = None,
        word_start_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> HypernetTokenClassifierOutput:
        """
        Args:
            input_ids and so on to backbone_states: as in `HypernetModel.forward`.
            word_start_mask (`(B, S)`): 1 at the tokens that the CRF reads, each word's first. Without it those are found by
                `input_ids`.
            labels (`(B, S)`): label ids; -100 where there is nothing to learn. The loss reads the main text's tokens with a
                label. `HypernetCollator` checks them.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes. The Trainer gives it,
                and the loss is then their sum divided by it: gradient accumulation changes nothing.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`.

        Raises:
            ValueError: without `word_start_mask` where nothing else says which tokens begin words.
        """
        reading = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "meta_mask": meta_mask,
            "main_mask": main_mask,
            "backbone_states": backbone_states,
        }
        scores, outputs = self._scores(**reading, **kwargs)
        words = outputs.main_mask & self.find_word_starts(input_ids, word_start_mask)
        return HypernetTokenClassifierOutput(
            loss=None if labels is None else self._loss(scores, outputs.main_mask, labels, num_items_in_batch),
            logits=self._log_marginals(scores, words),
            meta_embedding=outputs.meta_embedding,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @torch.no_grad()
    def decode(
        self,
        word_start_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_outputs: bool = False,
        **inputs,
    ):
        """The most likely labels of all words together (Viterbi), where `forward`'s logits are those of each word alone.

        Args:
            word_start_mask, labels and the inputs: as in `forward`; labels are only read for the output's loss.
            return_outputs: whether `forward`'s output is wanted too; the text is read once.

        Returns: label ids (B, S), -1 where no word begins; or the pair of them and the output.
        """
        scores, outputs = self._scores(**inputs)
        words = outputs.main_mask & self.find_word_starts(inputs.get("input_ids"), word_start_mask)
        allowed = None
        if self.config.constrained_decoding:
            allowed = tuple(x.to(scores.device) for x in allowed_steps(self.config.id2label))
        tags = self.crf.viterbi(scores, words, allowed)[0]
        if not return_outputs:
            return tags
        return tags, HypernetTokenClassifierOutput(
            loss=None if labels is None else self._loss(scores, outputs.main_mask, labels, None),
            logits=self._log_marginals(scores, words),
            meta_embedding=outputs.meta_embedding,
        )

    def _loss(self, scores, main_mask, labels, num_items_in_batch) -> torch.Tensor:
        """Minus the log-likelihood of the labels as one chain per row, by the number of labels."""
        labelled = main_mask & (labels != -100)
        total = torch.as_tensor(labelled.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        return -self.crf.log_likelihood(scores, labels, labelled).sum() / total

    def _scores(self, **inputs) -> tuple[torch.Tensor, HypernetModelOutput]:
        """-> the score of each label at each token, (B, S, C), and what the hypernetwork gave."""
        outputs = self.hypernet(**inputs)
        return self.classifier(self.dropout(outputs.last_hidden_state)), outputs

    def _log_marginals(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, S, C), (B, S) -> log p of each label where the mask is, O elsewhere."""
        outside = scores.new_full((self.config.num_labels,), IMPOSSIBLE, dtype=torch.float32)
        outside[outside_label(self.config.id2label)] = 0
        found = self.crf.log_marginals(scores, mask)
        return torch.where(mask[..., None], found.clamp(min=IMPOSSIBLE), outside.to(found.dtype))


class HypernetForSequenceClassification(HypernetPreTrainedModel):
    """Classifies texts by their titles and bodies: the hypernetwork's last state (or its mean), and a linear layer   (Sect. 3.1)

    Example:

    ```python
    >>> from modeling_hypernet import HypernetForSequenceClassification
    >>> model = HypernetForSequenceClassification.from_backbone("bert-large-uncased", num_labels=4)
    >>> model(**tokenizer(titles, texts, padding=True, return_tensors="pt")).logits
    ```
    """  # fmt: skip

    model_class = HypernetModel
    lora_task = "SEQ_CLS"

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = self.model_class(config)
        self.dropout = nn.Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.output_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        backbone_states: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> HypernetSequenceClassifierOutput:
        """
        Args:
            input_ids and so on to backbone_states: as in `HypernetModel.forward`.
            labels (`(B,)` class ids; `(B, C)` of 0.0 and 1.0 for several classes a text; `(B,)` numbers for `num_labels=1`).
            num_items_in_batch: labels in the whole step, as the Trainer counts them; the loss is then divided by it.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`.
        """
        outputs = self.hypernet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            meta_mask=meta_mask,
            main_mask=main_mask,
            backbone_states=backbone_states,
            **kwargs,
        )
        logits = self.classifier(
            self.dropout(read_out(outputs.last_hidden_state, outputs.main_mask, self.config.readout))
        )
        return HypernetSequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            meta_embedding=outputs.meta_embedding,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch) -> torch.Tensor:
        total = torch.as_tensor(labels.numel() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        problem, scores = self.config.problem_type, at_least_float32(logits)
        if problem == "regression" or (problem is None and self.config.num_labels == 1):
            return F.mse_loss(scores, labels.to(scores.dtype).view_as(scores), reduction="sum") / total
        if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
            return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum") / total
        return F.cross_entropy(scores, labels, reduction="sum") / total


class HypernetForQuestionAnswering(HypernetPreTrainedModel):
    """Finds the answer to a question in a text: the hypernetwork, and a linear layer for start and end   (Sect. 3.2)

    The first token is read before the text: where start and end both point to it, there is no answer.

    Example:

    ```python
    >>> from modeling_hypernet import HypernetForQuestionAnswering
    >>> model = HypernetForQuestionAnswering.from_backbone("roberta-large")
    >>> outputs = model(**tokenizer(question, text, return_tensors="pt"))
    ```
    """

    model_class = HypernetModel
    lora_task = "QUESTION_ANS"

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        from .pipeline_extractive_qa import ExtractiveQAPipeline

        return {"extractive-qa": ExtractiveQAPipeline}

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = self.model_class(config)
        self.dropout = nn.Dropout(config.head_dropout)
        self.qa_outputs = nn.Linear(config.output_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        backbone_states: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> HypernetQuestionAnsweringOutput:
        """
        Args:
            input_ids and so on to backbone_states: as in `HypernetModel.forward`; questions come first.
            start_positions, end_positions (`(B,)`): the tokens where the answer begins and ends, both the first token's
                place where there is none. `HypernetCollator` checks them.
            kwargs: for the backbone, such as `output_hidden_states` and `output_attentions`.

        """
        outputs = self.hypernet(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            meta_mask=meta_mask,
            main_mask=main_mask,
            backbone_states=backbone_states,
            first_in_main=True,
            **kwargs,
        )
        scores = at_least_float32(self.qa_outputs(self.dropout(outputs.last_hidden_state)))
        start, end = scores.masked_fill(~outputs.main_mask[..., None], IMPOSSIBLE).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)
        return HypernetQuestionAnsweringOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            meta_embedding=outputs.meta_embedding,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


HypernetModel.register_for_auto_class("AutoModel")
HypernetForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
HypernetForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
HypernetForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "HypernetForQuestionAnswering",
    "HypernetForSequenceClassification",
    "HypernetForTokenClassification",
    "HypernetModel",
    "HypernetPreTrainedModel",
]
