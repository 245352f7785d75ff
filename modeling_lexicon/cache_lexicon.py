# SPDX-License-Identifier: Apache-2.0
"""The argument and output of decoders that transformers calls `cache` since 5.24, and called `past_key_values` before."""

import functools

CACHE = "cache"


def accepts_both_names(forward):
    """Decorates a method with the argument `cache`: it can also be passed as `past_key_values`. Raises a
    `ValueError` for calls with both.
    """

    @functools.wraps(forward)
    def accepting(self, *args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            if kwargs.get("cache") is not None:
                raise ValueError("cache and past_key_values are both set. They are one argument: pass one of them.")
            kwargs["cache"] = past_key_values
        return forward(self, *args, **kwargs)

    return accepting


def named_for_peft(model, model_inputs: dict) -> dict:
    """The inputs of a generation step, for the return of `prepare_inputs_for_generation`. If peft calls it, the cache has its
    old name, where peft 0.21 looks for it: otherwise prefix and prompt tuning would add their virtual tokens in each step.
    """
    if "prepare_inputs_for_generation" in vars(model) and "cache" in model_inputs:  # replaced by peft's
        model_inputs["past_key_values"] = model_inputs.pop("cache")
    return model_inputs
