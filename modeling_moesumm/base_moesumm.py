# SPDX-License-Identifier: Apache-2.0
"""Base class of the MoeSumm models: backbone, initialisation, saving and loading, datasets (MoeSumm, Sect. 4).

Letters: N deputies, E datasets.
"""

from dataclasses import fields

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel, initialization

from .configuration_moesumm import BACKBONES, DECODERS, EXPERTS_IMPLEMENTATIONS, MoeSummConfig, check_datasets
from .experts_moesumm import DatasetSelectors, DeputyExperts, DeputyFeedForward
from .layers_moesumm import LAYER_CLASSES, attach_deputies, get_layers, layer_stacks
from .routing_moesumm import RoutingContext, check_positions, given_tokens, make_routing_context, past_length
from .shared_moesumm import LexpertsModelMixin, lexperts_tools

# arguments of from_backbone() for the configuration
CONFIG_OPTIONS = {field.name for field in fields(MoeSummConfig)} - {"text_config"}


def language_model_class(config):
    """The auto class of a backbone with its head, by a configuration."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


class MoeSummPreTrainedModel(LexpertsModelMixin, PreTrainedModel):
    """A backbone with deputies: initialisation, saving, loading, datasets. All subclasses have the same parameters.

    `has_encoder` is whether the backbone has an encoder; `None` for both kinds.
    """

    card_family = "MoeSumm: one main expert, and deputy experts for each dataset (Chen et al. 2024)"
    config_class = MoeSummConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    has_encoder: bool | None = None
    lora_task = "FEATURE_EXTRACTION"
    _no_split_modules = [cls.__name__ for cls in LAYER_CLASSES.values()]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MoeSummConfig):
        super().__init__(config)
        config.check()
        self.backbone = self.build_backbone(config.text_config)
        attach_deputies(self.backbone.base_model, config)
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        datasets: list[str] | None = None,
        num_deputies: int = 3,
        deputy_intermediate_size: int | None = None,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """Builds a model whose main expert is a pretrained model, with new deputies and selectors.

        Args:
            name_or_path (`str`): folder or Hub id of a BART or PEGASUS; for `MoeSummForCausalLM` of a Llama, Mistral, Qwen2 or
                Qwen3, or "smollm2", which comes as a package.
            datasets, num_deputies, deputy_intermediate_size: as in `MoeSummConfig`.
            dtype: of all weights, "auto" for the checkpoint's; new experts do not train well in half precision.
            attention_dropout (`float`, *optional*): replaces the backbone's.
            options: other fields of `MoeSummConfig`, and arguments of `from_pretrained`.

        Raises:
            OSError: if the model cannot be loaded, or is not supported.
            TypeError: for an unknown option.
            ValueError: for a value out of range.
        """
        options = {"datasets": datasets, "num_deputies": num_deputies, **options}
        options["deputy_intermediate_size"] = deputy_intermediate_size
        tools = lexperts_tools("backbones", "from_backbone()")
        options, load_kwargs = tools.split_options(options, CONFIG_OPTIONS)

        def make_config(backbone):
            return cls.config_class(text_config=backbone, **options)

        loaded = tools.load_over_backbone(cls, name_or_path, make_config, load_kwargs, dtype, attention_dropout)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if not model.config.main_expert:
            hub = tools.hub_options(load_kwargs)
            hub["use_safetensors"] = load_kwargs.get("use_safetensors") is not False
            source = tools.locate_model(name_or_path)
            pretrained = language_model_class(model.config).from_pretrained(source, dtype=model.dtype, **hub)
            model._copy_backbone_weights(pretrained)
        return loaded

    @classmethod
    def build_backbone(cls, config) -> PreTrainedModel:
        """The backbone of its configuration. Raises a `ValueError` for one that this class does not support."""
        is_seq2seq = config.is_encoder_decoder
        if cls.has_encoder not in (None, is_seq2seq) or not (is_seq2seq or config.model_type in DECODERS):
            raise ValueError(f"model_type={config.model_type!r} is not supported by {cls.__name__}. Use a {BACKBONES}.")
        backbone = language_model_class(config).from_config(config, trust_remote_code=False)
        get_layers(backbone.base_model)
        return backbone

    def _copy_backbone_weights(self, backbone: PreTrainedModel):
        """FlatMoE: every expert is initialised as a copy of the backbone's feed-forward layer."""
        layers = [layer for stack in layer_stacks(self.backbone.base_model) for layer in stack]
        for layer, source in zip(layers, get_layers(backbone.base_model), strict=True):
            layer.copy_main_expert(source)

    def _init_weights(self, module):
        backbone = self.config.text_config
        std = getattr(backbone, "init_std", getattr(backbone, "initializer_range", 0.02))
        if isinstance(module, DatasetSelectors):
            initialization.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, DeputyExperts):
            initialization.normal_(module.up_proj, mean=0.0, std=std)
            if module.up_bias is not None:
                initialization.zeros_(module.up_bias)
            # FlatMoE has no main expert; zero weights would make its output zero
            down_std = self.config.deputy_init_std if self.config.main_expert else std
            initialization.normal_(module.down_proj, mean=0.0, std=down_std)
        else:
            super()._init_weights(module)

    def initialize_weights(self):
        """Initialises new modules. transformers calls the backbone's initialiser for all modules inside the backbone, which
        skips the deputies."""
        classes = (DatasetSelectors, DeputyExperts)
        new = [m for m in self.modules() if isinstance(m, classes) and not getattr(m, "_is_hf_initialized", False)]
        super().initialize_weights()
        with torch.no_grad():
            for module in new:
                self._init_weights(module)
        for module in self.modules():
            if "Sinusoidal" in type(module).__name__:
                module.weight.requires_grad_(False)  # a constant table, which PEGASUS does not freeze

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """The name of an implementation of `DeputyExperts`, by default `"auto"`."""
        requested = "auto" if requested_experts is None else requested_experts
        if requested not in EXPERTS_IMPLEMENTATIONS:
            raise ValueError(f"experts_implementation={requested!r} is none of {', '.join(EXPERTS_IMPLEMENTATIONS)}.")
        return requested

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        """As in transformers."""
        embeddings = self.backbone.resize_token_embeddings(*args, **kwargs)
        self.vocab_size = self.config.vocab_size
        return embeddings

    @property
    def num_layers(self) -> int:
        """Layers of the decoder, and of the encoder if there is one."""
        return sum(map(len, layer_stacks(self.backbone.base_model)))

    def _make_routing(
        self, inputs: dict, cache=None, encoder_outputs=None, **options
    ) -> tuple[torch.Tensor, RoutingContext]:
        """The source `(B, S)` or `(B, S, d)`, of a decoder all tokens, and the routing; `options` as of `make_routing_context`."""
        tokens = encoder_outputs[0] if encoder_outputs else given_tokens(inputs["input_ids"], inputs["inputs_embeds"])
        past = past_length(cache)
        if self.config.is_encoder_decoder:
            check_positions(self.config, "texts", tokens.shape[1])
            for name in ("decoder_input_ids", "decoder_inputs_embeds"):
                if inputs.get(name) is not None:
                    check_positions(self.config, "summaries", past + inputs[name].shape[1])
        options["validated"] = past > 0
        return tokens, make_routing_context(self.config, len(tokens), tokens.device, **options)

    def _router_outputs(self, routing: RoutingContext, B: int, outputs, encoder_ran: bool = True) -> dict[str, tuple]:
        """The output fields for `output_router_indices`, of the first B rows of the backbone's outputs."""
        states, layers = outputs.last_hidden_state, range(self.num_layers)
        shape = B, states.shape[1]
        if not self.config.is_encoder_decoder:
            return routing.outputs(layers, shape, states.device)
        depth = len(self.backbone.base_model.encoder.layers)
        fields = routing.outputs(layers[depth:], shape, states.device, "decoder_")
        if encoder_ran:
            shape = B, outputs.encoder_last_hidden_state.shape[1]
            fields |= routing.outputs(layers[:depth], shape, states.device, "encoder_")
        return fields

    def deputies(self) -> list[DeputyFeedForward]:
        """The deputies of each layer with their selectors, including copies that an adapter keeps; the encoder's first."""
        return [module for module in self.modules() if isinstance(module, DeputyFeedForward)]

    def lora_config(self, **overrides):
        """A peft `LoraConfig` with r = 16, alpha = 16 and dropout 0.1 on the backbone's query and value projections; deputies and
        selectors are trained and saved in full. `overrides` replace its fields.
        """
        options = {"task_type": self.lora_task, "modules_to_save": ["deputies"]}
        return lexperts_tools("backbones", "lora_config()").make_lora_config(self, overrides, self.backbone, **options)

    def add_dataset(self, name: str, init: str = "mean") -> int:
        """Adds a dataset with a selector in every layer, and returns its id. Outputs for existing datasets do not change. Create
        the optimizer afterwards.

        `init` is `"mean"` for the mean of the existing selectors, or a dataset whose selectors are copied. Raises a `ValueError`
        for a name that exists, or an unknown `init`.
        """
        datasets = self.config.datasets
        if init != "mean" and init not in datasets:
            raise ValueError(f"init={init!r} is not one of {', '.join(['mean', *datasets])}.")
        check_datasets([*datasets, name])
        if self.config.dataset_aware:
            copied = slice(None) if init == "mean" else [datasets.index(init)]
            self._change_selectors(lambda weight: torch.cat([weight, weight[copied].mean(0, keepdim=True)]))
        self.config.datasets = [*datasets, name]
        return len(datasets)

    def remove_dataset(self, name: str):
        """Removes a dataset and its selectors. The ids of the datasets after it decrease by one; their outputs stay the same.

        Raises a `ValueError` for an unknown name, and for the last dataset.
        """
        datasets = self.config.datasets
        if name not in datasets or len(datasets) == 1:
            raise ValueError(f"dataset={name!r} cannot be removed from {datasets}, of which one has to stay.")
        index = datasets.index(name)
        if self.config.dataset_aware:
            self._change_selectors(lambda weight: torch.cat([weight[:index], weight[index + 1 :]]))
        self.config.datasets = [other for other in datasets if other != name]

    @torch.no_grad()
    def _change_selectors(self, change):
        for deputies in self.deputies():
            for name, old in list(deputies.selectors.named_parameters()):
                setattr(deputies.selectors, name, nn.Parameter(change(old), requires_grad=old.requires_grad))

    def freeze_all_but_deputies(self) -> int:
        """Freezes everything except deputies and selectors, to adapt to a new dataset with few examples (MoeSumm, Sect. 4).
        Returns the number of trainable parameters.
        """
        self.requires_grad_(False)
        for deputies in self.deputies():
            deputies.requires_grad_(True)
        return sum(p.numel() for p in self.parameters() if p.requires_grad)
