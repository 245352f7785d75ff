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

    Raises:
        ValueError: for a limit below 1.
    """

    model: str | None = None
    mixture: str | Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    max_characters: int = 20_000

    def __post_init__(self):
        if self.max_characters < 1:
            raise ValueError(f"max_characters={self.max_characters} must be at least 1.")
