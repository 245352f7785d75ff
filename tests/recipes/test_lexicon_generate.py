"""`lexperts define term`, `terms` and `generate`: the best of several samples, and interruptions."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, pipeline
from typer.testing import CliRunner

from lexperts.cli.define import app
from lexperts.recipes.lexicon import generate, train_expert
from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_lexicon.data_lexicon import format_prompt
from modeling_lexicon.generation_lexicon import SAMPLING, DefinitionGenerator, generated_lengths
from modeling_lexicon.terms_lexicon import find_term, truncate_context_around
from run_tools.run_over import Output
from tests.recipes import helpers
from tests.recipes.helpers import read_rows, write_rows
from tests.recipes.lexicon_helpers import is_tool, kind_rows, save_embedder

TINY = {**helpers.TINY, "initializer_range": 0.2}
ROWS = kind_rows(0, 10)
TERMS = [{name: row[name] for name in ("term", "context")} for row in ROWS]


@pytest.fixture(scope="module")
def tokenizer():
    return train_expert.train_tokenizer(ROWS, TINY["vocab_size"])


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A dense model, a reward model and rows."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "dense")
    LlamaForSequenceClassification(LlamaConfig(**TINY, num_labels=1)).save_pretrained(folder / "reward")
    for name in ("dense", "reward"):
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


@pytest.fixture
def run(folder, capsys):
    """run(output, *options) -> the rows that `generate` writes and what it prints."""

    def run(output, *options, model="dense", rows="rows.jsonl"):
        given = ("--model_name_or_path", folder / model, "--test_files", folder / rows, "--output", output,
                 "--max_new_tokens", 6, "--batch_size", 4, *options)  # fmt: skip
        generate.main([*map(str, given)])
        printed = capsys.readouterr().out
        return (read_rows(output) if Path(output).exists() else None), printed

    return run


def refused(run, capsys, *given, **more) -> str:
    with pytest.raises(SystemExit) as ended:
        run(*given, **more)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert ended.value.code == 2 and len(error) == 1
    return error[0]


def drawn_by_generate(folder, tokenizer, seed, batch_size=4):
    """What the model's own generate draws, batch by batch, each with its seed."""
    model, found = LlamaForCausalLM.from_pretrained(folder / "dense").eval(), []
    for start in range(0, len(ROWS), batch_size):
        own = ROWS[start : start + batch_size]
        prompts = [
            [0, *tokenizer(format_prompt(row["term"], row["context"]), add_special_tokens=False)["input_ids"], 1]
            for row in own
        ]
        order = sorted(range(len(own)), key=lambda i: len(prompts[i]), reverse=True)
        T = max(map(len, prompts))
        ids = torch.tensor([[2] * (T - len(prompts[i])) + prompts[i] for i in order])
        torch.manual_seed(seed + start)
        made = model.generate(ids, attention_mask=(ids != 2).long(), max_new_tokens=6, do_sample=True, **SAMPLING)
        texts = [tokenizer.decode(own[:k], skip_special_tokens=True).strip() for own, k in
                 zip(made[:, T:], generated_lengths(made[:, T:], 1), strict=True)]  # fmt: skip
        found += [texts[order.index(i)] for i in range(len(own))]
    return found


# --- the best of n ---


def test_the_best_of_one_is_plain_generation_under_the_same_seed(run, folder, tokenizer, tmp_path):
    plain = drawn_by_generate(folder, tokenizer, 7)
    for name, options in (("likelihood", ()), ("reward", ("--reward_model", folder / "reward"))):
        lines, _ = run(tmp_path / f"{name}.jsonl", "--sample", "--seed", 7, *options)
        assert [line["generated"] for line in lines] == plain
    other, _ = run(tmp_path / "other.jsonl", "--sample", "--seed", 8)
    assert [line["generated"] for line in other] != plain
    greedy, printed = run(tmp_path / "greedy.jsonl")
    define = pipeline("definition-modeling", model=str(folder / "dense"), max_new_tokens=6)
    assert [line["generated"] for line in greedy] == [one["definition"] for one in define(ROWS)]
    assert "10 rows in" in printed and "per second" in printed
    assert [{name: line[name] for name in ROWS[0]} for line in greedy] == ROWS
    assert all(set(line) == {*ROWS[0], "generated", "score"} for line in greedy)


