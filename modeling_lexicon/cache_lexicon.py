# SPDX-License-Identifier: Apache-2.0
"""The argument and output of decoders that transformers calls `cache` since 5.24, and called `past_key_values` before."""

from transformers.utils.deprecation import deprecate_kwarg

CACHE = "cache"
# decorates methods with the argument `cache`, as in transformers
accepts_both_names = deprecate_kwarg("past_key_values", "5.40.0", new_name=CACHE, raise_if_both_names=True)


def named_for_peft(model, model_inputs: dict) -> dict:
    """The inputs of a generation step, for the return of `prepare_inputs_for_generation`. If peft calls it, the cache has its
    old name, where peft 0.21 looks for it: otherwise prefix and prompt tuning would add their virtual tokens in each step. Without
    `use_cache` they have to: the cache is that of the tokens, which are read again.
    """
    if "prepare_inputs_for_generation" in vars(model) and "cache" in model_inputs:  # replaced by peft's
        cache = model_inputs.pop("cache")
        if model_inputs.get("use_cache") is not False:
            model_inputs["past_key_values"] = cache
    return model_inputs
