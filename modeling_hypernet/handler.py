"""Serves a checkpoint on hosted inference endpoints, which look for an `EndpointHandler` in `handler.py`.

The same file in every modeling package, which travels alone: edit modeling_seke's, then run `make fix-copies`.
"""

import json
from pathlib import Path

import torch
from transformers import pipeline


class EndpointHandler:
    """The pipeline that the checkpoint's configuration names, behind the protocol of hosted inference endpoints.

    Args:
        path: the checkpoint's folder. Its own code is run, as the owner of an endpoint has asked for.
    """

    def __init__(self, path: str = ""):
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        self.task = next(iter(config["custom_pipelines"]))
        device = 0 if torch.cuda.is_available() else -1
        self.pipeline = pipeline(self.task, model=str(path), trust_remote_code=True, device=device)

    def __call__(self, data: dict):
        """`{"inputs": ..., "parameters": {...}}` -> what the pipeline returns, ready for JSON.

        Args:
            data: `inputs` is what the pipeline takes, one or a list; or a dictionary of its keyword arguments where it
                takes several (`{"question": ..., "context": ...}`). `parameters` are its options.

        Raises:
            ValueError: without `inputs`.
        """
        if "inputs" not in data:
            raise ValueError(f'The request has no "inputs" for {self.task}, only {sorted(data)}.')
        inputs, parameters = data["inputs"], data.get("parameters") or {}
        if self.task == "extractive-qa" and isinstance(inputs, dict):
            return self.pipeline(**inputs, **parameters)
        return self.pipeline(inputs, **parameters)
