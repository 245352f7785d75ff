"""ExHiRD: keyphrases generated one by one, present and absent, none of which repeats another's beginning.

Letters: B documents, L words of the longest one, N windows of S sub-words, I phrases, J steps within a phrase, V words of the vocabulary,
d hidden size.
"""

import math
from dataclasses import fields

import torch
from torch import nn
from transformers.utils import can_return_tuple

from .backbone_exhird import build_encoder, split_options
from .base_exhird import ExHirdPreTrainedModel
from .configuration_exhird import ExHirdConfig
from .decoder_exhird import DecoderState, HierarchicalDecoder, Memory
from .encoders_exhird import ENCODERS, PhraseStart, PieceEncoder
from .generating_exhird import Limits, PhraseGenerationMixin, generate_rows
from .keyphrases_exhird import write_keyphrases
from .outputs_exhird import ExHirdEncoderOutput, ExHirdOutput, GeneratedRows
from .words_exhird import TINY, WordMixture, exclusive_pairs, label_rows


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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> ExHirdEncoderOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): words as `ExHirdTokenizer` gives them.
            piece_ids, piece_mask, piece_words (`(B, N, S)`): for a pretrained encoder its sub-words, and the word that each
                belongs to, -1 for none.
            output_attentions, output_hidden_states: see `ExHirdEncoderOutput`; by default the configuration's. Attentions
                of a Transformer need memory for all pairs of words.

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
            given = (mask, piece_ids, piece_mask, piece_words)
        else:
            given = (self.embeddings(input_ids), mask)
        read = self.reader(
            *given,
            output_attentions=self.config.output_attentions if output_attentions is None else output_attentions,
            output_hidden_states=(
                self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
            ),
        )
        return ExHirdEncoderOutput(
            last_hidden_state=read.memory,
            hidden_states=read.hidden_states,
            attentions=read.attentions,
            phrase_start=self.start(read.memory, mask, read.last),
        )


