"""What the deputies of a MoeSumm model specialise in (MoeSumm, Sect. 5.2: Figure 3, Table 7).

    python benchmarks/moesumm_deputies.py --model runs/moesumm --datasets mail=data/mail news=data/news --work runs/deputies

- Per cent of the tokens that each deputy receives, by data set, and their mean gate. The decoder reads the reference summaries;
  padding is not counted. Deputy 0 of one layer is unrelated to deputy 0 of another, so each layer has its own row: Cramer's V of
  data set and deputy, from 0 (unrelated) to 1 (a deputy per data set), and the largest share of a deputy.
- ROUGE of summaries of the same texts by the model's own routing, by each deputy alone, and by the main expert alone. They are
  kept in the work folder; an interrupted run resumes.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch

from keyphrase_tools.specialisation import cramers_v_of_table
from lexperts.recipes.moesumm.arguments import DataArguments, GenerationArguments
from lexperts.recipes.moesumm.data import load_sources, require_split
from lexperts.recipes.moesumm.resumable_summaries import SummaryFile, load_summarizer, read_summaries
from lexperts.recipes.moesumm.scores import rouge
from modeling_moesumm import DataCollatorForMoeSumm
from run_tools.fingerprints import fingerprint

SIDES = ("encoder", "decoder")
BATCH = 8


@torch.no_grad()
def count_tokens(name: str, rows, model, tokenizer, batch_size: int = BATCH) -> pd.DataFrame:
    """A row for each side, layer and deputy, with the number of its tokens and the sum of their gates."""
    collator = DataCollatorForMoeSumm(tokenizer, model, on_long="truncate")
    N, counts = model.config.num_deputies, {}
    by_length = sorted(rows, key=lambda row: len(row["document"]), reverse=True)
    for start in range(0, len(by_length), batch_size):
        batch = {key: x.to(model.device) for key, x in collator(by_length[start : start + batch_size]).items()}
        labels = batch.pop("labels")
        targets = model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**batch, decoder_input_ids=targets, output_router_indices=True, use_cache=False)
        for side, real in zip(SIDES, (batch["attention_mask"] > 0, labels != -100), strict=True):
            layers = zip(outputs[f"{side}_expert_indices"], outputs[f"{side}_expert_weights"], strict=True)
            for layer, (deputy, gate) in enumerate(layers):
                tokens = torch.bincount(deputy[real], minlength=N)
                gates = torch.bincount(deputy[real], gate[real].double(), minlength=N)
                counts[side, layer] = counts.get((side, layer), 0) + torch.stack([tokens, gates])
    return pd.DataFrame(
        {"data set": name, "side": side, "layer": layer, "deputy": i, "tokens": int(tokens), "gates": float(gates)}
        for (side, layer), values in counts.items()
        for i, (tokens, gates) in enumerate(values.T)
    )


def deputy_shares(counts: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Each deputy's share of the tokens in per cent, and their mean gate, for each combination of the columns `by`."""
    table = counts.groupby([*by, "deputy"], sort=False)[["tokens", "gates"]].sum().reset_index()
    table["share"] = 100 * table["tokens"] / table.groupby(by)["tokens"].transform("sum")
    table["mean gate"] = table.pop("gates") / table["tokens"]
    return table


def unevenness(counts: pd.DataFrame) -> pd.DataFrame:
    """For each layer Cramer's V of data set and deputy, and the largest share of the tokens."""
    rows = []
    for (side, layer), group in counts.groupby(["side", "layer"], sort=False):
        table = group.pivot(index="data set", columns="deputy", values="tokens").to_numpy(float)  # (E, N)
        shares = 100 * table.sum(0) / table.sum()
        largest = {"largest share": shares.max(), "of deputy": int(shares.argmax())}
        rows.append({"side": side, "layer": layer, "Cramer's V": cramers_v_of_table(table), **largest})
    return pd.DataFrame(rows)


def score_deputies(name: str, texts, model, tokenizer, args) -> list[dict]:
    """ROUGE of the summaries by each routing."""
    routings: dict[str, dict] = {"own routing": {}}
    routings |= {f"deputy {i}": {"deputy_id": i} for i in range(model.config.num_deputies)}
    if model.config.main_expert:  # FlatMoE has none
        routings["main expert"] = {"main_expert_only": True}
    rows = []
    for routing, options in routings.items():
        generation = GenerationArguments(args.num_beams, on_long="truncate", generation_batch_size=BATCH)
        path = Path(args.work) / f"{name}-{routing.replace(' ', '_')}.jsonl"
        file = SummaryFile(path, texts, generation, fingerprint(args.model), name, **options)
        file.write_summaries(model, tokenizer)
        scores = rouge(*read_summaries(path))
        rows.append({"data set": name, "summaries by": routing, **{metric: s.mean() for metric, s in scores.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--datasets", nargs="+", required=True, help="NAME=PLACE, under the names of the model's datasets"
    )
    parser.add_argument("--work", required=True, help="folder of the summaries")
    parser.add_argument("--max-rows", type=int, default=200, help="use only the first N texts of each data set")
    parser.add_argument("--num-beams", type=int, default=4)
    args = parser.parse_args()
    data = DataArguments(datasets=args.datasets, max_rows=args.max_rows)
    test = require_split(load_sources(data), "test", data)
    model, tokenizer = load_summarizer(args.model)
    counts = pd.concat([count_tokens(name, rows, model, tokenizer) for name, rows in test.items()], ignore_index=True)
    rouges = [row for name, texts in test.items() for row in score_deputies(name, texts, model, tokenizer, args)]
    for table in (deputy_shares(counts, ["data set", "side"]), unevenness(counts), pd.DataFrame(rouges)):
        print(f"\n{table.to_markdown(index=False, floatfmt='.2f')}")


if __name__ == "__main__":
    main()
