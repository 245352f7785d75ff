"""A tokenizer.json of the Hugging Face Hub, called as the fast tokenizers of transformers are, as far as `windows` does."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NO_LIMIT = int(1e30)  # model_max_length of a tokenizer without one
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


class FastTokenizer:
    """The tokenizer in a folder.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.
        read: opens a tokenizer.json, given its path; by default `tokenizers.Tokenizer.from_file`.

    Raises:
        FileNotFoundError: if the folder has no tokenizer.
        ValueError: if its files cannot be read.
    """

    is_fast = True
    truncation_side = "right"

    def __init__(self, folder: Path, read: Callable[[str], Any] | None = None):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).exists():
                raise FileNotFoundError(f"{folder} has no {name}.")
        if read is None:
            from tokenizers import Tokenizer

            read = Tokenizer.from_file
        try:
            self._tokenizer = read(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            self._tokenizer.no_padding()
            self.model_max_length = int(config.get("model_max_length") or NO_LIMIT)
            self.model_input_names = config.get("model_input_names") or INPUTS
            padding = config.get("pad_token") or "[PAD]"
            padding = padding["content"] if isinstance(padding, dict) else padding
            self.pad_token_id = self._tokenizer.token_to_id(padding)
            self.pad_token_type_id = config.get("pad_token_type_id") or 0
        except Exception as error:  # the library has no error class of its own
            raise ValueError(f"The tokenizer in {folder} cannot be read: {error}.") from error
        self._lock = threading.Lock()  # truncation is a state of the tokenizer

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict) -> None:
        """Of a copy, which has a lock of its own, so that the two do not wait for each other."""
        self.__dict__.update(state, _lock=threading.Lock())

    def num_special_tokens_to_add(self) -> int:
        """The number of special tokens of one text."""
        return self._tokenizer.num_special_tokens_to_add(False)

    def __call__(
        self,
        texts: Sequence[str] | str,
        *,
        max_length: int | None = None,
        stride: int = 0,
        truncation: bool = False,
        add_special_tokens: bool = True,
        **_,
    ) -> dict[str, list]:
        """The sub-tokens of texts; with `truncation` in windows of at most `max_length` that share `stride` sub-tokens."""
        one = isinstance(texts, str)
        with self._lock:
            if truncation:
                self._tokenizer.enable_truncation(max_length, stride=stride)
            else:
                self._tokenizer.no_truncation()
            encoded = self._tokenizer.encode_batch(
                [texts] if one else list(texts), add_special_tokens=add_special_tokens
            )
        rows = [(i, row) for i, first in enumerate(encoded) for row in (first, *first.overflowing)]
        fields = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
        found = {
            name: [getattr(row, fields[name]) for _, row in rows] for name in self.model_input_names if name in fields
        }
        if one:
            return {name: values[0] for name, values in found.items()}
        return found | {
            "offset_mapping": [row.offsets for _, row in rows],
            "special_tokens_mask": [row.special_tokens_mask for _, row in rows],
            "overflow_to_sample_mapping": [i for i, _ in rows],
        }
