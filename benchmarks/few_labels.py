"""How many labelled documents does a model of your own need? F1 by the number of documents, and by the model that training starts from.

    python benchmarks/few_labels.py --data PATH --work FOLDER     # PATH/keyphrases/{krapivin,nus}/test.jsonl; half an hour on two cores

krapivin and nus are sources that the default model has not seen. The first 25 or 100 documents of each are the labelled ones, and the
scores are those of all documents after the first 100. `lexperts train seke minilm_cpu --fit_ranker true` starts from MiniLM or from the
default model, which is also scored without training. A fifth of the labelled documents is for validation and the ranker. One seed.

Rows and runs in the work folder are reused if their settings, data and versions are the same.
"""

import argparse
from pathlib import Path

from common import Record, add_record_arguments, run_once
from transformers import pipeline

import lexperts  # noqa: F401  (registers the models)
from keyphrase_tools.default_model import find_default_model
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.jsonl import full_text, read_jsonl
from lexperts.recipes.seke.scoring import gold_phrases

SETS = ("krapivin", "nus")
STARTS = {"MiniLM-L6": {}, "the default model": {"start_from": "default"}}


def split(options, name: str, labels: int) -> tuple[Path, list[dict]]:
    """A file with the labelled documents, and the test documents."""
    rows = Path(options.data, "keyphrases", name, "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    train, test = options.work / f"{name}-{labels}.jsonl", options.work / f"{name}-test.jsonl"
    train.write_text("".join(rows[:labels]), encoding="utf-8")
    test.write_text("".join(rows[max(options.labels) :]), encoding="utf-8")
    return train, read_jsonl(test)


def score(model: str | Path, rows: list[dict]) -> dict:
    """F1@5 and F1@10 by the rules of the paper."""
    texts = [full_text(row) for row in rows]
    phrases = pipeline("keyphrase-extraction", model=str(model))(texts)
    scores = score_phrases(phrases, gold_phrases(texts, [row["keyphrases"] for row in rows], "seke"))
    return {"documents": len(rows), **{name: scores[name] for name in ("f1@5", "f1@10")}}


def main() -> None:
    """Trains and scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with keyphrases/NAME/test.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder for the trained models")
    parser.add_argument("--labels", type=int, nargs="+", default=[25, 100], help="numbers of labelled documents")
    add_record_arguments(parser, "few_labels")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    default = Path(find_default_model(), "model.safetensors")
    record = Record(options.name, overwrite=options.overwrite, default=default, test_after=max(options.labels))
    for name in SETS:
        for labels in (0, *options.labels):
            train, test = split(options, name, labels)
            for start, settings in STARTS.items():
                key = {"set": name, "labels": labels, "start": start}
                if record.find(**key) or (not labels and not settings):
                    continue
                model = options.work / f"{name}-{labels}-{'default' if settings else 'minilm'}"
                if labels:
                    given = {"fit_ranker": True, "show": 0, "disable_tqdm": True, "save_total_limit": 1, **settings}
                    run_once(
                        *("train", "seke", "minilm_cpu"),
                        output=model,
                        done="results.json",
                        options={"train_files": train, **given},
                        overwrite=options.overwrite,
                        threads=None,
                        default=default,
                    )
                row = record.add({**key, **score(model if labels else default.parent, test)})
                print("  ".join(f"{field} {value}" for field, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
