"""The examples' scripts as modules: each folder's import one another by bare names, which other folders and libraries have too."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@contextmanager
def scripts_of(folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """The named scripts of examples/`folder`; afterwards, and before, its names are those of whoever had them."""
    place = EXAMPLES / folder
    own = [path.stem for path in place.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(place))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(place))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(before)
