# SPDX-License-Identifier: Apache-2.0
"""Serves a checkpoint on hosted inference endpoints, which look for an `EndpointHandler` in `handler.py`.

A file of each checkpoint that has a pipeline: saving a model copies it, and nothing imports it from this package.
"""

import json
from pathlib import Path


class EndpointHandler:
    """The pipeline that the checkpoint's configuration names, behind the protocol of hosted inference endpoints.

    Args:
        path: the checkpoint's folder. The checkpoint's own code is run: whoever deploys the endpoint trusts it.
    """

    def __init__(self, path: str = ""):
        import torch
        from transformers import pipeline

        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        self.task = next(iter(config["custom_pipelines"]))
        device = 0 if torch.cuda.is_available() else -1
        self.pipeline = pipeline(self.task, model=str(path), trust_remote_code=True, device=device)

    def __call__(self, data: dict):
        """Runs the pipeline on a request.

        Args:
            data: `{"inputs": ..., "parameters": {...}}`. `inputs` is one input of the pipeline or a list of them; for
                "extractive-qa" it may be `{"question": ..., "context": ...}`. `parameters` are the pipeline's options.

        Returns:
            The pipeline's output, which can be converted to JSON.

        Raises:
            ValueError: for a request without `inputs`.
        """
        if "inputs" not in data:
            raise ValueError(f'The request has no "inputs", only {sorted(data)}: {self.task} needs {{"inputs": ...}}.')
        inputs, parameters = data["inputs"], data.get("parameters") or {}
        if self.task == "extractive-qa" and isinstance(inputs, dict):
            return self.pipeline(**inputs, **parameters)
        return self.pipeline(inputs, **parameters)
