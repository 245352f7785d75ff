"""Keyphrases on onnxruntime, without PyTorch and transformers.

```python
from lexperts_lite import extract_keyphrases

extract_keyphrases("Graph cuts solve energy minimisation problems in computer vision.", top_k=2)
```
"""

from .runtime import KeyphraseExtractor, extract_keyphrases

__all__ = ["KeyphraseExtractor", "extract_keyphrases"]