@pytest.mark.parametrize("reward", [False, True])
def test_the_best_sample_is_taken(reward, run, folder, tokenizer, tmp_path):
    """Of those that the model's own generate draws, by their likelihood or by a sequence classifier."""
    options = ("--reward_model", folder / "reward") * reward
    lines, _ = run(tmp_path / "best.jsonl", "--best_of", 5, "--temperature", 2.0, "--batch_size", 10, *options)
    model = LlamaForCausalLM.from_pretrained(folder / "dense").eval()
    more = {"reward_model": str(folder / "reward")} if reward else {}
    generator = DefinitionGenerator(model, tokenizer, best_of=5, temperature=2.0, max_new_tokens=6, **more)
    torch.manual_seed(42)
    for line, samples in zip(lines, generator.sample(ROWS, batch_size=10), strict=True):
        usable = [sample for sample in samples if sample["definition"]] or samples
        best = max(usable, key=lambda sample: sample["score"])
        assert (line["generated"], line["score"]) == (best["definition"], best["score"])


# --- interruptions ---


def test_an_interrupted_run_ends_in_the_same_files(run, tmp_path, monkeypatch):
    options = ("--best_of", 3)
    run(tmp_path / "whole.jsonl", *options)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for left in range(3):
        write, batches = Output.write, iter(range(left))

        def some(*arguments, write=write, batches=batches):
            if next(batches, None) is None:
                raise KeyboardInterrupt
            write(*arguments)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(Output, "write", some)
            run(tmp_path / f"{left}.jsonl", *options)
        assert ended.value.code == 130
        _, printed = run(tmp_path / f"{left}.jsonl", *options)
        assert (tmp_path / f"{left}.jsonl").read_bytes() == whole and f"{10 - 4 * left} rows in" in printed
    _, printed = run(tmp_path / "whole.jsonl", *options)
    assert "is complete already" in printed


def test_a_file_of_other_settings_is_not_gone_on_with(run, capsys, tmp_path, folder):
    run(tmp_path / "a.jsonl")
    assert "seed=42 before, 1 now" in refused(run, capsys, tmp_path / "a.jsonl", "--seed", 1)
    write_rows(folder / "fewer.jsonl", ROWS[:3])
    error = refused(run, capsys, tmp_path / "a.jsonl", rows="fewer.jsonl")
    assert "rows=10 before, 3 now" in error and "rows_sha256" in error
    # what was refused before a row was sampled leaves nothing that the next command would trip over
    refused(run, capsys, tmp_path / "b.jsonl", "--embedder", "none")
    assert run(tmp_path / "b.jsonl")[0]


def test_definitions_of_a_model_trained_again_in_its_place_are_not_taken(run, capsys, tmp_path, folder):
    shutil.copytree(folder / "dense", tmp_path / "dense")
    run(tmp_path / "a.jsonl", model=tmp_path / "dense")
    shutil.copytree(tmp_path / "dense", tmp_path / "moved")
    (tmp_path / "moved" / "results.json").write_text("{}")
    assert "is complete already" in run(tmp_path / "a.jsonl", model=tmp_path / "moved")[1]  # the same content
    model = LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "dense")
    assert "model_name_or_path=dense (" in refused(run, capsys, tmp_path / "a.jsonl", model=tmp_path / "dense")
    (tmp_path / "a.jsonl.settings.json").unlink()
    assert "is not of a run" in refused(run, capsys, tmp_path / "a.jsonl")


# --- mixtures ---


@pytest.fixture(scope="module")
def mixtures(folder, tokenizer):
    """A mixture of two with centroids and gates, and the embedder that they are of."""
    save_embedder(folder / "embedder", kind_rows(0, 12))
    torch.manual_seed(1)
    for name, changes in (("token", {}), ("domain", {"routing_policy": "domain"}), ("bare", {"centroid_size": None})):
        changes = {"centroid_size": 2, "embedder": str(folder / "embedder"), **changes}
        model = LexiconForCausalLM(LexiconConfig(**TINY, num_local_experts=2, **changes))
        if model.domain_centroids is not None:
            model.domain_centroids.copy_(torch.eye(2))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_domains_are_those_of_the_nearest_centroids(run, mixtures, tmp_path):
    expected = [int(is_tool(row["term"])) for row in ROWS]
    lines, _ = run(tmp_path / "domain.jsonl", model="domain")
    assert [line["domain"] for line in lines] == expected and all(0 < line["distance"] < 0.5 for line in lines)
    define = pipeline("definition-modeling", model=str(mixtures / "domain"), max_new_tokens=6)
    for line, one in zip(lines, define(ROWS, embedder=str(mixtures / "embedder")), strict=True):
        assert (line["generated"], line["domain"], line["distance"]) == (
            one["definition"], one["domain"], pytest.approx(one["distance"], abs=1e-5))  # fmt: skip
    # a token mixture with the same centroids: named only where they are asked for, and routed by them where it is told to
    plain, _ = run(tmp_path / "plain.jsonl", model="token")
    named, _ = run(tmp_path / "named.jsonl", "--embedder", mixtures / "embedder", model="token")
    assert "domain" not in plain[0] and [line["domain"] for line in named] == expected
    assert [line["generated"] for line in named] == [line["generated"] for line in plain]
    routed, _ = run(tmp_path / "routed.jsonl", "--routing_policy", "domain", model="token")
    assert [line["domain"] for line in routed] == expected
    given = LexiconForCausalLM.from_pretrained(mixtures / "token", routing_policy="domain").eval()
    define = pipeline("definition-modeling", model=given, tokenizer=define.tokenizer, max_new_tokens=6)
    assert [line["generated"] for line in routed] == [one["definition"] for one in define(ROWS, domain_ids=expected)]
    one, _ = run(tmp_path / "one.jsonl", "--experts_per_token", 1, model="token")
    assert [line["score"] for line in one] != [line["score"] for line in plain]


