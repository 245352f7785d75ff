"""What every MoeSumm model has: initialisation, saving and loading, and the datasets it knows (MoeSumm, Sect. 4).

Letters: N deputies, E datasets, d hidden size.
"""

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from .backbone_moesumm import BackboneMixin
from .configuration_moesumm import EXPERTS_IMPLEMENTATIONS, MoeSummConfig, check_datasets, nearest
from .experts_moesumm import DatasetSelectors, Deputies, DeputyExperts
from .layers_moesumm import LAYER_CLASSES
from .saving_moesumm import CompleteCheckpointMixin


class MoeSummPreTrainedModel(BackboneMixin, CompleteCheckpointMixin, PreTrainedModel):
    """Initialisation, saving and loading of MoeSumm models."""

    config_class = MoeSummConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = [cls.__name__ for cls in LAYER_CLASSES.values()]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        std = getattr(self.config.text_config, "init_std", 0.02)
        if isinstance(module, DatasetSelectors):
            initialization.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, DeputyExperts):
            initialization.normal_(module.up_proj, mean=0.0, std=std)
            initialization.zeros_(module.up_bias)
            # FlatMoE has nothing else that could speak
            out = self.config.deputy_output_std if self.config.main_expert else std
            initialization.normal_(module.down_proj, mean=0.0, std=out)
        else:
            super()._init_weights(module)

    def initialize_weights(self):
        # transformers hands what lies inside the backbone to the backbone's initialiser, which passes the deputies by.
        kinds = (DatasetSelectors, DeputyExperts)
        new = [m for m in self.modules() if isinstance(m, kinds) and not getattr(m, "_is_hf_initialized", False)]
        super().initialize_weights()
        with torch.no_grad():
            for module in new:
                self._init_weights(module)
        for module in self.modules():
            if "Sinusoidal" in type(module).__name__:
                module.weight.requires_grad_(False)  # a table that gets no gradient, and that PEGASUS leaves open

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """A name that `DeputyExperts` has an implementation for, `"auto"` unless one is requested."""
        requested = "auto" if requested_experts is None else requested_experts
        if requested not in EXPERTS_IMPLEMENTATIONS:
            raise ValueError(
                f"experts_implementation={requested!r} is not known. {nearest(requested, EXPERTS_IMPLEMENTATIONS)}"
            )
        return requested

    backbone_example = "a BART, PEGASUS or mBART, such as 'facebook/bart-large'"

    @classmethod
    def check_backbone(cls, config):
        if not config.is_encoder_decoder:
            raise ValueError(f"{config.model_type!r} has no encoder with a decoder.")

    def deputies(self) -> list[Deputies]:
        """Each layer's deputies with their selectors, the encoder's first; copies that an adapter keeps among them."""
        return [module for module in self.modules() if isinstance(module, Deputies)]

    def add_dataset(self, name: str, init: str = "mean") -> int:
        """Makes a dataset known: a new selector in every layer. What the model says for the others stays as it is.

        An optimizer must be made after this, as the selectors are new parameters.

        Args:
            name: of the new dataset; not known yet.
            init: `"mean"` starts its selectors as the mean of those there are, a known dataset's name as that one's.

        Returns: its id.

        Raises:
            ValueError: for a name that is known already, or an `init` that is not known.
        """
        known = self.config.datasets
        if init != "mean" and init not in known:
            raise ValueError(f"init={init!r} is not known: {nearest(init, ['mean', *known])}")
        check_datasets([*known, name])
        if self.config.dataset_aware:

            def with_new(weight):
                new = weight.mean(0) if init == "mean" else weight[known.index(init)]
                return torch.cat([weight, new[None]])

            self._change_selectors(with_new)
        self.config.datasets = [*known, name]
        return len(known)

    def remove_dataset(self, name: str):
        """Forgets a dataset and its selectors. The datasets behind it move up, each id by one; the rest stays.

        Raises:
            ValueError: for a name that is not known, and for the last one.
        """
        known = self.config.datasets
        if name not in known:
            raise ValueError(f"dataset {name!r} is not known, so it cannot be removed. {nearest(name, known)}")
        if len(known) == 1:
            raise ValueError(
                f"{name!r} is the only dataset: without one no deputy could be chosen. Add another one first, or pass "
                "dataset=None (or main_expert_only=True) to have the main expert alone."
            )
        gone = known.index(name)
        if self.config.dataset_aware:
            self._change_selectors(lambda weight: torch.cat([weight[:gone], weight[gone + 1 :]]))
        self.config.datasets = [other for other in known if other != name]

    @torch.no_grad()
    def _change_selectors(self, change):
        for deputies in self.deputies():
            for name, old in list(deputies.selectors.named_parameters()):
                setattr(deputies.selectors, name, nn.Parameter(change(old), requires_grad=old.requires_grad))

    def train_deputies_only(self) -> int:
        """Freezes everything but deputies and selectors: MoeSumm's way to a new dataset of few examples (Sect. 4).

        Returns: the number of parameters that are left to train.
        """
        self.requires_grad_(False)
        left = [p for deputies in self.deputies() for p in deputies.parameters()]
        for p in left:
            p.requires_grad_(True)
        return sum(p.numel() for p in left)
