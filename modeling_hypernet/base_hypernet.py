# SPDX-License-Identifier: Apache-2.0
"""The hypernetwork without a head, and what all its models share: initialisation, loading, saving and adapters.

Letters: B pairs, S tokens of a padded pair, U and L tokens of the longest meta-text and main text, d the backbone's hidden
size, N_z size of the meta-text's vector, D size of the main text's states (N_h, or 2 N_h if bidirectional).
"""

import inspect
from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from .configuration_hypernet import HypernetConfig
from .crf_hypernet import LinearChainCrf
from .lstm_hypernet import GeneratedLstm, MetaEncoder, WeightGenerator
from .segments_hypernet import LeftAlignedTokens, find_segments
from .shared_hypernet import LexpertsModelMixin, build_encoder, lexperts_tools

# Options of from_backbone() that are fields of the configuration.
CONFIG_OPTIONS = {field.name for field in fields(HypernetConfig)} - {"text_config"} | {"num_labels", "problem_type"}


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Converts half precisions to float32 and leaves float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass
class HypernetModelOutput(BaseModelOutput):
    """
    Args:
        last_hidden_state (`(B, S, D)`): H^S at the main text's tokens, 0 elsewhere.
        hidden_states (tuple of `(B, S, d)`, with `output_hidden_states`): the backbone's.
        attentions (tuple of `(B, heads, S, S)`, with `output_attentions`): the backbone's.
        meta_embedding (`(B, N_z)`): z, from which the weights are generated.
        main_mask (`(B, S)`, bool): the main text's tokens.
    """

    meta_embedding: torch.Tensor | None = None
    main_mask: torch.Tensor | None = None


class HypernetPreTrainedModel(LexpertsModelMixin, PreTrainedModel):
    """Initialisation, loading, saving and adapters of hypernetwork models."""

    card_family = "Hypernetwork: the title or question generates the weights that read the text (Duan et al. 2021)"
    default_labels: tuple[str, ...] = ()  # of from_backbone()

    config_class = HypernetConfig
    base_model_prefix = "hypernet"
    backbone_path = "hypernet.backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        if isinstance(module, WeightGenerator):
            N_h = module.bias.shape[1]
            for weight in module.parameters():  # z has length 1, so generated weights have variance 1 / N_h
                init.normal_(weight, mean=0.0, std=N_h**-0.5)
        elif isinstance(module, LinearChainCrf):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def initialize_weights(self):
        """As in transformers; then freezes the backbone if `freeze_backbone`."""
        super().initialize_weights()
        if self.config.freeze_backbone:  # loading replaces parameters by new ones, which require gradients
            self.base_model.backbone.requires_grad_(False)

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
        **options,
    ):
        """Builds the model on a pretrained encoder. Everything else is newly initialised.

        Args:
            name_or_path (`str`): folder or Hub id of any encoder that `AutoModel` opens, or "minilm".
            dtype: dtype of all weights; "auto" for the checkpoint's. A new head does not learn in half precision.
            attention_dropout (`float`, *optional*): replaces the encoder's own. 0 is faster on a CPU, where fused attention
                does not support dropout.
            options: fields of `HypernetConfig` (`meta_embedding_size=16`, `freeze_backbone=False`, `id2label=...`), and
                arguments of `from_pretrained` (`revision`, `token`, `device_map`, `quantization_config`, `variant`, ...).

        Raises:
            ImportError: without Lexperts.
            OSError: if the encoder cannot be opened.
            TypeError, ValueError: for an unknown option, or a value out of range.
        """
        tools = lexperts_tools("backbones", "from_backbone()")
        options, load_kwargs = tools.split_options(options, CONFIG_OPTIONS)
        if cls.default_labels and not {"num_labels", "id2label", "label2id"} & set(options):
            options["id2label"] = dict(enumerate(cls.default_labels))

        def make_config(encoder):
            try:
                source = tools.open_tokenizer(name_or_path, **tools.hub_options(load_kwargs))
            except (OSError, ValueError, ImportError):
                source = encoder
            return HypernetConfig(text_config=encoder, **special_token_ids(source) | options)

        return tools.load_over_backbone(cls, name_or_path, make_config, load_kwargs, dtype, attention_dropout)

    def lora_config(self, **overrides):
        """A peft `LoraConfig` for this model: r = 16, alpha = 16, dropout 0.1 on the backbone's query and value projections,
        with everything else trained and saved. peft's default would freeze the hypernetwork and leave it out of the
        adapter. `overrides` are fields of `LoraConfig` that replace these. Warns as `run_tools.backbones.make_lora_config`.
        """
        children = {name for name, module in self.named_children() if any(True for _ in module.parameters())}
        heads = sorted(children - {self.base_model_prefix, "backbone", "meta_encoder", "reader"})
        options = {"task_type": self.lora_task, "modules_to_save": ["meta_encoder", "reader", *heads]}
        tools = lexperts_tools("backbones", "lora_config()")
        return tools.make_lora_config(self, overrides, self.base_model.backbone, **options)


