"""ExHiRD: keyphrases generated one by one, present and absent, none of which repeats another's beginning.

Letters: B documents, L words of the longest one, N windows of S sub-words, I phrases, J steps within a phrase, V words of the vocabulary,
d hidden size.
"""

from dataclasses import fields

import torch
from torch import nn
from transformers.utils import can_return_tuple

from .backbone_exhird import build_encoder, split_options
from .base_exhird import ExHirdPreTrainedModel
from .configuration_exhird import ExHirdConfig
from .decoder_exhird import HierarchicalDecoder, Memory
from .encoders_exhird import ENCODERS, PhraseStart, PieceEncoder
from .generating_exhird import Limits, generate_rows
from .keyphrases_exhird import write_keyphrases
from .outputs_exhird import ExHirdEncoderOutput, ExHirdOutput, GeneratedRows
from .words_exhird import TINY, WordMixture, exclusive_pairs


class ExHirdEncoder(ExHirdPreTrainedModel):
    """Reads a document's words: the memory that the decoder attends to, and the state that it starts from."""

    def __init__(self, config: ExHirdConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.word_size)
        if config.encoder_type == "pretrained":
            self.reader = PieceEncoder(config, build_encoder(config.text_config))
        else:
            self.reader = ENCODERS[config.encoder_type](config)
        self.start = PhraseStart(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module):
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        piece_ids: torch.Tensor | None = None,
        piece_mask: torch.Tensor | None = None,
        piece_words: torch.Tensor | None = None,
        **kwargs,
    ) -> ExHirdEncoderOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): words as `ExHirdTokenizer` gives them.
            piece_ids, piece_mask, piece_words (`(B, N, S)`): for a pretrained encoder its sub-words, and the word that each
                belongs to, -1 for none.

        Raises:
            ValueError: without sub-words where they are needed.
        """
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        if self.config.encoder_type == "pretrained":
            if piece_ids is None or piece_words is None:
                raise ValueError(
                    "The encoder reads sub-words, and there are none. Give the tokenizer the encoder's own with "
                    "tokenizer.with_pieces(AutoTokenizer.from_pretrained(...)), and pass piece_ids, piece_mask, piece_words."
                )
            memory, last = self.reader(mask, piece_ids, piece_mask, piece_words)
        else:
            memory, last = self.reader(self.embeddings(input_ids), mask)
        return ExHirdEncoderOutput(last_hidden_state=memory, phrase_start=self.start(memory, mask, last))


class ExHirdForKeyphraseGeneration(ExHirdPreTrainedModel):
    """Generates keyphrases, present ones first, then absent ones (Chen et al. 2020; sparse, relative attention: Xu et al. 2021)

    Example:

    ```python
    >>> from modeling_exhird import ExHirdConfig, ExHirdForKeyphraseGeneration, ExHirdTokenizer
    >>> tokenizer = ExHirdTokenizer.from_texts(texts)
    >>> model = ExHirdForKeyphraseGeneration(ExHirdConfig.for_tokenizer(tokenizer))  # random weights: train it
    >>> model.generate_keyphrases(["A text. ..."], tokenizer)  # [[{"keyphrase", "present", "score", "start", "end"}, ...]]
    ```
    """  # fmt: skip

    backbone_path = "encoder.reader.backbone"

    def __init__(self, config: ExHirdConfig):
        super().__init__(config)
        self.encoder = ExHirdEncoder(config)
        self.decoder = HierarchicalDecoder(config.word_size, config.hidden_size)
        self.mixture = WordMixture(config.hidden_size, config.vocab_size, config.pad_token_id)
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
        """The same decoder over any pretrained encoder: a warm start, which the papers do not have.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            tokenizer: an `ExHirdTokenizer` with `pieces`, the encoder's own tokenizer.
            dtype: of all weights, "auto" for the checkpoint's.
            attention_dropout (`float`, *optional*): in place of the encoder's own. 0 is faster on a CPU, whose fused
                attention does not support dropout.
            options: fields of `ExHirdConfig`, and what `from_pretrained` takes to find and load weights (`revision`,
                `token`, `device_map`, `quantization_config`, `variant`, ...).

        Raises:
            OSError: when there is no such encoder.
            ValueError: for an unknown option, or a value out of range.
        """
        options, load_kwargs = split_options(options, {field.name for field in fields(ExHirdConfig)})
        if options.setdefault("encoder_type", "pretrained") != "pretrained" or "text_config" in options:
            raise ValueError(
                "encoder_type and text_config cannot be set in from_backbone(). Build models with other encoders from "
                "ExHirdConfig.for_tokenizer(tokenizer, encoder_type=...)."
            )

        def make_config(encoder):
            return ExHirdConfig.for_tokenizer(tokenizer, text_config=encoder, **options)

        return cls.load_over_backbone(name_or_path, make_config, load_kwargs, dtype, attention_dropout)

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline

        return {"keyphrase-generation": KeyphraseGenerationPipeline}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> embeddings; what the vocabulary lacks is `<unk>`."""
        return self.encoder.embeddings(ids.masked_fill(ids >= self.config.vocab_size, self.config.unk_token_id))

    def read_words(self, ids: torch.Tensor) -> torch.Tensor:
        """Extended ids -> the words' part of the decoder's gates."""
        return self.decoder.word_input(self.embed(ids))

    def memorise(self, input_ids, attention_mask, copy_ids, **pieces) -> tuple[Memory, torch.Tensor]:
        """-> what the decoder reads, and h_0."""
        encoded = self.encoder(input_ids, attention_mask, **pieces, return_dict=True)
        states = encoded.last_hidden_state
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # half of the smallest number: a score may be added, and a document without words is no nan
        bias = states.new_zeros(attention_mask.shape).masked_fill(
            attention_mask == 0, torch.finfo(states.dtype).min / 2
        )
        return Memory(states, bias, input_ids if copy_ids is None else copy_ids), encoded.phrase_start

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        piece_ids: torch.Tensor | None = None,
        piece_mask: torch.Tensor | None = None,
        piece_words: torch.Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> ExHirdOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): a document's words.
            copy_ids (`(B, L)`): the same as extended ids, which tell words apart that the vocabulary lacks.
            labels (`(B, I, J)`): a row for each phrase, its start, words and `;`, and a last one with `</s>`, as extended
                ids; -100 elsewhere.
            piece_ids, piece_mask, piece_words (`(B, N, S)`): as in `ExHirdEncoder.forward`.
            output_attentions: whether alpha is wanted.
        """
        pieces = {"piece_ids": piece_ids, "piece_mask": piece_mask, "piece_words": piece_words}
        memory, start = self.memorise(input_ids, attention_mask, copy_ids, **pieces)
        if labels is None:
            return ExHirdOutput(memory=memory.states)
        config = self.config
        before = torch.cat([labels.new_full((*labels.shape[:2], 1), config.bos_token_id), labels[..., :-1]], 2)
        embedded = self.embed(before.masked_fill(before == -100, config.pad_token_id))
        ends = (config.end_phrase_token_id, config.eos_token_id)
        a, alpha = self.decoder(embedded, labels, start, memory, ends)
        log_probs, exclusive = self._score(a, alpha, memory.copy_ids, labels)
        documents = len(labels)
        generation_loss = loss = -log_probs.sum() / documents
        exclusive_loss = exclusive / documents
        if self.training and config.exclusive_loss_coef:
            loss = loss + config.exclusive_loss_coef * exclusive_loss
        return ExHirdOutput(
            loss=loss,
            log_probs=log_probs,
            generation_loss=generation_loss.detach(),
            exclusive_loss=exclusive_loss.detach(),
            memory=memory.states,
            attention=alpha if output_attentions else None,
        )

    def _score(self, a, alpha, copy_ids, labels) -> tuple[torch.Tensor, torch.Tensor]:
        """-> log P of each label (B, I, J), 0 where there is none, and the exclusive loss's sum.

        L_ex = -sum of log(1 - P_i(y_k)) over phrases i and the first words y_k of phrases shortly before   (Sect. 3.5)
        """
        config, scored = self.config, labels != -100
        document, phrase, step = scored.nonzero(as_tuple=True)
        row = torch.zeros_like(labels)
        row[scored] = torch.arange(len(document), device=labels.device)  # a step's number among the scored ones
        words = labels[scored]
        rows = torch.arange(len(words), device=words.device)
        wanted = config.exclusive_loss_coef and config.exclusive_loss_window
        if wanted:
            of, i, first = exclusive_pairs(labels, config.vocab_size, config.unk_token_id, config.exclusive_loss_window)
            rows, words = torch.cat([rows, row[of, i, 1]]), torch.cat([words, first])
        p = self.mixture(a[scored], alpha[scored], copy_ids[document], rows, words)
        n = len(document)
        log_probs = p.new_zeros(labels.shape).masked_scatter(scored, (p[:n] + TINY).log())
        return log_probs, -(1 - p[n:] + TINY).log().sum()

    @torch.no_grad()
    def generate_rows(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        piece_ids: torch.Tensor | None = None,
        piece_mask: torch.Tensor | None = None,
        piece_words: torch.Tensor | None = None,
        max_phrases: int | None = None,
        max_phrase_length: int | None = None,
        exclusion_window: int | None = None,
        num_beams: int = 1,
    ) -> GeneratedRows:
        """Phrases as rows of extended ids; `generate_keyphrases` gives them as words.

        Args:
            input_ids to piece_words: as in `forward`.
            max_phrases, max_phrase_length, exclusion_window: by default the configuration's.
            num_beams: 1 takes the likeliest word at each step, more keep so many beginnings of each phrase.

        Raises:
            ValueError: for a number out of range.
        """
        config = self.config
        given = (max_phrases, max_phrase_length, exclusion_window)
        set_ = (config.max_phrases, config.max_phrase_length, config.exclusion_window)
        limits = Limits(config, *(b if a is None else a for a, b in zip(given, set_, strict=True)), num_beams)
        pieces = {"piece_ids": piece_ids, "piece_mask": piece_mask, "piece_words": piece_words}
        memory, start = self.memorise(input_ids, attention_mask, copy_ids, **pieces)
        extra = max(0, int(memory.copy_ids.max()) + 1 - config.vocab_size)
        return generate_rows(self, memory, start, extra, limits)

    def generate_keyphrases(
        self,
        documents,
        tokenizer,
        num_keyphrases: int | None = None,
        batch_size: int = 8,
        max_phrases: int | None = None,
        max_phrase_length: int | None = None,
        exclusion_window: int | None = None,
        num_beams: int = 1,
    ) -> list:
        """Keyphrases of documents, a document's own whatever else is in the call.

        Args:
            documents: a text or `{"title", "text"}`, or an iterable of them.
            tokenizer: the model's.
            num_keyphrases: the likeliest so many, in the order in which they were generated; by default all.
            batch_size: documents that are read at once.
            max_phrases, max_phrase_length, exclusion_window, num_beams: as in `generate_rows`.

        Returns: for each document a list of `{"keyphrase", "present", "score", "start", "end"}`; `score` is the phrase's
            probability after those before it, the places are those of present phrases. A document without words has none.

        Raises:
            TypeError: for what is neither a text nor a dictionary with one.
            ValueError: for a tokenizer of another checkpoint.
        """
        return write_keyphrases(
            self,
            documents,
            tokenizer,
            num_keyphrases=num_keyphrases,
            batch_size=batch_size,
            max_phrases=max_phrases,
            max_phrase_length=max_phrase_length,
            exclusion_window=exclusion_window,
            num_beams=num_beams,
        )


ExHirdEncoder.register_for_auto_class("AutoModel")
ExHirdForKeyphraseGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["ExHirdEncoder", "ExHirdForKeyphraseGeneration", "ExHirdPreTrainedModel"]