def test_without_centroids_rows_name_their_domains(run, capsys, mixtures, tmp_path):
    routed = ("--routing_policy", "domain")
    assert "neither centroids nor a gate" in refused(run, capsys, tmp_path / "a.jsonl", *routed, model="bare")
    write_rows(mixtures / "domains.jsonl", [{**row, "domain": i % 2} for i, row in enumerate(ROWS)])
    lines, _ = run(tmp_path / "b.jsonl", *routed, model="bare", rows="domains.jsonl")
    assert [line["domain"] for line in lines] == [i % 2 for i in range(10)] and "distance" not in lines[0]
    write_rows(mixtures / "others.jsonl", [{**row, "domain": 1 - i % 2} for i, row in enumerate(ROWS)])
    others, _ = run(tmp_path / "c.jsonl", *routed, model="bare", rows="others.jsonl")
    assert all(a["score"] != b["score"] for a, b in zip(lines, others, strict=True))


def test_routing_that_a_model_does_not_have_is_refused(run, capsys, mixtures, tmp_path):
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "domain")
    assert "is a 'llama' model" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "token", model="domain")
    assert "it has no model.layers.0.mlp.gate.weight" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "domains", model="token")
    assert "Did you mean 'domain'?" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--embedder", mixtures / "embedder")
    assert "--embedder" in error


# --- what is counted, and what is refused ---


def test_absent_terms_and_long_contexts_are_counted(run, capsys, folder, tmp_path):
    long = {"term": "axe", "context": "so old " * 40 + "an axe " + "so old " * 40, "definition": "a tool"}
    write_rows(folder / "long.jsonl", [*ROWS[:3], long, {**ROWS[3], "context": "nothing"}])
    lines, printed = run(tmp_path / "a.jsonl", rows="long.jsonl")
    assert "absent from its context in 1 of 5" in printed
    assert "1 of 5 contexts exceed" in printed
    assert lines[3]["context"] == long["context"]  # the row is as it was
    error = refused(run, capsys, tmp_path / "b.jsonl", "--on_long", "error", rows="long.jsonl")
    assert "'axe'" in error
    assert truncate_context_around("axe", "a b c axe d e", lambda text: len(text.split()) <= 3) == "c axe d"
    assert truncate_context_around("axe", "a b", lambda text: False) is None
    assert truncate_context_around("to chop", "a b c chopped d e", lambda text: len(text.split()) <= 4) == "c chopped d"


def test_an_output_of_another_format_is_refused(run, capsys, tmp_path):
    assert "a.txt" in refused(run, capsys, tmp_path / "a.txt")


def test_signs_that_break_lines_elsewhere_are_kept(run, folder, tmp_path):
    odd = {"term": "axe", "context": "an axe\u2028and\x85a saw", "definition": "a\u2029tool"}
    write_rows(folder / "odd.jsonl", [odd, ROWS[0]])
    lines, _ = run(tmp_path / "odd.jsonl", "--best_of", 2, rows="odd.jsonl")
    assert len(lines) == 2 and {name: lines[0][name] for name in odd} == odd


