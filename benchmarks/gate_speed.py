"""What gates in closed form cost: `compose` with ridge gates, against the base's forward pass over the same tokens and the copy alone.

    python benchmarks/gate_speed.py --data PATH --work FOLDER           # PATH/summarization/*, PATH/keyphrases/stackexchange

Four experts of SmolLM2-135M with 4,000 tokens of samples each. What experts have learned does not change the time: these are the base, in
float32 as trainings write it.
"""

import shutil

import torch
from common import Record, make_parser
from modular_experts import DOMAINS, WINDOW, write_texts
from timing import compare
from transformers import AutoModelForCausalLM, AutoTokenizer

import merge_tools
from merge_tools.gate_training import cut_windows, pad
from merge_tools.texts import read_texts
from run_tools.pretrained import unpacked

EXPERTS, TOKENS, BATCH = 4, 4000, 32


def main():
    """Times the three in turns."""
    parser = make_parser(__doc__, "gate_speed", "summarization/ and keyphrases/", work=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.jobs)
    base, expert, output = unpacked("smollm2"), options.work / "float32", options.work / "mixture"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.float().save_pretrained(expert)
    model.bfloat16()
    tokenizer.save_pretrained(expert)
    files = {name: write_texts(options.data, options.work, name, "train") for name in list(DOMAINS)[:EXPERTS]}
    specs = [{"source_model": str(expert), "name": name, "samples": str(file)} for name, file in files.items()]
    recipe = {"base_model": str(base), "average": "base", "experts": specs}
    windows: list[list[int]] = []
    for number, file in enumerate(files.values(), 1):
        texts = read_texts(file, lambda row: row["text"], "text")
        beginnings = (window for text in texts for window in cut_windows(tokenizer, [text], WINDOW)[:1])
        while sum(map(len, windows)) < number * TOKENS:
            windows.append(next(beginnings))
    windows.sort(key=len)

    def compose(**keys):
        shutil.rmtree(output, ignore_errors=True)
        merge_tools.compose(recipe | keys, output)

    @torch.no_grad()
    def forward():
        for start in range(0, len(windows), BATCH):
            batch = pad(windows[start : start + BATCH], model.device)
            model.model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)

    candidates = {
        "forward pass": forward,
        "copy": lambda: compose(gate_mode="random"),
        "ridge": lambda: compose(gate_mode="ridge", gate_tokens=TOKENS),
    }
    record = Record(options.name, overwrite=options.overwrite, experts=EXPERTS, tokens=TOKENS, rounds=options.rounds)
    if not record.rows():
        row = record.add(compare(candidates, options.rounds, tokens=sum(map(len, windows))))
        forward_ms, copy_ms, ridge_ms = (row["times"][name]["median_ms"] for name in candidates)
        print(f"ridge / (forward pass + copy) = {ridge_ms / (forward_ms + copy_ms):.2f}")


if __name__ == "__main__":
    main()
