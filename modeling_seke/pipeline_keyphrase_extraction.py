# SPDX-License-Identifier: Apache-2.0
"""`pipeline("keyphrase-extraction")` where Lexperts is not installed. Copied by `make fix-copies`."""


class KeyphraseExtractionPipeline:
    """Says what is missing; `pipeline("token-classification")` needs no more than a checkpoint's code."""

    def __init__(self, *_, **__):
        raise ImportError('pipeline("keyphrase-extraction") needs Lexperts: https://github.com/lexperts/lexperts')
