# SPDX-License-Identifier: Apache-2.0
"""ExHiRD: an encoder and a hierarchical decoder that generates present and absent keyphrases without repeats.

Letters: B documents, L words of the longest one, N windows of S sub-words, I phrases, J steps within a phrase, T tokens of a flat
target, V words of the vocabulary, O out-of-vocabulary words of the batch's documents, d hidden size, A heads.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from .backbone_exhird import build_encoder
from .base_exhird import ExhirdPreTrainedModel
from .cache_exhird import CACHE, accepts_both_names
from .configuration_exhird import ExhirdConfig
from .decoder_exhird import (
    EPS,
    CopyGenerator,
    DecoderState,
    EncoderMemory,
    HierarchicalDecoder,
    labels_by_phrase,
    score_labels,
)
from .encoders_exhird import ENCODER_CLASSES, DecoderInit, PretrainedWordEncoder
from .generation_exhird import PhraseGenerationMixin
from .saving_exhird import lexperts_tools


@dataclass
class ExhirdEncoderOutput(BaseModelOutput):
    """
    Args:
        last_hidden_state (`(B, L, d)`): word states m, 0 at padding.
        hidden_states (tuple of `(B, L, d)`, with `output_hidden_states=True`): the input of the first layer and the output of
            each layer; the last is `last_hidden_state`. A recurrent encoder counts as one layer, since PyTorch computes its
            layers in one call. States of a pretrained encoder are averaged over words, followed by `last_hidden_state`.
        attentions (tuple, with `output_attentions=True`): `(B, A, L, L)` for each layer of a Transformer; those of a pretrained
            encoder are `(windows, A, S, S)`; empty for encoders without self-attention.
        decoder_initial_state (`(B, d)`): h_0 of the phrase decoder.
    """

    decoder_initial_state: torch.FloatTensor | None = None


@dataclass
class ExhirdSeq2SeqLMOutput(Seq2SeqLMOutput):
    """transformers' `Seq2SeqLMOutput` with the parts of the loss. With labels `(B, I, J)`, T is I, J.

    Args:
        loss (`()`): the sum over words divided by the number of documents; in eval mode the generation loss alone.
        logits (`(B, T, V + O)`): log P of each next word, out-of-vocabulary words included; 0 where there is no label. In
            training with labels only with `output_logits=True`. After the last word allowed, and after padding, `;` has P = 1.
        cache (`DecoderState`): the state for the next step, without labels; `past_key_values` before transformers 5.24.
        decoder_hidden_states (tuple of one `(B, T, d)`, with `output_hidden_states=True`): the attentional vectors a.
        decoder_attentions: `None`, the decoder is recurrent.
        cross_attentions (tuple of one `(B, 1, T, L)`, with `output_attentions=True`): alpha.
        encoder_last_hidden_state, encoder_hidden_states, encoder_attentions: see `ExhirdEncoderOutput`.
        log_probs (`(B, T)`): log-probability of each label given the preceding ones; 0 where there is no label.
        generation_loss (`()`): negative log-likelihood per document.
        exclusive_loss (`()`): exclusive loss per document, without its coefficient.
    """

    log_probs: torch.FloatTensor | None = None
    generation_loss: torch.FloatTensor | None = None
    exclusive_loss: torch.FloatTensor | None = None


class ExhirdEncoder(ExhirdPreTrainedModel):
    """Encodes the words of a document: states for the decoder's attention, and the decoder's initial state."""

    _input_embed_layer = "embeddings"  # which the decoder shares

    def __init__(self, config: ExhirdConfig):
        super().__init__(config)
        config.check()
        self.embeddings = nn.Embedding(config.vocab_size, config.word_size)
        self.word_encoder: nn.Module
        if config.encoder_type == "pretrained":
            self.word_encoder = PretrainedWordEncoder(config, build_encoder(config.text_config))
        else:
            self.word_encoder = ENCODER_CLASSES[config.encoder_type](config)
        self.start = DecoderInit(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        subword_ids: torch.Tensor | None = None,
        subword_mask: torch.Tensor | None = None,
        subword_word_ids: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> ExhirdEncoderOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): words, from `ExhirdTokenizer`.
            subword_ids, subword_mask, subword_word_ids (`(B, N, S)`): for a pretrained encoder its sub-words, and the index of
                each one's word, -1 for none.
            output_attentions, output_hidden_states: see `ExhirdEncoderOutput`; by default the configuration's. Attentions
                of a Transformer need memory for all pairs of words.

        Raises:
            ValueError: if a pretrained encoder gets no sub-words.
        """
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        if self.config.encoder_type == "pretrained":
            if subword_ids is None or subword_word_ids is None:
                missing = "subword_ids" if subword_ids is None else "subword_word_ids"
                raise ValueError(
                    f"{missing}=None, but the encoder reads sub-words. Add the encoder's tokenizer with tokenizer."
                    "with_subword_tokenizer(AutoTokenizer.from_pretrained(...)), and pass subword_ids, subword_mask, "
                    "subword_word_ids."
                )
            inputs: tuple = (mask, subword_ids, subword_mask, subword_word_ids)
        else:
            inputs = (self.embeddings(input_ids), mask)
        encoded = self.word_encoder(*inputs, **self.output_flags(output_attentions, output_hidden_states))
        return ExhirdEncoderOutput(
            last_hidden_state=encoded.states,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            decoder_initial_state=self.start(encoded.states, mask, encoded.final_state),
        )


