"""Hooks of mkdocs: links to files of the repository outside docs/ lead to GitHub, where they are shown."""

import re
from pathlib import Path

REPOSITORY = "https://github.com/lexperts/lexperts/blob/main/"
ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?P<path>(?:\.\./)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def to_repository(link: re.Match, page: Path) -> str:
    """The link itself within docs/, else that of the file on GitHub; raises an error if there is no such file."""
    path = (page.parent / link["path"]).resolve()
    if not path.exists():
        raise FileNotFoundError(f"{page}: there is no {link['path']}")
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    return f"]({REPOSITORY}{path.relative_to(ROOT)}{link['anchor'] or ''})"


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Rewrites the links of a page."""
    return LINK.sub(lambda link: to_repository(link, Path(page.file.abs_src_path)), markdown)
