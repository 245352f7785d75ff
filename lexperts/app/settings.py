"""What the person who starts the app decides."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AppSettings:
    """What the person who starts the app decides; visitors cannot change it.

    Args:
        model: folder or Hub id of a token classifier, or tiny; by default the default model.
        mixture: folder of a merged mixture, whose routing a tab draws.
        device: of the keyphrase model.
        trust_remote_code: run code in the model's folder or repository.
        max_characters: of a text.
        max_file_mb: of an uploaded file, in MB.
        max_documents: of a file.

    Raises:
        ValueError: for a limit below 1.
    """

    model: str | None = None
    mixture: str | Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    max_characters: int = 20_000
    max_file_mb: int = 20
    max_documents: int = 2_000

    def __post_init__(self):
        for name in ("max_characters", "max_file_mb", "max_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
