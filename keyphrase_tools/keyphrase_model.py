"""What `pipeline("keyphrase-extraction")` opens a name with. Unlike the pipeline's files, this one does not travel with a checkpoint."""

from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification

from run_tools.loading import PipelineLoadingError, hub_options, named_errors, open_model, read_config

from .exported_model import ExportedModel


class KeyphraseModel(AutoModelForTokenClassification):
    """Opens an exported graph, or any PyTorch token classifier."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """An `ExportedModel` for a folder without PyTorch weights, otherwise as `run_tools.loading.open_model`."""
        name = pretrained_model_name_or_path
        hub = hub_options(kwargs)
        with named_errors(name, PipelineLoadingError):
            config = read_config(name, hub)
            has_weights = any(Path(name, hub.get("subfolder") or "").glob("*.safetensors"))
            if config.get("exported") and not has_weights:
                if kwargs.get("dtype") in (torch.bfloat16, torch.float16, "bfloat16", "float16"):
                    raise ValueError(
                        f"dtype={kwargs['dtype']}: a graph has the precision of its export. Leave dtype out."
                    )
                return ExportedModel(name, **hub)
            model = open_model(AutoModelForTokenClassification, name, *args, **kwargs)
        if config.get("exported"):
            model.exported_from = hub  # for a pipeline with `backend=...`, which removes it
        return model
