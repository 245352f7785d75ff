"""Whether transformers can open a configuration: builds its class, one layer without weights, and the RoPE frequencies.

transformers imports PyTorch, which a merge does not need. Unless it is imported already, a process of its own runs it.
"""

import json
import logging
import os
import subprocess
import sys
from typing import Any

TIMEOUT = 300  # seconds
NOT_CARRIED = {"auto_map", "attn_implementation", "_attn_implementation", "layer_types", "torch_dtype"}


def find_opening_errors(configs: list[dict[str, Any]]) -> list[str | None]:
    """The first error that opening a model with each configuration gives, on one line; None if it opens."""
    if "transformers" in sys.modules:
        return [find_opening_error(config) for config in configs]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(
        command, input=json.dumps(configs), capture_output=True, text=True, timeout=TIMEOUT, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ImportError(f"transformers could not check the configurations: {lines[-1]:.200}")
    return json.loads(done.stdout.splitlines()[-1])


class Warnings(logging.Handler):
    """Collects the warnings that transformers logs about invalid RoPE settings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord):
        """Keeps a warning about a value that must be another."""
        message = record.getMessage()
        if "must be" in message or "Missing validation function" in message:
            self.messages.append(message)


def find_opening_error(config: dict[str, Any]) -> str | None:
    """The error that opening a model with this configuration gives, in this process."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config["model_type"] == "lexicon":
        import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

    content = {key: value for key, value in config.items() if key not in NOT_CARRIED}
    content |= {"num_hidden_layers": 1, "dtype": "float32"}
    if content.get("router_layers_index") is not None:
        content["router_layers_index"] = [0]
    warnings, logger = Warnings(), logging.getLogger("transformers")
    logger.addHandler(warnings)
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(content)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        frequencies = type(model.model.rotary_emb)(made).inv_freq
        if warnings.messages:
            return " ".join(warnings.messages[0].split())
        if not bool(torch.isfinite(frequencies).all()):
            return "its RoPE settings give frequencies that are not finite"
        return None
    except Exception as error:  # whatever transformers raises for an invalid value
        text = " ".join(str(error).split())
        return (
            f"{type(error).__name__}: {text}" if isinstance(error, KeyError | AttributeError) else text or repr(error)
        )
    finally:
        logger.removeHandler(warnings)


def main():
    """Reads configurations as a JSON list from the standard input, and prints their errors as a JSON list."""
    configs = json.load(sys.stdin)
    print(json.dumps([find_opening_error(config) for config in configs]))


if __name__ == "__main__":
    main()