class ExHirdForKeyphraseGeneration(ExHirdPreTrainedModel, PhraseGenerationMixin):
    """Generates keyphrases, present ones first, then absent ones (Chen et al. 2020; sparse, relative attention: Xu et al. 2021)

    Example:

    ```python
    >>> from modeling_exhird import ExHirdConfig, ExHirdForKeyphraseGeneration, ExHirdTokenizer
    >>> tokenizer = ExHirdTokenizer.from_texts(texts)
    >>> model = ExHirdForKeyphraseGeneration(ExHirdConfig.for_tokenizer(tokenizer))  # random weights: train it
    >>> model.generate_keyphrases(["A text. ..."], tokenizer)  # [[{"keyphrase", "present", "score", "start", "end"}, ...]]
    >>> model.generate(**ExHirdCollator(tokenizer)(rows), num_beams=4)  # ids, as of any sequence-to-sequence model
    ```
    """  # fmt: skip

    backbone_path = "encoder.reader.backbone"

    def __init__(self, config: ExHirdConfig):
        super().__init__(config)
        self.encoder = ExHirdEncoder(config)
        self.decoder = HierarchicalDecoder(config.word_size, config.hidden_size)
        self.mixture = WordMixture(config.hidden_size, config.vocab_size, config.pad_token_id)
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

    def memory_of(self, encoded, input_ids, attention_mask, copy_ids) -> Memory:
        """What the decoder reads."""
        states, words = encoded.last_hidden_state, input_ids if copy_ids is None else copy_ids
        if attention_mask is None:
            attention_mask = torch.ones_like(words)
        # half of the smallest number: a score may be added, and a document without words is no nan
        bias = states.new_zeros(attention_mask.shape).masked_fill(
            attention_mask == 0, torch.finfo(states.dtype).min / 2
        )
        return Memory(states, bias, words)

    def memorise(self, input_ids, attention_mask, copy_ids, **pieces) -> tuple[Memory, torch.Tensor]:
        """-> what the decoder reads, and h_0."""
        encoded = self.encoder(input_ids, attention_mask, **pieces, return_dict=True)
        return self.memory_of(encoded, input_ids, attention_mask, copy_ids), encoded.phrase_start

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        copy_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        piece_ids: torch.Tensor | None = None,
        piece_mask: torch.Tensor | None = None,
        piece_words: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: ExHirdEncoderOutput | None = None,
        past_key_values: DecoderState | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        max_phrase_length: int | None = None,
    ) -> ExHirdOutput:
        """
        Args:
            input_ids, attention_mask (`(B, L)`): a document's words.
            copy_ids (`(B, L)`): the same as extended ids, which tell words apart that the vocabulary lacks.
            labels (`(B, T)`): each phrase's start, words and `;`, one phrase after the other, and `</s>`, as extended ids;
                -100 elsewhere. Or a row for each phrase, `(B, I, J)`.
            piece_ids, piece_mask, piece_words (`(B, N, S)`): as in `ExHirdEncoder.forward`.
            decoder_input_ids (`(B, T)`): `<s>`, and what follows as in flat labels; by default, without labels, `<s>` alone.
                Padding is passed over. They are read one after the other: to train, pass labels.
            encoder_outputs: of `model.encoder`, in place of `input_ids` and sub-words; needs `copy_ids` too.
            past_key_values: of the call before, which has read all but these `decoder_input_ids`.
            use_cache (default `True`): whether `past_key_values` are wanted, where there are no labels.
            output_attentions, output_hidden_states: see `ExHirdOutput`; by default the configuration's.
            output_logits: whether logits are wanted where there are labels; by default in eval mode, since training
                needs none, and they take more memory than all else.
            logits_to_keep: how many of the last positions get logits, where there are no labels; 0 for all.
            max_phrase_length: J, after which a phrase ends whatever its words are. Generation passes it on.

        Raises:
            ValueError: for labels with `decoder_input_ids`, and `encoder_outputs` without words to copy.
        """
        config = self.config
        if labels is not None and decoder_input_ids is not None:
            raise ValueError(
                "labels and decoder_input_ids are both given. Pass labels: the decoder reads these, shifted."
            )
        if input_ids is None and (encoder_outputs is None or copy_ids is None):
            raise ValueError("input_ids=None. Pass input_ids, or encoder_outputs with copy_ids.")
        show = {
            "output_attentions": config.output_attentions if output_attentions is None else output_attentions,
            "output_hidden_states": config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states,
        }
        if encoder_outputs is None:
            pieces = {"piece_ids": piece_ids, "piece_mask": piece_mask, "piece_words": piece_words}
            encoder_outputs = self.encoder(input_ids, attention_mask, **pieces, **show, return_dict=True)
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = ExHirdEncoderOutput(*encoder_outputs)
        memory = self.memory_of(encoder_outputs, input_ids, attention_mask, copy_ids)
        start = encoder_outputs.phrase_start
        if labels is not None:
            wanted = not self.training if output_logits is None else output_logits
            outputs = self._teach(labels, memory, start, max_phrase_length, wanted, **show)
        else:
            if decoder_input_ids is None:
                decoder_input_ids = memory.copy_ids.new_full((len(start), 1), config.decoder_start_token_id)
            outputs = self._read(
                decoder_input_ids, memory, start, past_key_values, max_phrase_length, logits_to_keep, **show
            )
            if use_cache is False:
                outputs.past_key_values = None
        outputs.encoder_last_hidden_state = encoder_outputs.last_hidden_state
        outputs.encoder_hidden_states = encoder_outputs.get("hidden_states")
        outputs.encoder_attentions = encoder_outputs.get("attentions")
        return outputs

    def _teach(self, labels, memory, start, limit, output_logits, output_attentions, output_hidden_states):
        """All labels at once, each after the right ones before it."""
        config = self.config
        rows, there = labels, labels != -100
        if labels.dim() == 2:
            rows, there = label_rows(labels, config.end_phrase_token_id, limit)
        before = torch.cat([rows.new_full((*rows.shape[:2], 1), config.bos_token_id), rows[..., :-1]], 2)
        embedded = self.embed(before.masked_fill(before == -100, config.pad_token_id))
        ends = (config.end_phrase_token_id, config.eos_token_id)
        a, alpha = self.decoder(embedded, rows, start, memory, ends)
        scored = rows != -100
        a, alpha, document = a[scored], alpha[scored], scored.nonzero(as_tuple=True)[0]
        hidden, cross = None, None
        if output_hidden_states:  # what is returned is what the loss goes through
            hidden = a.new_zeros(*labels.shape, a.shape[1]).masked_scatter(there[..., None], a)
            a = hidden[there]
        if output_attentions:
            cross = alpha.new_zeros(*labels.shape, alpha.shape[1]).masked_scatter(there[..., None], alpha).unsqueeze(1)
            alpha = cross.squeeze(1)[there]
        logits = None
        if output_logits:
            extra = max(memory.extra(config.vocab_size), int(labels.max()) + 1 - config.vocab_size)
            logits = self.log_probabilities(a, alpha, memory.copy_ids[document], extra)
        p, exclusive = self._score(a, alpha, memory.copy_ids[document], rows, logits)
        log_probs = p.new_zeros(labels.shape).masked_scatter(there, p)
        if logits is not None:
            logits = logits.new_zeros(*labels.shape, logits.shape[1]).index_put_((there,), logits)
        documents = len(labels)
        generation_loss = loss = -log_probs.sum() / documents
        exclusive_loss = exclusive / documents
        if self.training and config.exclusive_loss_coef:
            loss = loss + config.exclusive_loss_coef * exclusive_loss
        return ExHirdOutput(
            loss=loss,
            logits=logits,
            log_probs=log_probs,
            generation_loss=generation_loss.detach(),
            exclusive_loss=exclusive_loss.detach(),
            decoder_hidden_states=None if hidden is None else (hidden,),
            cross_attentions=None if cross is None else (cross,),
        )

    def _score(self, a, alpha, copy_ids, rows, logits) -> tuple[torch.Tensor, torch.Tensor]:
        """a (n, d), alpha and copy_ids (n, L) of each label -> its log P (n,), and the exclusive loss's sum.

        L_ex = -sum of log(1 - P_i(y_k)) over phrases i and the first words y_k of the K_L phrases before   (the exclusive loss
        of ExHiRD-s, the soft exclusion: Chen et al. 2020, Sect. 3.5, "EL" in Fig. 2)

        Args:
            rows (`(B, I, J)`): the labels.
            logits (`(n, V + O)`): log P of all words, where they were made.
        """
        config, scored = self.config, rows != -100
        words = rows[scored]
        numbers = torch.arange(len(words), device=words.device)
        n = len(words)
        if config.exclusive_loss_coef and config.exclusive_loss_window:
            row = torch.zeros_like(rows)
            row[scored] = numbers  # a step's number among the scored ones
            of, i, first = exclusive_pairs(rows, config.vocab_size, config.unk_token_id, config.exclusive_loss_window)
            numbers, words = torch.cat([numbers, row[of, i, 1]]), torch.cat([words, first])
        if logits is None:
            p = self.mixture(a, alpha, copy_ids, numbers, words)
            log_p = (p[:n] + TINY).log()
        else:
            p, log_p = logits[numbers, words].exp(), logits[numbers[:n], words[:n]]
        return log_p, -(1 - p[n:] + TINY).log().sum()

    def log_probabilities(self, a, alpha, copy_ids, extra: int) -> torch.Tensor:
        """a (n, d), alpha and copy_ids (n, L) -> log P of all words (n, V + extra)."""
        p = self.mixture.probabilities(a, alpha, copy_ids, extra).add_(TINY)
        return p.log() if p.requires_grad else p.log_()

    def _read(self, ids, memory, start, state, limit, keep, output_attentions, output_hidden_states):
        """One column of ids after the other; each hypothesis is at a place of its own."""
        config = self.config
        if state is None:
            nothing = torch.zeros_like(start)
            position = ids.new_zeros(len(ids))
            state = DecoderState(start, nothing, nothing, position, 0, memory.extra(config.vocab_size))
        vectors, weights, certain = [], [], []
        for token in ids.unbind(1):
            begins = (state.position == 0) | (token == config.end_phrase_token_id)
            still = token == config.pad_token_id
            if limit is not None:
                still = still | ((state.position >= limit) & ~begins)
            read = self.read_words(token.masked_fill(begins, config.bos_token_id))
            state, alpha = self.decoder.advance(read, state, memory, begins, still)
            vectors.append(state.vector)
            weights.append(alpha)
            certain.append(still)
        a, alpha = torch.stack(vectors, 1), torch.stack(weights, 1)[:, None]  # (B, T, d), (B, 1, T, L)
        known = torch.stack(certain, 1)[:, -keep:]  # after padding, and after the last word allowed
        document, column = (~known).nonzero(as_tuple=True)
        given = a[:, -keep:][document, column], alpha[:, 0, -keep:][document, column], memory.copy_ids[document]
        logits = self.log_probabilities(*given, state.extra)
        if len(document) < known.numel():
            full = logits.new_full((*known.shape, logits.shape[1]), math.log(TINY))
            full[..., config.end_phrase_token_id] = 0
            logits = full.index_put_((document, column), logits)
        return ExHirdOutput(
            logits=logits.view(*known.shape, -1),
            past_key_values=state,
            decoder_hidden_states=(a,) if output_hidden_states else None,
            cross_attentions=(alpha,) if output_attentions else None,
        )

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
        limits = Limits(self.config, max_phrases, max_phrase_length, exclusion_window, num_beams)
        pieces = {"piece_ids": piece_ids, "piece_mask": piece_mask, "piece_words": piece_words}
        memory, start = self.memorise(input_ids, attention_mask, copy_ids, **pieces)
        return generate_rows(self, memory, start, memory.extra(self.config.vocab_size), limits)

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
