"""What the preflight found: findings, and the report that holds them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import MergeError
from .recipe import Recipe
from .sources import Source

MESSAGES_SHOWN = 3
LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One result of the preflight: `level` is "ok", "note", "warning" or "error"."""

    level: str
    check: str
    subject: str
    message: str
    allow: str | None = None  # the option that would accept it


@dataclass
class Report:
    """All findings, and the sources that could be opened."""

    findings: list[Finding] = field(default_factory=list)
    recipe: Recipe | None = None
    base: Source | None = None
    experts: list[Source] = field(default_factory=list)

    def add(self, level: str, check: str, subject: str, message: str, allow: str | None = None):
        if level == "error" and allow and self.recipe and allow in self.recipe.allow:
            level, message = "warning", f"{message} (allowed: {allow})"
        self.findings.append(Finding(level, check, subject, message, allow))

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "warning"]

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def raise_for_errors(self):
        """One message with every error, each with its mend.

        Raises:
            MergeError: unless there is none.
        """
        if self.errors:
            raise MergeError("\n".join(f"{f.subject}: {f.message}{mend(f)}" for f in self.errors))


def mend(finding: Finding) -> str:
    return f" Accept it with --allow {finding.allow}." if finding.level == "error" and finding.allow else ""


def folded(findings: list[Finding], level: str) -> list[tuple[str, list[str], str]]:
    """Findings of a level as [(check, subjects, message)]: the same message once; of a check that is well, one line."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.level == level:
            groups.setdefault((finding.check, "" if level == "ok" else finding.message), []).append(finding)
    lines = []
    for (check, _), group in groups.items():
        messages = list(dict.fromkeys(finding.message + mend(finding) for finding in group))
        more = f" and {len(messages) - MESSAGES_SHOWN} more" if len(messages) > MESSAGES_SHOWN else ""
        lines.append((check, [finding.subject for finding in group], "; ".join(messages[:MESSAGES_SHOWN]) + more))
    return lines
