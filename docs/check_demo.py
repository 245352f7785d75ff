"""Compares the keyphrases of the demo in Chromium with those of the same modules in Python, and times the page.

    make demo-check
    python docs/check_demo.py --record    # after make docs; writes benchmarks/results/demo.json

Needs the packages playwright and onnxruntime, and chromium (`--chromium` names its program). Ends with exit status 1 if a keyphrase,
its place or its score differs, or if the page loads anything from another server.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
CLOSE = 0.01  # of scores: onnxruntime-web adds in another order, and then rounds some activations to another int8 value
ODD = [
    "", "   ", "a", "graph cuts " * 400, "[SEP] of [MASK] networks", "日本語のテキスト", "C++ and .NET in R&D", "x" * 3000,
    "naïve café ﬁnancial — “quotes” 😀 résumé", "Σας ΟΔΟΣ İstanbul", "\x00NUL\u200b and soft\u00adware", "<p>HTML</p> at https://example.org/a",
]  # fmt: skip
OPTIONS = [{}, {"style": "terms"}, {"style": "phrases", "top_k": 5}]
VIEWS = {"wide": (1280, 900), "narrow": (390, 844)}
EXTRACT = """async ([text, options]) => {
    const { extractor } = await import(new URL('demo/demo.js', location.href));
    return extractor.extract(text, options);
}"""


def serve(folder: Path) -> str:
    """The address of a server of this folder, which ends with the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def texts() -> list[str]:
    """At least fifty texts."""
    found = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks" / "forty_texts").glob("*.txt"))]
    return [*found, *ODD]


def places(phrases: list[dict]) -> list[tuple]:
    """What must be equal."""
    return [(p["keyphrase"], p["start"], p["end"], [(m["start"], m["end"]) for m in p["mentions"]]) for p in phrases]


def compare(page, lib: Path) -> dict:
    """The differences between the page and its modules and model in Python, and the time of a text."""
    sys.path.insert(0, str(lib / "lexperts_lite.zip"))
    from lexperts_lite import KeyphraseExtractor

    extract, differ, count, largest, milliseconds = KeyphraseExtractor(lib / "model"), [], 0, 0.0, []
    for text in texts():
        for options in OPTIONS:
            expected = extract(text, **options)
            found = page.evaluate(EXTRACT, [text, options])
            milliseconds.append(1000 * found["seconds"])
            count += len(expected)
            if places(found["phrases"]) != places(expected):
                differ.append({"text": text[:60], **options})
                continue
            pairs = zip(found["phrases"], expected, strict=True)
            largest = max([largest, *(abs(a["score"] - b["score"]) for a, b in pairs)])
    return {
        "texts": len(texts()), "calls": len(milliseconds), "keyphrases": count, "calls_that_differ": differ,
        "largest_difference_of_scores": largest, "median_ms": statistics.median(milliseconds[-60:]),
    }  # fmt: skip


def open_page(browser, base: str, view: tuple[int, int], requests: list[str]):
    """The first page of the site, with all that it loads added to `requests`."""
    context = browser.new_context(viewport=dict(zip(("width", "height"), view, strict=True)))
    context.on("request", lambda request: requests.append(request.url))
    page = context.new_page()
    page.goto(base)
    page.wait_for_selector(".kd-list li")
    return page


def first_answer(page) -> float:
    """Seconds from the click to the answer, in a page that has loaded nothing yet."""
    start = time.perf_counter()
    page.click(".keyphrase-demo button")
    page.wait_for_selector(".keyphrase-demo button:enabled", timeout=120_000)
    return time.perf_counter() - start


def main() -> int:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--site", type=Path, default=SITE, help="the built site")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/demo.json, which docs/lite.md quotes"
    )
    args = parser.parse_args()
    base, requests, results = serve(args.site), [], {}
    with sync_playwright() as playwright:
        for name, view in VIEWS.items():
            browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)  # a new one has no cache
            page = open_page(browser, base, view, requests)
            results[f"first_answer_{name}_s"] = first_answer(page)
            results[f"status_{name}"] = page.inner_text(".kd-status")
            if name == "wide":
                results |= compare(page, args.site / "demo" / "lib") | {"chromium": browser.version}
            browser.close()
    foreign = sorted({url for url in requests if not url.startswith((base, "data:", "blob:"))})
    results |= {
        "bytes": sum(path.stat().st_size for path in (args.site / "demo" / "lib").rglob("*") if path.is_file()),
        "requests": len(requests),
        "files": sorted({url.removeprefix(base) for url in requests}),
        "foreign": foreign,
    }
    print(json.dumps(results, indent=2))
    if args.record:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from common import write

        write("demo", [results])
    failed = results["calls_that_differ"] or foreign or results["largest_difference_of_scores"] > CLOSE
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
