"""Findings of the preflight, and the report that collects them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from run_tools.errors import escape

from .errors import MergeError

MAX_MESSAGES = 3  # that one line of the table shows
LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One result of the preflight: `level` is "ok", "note", "warning" or "error"."""

    level: str
    check: str
    subject: str
    message: str
    allow: str | None = None  # the value of --allow that would accept it


@dataclass
class Report:
    """All findings of a preflight. Errors whose `allow` is listed in `allow` are added as warnings."""

    allow: Sequence[str] = ()
    findings: list[Finding] = field(default_factory=list)

    def add(self, level: str, check: str, subject: str, message: str, allow: str | None = None):
        """Adds a finding."""
        if level == "error" and allow in self.allow:
            level, message = "warning", f"{message} (allowed: {allow})"
        self.findings.append(Finding(level, check, escape(subject), escape(message), allow))

    @property
    def errors(self) -> list[Finding]:
        """The findings that prevent a merge."""
        return [f for f in self.findings if f.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that do not prevent a merge but should be read."""
        return [f for f in self.findings if f.level == "warning"]

    @property
    def notes(self) -> list[Finding]:
        """The findings that say what a user may not expect."""
        return [f for f in self.findings if f.level == "note"]

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable values."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def raise_for_errors(self):
        """Raises one `MergeError` that lists every error and how to accept it, if there are errors."""
        if self.errors:
            raise MergeError("\n".join(f"{f.subject}: {f.message}{hint(f)}" for f in self.errors))


def count_more(items: Sequence, noun: str) -> str:
    """How many there are besides the first, such as "2 more tensors"."""
    more = len(items) - 1
    return f"{more} more {noun}{'s' * (more != 1)}"


def hint(finding: Finding) -> str:
    """How to accept an error, if it can be accepted."""
    return f" Accept it with --allow {finding.allow}." if finding.level == "error" and finding.allow else ""


def grouped(findings: list[Finding], level: str) -> list[tuple[str, list[str], str]]:
    """Findings of a level as `[(check, subjects, message)]`: equal messages once; all "ok" findings of a check once."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.level == level:
            groups.setdefault((finding.check, "" if level == "ok" else finding.message), []).append(finding)
    lines = []
    for (check, _), group in groups.items():
        messages = list(dict.fromkeys(finding.message + hint(finding) for finding in group))
        more = f" and {len(messages) - MAX_MESSAGES} more" if len(messages) > MAX_MESSAGES else ""
        lines.append((check, [finding.subject for finding in group], "; ".join(messages[:MAX_MESSAGES]) + more))
    return lines
