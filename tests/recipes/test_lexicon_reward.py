"""The reward model of definitions: pairs, the loss by its formula, training by the script, the best of several samples."""

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, pipeline

import modeling_lexicon  # noqa: F401
from lexperts.recipes.lexicon import rewards, train_expert, train_reward
from run_tools.resume import ResumableJsonl
from tests.recipes import helpers
from tests.recipes.helpers import fails, read_rows, run_main, write_rows

TINY = {**helpers.TINY, "num_hidden_layers": 1, "initializer_range": 0.2}
ROWS = [
    {
        "term": f"thing{i}",
        "context": f"the thing{i} is {'old ' * (i % 3)}here",
        "definition": f"a thing of kind {i % 4}",
    }
    for i in range(24)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    train_expert.train_tokenizer(ROWS, TINY["vocab_size"]).save_pretrained(folder)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def test_the_loss_is_its_formula():
    r = torch.tensor([1.0, -0.5, 0.2, 0.7])  # two chosen, two rejected
    expected = sum(-math.log(1 / (1 + math.exp(-d))) for d in (1.0 - 0.2, -0.5 - 0.7)) / 2
    assert float(rewards.reward_loss(r)) == pytest.approx(expected, abs=1e-6)


def test_rejected_are_the_likeliest_that_are_not_the_gold_one():
    samples = [{"definition": text} for text in ("A cat.", "a dog", "", "A  dog.", "a cat", "a cow", "an ox")]
    assert rewards.select_rejected(samples, "a cat", 2) == ["a dog", "a cow"]
    assert rewards.select_rejected(samples[:1], "a cat", 2) == []


def test_the_nearest_sample_is_chosen_over_the_furthest():
    texts = ("a cat that runs", "a dog", "", "a cat that sits", "a  dog", "the large cat that sits")
    samples = [{"definition": text} for text in texts]
    chosen, rejected = rewards.nearest_pair(samples, "a cat that sits down.", 2)
    assert chosen == "a cat that sits" and set(rejected) == {"a dog", "a  dog"}
    assert len(rewards.nearest_pair(samples, "a cat that sits down", 9)[1]) == 4
    assert rewards.nearest_pair(samples[1:3], "a cat", 2) == ("a dog", [])  # nothing to choose from
    assert rewards.nearest_pair(samples[2:3], "a cat", 2) == ("", [])


def options_of(folder, output, *options):
    return (
        "--model_name_or_path", folder, "--reward_base", folder, "--train_files", folder / "rows.jsonl",
        "--validation_files", folder / "rows.jsonl", "--output_dir", output, "--samples", 6, "--kept", 3,
        "--max_new_tokens", 6, "--sampling_batch_size", 4, "--learning_rate", 0.01,
        "--per_device_train_batch_size", 8, "--num_train_epochs", 6, "--use_cpu", "--report_to", "none",
        "--save_strategy", "no", "--disable_tqdm", "true", *options,
    )  # fmt: skip


def train(folder, output, *options):
    done = run_main(train_reward.main, *options_of(folder, output, *options))
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder, output, *options):
    return fails(train_reward.main, *options_of(folder, output, *options))


def test_it_learns_to_prefer_the_gold_definitions_and_chooses_by_that(folder, tmp_path):
    printed = train(folder, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["eval_accuracy"] > 0.9 and "has the larger reward in" in printed
    pairs = read_rows(tmp_path / "pairs_train.jsonl")
    assert [pair["chosen"] for pair in pairs] == [row["definition"] for row in ROWS]
    assert all(len(pair["rejected"]) <= 3 and pair["chosen"] not in pair["rejected"] for pair in pairs)
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert reward.config.num_labels == 1 and reward.config.pad_token_id == 2
    define = pipeline("definition-modeling", model=str(folder), max_new_tokens=6)
    torch.manual_seed(0)
    found = define(ROWS[0], best_of=4, num_definitions=4, reward_model=reward)
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)


def test_killed_after_sampling_it_goes_on_with_the_same_pairs(folder, tmp_path):
    train(folder, tmp_path, "--max_steps", 2)
    weights = (tmp_path / "model.safetensors").read_bytes()
    sampled = {path: path.stat().st_mtime_ns for path in tmp_path.glob("pairs_*.jsonl")}
    for path in tmp_path.iterdir():
        if "pairs_" not in path.name:
            path.unlink()
    train(folder, tmp_path, "--max_steps", 2)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert len(sampled) == 2 and all(path.stat().st_mtime_ns == time for path, time in sampled.items())


def test_pairs_of_other_settings_are_not_taken(folder, tmp_path):
    train(folder, tmp_path, "--chosen", "nearest", "--max_steps", 1)
    pairs = read_rows(tmp_path / "pairs_train.jsonl")
    assert not any(
        pair["chosen"] in (row["definition"], *pair["rejected"]) for pair, row in zip(pairs, ROWS, strict=True)
    )
    times = [path.stat().st_mtime_ns for path in tmp_path.glob("pairs_*.jsonl")]
    given = ("--chosen", "nearest", "--max_steps", 1, "--learning_rate", 0.02, "--overwrite_output_dir", "true")
    assert "removed from" in train(folder, tmp_path, *given)
    assert times == [
        path.stat().st_mtime_ns for path in tmp_path.glob("pairs_*.jsonl")
    ]  # settings of theirs are the same

    assert "chosen='nearest' before, 'gold' now; samples=6 before, 5 now" in refused(folder, tmp_path, "--samples", 5)
    (tmp_path / "results.json").unlink()
    for path in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.json")]:
        if "pairs_" not in path.name:
            path.unlink()
    assert "chosen='nearest' before" in refused(folder, tmp_path, "--samples", 5)


def test_interrupted_sampling_ends_in_the_same_pairs(folder, tmp_path):
    from transformers import AutoTokenizer

    model, tokenizer = LlamaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = {"samples": 4, "kept": 2, "batch_size": 4, "seed": 1, "max_new_tokens": 4}
    rewards.write_pairs(model, tokenizer, ROWS, ResumableJsonl(tmp_path / "whole.jsonl", given), **given)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    for done in (0, 4, 8):
        file = ResumableJsonl(tmp_path / f"{done}.jsonl", given)
        file.start()
        with file.lock():
            for start in range(0, done, 4):
                file.write_block(start, start + 4, b"".join(lines[start : start + 4]).decode())
        rewards.write_pairs(model, tokenizer, ROWS, file, **given)
        assert file.path.read_bytes() == whole


def test_pairs_without_room_are_refused(folder, tmp_path):
    from transformers import AutoTokenizer

    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"term": "a", "context": "b", "chosen": "c", "rejected": ["d"]}) + "\n")
    with pytest.raises(ValueError, match="max_length=5"):
        rewards.encode_pairs(path, AutoTokenizer.from_pretrained(folder), 5)
