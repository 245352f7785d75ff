# SPDX-License-Identifier: Apache-2.0
"""`pipeline("keyphrase-extraction")` where Lexperts is not installed. Copied by `make fix-copies`."""

from transformers import Pipeline


class KeyphraseExtractionPipeline(Pipeline):
    """Says what is missing; `pipeline("token-classification")` needs no more than a checkpoint's code."""

    _load_tokenizer, _load_processor, _load_image_processor, _load_feature_extractor = True, False, False, False

    def __new__(cls, *_, **__):
        """Raises an `ImportError`."""
        raise ImportError('pipeline("keyphrase-extraction") needs Lexperts: https://github.com/lexperts/lexperts')
