"""Writes the tables of the README and docs from benchmarks/results, between <!-- table:NAME --> and <!-- end -->.

python benchmarks/tables.py            # or: make tables
python benchmarks/tables.py --check    # fails if a page is out of date
"""

import argparse
import re
import sys
from pathlib import Path

from makers import (
    definitions,
    domains,
    exhird,
    hypernet,
    lite,
    load,
    merging,
    modular,
    moesumm,
    peers,
    scale,
    seke,
    verdicts,
)

ROOT = Path(__file__).resolve().parent.parent


def quickstart() -> str:
    """The quickstart's scores."""
    record = load("quickstart")
    scores = record["results"]["scores"]
    table = "; ".join(f"{name} {100 * s['f1@5']:.1f} / {100 * s['f1@10']:.1f}" for name, s in scores.items())
    return f"After {record['settings']['steps']} steps, F1@5 / F1@10 on the 50 held-out texts, one seed: {table}."


MAKERS = {
    "table:seke_inspec": seke.seke_inspec,
    "table:lite_quality": lite.quality,
    "table:lite_speed": lite.speed,
    "result:demo": lite.demo,
    "table:seke_backbones": seke.backbones,
    "table:seke_head": seke.seke_head,
    "table:seke_speed": seke.seke_speed,
    "table:seke_speed_cuda": seke.seke_speed_cuda,
    "table:seke_quality": seke.seke_quality,
    "table:merge_speed": merging.merge_speed,
    "table:merge_gates": merging.merge_gates,
    "table:merge_engines": merging.merge_engines,
    "table:adapter_options": merging.adapter_options,
    "table:moe_speed": merging.moe_speed,
    "table:merge_means": merging.merge_means,
    "table:modular_experts": modular.modular_experts,
    "table:modular_losses": modular.losses,
    "result:kept": modular.kept,
    "result:headline": lite.headline,
    "result:modular_findings": modular.findings,
    "table:lexicon_quality": definitions.lexicon_quality,
    "table:lexicon_quality_medium": definitions.lexicon_quality_medium,
    "table:lexicon_smollm2": definitions.lexicon_smollm2,
    "table:lexicon_smollm2_dictionaries": definitions.lexicon_smollm2_dictionaries,
    "table:lexicon_smollm2_all": definitions.lexicon_smollm2_all,
    "table:lexicon_smollm2_policies": definitions.lexicon_smollm2_policies,
    "table:lexicon_speed": definitions.lexicon_speed,
    "table:moesumm_speed": moesumm.moesumm_speed,
    "table:moesumm_quality": moesumm.moesumm_quality,
    "table:moesumm_authors": moesumm.moesumm_authors,
    "table:moesumm_smollm2": moesumm.moesumm_smollm2,
    "table:moesumm_smollm2_systems": moesumm.moesumm_smollm2_systems,
    "table:moesumm_smollm2_few": moesumm.moesumm_smollm2_few,
    "table:moesumm_smollm2_four": moesumm.moesumm_smollm2_four,
    "table:hypernet_quality": hypernet.hypernet_quality,
    "table:hypernet_speed": hypernet.hypernet_speed,
    "table:hypernet_crf": hypernet.hypernet_crf,
    "table:exhird_quality": exhird.exhird_quality,
    "table:exhird_smollm2": exhird.exhird_smollm2,
    "table:exhird_smollm2_windows": exhird.exhird_smollm2_windows,
    "table:exhird_speed": exhird.exhird_speed,
    "table:all_sets": domains.all_sets,
    "table:left_out": domains.left_out,
    "table:calibration": domains.calibration,
    "table:free_tools": peers.free_tools,
    "table:exported": domains.exported,
    "table:pipeline_profile": domains.pipeline_profile,
    "table:serving": scale.serving,
    "table:many_documents": scale.many_documents,
    "table:killed_runs": scale.killed_runs,
    "table:corpus_growth": scale.corpus_growth,
    "table:long_documents": domains.long_documents,
    "table:diversity": domains.diversity,
    "table:forty_texts": verdicts.forty_texts,
    "result:first_screen": domains.first_screen,
    "result:peers": domains.comparison,
    "result:merging": merging.comparison,
    "result:quickstart": quickstart,
}
PAGES = (
    "README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
    "models/seke-minilm/README.md",
)


def main():
    """Writes or checks the tables of all pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page is out of date")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = old = path.read_text(encoding="utf-8")
        for name, make in MAKERS.items():
            block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
            text = block.sub(lambda match, make=make: match[1] + make() + "\n" + match[2], text)
        if args.check:
            stale += [page] * (text != old)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"{', '.join(stale)}: tables differ from benchmarks/results. Run: make tables")


if __name__ == "__main__":
    main()
