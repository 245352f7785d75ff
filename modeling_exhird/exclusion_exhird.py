# SPDX-License-Identifier: Apache-2.0
"""Exclusive search: a phrase does not begin as a recent one did (ExHiRD-h; Chen et al. 2020, "ES" in Fig. 2, no numbered equation).

    P_i(y_1 = w) = 0   for every w that is y_1 of one of the phrases i - K, ..., i - 1

P is not renormalised. K is the window, "history" in the reference code: 0 for no exclusion, -1 for all preceding phrases.

Letters: n sequences, T tokens, V vocabulary, K window.
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


def token_id(tokenizer, text: str) -> int:
    """The id of a text that is a single token. Raises a `ValueError` if it is not."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        tokens = tokenizer.convert_ids_to_tokens(ids)
        raise ValueError(f"{text!r} is {len(ids)} tokens, {tokens}, and must be one. Use another separator, or an id.")
    return ids[0]


class ExclusionLogitsProcessor(LogitsProcessor):
    """Exclusive search for `generate` of any causal or seq2seq model that writes phrases with a separator between them.

    At the first token of a phrase, the tokens that began one of the last K phrases of the same sequence get the score -inf. In
    ExHiRD the unit is the word, here it is the token. Where words are several tokens, more is excluded: "neural" also excludes
    "neuron" if both begin with the token "neu". Where a word has several tokens to begin with, less is: "graph" does not exclude
    "Graph". An empty phrase begins with its separator, as in the reference, so that a second one is excluded.

    The history is read from `input_ids` at every step, so that beams may be reordered. If other processors allow no token but the
    excluded ones, the exclusion is skipped for this row.

    ```python
    >>> exclusion = ExclusionLogitsProcessor(tokenizer, separator=" ;", window=4, prompt_length=inputs["input_ids"].shape[1])
    >>> model.generate(**inputs, logits_processor=[exclusion])
    ```

    Args:
        tokenizer: of the model; may be `None` if separators are ids.
        separator: the text that ends a phrase, a single token of the tokenizer, or its id; or a list of these.
        window: K; 0 for no exclusion, -1 for all preceding phrases.
        prompt_length: number of tokens before the first generated one, which do not count: the width of `input_ids`, padding
            included, of a causal model; 1 for a seq2seq model, or the width of its `decoder_input_ids`.

    Raises:
        ValueError: for a separator that is not a single token, and numbers out of range.
    """

    def __init__(
        self, tokenizer=None, separator: str | int | Sequence[str | int] = " ;", window: int = 1, *, prompt_length: int
    ):
        separators = [separator] if isinstance(separator, str | int) else list(separator)
        self.separators = [one if isinstance(one, int) else token_id(tokenizer, one) for one in separators]
        self.window, self.prompt_length = window, prompt_length
        if window < -1:
            raise ValueError(f"window={window} must be at least -1.")

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids (n, T), scores (n, V) -> scores with -inf for excluded tokens."""
        if input_ids.shape[1] < self.prompt_length:
            raise ValueError(
                f"prompt_length={self.prompt_length} exceeds the {input_ids.shape[1]} tokens of input_ids."
            )
        answer = input_ids[:, self.prompt_length :]
        if not self.window or not answer.shape[1]:
            return scores
        ends = torch.isin(answer, torch.tensor(self.separators, device=answer.device))
        first = torch.cat([torch.ones_like(ends[:, :1]), ends[:, :-1]], 1)  # of a phrase
        if self.window > 0:
            phrase = ends.cumsum(1) - ends.long()  # of each token
            first = first & (phrase >= ends.sum(1, keepdim=True) - self.window)
        rows, positions = (first & ends[:, -1:]).nonzero(as_tuple=True)
        limited = scores.clone()
        limited[rows, answer[rows, positions]] = -torch.inf
        return torch.where(limited.amax(1, keepdim=True) == -torch.inf, scores, limited)