class HypernetModel(HypernetPreTrainedModel):
    """H^S = LSTM_{W(z)}(H^v) with z from H^u; H^u and H^v are the backbone's states of the pair   (Duan et al. 2021, Sect. 2)"""

    backbone_path = "backbone"

    def __init__(self, config: HypernetConfig):
        super().__init__(config)
        self.backbone = build_encoder(config.text_config)
        self._takes_token_type_ids = "token_type_ids" in inspect.signature(self.backbone.forward).parameters
        N_z, N_x = config.meta_embedding_size, config.input_size
        self.meta_encoder = MetaEncoder(N_x, N_z, config.meta_hidden_size)
        self.reader = GeneratedLstm(N_z, N_x, config.hidden_size, config.bidirectional)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        """Replaces the backbone's."""
        self.backbone.set_input_embeddings(value)

    def train(self, mode: bool = True):
        """As in PyTorch, but a frozen backbone stays in eval mode, without dropout."""
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

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
        prepend_cls_to_main: bool = False,
        **kwargs,
    ) -> HypernetModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids (`(B, S)`), inputs_embeds (`(B, S, d)`): a tokenizer's pairs (meta-text,
                main text), as for the backbone; a single text is a main text.
            meta_mask, main_mask (`(B, S)`): 1 at the tokens of H^u and of H^v, as made by `DataCollatorForTextPairs`.
                Without them the separators divide the texts.
            encoder_hidden_states (`(B, S, d)`): precomputed last states of the backbone, which is then not run.
            prepend_cls_to_main: whether the first token is added before the main text, to represent "no answer".
            kwargs: for the backbone, such as `position_ids`, `output_hidden_states` and `output_attentions`.

        Raises:
            ValueError: without inputs, and as `find_segments`.
        """
        tokens = next((x for x in (encoder_hidden_states, input_ids, inputs_embeds) if x is not None), None)
        if tokens is None:
            raise ValueError("Pass input_ids, inputs_embeds or encoder_hidden_states.")
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        u, v = find_segments(self.config, input_ids, attention_mask, meta_mask, main_mask)
        if prepend_cls_to_main:
            real = attention_mask != 0
            v = LeftAlignedTokens(v.mask | (real & (real.cumsum(1) == 1)), v.index.shape[1] + 1)
        outputs = None
        if encoder_hidden_states is None:
            if token_type_ids is not None and self._takes_token_type_ids:
                kwargs["token_type_ids"] = token_type_ids
            outputs = self.backbone(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
            encoder_hidden_states = outputs.last_hidden_state
        x = encoder_hidden_states
        with torch.autocast(x.device.type, enabled=False):  # recurrences over hundreds of steps need float32
            z = self.meta_encoder(u.gather(x), u.lengths)
            states = self.reader(v.gather(x), v.lengths, z).to(z.dtype)
        return HypernetModelOutput(
            last_hidden_state=v.scatter(states),
            meta_embedding=z,
            main_mask=v.mask,
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )


def special_token_ids(source) -> dict[str, int | None]:
    """`cls_token_id` and `sep_token_id` of a backbone's tokenizer or configuration."""
    cls, sep = (getattr(source, f"{name}_token_id", None) for name in ("cls", "sep"))
    return {"cls_token_id": cls, "sep_token_id": getattr(source, "eos_token_id", None) if sep is None else sep}


HypernetModel.register_for_auto_class("AutoModel")