class ExhirdForKeyphraseGeneration(ExhirdPreTrainedModel, PhraseGenerationMixin):
    """Generates keyphrases, present ones first, then absent ones (Chen et al. 2020; sparse, relative attention: Xu et al. 2021)

    Example:

    ```python
    >>> from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, ExhirdTokenizer
    >>> tokenizer = ExhirdTokenizer.from_texts(texts)
    >>> model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer))  # random weights: train it
    >>> generate = pipeline("keyphrase-generation", model=model, tokenizer=tokenizer)
    >>> generate(["A text. ..."])  # [[{"keyphrase", "present", "score", "start", "end"}, ...]]
    >>> model.generate(**DataCollatorForKeyphraseGeneration(tokenizer)(rows), num_beams=4)  # ids, as of any seq2seq model
    ```
    """  # fmt: skip

    card_use = {
        "what": "Generates keyphrases, including those that do not occur in the text",
        "tag": "text-generation",
        "task": "keyphrase-generation",
        "call": 'run({"title": "Graph cuts", "text": "They segment images."})',
    }
    backbone_path = "encoder.word_encoder.backbone"

    def __init__(self, config: ExhirdConfig):
        super().__init__(config)
        self.encoder = ExhirdEncoder(config)
        self.decoder = HierarchicalDecoder(config.word_size, config.hidden_size)
        pad_id: Any = config.pad_token_id  # an id: the configuration checks it
        self.generator = CopyGenerator(config.hidden_size, config.vocab_size, pad_id)
        self.set_generation_defaults()
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        tokenizer,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """The same decoder on a pretrained encoder: a warm start, which is not in the papers.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            tokenizer: an `ExhirdTokenizer` with the encoder's tokenizer as its `subword_tokenizer`.
            dtype: of all weights, "auto" for the checkpoint's.
            attention_dropout (`float`, *optional*): replaces the encoder's own. 0 is faster on CPU, where fused attention
                does not support dropout.
            options: fields of `ExhirdConfig`, and arguments of `from_pretrained` (`revision`, `token`, `device_map`,
                `quantization_config`, `variant`, ...).

        Raises:
            ImportError: without Lexperts.
            OSError: if the encoder cannot be opened.
            TypeError, ValueError: for an unknown option, or a value out of range.
        """
        tools = lexperts_tools("backbones", "from_backbone()")
        options, load_kwargs = tools.split_options(options, {field.name for field in fields(ExhirdConfig)})
        if options.setdefault("encoder_type", "pretrained") != "pretrained" or "text_config" in options:
            raise ValueError(
                "encoder_type and text_config cannot be set in from_backbone(). Build models with other encoders from "
                "ExhirdConfig.from_tokenizer(tokenizer, encoder_type=...)."
            )

        def make_config(encoder):
            return ExhirdConfig.from_tokenizer(tokenizer, text_config=encoder, **options)

        return tools.load_over_backbone(cls, name_or_path, make_config, load_kwargs, dtype, attention_dropout)

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """The pipeline of each task, for `SelfContainedCheckpointMixin`."""
        from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline

        return {"keyphrase-generation": KeyphraseGenerationPipeline}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> embeddings, that of `<unk>` for out-of-vocabulary words."""
        return self.encoder.embeddings(ids.masked_fill(ids >= self.config.vocab_size, self.config.unk_token_id))

    def word_gates(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> the words' part of the decoder's gates."""
        return self.decoder.word_input(self.embed(ids))

    def make_memory(self, encoded, input_ids, attention_mask, copy_ids) -> EncoderMemory:
        """The input of the decoder's attention and copying."""
        states, words = encoded.last_hidden_state, input_ids if copy_ids is None else copy_ids
        if attention_mask is None:
            attention_mask = torch.ones_like(words)
        # half of the minimum of float16, which autocast may use: scores may be added to it, and a document without words gives no nan
        lowest = torch.finfo(torch.float16).min / 2
        bias = states.new_zeros(attention_mask.shape).masked_fill(attention_mask == 0, lowest)
        return EncoderMemory(states, bias, words)

    def encode(self, input_ids, attention_mask, copy_ids, **subwords) -> tuple[EncoderMemory, torch.Tensor]:
        """Documents -> the memory of the decoder, and h_0."""
        encoded = self.encoder(input_ids, attention_mask, **subwords, return_dict=True)
        return self.make_memory(encoded, input_ids, attention_mask, copy_ids), encoded.decoder_initial_state

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        subword_ids: torch.Tensor | None = None,
        subword_mask: torch.Tensor | None = None,
        subword_word_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: ExhirdEncoderOutput | None = None,
        cache: DecoderState | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        max_tokens_per_phrase: int | None = None,
    ) -> ExhirdSeq2SeqLMOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): words of documents.
            copy_ids (`(B, L)`): the same as extended ids, in which out-of-vocabulary words differ from each other.
            labels (`(B, T)`): the start, words and `;` of each phrase, and `</s>`, as extended ids, padded with -100. Or one
                row per phrase, `(B, I, J)`.
            subword_ids, subword_mask, subword_word_ids (`(B, N, S)`): as in `ExhirdEncoder.forward`.
            decoder_input_ids (`(B, T)`): `<s>`, followed by tokens as in flat labels; without labels, the default is `<s>`.
                Padding is skipped. They are processed sequentially; for training pass labels.
            encoder_outputs: of `model.encoder`, instead of `input_ids` and sub-words; requires `copy_ids`.
            cache: of the previous call, which has processed all but these `decoder_input_ids`.
            use_cache (default `True`): whether to return `cache`, without labels.
            output_attentions, output_hidden_states: see `ExhirdSeq2SeqLMOutput`; by default the configuration's.
            output_logits: whether to return logits with labels; by default in eval mode only, since training does not
                need them, and they take more memory than everything else.
            logits_to_keep: number of last positions with logits, without labels; 0 for all.
            max_tokens_per_phrase: start and words after which a phrase ends in any case; `generate` passes it.

        Raises:
            ValueError: for labels with `decoder_input_ids`, in training without either, and without `input_ids` or `encoder_outputs` and `copy_ids`.
        """
        config = self.config
        if labels is not None and decoder_input_ids is not None:
            raise ValueError("labels and decoder_input_ids are both set. Pass labels only; the decoder shifts them.")
        if self.training and labels is None and decoder_input_ids is None:
            raise ValueError(
                "labels=None in training. With label_smoothing_factor or compute_loss_func the Trainer keeps the labels, but the "
                "loss of this model is computed inside, over the words of each document. Set label_smoothing_factor=0."
            )
        if input_ids is None and (encoder_outputs is None or copy_ids is None):
            raise ValueError("input_ids=None. Pass input_ids, or encoder_outputs with copy_ids.")
        flags = self.output_flags(output_attentions, output_hidden_states)
        if encoder_outputs is None:
            subwords = {"subword_ids": subword_ids, "subword_mask": subword_mask, "subword_word_ids": subword_word_ids}
            encoder_outputs = self.encoder(input_ids, attention_mask, **subwords, **flags, return_dict=True)
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = ExhirdEncoderOutput(*encoder_outputs)
        memory = self.make_memory(encoder_outputs, input_ids, attention_mask, copy_ids)
        start = encoder_outputs.decoder_initial_state
        if labels is not None:
            output_logits = not self.training if output_logits is None else output_logits
            outputs = self._forward_labels(labels, memory, start, max_tokens_per_phrase, output_logits, **flags)
        else:
            if decoder_input_ids is None:
                decoder_input_ids = memory.copy_ids.new_full((len(memory.copy_ids), 1), config.decoder_start_token_id)
            outputs = self._forward_prefix(
                decoder_input_ids, memory, start, cache, max_tokens_per_phrase, logits_to_keep, use_cache, **flags
            )
        outputs.encoder_last_hidden_state = encoder_outputs.last_hidden_state
        outputs.encoder_hidden_states = encoder_outputs.get("hidden_states")
        outputs.encoder_attentions = encoder_outputs.get("attentions")
        return outputs

    def _forward_labels(
        self, labels, memory, start, max_tokens, output_logits, output_attentions, output_hidden_states
    ):
        """Teacher forcing: all labels at once."""
        config = self.config
        rows, valid = labels, labels != -100
        if labels.dim() == 2:
            rows, valid = labels_by_phrase(labels, config.end_phrase_token_id, max_tokens)
        previous = torch.cat([rows.new_full((*rows.shape[:2], 1), config.bos_token_id), rows[..., :-1]], 2)
        embedded = self.embed(previous.masked_fill(previous == -100, config.pad_token_id))
        ends = (config.end_phrase_token_id, config.eos_token_id)
        a, alpha = self.decoder(embedded, rows, start, memory, ends)
        scored = rows != -100
        a, alpha, document = a[scored], alpha[scored], scored.nonzero(as_tuple=True)[0]
        hidden, cross = None, None
        if output_hidden_states:  # the loss is computed from the returned tensor, which is then part of the graph
            hidden = a.new_zeros(*labels.shape, a.shape[1]).masked_scatter(valid[..., None], a)
            a = hidden[valid]
        if output_attentions:
            cross = alpha.new_zeros(*labels.shape, alpha.shape[1]).masked_scatter(valid[..., None], alpha).unsqueeze(1)
            alpha = cross.squeeze(1)[valid]
        logits, copy_ids = None, memory.copy_ids[document]
        if output_logits:
            num_oov = max(memory.num_oov(config.vocab_size), int(labels.max()) + 1 - config.vocab_size)
            logits = self.generator.log_probabilities(a, alpha, copy_ids, num_oov)
        p, exclusive = score_labels(self.generator, config, a, alpha, copy_ids, rows, logits)
        log_probs = p.new_zeros(labels.shape).masked_scatter(valid, p)
        if logits is not None:
            logits = logits.new_zeros(*labels.shape, logits.shape[1]).index_put_((valid,), logits)
        generation_loss = loss = -log_probs.sum() / len(labels)
        exclusive_loss = exclusive / len(labels)
        if self.training and config.exclusive_loss_coef:
            loss = loss + config.exclusive_loss_coef * exclusive_loss
        return ExhirdSeq2SeqLMOutput(
            loss=loss,
            logits=logits,
            log_probs=log_probs,
            generation_loss=generation_loss.detach(),
            exclusive_loss=exclusive_loss.detach(),
            decoder_hidden_states=None if hidden is None else (hidden,),
            cross_attentions=None if cross is None else (cross,),
        )

    def _forward_prefix(
        self, ids, memory, start, state, max_tokens, keep, use_cache, output_attentions, output_hidden_states
    ):
        """Processes ids column by column; hypotheses may be at different positions of their phrases."""
        config = self.config
        if state is None:
            zeros, position = torch.zeros_like(start), ids.new_zeros(len(ids))
            state = DecoderState(start, zeros, zeros, position, 0, memory.num_oov(config.vocab_size))
        vectors, weights, certain = [], [], []
        for token in ids.unbind(1):
            begins = (state.position == 0) | (token == config.end_phrase_token_id)
            frozen = token == config.pad_token_id
            if max_tokens is not None:
                frozen = frozen | ((state.position >= max_tokens) & ~begins)
            gates = self.word_gates(token.masked_fill(begins, config.bos_token_id))
            state, alpha = self.decoder.advance(gates, state, memory, begins, frozen)
            vectors.append(state.vector)
            weights.append(alpha)
            certain.append(frozen)
        a, alpha = torch.stack(vectors, 1), torch.stack(weights, 1)[:, None]  # (B, T, d), (B, 1, T, L)
        certain = torch.stack(certain, 1)[:, -keep:]  # `;` follows padding and the last word allowed
        document, column = (~certain).nonzero(as_tuple=True)
        inputs = a[:, -keep:][document, column], alpha[:, 0, -keep:][document, column], memory.copy_ids[document]
        logits = self.generator.log_probabilities(*inputs, state.num_oov)
        if len(document) < certain.numel():
            all_logits = logits.new_full((*certain.shape, logits.shape[1]), math.log(EPS))
            all_logits[..., config.end_phrase_token_id] = 0
            logits = all_logits.index_put_((document, column), logits)
        return ExhirdSeq2SeqLMOutput(
            logits=logits.view(*certain.shape, -1),
            decoder_hidden_states=(a,) if output_hidden_states else None,
            cross_attentions=(alpha,) if output_attentions else None,
            **{CACHE: None if use_cache is False else state},
        )


ExhirdEncoder.register_for_auto_class("AutoModel")
ExhirdForKeyphraseGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["ExhirdEncoder", "ExhirdForKeyphraseGeneration", "ExhirdPreTrainedModel"]
