"""Checks the pages of the built site with axe-core in Chromium, light and dark, wide and narrow.

make accessibility
python docs/check_accessibility.py --axe node_modules/axe-core/axe.min.js  # after make docs and npm install axe-core

Needs the packages playwright and chromium (`--chromium` names its program). Ends with exit status 1 if a page has a violation that
axe-core calls serious or critical, or loads anything from another server.
"""

import argparse
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
VIEWS = (("light", 1280, 900), ("dark", 390, 844))  # colour scheme, pixels


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *args):
        """Nothing."""


def serve(folder: Path) -> str:
    """The address of a server of this folder, which ends with the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def violations(page, axe: str) -> list[dict]:
    """What axe-core finds on a loaded page."""
    page.add_script_tag(content=axe)
    return page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(result => result.violations)")


def main() -> int:
    """Checks all pages; the number of serious violations, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of axe-core")
    parser.add_argument("--site", type=Path, default=SITE, help="the built site")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    axe, base = args.axe.read_text(encoding="utf-8"), serve(args.site)
    pages = sorted(path.parent.relative_to(args.site).as_posix() for path in args.site.rglob("index.html"))
    failed, minor = 0, 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)
        for scheme, width, height in VIEWS:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            for path in pages:
                page, foreign = context.new_page(), []
                page.on(
                    "request", lambda r, f=foreign: f.append(r.url) if not r.url.startswith((base, "data:")) else None
                )
                page.goto(f"{base}{path}/" if path != "." else base, wait_until="load")
                for found in violations(page, axe):
                    serious = found["impact"] in ("serious", "critical")
                    failed, minor = failed + serious, minor + (not serious)
                    if serious:
                        nodes = "; ".join(node["html"][:160] for node in found["nodes"][:3])
                        print(
                            f"{path} ({scheme}, {width}): {found['id']}, {found['impact']}, {len(found['nodes'])}: {nodes}"
                        )
                failed += len(foreign)
                print(*(f"{path}: loads {url}" for url in foreign), sep="\n", end="\n" if foreign else "")
                page.close()
        browser.close()
    print(f"{len(pages)} pages in {len(VIEWS)} views: {failed} serious, {minor} minor violations")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
