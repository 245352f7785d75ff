# SPDX-License-Identifier: Apache-2.0
"""Keyphrase generation by a pretrained decoder, with ExHiRD's phrases and exclusive search; it is not in the papers.

The model reads `Title: ... Text: ... Keyphrases:` and writes present phrases, absent phrases, and EOS.

Letters: B documents, T tokens, V vocabulary.
"""

from dataclasses import fields
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .backbone_exhird import BackboneMixin
from .cache_exhird import CACHE, accepts_both_names, named_for_peft
from .causal_search_exhird import CausalPhraseSearch
from .configuration_exhird_causal import ExhirdCausalConfig
from .exclusion_exhird import ExclusionLogitsProcessor
from .low_rank_exhird import LowRankLinear, replace_linears
from .saving_exhird import SelfContainedCheckpointMixin, lexperts_tools
from .search_exhird import ExhirdGenerateOutput

# Arguments of from_backbone() for the configuration.
CONFIG_OPTIONS = {field.name for field in fields(ExhirdCausalConfig)} - {"text_config"}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # and what else has their layers


class ExhirdForCausalLM(BackboneMixin, SelfContainedCheckpointMixin, PreTrainedModel, GenerationMixin):
    """A decoder such as Llama that writes keyphrases, with exclusive search in `generate`.

    Its tensors are those of the backbone under the prefix `backbone.`, and with `adapter_rank` the factors `lora_A` and `lora_B` of
    each linear layer. A checkpoint in which the backbone's tensors have their own names opens, too.

    Example:

    ```python
    >>> from modeling_exhird import ExhirdForCausalLM
    >>> model = ExhirdForCausalLM.from_backbone("smollm2", exclusion_window=4)  # no keyphrases yet: train it
    >>> generate = pipeline("keyphrase-generation", model=model, tokenizer=tokenizer)
    >>> generate({"title": "Graph cuts", "text": "They segment images. ..."})
    ```
    """

    card_family = "ExHiRD's phrases and exclusive search over a pretrained decoder (after Chen et al. 2020)"
    card_use = {
        "what": "Generates keyphrases, including those that do not occur in the text",
        "tag": "text-generation",
        "task": "keyphrase-generation",
        "call": 'run({"title": "Graph cuts", "text": "They segment images."})',
    }
    config_class = ExhirdCausalConfig
    base_model_prefix = "backbone"
    lora_task = "CAUSAL_LM"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: ExhirdCausalConfig):
        super().__init__(config)
        config.check()
        self.backbone = self.build_backbone(config.text_config)
        if config.adapter_rank is not None:
            replace_linears(self._layers(), nn.Linear, partial(LowRankLinear, rank=config.adapter_rank))
        self.post_init()
        if config.adapter_rank is not None:
            self._freeze_all_but_factors()

    @classmethod
    def build_backbone(cls, config) -> PreTrainedModel:
        """The backbone of its configuration. Raises a `ValueError` for one that is not a decoder like Llama's."""
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type!r} is an encoder with a decoder. Use a model with a decoder only.")
        backbone = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        layers = getattr(backbone.base_model, "layers", None) or [None]
        if not hasattr(getattr(layers[0], "self_attn", None), "q_proj") or not hasattr(layers[0], "mlp"):
            raise ValueError(
                f"model_type={config.model_type!r} is not a decoder like Llama's. Use one of {', '.join(DECODERS)}."
            )
        return backbone

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        tokenizer=None,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """A pretrained decoder, to be trained to write keyphrases.

        Args:
            name_or_path (`str`): folder or Hub id of a decoder, or "smollm2".
            tokenizer: names the tokens between phrases; by default the decoder's, which is opened.
            dtype: of all weights, "auto" for the checkpoint's.
            attention_dropout (`float`, *optional*): replaces the decoder's own.
            options: fields of `ExhirdCausalConfig`, and arguments of `from_pretrained` (`revision`, `token`, `device_map`,
                `quantization_config`, `variant`, ...).

        Raises:
            ImportError: without Lexperts.
            OSError: if the decoder cannot be opened.
            TypeError: for an unknown option.
            ValueError: for a value out of range, and a tokenizer without the tokens between phrases.
        """
        tools = lexperts_tools("backbones", "from_backbone()")
        options, load_kwargs = tools.split_options(options, CONFIG_OPTIONS)
        if options.get("adapter_rank") is not None and load_kwargs.get("quantization_config") is not None:
            raise ValueError(
                f"adapter_rank={options['adapter_rank']} is not supported with a quantization_config. Leave one of them out; peft "
                "adapts quantised models: model.add_adapter(model.lora_config())."
            )

        def make_config(backbone):
            ids = {name: options[name] for name in ("separator_token_id", "absent_token_id") if name in options}
            if len(ids) < 2:
                opened = (
                    tools.open_tokenizer(name_or_path, **tools.hub_options(load_kwargs))
                    if tokenizer is None
                    else tokenizer
                )
                ids = {**ExhirdCausalConfig.marks_of(opened), **ids}
                if backbone.pad_token_id is None:
                    backbone.pad_token_id = opened.pad_token_id
            return ExhirdCausalConfig(text_config=backbone, **{**options, **ids})

        return tools.load_over_backbone(cls, name_or_path, make_config, load_kwargs, dtype, attention_dropout)

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """The pipeline of each task, for `SelfContainedCheckpointMixin`."""
        from .pipeline_keyphrase_generation import KeyphraseGenerationPipeline

        return {"keyphrase-generation": KeyphraseGenerationPipeline}

    def _layers(self) -> nn.Module:
        return self.backbone.base_model.layers

    def _freeze_all_but_factors(self):
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, LowRankLinear):
                module.lora_A.requires_grad_(True)
                module.lora_B.requires_grad_(True)

    def initialize_weights(self):
        """As in transformers, whose initialiser of the backbone would draw the factors like other linear layers; then freezes
        the weights that loading has created as trainable."""
        for module in self.modules():
            if isinstance(module, LowRankLinear):
                module.initialise()
        super().initialize_weights()
        if self.config.adapter_rank is not None:
            self._freeze_all_but_factors()

    def merge_adapter(self) -> "ExhirdForCausalLM":
        """This model with the differences of low rank added to the weights, all of which are trainable afterwards, and
        `adapter_rank=None`. `model.backbone.save_pretrained` then writes a plain Llama, e.g. for llama.cpp.
        """
        replace_linears(self._layers(), LowRankLinear, LowRankLinear.merged)
        self.config.adapter_rank = None
        return self.requires_grad_(True)

    def lora_config(self, **overrides):
        """A peft `LoraConfig` for this model: r = 16, alpha = 16, dropout 0.1 on the query and value projections. `overrides` are
        fields of `LoraConfig` that replace these.

        Warns, Raises: as `run_tools.backbones.make_lora_config`, and a `ValueError` for a model with `adapter_rank`.
        """
        if self.config.adapter_rank is not None:
            raise ValueError(
                f"This model has adapter_rank={self.config.adapter_rank} already. Train it unchanged, or call model.merge_adapter()."
            )
        tools = lexperts_tools("backbones", "lora_config()")
        return tools.make_lora_config(self, overrides, self.backbone, task_type=self.lora_task)

    def get_output_embeddings(self) -> nn.Module:
        """The language modeling head."""
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module):
        """Replaces the language modeling head."""
        self.backbone.set_output_embeddings(value)

    @can_return_tuple
    @accepts_both_names
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As the backbone's.

        Args:
            input_ids, attention_mask, position_ids (`(B, T)`), cache, inputs_embeds (`(B, T, d)`), use_cache: as for a Llama.
            labels (`(B, T)`): token ids, -100 for tokens without a loss. With `logits_to_keep=K` those of the last K tokens.
            logits_to_keep: the number of last positions to score, or their indices; 0 for all.
            num_items_in_batch: labels in the whole step, over accumulated batches and processes, as the Trainer counts them.
            kwargs: for the backbone, such as `output_hidden_states`.
        """
        if labels is not None:
            if num_items_in_batch is None:
                targets = kwargs.get("shift_labels")
                num_items_in_batch = ((labels[:, 1:] if targets is None else targets) != -100).sum()
            # a batch without labels has the loss 0
            kwargs["num_items_in_batch"] = torch.as_tensor(num_items_in_batch).clamp(min=1)
        return self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            labels=labels, use_cache=use_cache, logits_to_keep=logits_to_keep, return_dict=True, **{CACHE: cache}, **kwargs,
        )  # fmt: skip

    def prepare_inputs_for_generation(self, *args, **kwargs):
        """As in transformers."""
        return named_for_peft(self, super().prepare_inputs_for_generation(*args, **kwargs))

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config=None,
        logits_processor=None,
        *,
        exclusion_window: int | None = None,
        **kwargs,
    ):
        """As in transformers, with exclusive search: see `ExclusionLogitsProcessor`.

        Args:
            inputs, generation_config, logits_processor, kwargs: as in `GenerationMixin.generate`. Without a limit of the length,
                `max_new_tokens` has room for all phrases.
            exclusion_window: K; defaults to the model's configuration.

        Raises:
            ValueError: if the configuration does not name the tokens between phrases.
        """
        config = self.config
        window = config.exclusion_window if exclusion_window is None else exclusion_window
        ids, processors = kwargs.get("input_ids", inputs), list(logits_processor or ())
        if window:
            # without input_ids, generation starts from BOS, and with embeddings from nothing
            length = ids.shape[1] if ids is not None else int(kwargs.get("inputs_embeds") is None)
            processors.append(ExclusionLogitsProcessor(None, config.marks, window, prompt_length=length))
        of_configs = [given for given in (generation_config, self.generation_config) if given is not None]
        limits = [getattr(given, name, None) for given in of_configs for name in ("max_length", "max_new_tokens")]
        if not any(limits) and not kwargs.keys() & {"max_length", "max_new_tokens"}:
            kwargs["max_new_tokens"] = config.max_phrases * (config.max_tokens_per_phrase + 1)
        return super().generate(inputs, generation_config, processors, **kwargs)

    @torch.no_grad()
    def generate_phrases(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_phrases: int | None = None,
        max_tokens_per_phrase: int | None = None,
        exclusion_window: int | None = None,
        num_beams: int = 1,
        min_phrases: int = 0,
    ) -> ExhirdGenerateOutput:
        """Generates phrase by phrase, with the log-probability of each phrase. The pipeline returns them as text.

        Args:
            input_ids, attention_mask (`(B, T)`): prompts, padded on either side.
            max_phrases, max_tokens_per_phrase, exclusion_window: default to the configuration.
            num_beams: 1 is greedy search; more is beam search over each phrase.
            min_phrases: of a document: EOS is forbidden before the last of them.

        Raises:
            ValueError: for a number out of range.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        limits = (max_phrases, max_tokens_per_phrase, exclusion_window, num_beams, min_phrases)
        return CausalPhraseSearch(self, *limits)(input_ids, mask)


ExhirdForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["ExhirdForCausalLM"]