def test_terms_of_a_file_are_defined(folder, tmp_path):
    """`lexperts define terms` writes what the pipeline returns."""
    source, output = write_rows(tmp_path / "in.jsonl", TERMS), tmp_path / "out.jsonl"
    command = ["terms", str(source), str(output), "-m", str(folder / "dense")]
    command += ["--max-new-tokens", "6", "--batch-size", "4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "10 documents in" in result.output, result.output
    define = pipeline("definition-modeling", model=str(folder / "dense"), max_new_tokens=6)
    expected = [row | one for row, one in zip(TERMS, define(TERMS), strict=True)]
    assert [line["definition"] for line in read_rows(output)] == [line["definition"] for line in expected]
    error = CliRunner().invoke(app, [*command, "--best-of", "2"])
    assert error.exit_code == 2 and "best_of=1 before, 2 now" in error.stderr
    other = shutil.copytree(folder / "dense", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    error = CliRunner().invoke(app, [*command[:3], "-m", str(other), *command[5:]])
    assert error.exit_code == 2 and "model=dense (" in error.stderr
    assert "is complete: " in CliRunner().invoke(app, command).output


def test_sampled_definitions_do_not_depend_on_interruptions_and_bad_rows_are_reported(folder, tmp_path):
    rows = [*TERMS[:9], {"term": "axe", "context": None}]
    source, whole, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ["-m", str(folder / "dense"), "--max-new-tokens", "6", "--best-of", "2", "--batch-size", "1"]
    CliRunner().invoke(app, ["terms", str(source), str(whole), *options])
    output.write_text("".join(whole.read_text().splitlines(keepends=True)[:8]))  # as if killed after a batch
    shutil.copy(f"{whole}.settings.json", f"{output}.settings.json")
    done = CliRunner().invoke(app, ["terms", str(source), str(output), *options])
    assert done.exit_code == 0 and "2 of them new; 1 could not be processed" in done.output, done.output
    assert output.read_bytes() == whole.read_bytes()
    assert read_rows(output)[9] == rows[9] | {"error": "its context is None, not a text"}


def test_a_definition_of_the_source_is_not_replaced(folder, tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    error = CliRunner().invoke(app, ["terms", str(source), str(output), "-m", str(folder / "dense")])
    assert error.exit_code == 2 and "column 'definition' has the name of a result" in error.stderr
    assert not output.exists()


def test_a_file_without_the_columns_names_no_option_that_the_command_lacks(folder, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"term": "axe", "sentence": "an axe fell"}])
    error = CliRunner().invoke(app, ["terms", str(source), str(tmp_path / "out.jsonl"), "-m", str(folder / "dense")])
    assert error.exit_code == 2 and "has no column 'context'" in error.stderr and "--" not in error.stderr


@pytest.mark.parametrize("options, count", [((), 1), (("--num-definitions", "3"), 3), (("--best-of", "4"), 1)])
def test_a_term_of_the_command_line_is_defined(options, count, folder, monkeypatch):
    command = ["term", "bell", "-c", "the bell rang", "--json", *options]
    monkeypatch.setattr("run_tools.packaged.find_packaged", lambda name: str(folder / "dense"))
    given = CliRunner().invoke(app, [*command, "-m", str(folder / "dense")])
    by_default = CliRunner().invoke(app, command)
    found = json.loads(given.stdout.splitlines()[-1])
    assert 1 <= len(found) <= count and {"term", "definition", "score"} <= found[0].keys()
    assert json.loads(by_default.stdout.splitlines()[-1]) == found


def test_a_term_without_a_context_of_its_own_is_defined_with_a_warning(folder, monkeypatch):
    warnings = []
    logger = SimpleNamespace(warning=warnings.append, warning_once=warnings.append)
    monkeypatch.setattr("modeling_lexicon.generation_lexicon.logger", logger)
    define, rows = pipeline("definition-modeling", model=str(folder / "dense")), []
    for term in ("gong", "Bell", "to bell"):
        rows.append({"term": term, "context": "the bell rang"})
        assert define(rows[-1])["term"] == term
    assert len(warnings) == 1 and "'gong' does not occur in its context" in warnings[0]
    assert define(rows) == [define(row) for row in rows]
    assert any(text.startswith("Some terms do not occur in their contexts, such as 'gong'") for text in warnings)


@pytest.mark.parametrize(
    "term, context, place",
    [
        ("primary", "Closed primaries, then a primary.", range(4, 5)),  # the word itself first
        ("closed primary", "They hold closed primaries.", range(2, 4)),
        ("to prune", "Prune the roses.", range(0, 1)),
        ("advance", "We are advancing.", range(2, 3)),
        ("day", "In other days", range(2, 3)),
        ("primary election", "Two primary elections", range(1, 3)),
        ("stop", "It stopped.", range(1, 2)),
        ("car", "They care", None),
        ("care", "A car", None),
        ("cat", "A catalogue of dogs", None),
        ("prune", "A prudent man", None),
        ("to", "nowhere at all", None),
        ("C++", "Neither C nor C++.", range(3, 4)),
        ("Acme, Inc.", "That is “Acme Inc”", range(2, 4)),
        ("*rose*", "Two ‘roses’ —", range(1, 2)),
        ("…", "And then … —", range(2, 3)),
        ("नदी", "नदे", None),
    ],
)
def test_a_term_is_found_in_its_context_in_another_form(term, context, place):
    assert find_term(term, context.split()) == place
