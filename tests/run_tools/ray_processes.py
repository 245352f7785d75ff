"""Processes for workers of Ray, which import neither torch nor the tests."""

import os
import signal
import time


def kill() -> None:
    """Ends this process at once, as when its machine is lost."""
    os.kill(os.getpid(), signal.SIGKILL)


class Counts:
    """The number of words of each document. Can kill its process: at a document, or when it loads; the first time or always."""

    results = ("words", "loaded")

    def __init__(self, fatal=None, mark=None, differs=False):
        self.fatal, self.mark, self.differs, self.is_loaded = fatal, mark, differs, False

    def lose(self, place):
        if place == self.fatal and not (self.mark and self.mark.exists()):
            if self.mark:
                self.mark.touch()
            kill()

    def describe(self):
        self.lose("describe")
        self.is_loaded = True
        return {"weights": os.getpid() if self.differs else 0}

    def process_rows(self, rows, progress=lambda documents: None):
        for row in rows:
            self.lose(row["text"])
        time.sleep(self.differs)  # so that the other worker starts before the run ends
        return [{"words": len(row["text"].split()), "loaded": self.is_loaded} for row in rows]

    def types(self):
        import pyarrow

        return {"words": pyarrow.int64(), "loaded": pyarrow.bool_(), "error": pyarrow.string()}


class LoadedInTurn:
    """Its second worker loads its model later, while the first is busy; each result names its process."""

    def __init__(self, first):
        self.first, self.second = first, first / "second"

    def describe(self):
        try:
            self.first.mkdir()
        except FileExistsError:
            time.sleep(1)
            self.second.mkdir()
        return {}

    def process_rows(self, rows):
        while not self.second.exists():
            time.sleep(0.05)
        time.sleep(1)
        return [{"process": os.getpid()} for _ in rows]
