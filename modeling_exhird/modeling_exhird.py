# SPDX-License-Identifier: Apache-2.0
"""ExHiRD: an encoder and a hierarchical decoder that generates present and absent keyphrases without repeats.

Letters: B documents, L words of the longest one, I phrases, J steps within a phrase, T tokens of a flat target, V words of the
vocabulary, O out-of-vocabulary words of the batch's documents, d hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, ModelOutput
from transformers.utils import can_return_tuple

from .attention_exhird import SparseRelativeAttention
from .configuration_exhird import ExhirdConfig
from .decoder_exhird import CopyGenerator, EncoderMemory, HierarchicalDecoder, labels_by_phrase, score_labels
from .encoders_exhird import ENCODER_CLASSES, DecoderInit
from .search_exhird import DecodingConstraints, ExhirdGenerateOutput, search_phrases
from .shared_exhird import LexpertsModelMixin


class ExhirdPreTrainedModel(LexpertsModelMixin, PreTrainedModel):
    """Initialisation, saving and loading of keyphrase generators."""

    card_family = "ExHiRD: an encoder and a hierarchical decoder without repeats (Chen et al. 2020, Xu et al. 2021)"
    config_class = ExhirdConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over documents: the Trainer divides it by accumulated batches

    def _init_weights(self, module):
        """All weights, biases included, from U(-r, r); LayerNorms with weight 1 and bias 0."""
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, SparseRelativeAttention) or not list(module.children()):
            for weight in module.parameters(recurse=False):
                init.uniform_(weight, -self.config.initializer_range, self.config.initializer_range)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs):
        """Returns the embeddings. The vocabulary has a fixed size: ids beyond it are out-of-vocabulary words to copy.

        Raises:
            ValueError: for another size.
        """
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"The vocabulary of {self.config.vocab_size:,} words cannot be resized to {new_num_tokens:,}: ids beyond it are words "
                "to copy. For another vocabulary train a model for another ExhirdTokenizer."
            )
        return self.get_input_embeddings()


@dataclass
class ExhirdEncoderOutput(BaseModelOutput):
    """
    Args:
        last_hidden_state (`(B, L, d)`): word states m, 0 at padding.
        decoder_initial_state (`(B, d)`): h_0 of the phrase decoder.
    """

    decoder_initial_state: torch.FloatTensor | None = None


@dataclass
class ExhirdOutput(ModelOutput):
    """
    Args:
        loss (`()`): the sum over words divided by the number of documents; in eval mode the generation loss alone.
        log_probs (as labels): log-probability of each label given the preceding ones; 0 where there is no label.
        generation_loss (`()`): negative log-likelihood per document.
        exclusive_loss (`()`): exclusive loss per document, without its coefficient.
        encoder_last_hidden_state (`(B, L, d)`): see `ExhirdEncoderOutput`; alone without labels.
    """

    loss: torch.FloatTensor | None = None
    log_probs: torch.FloatTensor | None = None
    generation_loss: torch.FloatTensor | None = None
    exclusive_loss: torch.FloatTensor | None = None
    encoder_last_hidden_state: torch.FloatTensor | None = None


class ExhirdEncoder(ExhirdPreTrainedModel):
    """Encodes the words of a document: states for the decoder's attention, and the decoder's initial state."""

    _input_embed_layer = "embeddings"  # which the decoder shares

    def __init__(self, config: ExhirdConfig):
        super().__init__(config)
        config.check()
        self.embeddings = nn.Embedding(config.vocab_size, config.word_size)
        self.word_encoder: nn.Module = ENCODER_CLASSES[config.encoder_type](config)
        self.start = DecoderInit(config)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> ExhirdEncoderOutput:
        """input_ids, attention_mask (`(B, L)`): words, from `ExhirdTokenizer`, padded on either side."""
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # moves padding to the right
        words, mask = self.embeddings(input_ids.gather(1, order)), mask.gather(1, order)
        states, final_state = self.word_encoder(words, mask)
        start = self.start(states, mask, final_state)
        states = torch.zeros_like(states).scatter(1, order[..., None].expand_as(states), states)
        return ExhirdEncoderOutput(last_hidden_state=states, decoder_initial_state=start)


class ExhirdForKeyphraseGeneration(ExhirdPreTrainedModel, GenerationMixin):
    """Generates keyphrases, present ones first, then absent ones (Chen et al. 2020; sparse, relative attention: Xu et al. 2021)

    Example:

    ```python
    >>> from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration, ExhirdTokenizer
    >>> tokenizer = ExhirdTokenizer.from_texts(texts)
    >>> model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer))  # random weights: train it
    >>> generate = pipeline("keyphrase-generation", model=model, tokenizer=tokenizer)
    >>> generate(["A text. ..."])  # [[{"keyphrase", "present", "score", "start", "end"}, ...]]
    ```
    """

    card_use = {
        "what": "Generates keyphrases, including those that do not occur in the text",
        "tag": "text-generation",
        "task": "keyphrase-generation",
        "call": 'run({"title": "Graph cuts", "text": "They segment images."})',
    }

    def __init__(self, config: ExhirdConfig):
        super().__init__(config)
        self.encoder = ExhirdEncoder(config)
        self.decoder = HierarchicalDecoder(config.word_size, config.hidden_size)
        pad_id: Any = config.pad_token_id  # an id: the configuration checks it
        self.generator = CopyGenerator(config.hidden_size, config.vocab_size, pad_id)
        # of all phrases: Seq2SeqTrainer writes 20 into a generation config without a length
        self.generation_config.max_length = 2 + config.max_phrases * (config.max_words_per_phrase + 2)
        self.post_init()

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """The pipeline of each task, for `LexpertsModelMixin`."""
        from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline

        return {"keyphrase-generation": KeyphraseGenerationPipeline}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> embeddings, that of `<unk>` for out-of-vocabulary words."""
        return self.encoder.embeddings(ids.masked_fill(ids >= self.config.vocab_size, self.config.unk_token_id))

    def word_gates(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> the words' part of the decoder's gates."""
        return self.decoder.word_input(self.embed(ids))

    def encode(self, input_ids, attention_mask=None, copy_ids=None) -> tuple[EncoderMemory, torch.Tensor]:
        """Documents -> the memory of the decoder's attention and copying, and h_0."""
        encoded = self.encoder(input_ids, attention_mask, return_dict=True)
        states = encoded.last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # half of the minimum of float16, which autocast may use: scores may be added to it, and a document without words gives no nan
        bias = states.new_zeros(mask.shape).masked_fill(mask == 0, torch.finfo(torch.float16).min / 2)
        return EncoderMemory(states, bias, input_ids if copy_ids is None else copy_ids), encoded.decoder_initial_state

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> ExhirdOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): words of documents.
            copy_ids (`(B, L)`): the same as extended ids, in which out-of-vocabulary words differ from each other.
            labels (`(B, T)`): the start, words and `;` of each phrase, and `</s>`, as extended ids, padded with -100. Or one
                row per phrase, `(B, I, J)`. All are read at once, with teacher forcing.
        """
        config = self.config
        memory, start = self.encode(input_ids, attention_mask, copy_ids)
        if labels is None:
            return ExhirdOutput(encoder_last_hidden_state=memory.states)
        rows, valid = labels, labels != -100
        if labels.dim() == 2:
            rows, valid = labels_by_phrase(labels, config.end_phrase_token_id)
        previous = torch.cat([rows.new_full((*rows.shape[:2], 1), config.bos_token_id), rows[..., :-1]], 2)
        embedded = self.embed(previous.masked_fill(previous == -100, config.pad_token_id))
        a, alpha = self.decoder(embedded, rows, start, memory, (config.end_phrase_token_id, config.eos_token_id))
        scored = rows != -100
        copy_ids = memory.copy_ids[scored.nonzero(as_tuple=True)[0]]
        p, exclusive = score_labels(self.generator, config, a[scored], alpha[scored], copy_ids, rows)
        log_probs = p.new_zeros(labels.shape).masked_scatter(valid, p)
        generation_loss = loss = -log_probs.sum() / len(labels)
        exclusive_loss = exclusive / len(labels)
        if self.training and config.exclusive_loss_coef:
            loss = loss + config.exclusive_loss_coef * exclusive_loss
        return ExhirdOutput(loss, log_probs, generation_loss.detach(), exclusive_loss.detach(), memory.states)

    @torch.no_grad()
    def generate_phrases(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        max_phrases: int | None = None,
        max_words_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        min_phrases: int = 1,
    ) -> ExhirdGenerateOutput:
        """Generates phrase by phrase, greedily, with the log-probability of each phrase. The pipeline returns them as text.

        Args:
            input_ids, attention_mask, copy_ids: as in `forward`.
            max_phrases, max_words_per_phrase, exclusion_window: default to the configuration.
            min_phrases: of a document.

        Raises:
            ValueError: for a number out of range.
        """
        limits = max_phrases, max_words_per_phrase, exclusion_window, min_phrases
        constraints = DecodingConstraints(self.config, *limits)
        return search_phrases(self, *self.encode(input_ids, attention_mask, copy_ids), constraints)

    def generate(self, *inputs, max_length=None, max_new_tokens=None, labels=None, synced_gpus=False, **options):
        """The phrases of `generate_phrases`, which has these arguments, as `Seq2SeqTrainer` expects them.

        Returns:
            `(B, T)`: `<s>`, the start, words and `;` of each phrase, `</s>`, and padding; at most `max_length` tokens.
        """
        config, sequences = self.config, []
        end, stop = config.end_phrase_token_id, config.eos_token_id
        ids = self.generate_phrases(*inputs, **options).ids
        for document in ids.tolist():
            sequence = [config.bos_token_id]
            for row in document:
                sequence += [i for i in row if i != config.pad_token_id]
                sequence += [end] if sequence[-1] not in (end, stop) else []
            sequences.append(ids.new_tensor(sequence if sequence[-1] == stop else [*sequence, stop]))
        length = max_length if max_new_tokens is None else 1 + max_new_tokens
        return pad_sequence(sequences, batch_first=True, padding_value=config.pad_token_id)[:, :length]

    def init_continuous_batching(self, *args, **kwargs):
        """Raises a `ValueError`: phrases are written without a cache of keys and values."""
        raise ValueError("ExhirdForKeyphraseGeneration has no cache for continuous batching. Use generate on a batch.")


ExhirdEncoder.register_for_auto_class("AutoModel")
ExhirdForKeyphraseGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["ExhirdEncoder", "ExhirdForKeyphraseGeneration", "ExhirdPreTrainedModel"]
