# SPDX-License-Identifier: Apache-2.0
"""A hypernetwork on any encoder, with three heads: a title or question generates the weights of the LSTM that encodes the
text.

Letters: B pairs, S tokens of a padded pair, C labels.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

from .base_hypernet import HypernetModel, HypernetModelOutput, HypernetPreTrainedModel, at_least_float32
from .configuration_hypernet import HypernetConfig
from .crf_hypernet import LinearChainCrf, allowed_transitions, outside_label_id
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from .segments_hypernet import pool

MIN_LOG_PROB = -1e4  # the logarithm of 0: finite in half precision


class HypernetForTokenClassification(HypernetPreTrainedModel):
    """Labels the main text's words: the hypernetwork, a linear layer, a linear-chain CRF   (Duan et al. 2021, Sect. 3.3)

    The CRF runs over the first token of each word, as marked by `word_start_mask`, or else over all tokens of the main text.

    Example:

    ```python
    >>> from modeling_hypernet import HypernetForTokenClassification
    >>> model = HypernetForTokenClassification.from_backbone("allenai/scibert_scivocab_uncased")  # labels O, B-KEY, I-KEY
    >>> model.decode(**tokenizer(title, text, return_tensors="pt"))  # label ids, -1 outside the text
    ```
    """  # fmt: skip

    card_use = {
        "what": "Extracts keyphrases from texts with titles",
        "tag": "token-classification",
        "task": "keyphrase-extraction",
        "call": 'run({"title": "Tidal power", "text": "A barrage holds the water back."})',
    }
    lora_task = "TOKEN_CLS"
    default_labels = ("O", "B-KEY", "I-KEY")

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """See `LexpertsModelMixin`."""
        return {"keyphrase-extraction": KeyphraseExtractionPipeline}

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = HypernetModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.output_size, config.num_labels)
        self.crf = LinearChainCrf(config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        word_start_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids to encoder_hidden_states, kwargs: as in `HypernetModel.forward`.
            word_start_mask (`(B, S)`): 1 at the first token of each word, over which the CRF runs; by default over all.
            labels (`(B, S)`): label ids; -100 for tokens without a label. The loss is over the labelled tokens of the main
                text.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes, as the Trainer counts them;
                the loss is then divided by it.

        Returns:
            The negative log-likelihood of the labels, divided by their number, and logits (B, S, C): log-probabilities of the
            labels at each token of the CRF (softmax does not change them); elsewhere 0 for O and -10,000 for the others. The
            logits do not depend on the labels.
        """
        scores, outputs = self._scores(
            input_ids, attention_mask, token_type_ids, inputs_embeds, meta_mask, main_mask, encoder_hidden_states,
            **kwargs,
        )  # fmt: skip
        words = outputs.main_mask if word_start_mask is None else outputs.main_mask & word_start_mask.bool()
        return self._output(scores, outputs, words, labels, num_items_in_batch)

    @torch.no_grad()
    def decode(
        self,
        word_start_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_outputs: bool = False,
        **inputs,
    ):
        """The most likely sequence of labels (Viterbi); the logits of `forward` are marginals of each word.

        Args:
            word_start_mask, labels, inputs: as in `forward`; labels are only used for the loss of the outputs.
            return_outputs: whether to return the outputs of `forward` too, from the same pass.

        Returns:
            Label ids (B, S), -1 outside the CRF; with `return_outputs` a pair of them and the outputs.
        """
        scores, outputs = self._scores(**inputs)
        words = outputs.main_mask if word_start_mask is None else outputs.main_mask & word_start_mask.bool()
        allowed = None
        if self.config.constrained_decoding:
            allowed = tuple(x.to(scores.device) for x in allowed_transitions(self.config.id2label))
        tags = self.crf.viterbi(scores, words, allowed)[0]
        return (tags, self._output(scores, outputs, words, labels)) if return_outputs else tags

    def _output(self, scores, outputs, words, labels, num_items_in_batch=None) -> TokenClassifierOutput:
        """Log-marginals of the words, and the negative log-likelihood of labels, with one chain per row, per label."""
        loss = None
        if labels is not None:
            labelled = outputs.main_mask & (labels != -100)
            total = torch.as_tensor(labelled.sum() if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
            loss = -self.crf.log_likelihood(scores, labels, labelled).sum() / total
        logits = self._log_marginals(scores, words)
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def _scores(self, *args, **inputs) -> tuple[torch.Tensor, HypernetModelOutput]:
        """Scores of the labels at each token (B, S, C), and the hypernetwork's outputs."""
        outputs = self.hypernet(*args, **inputs)
        return self.classifier(self.dropout(outputs.last_hidden_state)), outputs

    def _log_marginals(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scores (B, S, C), mask (B, S) -> log p of each label (B, S, C); outside the mask p(O) = 1."""
        outside = scores.new_full((self.config.num_labels,), MIN_LOG_PROB, dtype=torch.float32)
        outside[outside_label_id(self.config.id2label)] = 0
        marginals = self.crf.log_marginals(scores, mask)
        return torch.where(mask[..., None], marginals.clamp(min=MIN_LOG_PROB), outside.to(marginals.dtype))


class HypernetForSequenceClassification(HypernetPreTrainedModel):
    """Classifies texts with titles: a linear layer on the last state of the hypernetwork, or the mean state   (Sect. 3.1)"""

    card_use = {"what": "Classifies texts with titles", "tag": "text-classification"}
    lora_task = "SEQ_CLS"

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = HypernetModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.output_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids to encoder_hidden_states, kwargs: as in `HypernetModel.forward`.
            labels: class ids `(B,)`; 0.0 and 1.0 `(B, C)` for several classes per text; numbers `(B,)` with `num_labels=1`.
            num_items_in_batch: labels in the whole step, as counted by the Trainer; the loss is then divided by it.
        """
        outputs = self.hypernet(
            input_ids, attention_mask, token_type_ids, inputs_embeds, meta_mask, main_mask, encoder_hidden_states,
            **kwargs,
        )  # fmt: skip
        pooled = pool(outputs.last_hidden_state, outputs.main_mask, self.config.pooling)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch) -> torch.Tensor:
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        total = torch.as_tensor(count).clamp(min=1)
        problem, scores = self.config.problem_type, at_least_float32(logits)
        if problem == "regression" or (problem is None and self.config.num_labels == 1):
            return F.mse_loss(scores, labels.to(scores.dtype).view_as(scores), reduction="sum") / total
        if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
            return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum") / total
        return F.cross_entropy(scores, labels, reduction="sum") / total


class HypernetForQuestionAnswering(HypernetPreTrainedModel):
    """Finds the answer to a question in a text: the hypernetwork, and a linear layer for start and end   (Sect. 3.2)

    The first token is added before the text; start and end at this token mean "no answer".
    """

    card_use = {
        "what": "Finds the answers to questions in texts",
        "tag": "question-answering",
        "task": "extractive-qa",
        "call": 'run(question="What holds the water back?", context="A barrage holds the water back.")',
    }
    lora_task = "QUESTION_ANS"

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """See `LexpertsModelMixin`."""
        from .pipeline_extractive_qa import ExtractiveQAPipeline

        return {"extractive-qa": ExtractiveQAPipeline}

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.hypernet = HypernetModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.qa_outputs = nn.Linear(config.output_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        meta_mask: torch.Tensor | None = None,
        main_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            input_ids to encoder_hidden_states, kwargs: as in `HypernetModel.forward`, with the question as meta-text.
            start_positions, end_positions (`(B,)`): first and last token of the answer; both the row's first token for "no
                answer".

        Returns:
            The sum of the cross-entropies of start and end, and their logits (B, S): scores at the main text's tokens and at
            the first token, -10,000 elsewhere.
        """
        outputs = self.hypernet(
            input_ids, attention_mask, token_type_ids, inputs_embeds, meta_mask, main_mask, encoder_hidden_states,
            prepend_cls_to_main=True, **kwargs,
        )  # fmt: skip
        scores = at_least_float32(self.qa_outputs(self.dropout(outputs.last_hidden_state)))
        start, end = scores.masked_fill(~outputs.main_mask[..., None], MIN_LOG_PROB).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)
        return QuestionAnsweringModelOutput(loss, start, end, outputs.hidden_states, outputs.attentions)


HypernetForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
HypernetForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
HypernetForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "HypernetForQuestionAnswering", "HypernetForSequenceClassification", "HypernetForTokenClassification",
    "HypernetModel", "HypernetPreTrainedModel",
]  # fmt: skip
