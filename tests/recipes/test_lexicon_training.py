"""The training commands of LM-Lexicon, on tiny models."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lexperts.recipes.common import perplexity
from lexperts.recipes.common.arguments import parse_command
from lexperts.recipes.lexicon import train_expert, training, tune_router
from modeling_lexicon import data_lexicon
from run_tools.definition_rows import FIELDS, load_definition_rows
from tests.recipes.helpers import TINY, fails, write_rows

ROOT = Path(__file__).resolve().parents[2]
LEXICON = ROOT / "lexperts" / "recipes" / "lexicon"
THINGS = ("bird", "boat", "bell", "barn", "book")
SCRATCH = {name: value for name, value in TINY.items() if not name.endswith("_token_id")}


def some_rows(count: int = 40) -> list[dict]:
    return [
        {
            "term": f"{THINGS[i % 5]}{i}",
            "context": f"the {THINGS[i % 5]}{i} of {'old ' * (i % 4)}number {i}",
            "definition": f"a {THINGS[i % 5]} that is number {i}",
            "domain": i % 4,
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", some_rows())


@pytest.fixture(scope="module")
def tokenizer():
    return train_expert.train_tokenizer(some_rows(), TINY["vocab_size"])


@pytest.fixture(scope="module")
def mixtral(tokenizer, tmp_path_factory):
    """A stock Mixtral with random gates."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def environment(**changes) -> dict:
    """A process's, with this one's threads, so that sums come out alike."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads()), **changes}


def training_options(rows_file, output, *options) -> tuple:
    return (
        "--train_files", rows_file, "--validation_files", rows_file, "--output_dir", output, "--learning_rate", 0.01,
        "--per_device_train_batch_size", 8, "--use_cpu", "--report_to", "none", *options,
    )  # fmt: skip


def in_this_process(capsys, main, *options) -> str:
    """Runs a main() without the seconds that a new process takes to start -> its output."""
    main([*map(str, options)])
    return capsys.readouterr().out


def tune(capsys, mixture, rows_file, output, *options) -> str:
    return in_this_process(
        capsys, tune_router.main, "--model_name_or_path", mixture, "--train_files", rows_file,
        "--validation_files", rows_file, "--output_dir", output, "--max_steps", 4, "--learning_rate", 0.01,
        "--eval_strategy", "steps", "--eval_steps", 2, "--use_cpu", "--report_to", "none", *options,
    )  # fmt: skip


# --- data ---


def test_a_row_is_bos_prompt_eos_definition_eos_with_the_loss_on_the_definition(tokenizer):
    batch = {"term": ["bell"], "context": ["the bell rang"], "definition": ["a thing that rings"]}
    columns = data_lexicon.tokenize_definitions(batch, tokenizer, 128)
    ids, labels = columns["input_ids"][0], columns["labels"][0]
    text = '<s>"the bell rang" What is the definition of "bell"?</s>a thing that rings</s>'
    assert tokenizer.decode(ids) == text
    end = ids.index(tokenizer.eos_token_id) + 1
    assert labels == [-100] * end + ids[end:]
    assert tokenizer.decode(ids[end:]) == "a thing that rings</s>"


def test_no_token_spans_the_boundary_and_a_special_tokens_name_is_mere_text(tokenizer):
    batch = {"term": ["a"], "context": ["x </s> y"], "definition": ["<s>b</s>"]}
    ids = data_lexicon.tokenize_definitions(batch, tokenizer, 128)["input_ids"][0]
    assert ids.count(tokenizer.eos_token_id) == 2 and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == '<s>"x </s> y" What is the definition of "a"?</s><s>b</s></s>'


def test_long_rows_are_left_out_whole_and_counted(tokenizer):
    rows = [*some_rows(3), {"term": "long", "context": "very " * 90, "definition": "long", "domain": 3}]
    columns, too_long = training.tokenize_rows(rows, tokenizer, 64)
    assert too_long == 1 and columns["row"] == [0, 1, 2] and columns["domain_ids"] == [0, 1, 2]
    exact = max(map(len, columns["input_ids"]))
    assert training.tokenize_rows(rows[:3], tokenizer, exact)[1] == 0
    assert training.tokenize_rows(rows[:3], tokenizer, exact - 1)[1] >= 1
    with pytest.raises(ValueError, match="All 4 rows exceed max_length=3"):
        training.tokenize_rows(rows, tokenizer, 3)


def test_rows_without_a_field_are_dropped_and_counted(tmp_path):
    good = {"term": "a", "context": "b", "definition": "c"}
    bad = [{**good, "term": ""}, {**good, "context": "  "}, {**good, "definition": None}, {"term": "a"}]
    several = {**good, "context": ["one", "two", ""]}
    rows, dropped = load_definition_rows(
        write_rows(tmp_path / "rows.jsonl", [good, *bad, {**good, "term": 7}, several])
    )
    assert [row["context"] for row in rows] == ["b", "one", "two"] and dropped == 6
    with pytest.raises(ValueError, match="4 were dropped"):
        load_definition_rows(write_rows(tmp_path / "bad.jsonl", bad))
    (tmp_path / "broken.jsonl").write_text('{"term": "a"\n')
    with pytest.raises(ValueError, match=r"broken.jsonl, line 1"):
        load_definition_rows(tmp_path / "broken.jsonl")


def test_perplexity_is_that_of_the_definitions_tokens_whatever_the_batch(tokenizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.3)).eval()
    columns, _ = training.tokenize_rows(some_rows(7), tokenizer, 128)
    del columns["domain_ids"]  # a Llama has no use for them
    expected = []
    for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [t for t, label in enumerate(labels) if label != -100]
        expected.append([-sum(log_p[t - 1, ids[t]].item() for t in places), len(places)])
    collator = data_lexicon.DataCollatorForDefinitions(tokenizer)
    for batch_size in (1, 3, 7):
        losses = perplexity.definition_losses(model, columns, collator, batch_size)
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    nats, tokens = map(sum, zip(*expected, strict=True))
    assert perplexity.perplexity(losses) == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    for useless in ([[0.0, 0.0]], [[math.nan, 5.0]], []):
        with pytest.raises(ValueError, match="no perplexity can be computed"):
            perplexity.perplexity(useless)


@pytest.mark.parametrize(
    "model_class, config_class", [(LlamaForCausalLM, LlamaConfig), (MixtralForCausalLM, MixtralConfig)]
)
def test_scoring_the_answers_only_changes_neither_loss_nor_gradients(model_class, config_class, tokenizer):
    torch.manual_seed(0)
    model = model_class(config_class(**TINY, initializer_range=0.3))
    columns, _ = training.tokenize_rows(some_rows(7), tokenizer, 128)
    rows = [{name: columns[name][i] for name in ("input_ids", "labels")} for i in range(7)]
    count = sum(label >= 0 for row in rows for label in row["labels"])
    losses, gradients = [], []
    for answers_only in (False, True):
        batch = data_lexicon.DataCollatorForDefinitions(tokenizer, answers_only)(rows)
        model.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        losses.append(outputs.loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert outputs.logits.shape[1] == batch["labels"].shape[1]
        sums = perplexity.token_nll(outputs.logits, batch["labels"]).sum(0).tolist()
        assert sums == pytest.approx([losses[0] * count, count], rel=1e-4)
    assert outputs.logits.shape[1] < len(batch["input_ids"][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0])


# --- one expert ---


def train_expert_in(capsys, rows_file, output, *options) -> dict:
    """Trains an expert -> its results.json."""
    printed = in_this_process(capsys, train_expert.main, *training_options(rows_file, output, *options))
    assert "train: 40 rows; 0 dropped" in printed and "perplexity of the definitions" in printed
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def base(rows_file, tmp_path_factory):
    """A model that was trained from scratch for three epochs."""
    folder = tmp_path_factory.mktemp("base") / "base"
    options = training_options(rows_file, folder, "--from_scratch", json.dumps(SCRATCH), "--num_train_epochs", 3)
    train_expert.main([*map(str, options)])
    return folder


def test_an_expert_is_trained_from_scratch_and_fine_tuned_from_its_folder(base, rows_file, tmp_path, capsys):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    assert not list(base.glob("*.bin")) and model.generation_config.use_cache
    first = json.loads((base / "results.json").read_text())["eval_perplexity"]
    options = ("--model_name_or_path", base, "--num_train_epochs", 3)
    assert train_expert_in(capsys, rows_file, tmp_path / "expert", *options)["eval_perplexity"] < 0.9 * first


@pytest.mark.parametrize("part, names", [("mlp", {"mlp"}), ("linear", {"mlp", "self_attn"})])
def test_a_part_alone_is_trained(part, names, base, rows_file, tmp_path, capsys):
    train_expert_in(
        capsys, rows_file, tmp_path / "part", "--model_name_or_path", base, "--train", part, "--max_steps", 1
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "part"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if len(parts := name.split(".")) == 6 and parts[3] in names}


@pytest.mark.parametrize("part, places", [("mlp", (".mlp.",)), ("linear", (".mlp.", ".self_attn."))])
def test_differences_of_low_rank_are_trained_and_added_to_the_weights(part, places, base, rows_file, tmp_path, capsys):
    options = (
        "--model_name_or_path",
        base,
        "--train",
        part,
        "--lora_r",
        2,
        "--save_strategy",
        "steps",
        "--save_steps",
        2,
    )
    train_expert_in(capsys, rows_file, tmp_path / "whole", *options, "--max_steps", 4)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "whole"))
    assert before.keys() == after.keys()
    ranks = {
        name: torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4)
        for name in before
        if before[name].dim() == 2
    }
    trained = {name for name in before if any(place in name for place in places)}
    assert {int(ranks[name]) for name in trained} == {2}
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - trained)
    rest = ("--max_steps", 4, "--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-2")
    train_expert_in(capsys, rows_file, tmp_path / "resumed", *options, *rest)
    torch.testing.assert_close(load_file(tmp_path / "resumed" / "model.safetensors"), after)


@pytest.mark.parametrize("options", [("--from_scratch", "{}"), ("--model_name_or_path", "{base}")])
def test_low_rank_needs_a_model_and_a_part_of_it(options, base, rows_file, tmp_path):
    given = [option.format(base=base) if option == "{base}" else option for option in options]
    paths = ("--train_files", rows_file, "--output_dir", tmp_path / "out")
    assert "--lora-r 2 cannot be combined with" in fails(train_expert.main, *paths, *given, "--lora_r", 2)


def test_a_new_model_learns_from_whole_rows_and_is_validated_on_definitions(rows_file, tmp_path):
    options = training_options(rows_file, tmp_path, "--from_scratch", json.dumps(SCRATCH), "--learn", "row")
    trainer, _ = train_expert.prepare(*parse_command("lexicon", "train_expert", [*map(str, options)]))
    for row in trainer.train_dataset:
        assert row["labels"] == row["input_ids"]
    for row, learned in zip(trainer.eval_dataset, trainer.train_dataset, strict=True):
        definition = [label for label in row["labels"] if label != -100]
        assert row["input_ids"] == learned["input_ids"] and 0 < len(definition) < len(row["labels"])
        assert row["input_ids"][-len(definition) :] == definition


def test_errors_are_reported_in_one_line(rows_file, tmp_path):
    path = ("--train_files", rows_file, "--output_dir", tmp_path)
    for options, printed in (
        (path, "Pass one of them"),
        ((*path, "--from_scratch", '{"hiden_size": 8}'), "Did you mean 'hidden_size'?"),
    ):
        assert printed in fails(train_expert.main, *options)


def test_the_large_recipe_holds_the_papers_table():
    """Table 8; its text has other values for several of them."""
    recipe = yaml.safe_load((LEXICON / "llama3_8b.yml").read_text())
    found = {name: recipe[name] for name in ("learning_rate", "weight_decay", "warmup_steps", "num_train_epochs")}
    assert found == {"learning_rate": 5e-6, "weight_decay": 0.01, "warmup_steps": 0.1, "num_train_epochs": 3}
    assert (recipe["adam_beta1"], recipe["adam_beta2"], recipe["max_grad_norm"]) == (0.9, 0.95, 1.0)
    rows = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * 8
    assert rows * recipe["max_length"] == 524_288


# --- the router ---


@pytest.mark.parametrize("parts", ["gates", "gates,experts", "all"])
def test_only_what_is_named_is_trained_and_the_mixture_opens_again(parts, mixtral, rows_file, tmp_path, capsys):
    balance = ("--router_aux_loss_coef", 0.02) * (parts != "gates")
    printed = tune(capsys, mixtral, rows_file, tmp_path, "--train", parts, *balance)
    assert "perplexity of the definitions" in printed
    before, after = (load_file(folder / "model.safetensors") for folder in (mixtral, tmp_path))
    assert before.keys() == after.keys() and any("block_sparse_moe.experts.3.w1" in name for name in after)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    named = {name for name in after if ".gate." in name or (".experts." in name and "experts" in parts)}
    assert changed == (set(after) if parts == "all" else named)
    model = MixtralForCausalLM.from_pretrained(tmp_path)
    assert not model.config.output_router_logits
    assert model.config.router_aux_loss_coef == (0.02 if balance else MixtralConfig().router_aux_loss_coef)


def test_the_balance_loss_counts_once_a_step_under_gradient_accumulation(mixtral, rows_file, tmp_path, capsys):
    """A large coefficient, so that counting it once a micro-batch would show."""
    balance, weights = ("--router_aux_loss_coef", 50, "--eval_strategy", "no", "--optim", "sgd"), []
    for size, steps in ((8, 1), (2, 4)):
        batches = ("--per_device_train_batch_size", size, "--gradient_accumulation_steps", steps, "--max_grad_norm", 0)
        output = tmp_path / str(size)
        tune(capsys, mixtral, rows_file, output, *balance, *batches, "--max_steps", 1)
        weights.append(load_file(output / "model.safetensors"))
    start = load_file(mixtral / "model.safetensors")
    steps = [torch.cat([(w[n] - start[n]).flatten() for n in w if "gate." in n]).norm() for w in weights]
    assert 0.5 < steps[1] / steps[0] < 2 and steps[0] > 0


def test_lora_saves_attention_and_gates_and_the_adapter_opens(mixtral, rows_file, tmp_path, capsys):
    tune(capsys, mixtral, rows_file, tmp_path, "--lora", "--lora_r", 4)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("lora_A" in name for name in saved) == 8 and sum(".gate." in name for name in saved) == 2
    start = load_file(mixtral / "model.safetensors")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
    gates = {name: p for name, p in model.named_parameters() if "gate.modules_to_save" in name}
    assert len(gates) == 2
    for i, gate in enumerate(gates.values()):
        assert not torch.equal(gate, start[f"model.layers.{i}.block_sparse_moe.gate.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    columns, _ = training.tokenize_rows(some_rows(), tokenizer, 128)
    del columns["domain_ids"]
    losses = perplexity.definition_losses(model, columns, data_lexicon.DataCollatorForDefinitions(tokenizer))
    trained = json.loads((tmp_path / "results.json").read_text())["eval_perplexity"]
    assert perplexity.perplexity(losses) == pytest.approx(trained, rel=1e-4)


def test_a_model_without_routers_and_a_top_1_mixtral_are_refused(mixtral, tokenizer, rows_file, tmp_path, capsys):
    dense, lone = tmp_path / "dense", tmp_path / "lone"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(dense)
    MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2, num_experts_per_tok=1)).save_pretrained(lone)
    for folder, options, printed in (
        (dense, (), "model_type='llama' has no routers"),
        (lone, (), "num_experts_per_tok=1"),
        (mixtral, ("--train", "gate"), "unknown part 'gate'"),
        (mixtral, ("--train", "all", "--lora"), "train='all' cannot be combined with lora"),
    ):
        tokenizer.save_pretrained(folder)
        with pytest.raises(SystemExit) as ended:
            tune(capsys, folder, rows_file, tmp_path / "out", *options)
        assert ended.value.code == 2 and printed in capsys.readouterr().err


def test_two_processes_score_what_one_does(mixtral, rows_file, tmp_path, capsys):
    """With a validation set that does not divide by the batches, on weights that hardly move."""
    options = (
        "--per_device_eval_batch_size", 6, "--max_steps", 2, "--eval_strategy", "no", "--router_aux_loss_coef", 0.01,
        "--learning_rate", 1e-9, "--use_cpu", "--report_to", "none", "--train_files", rows_file,
        "--validation_files", rows_file, "--model_name_or_path", mixtral,
    )  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 29611]
    launch += ["-m", "lexperts", "train", "lexicon-router"]
    done = subprocess.run(
        [sys.executable, *map(str, (*launch, *options, "--output_dir", tmp_path / "two"))],
        env=environment(ACCELERATE_USE_CPU="true"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("perplexity of the definitions") == 1
    in_this_process(capsys, tune_router.main, *options, "--output_dir", tmp_path / "one")
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text())["eval_perplexity"] for name in ("one", "two")
    )
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize("policy", ["token", "sequence_soft", "sequence_hard", "domain"])
def test_a_lexicon_model_is_tuned_under_every_policy(policy, tokenizer, rows_file, tmp_path, capsys):
    modeling_lexicon = pytest.importorskip("modeling_lexicon")
    torch.manual_seed(0)
    config = modeling_lexicon.LexiconConfig(
        **TINY, num_local_experts=4, routing_policy=policy, expert_names=list("abcd"), initializer_range=0.3
    )
    mixture = tmp_path / "mixture"
    modeling_lexicon.LexiconForCausalLM(config).save_pretrained(mixture)
    tokenizer.save_pretrained(mixture)
    parts = "experts" if policy == "domain" else "gates"
    tune(capsys, mixture, rows_file, tmp_path / "out", "--train", parts)
    before, after = (load_file(folder / "model.safetensors") for folder in (mixture, tmp_path / "out"))
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed and all("experts" in name if policy == "domain" else "gate.weight" in name for name in changed)
    if policy == "domain":
        plain = write_rows(tmp_path / "rows.jsonl", [{name: row[name] for name in FIELDS} for row in some_rows()])
        with pytest.raises(SystemExit):
            tune(capsys, mixture, plain, tmp_path / "none", "--train", parts)
        assert "the rows have no domain" in capsys.readouterr().err
