"""generate.py and in_context.py: the best of several samples, the same file after an interruption, prompts to the byte."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_lexicon.data_lexicon import prompt
from modeling_lexicon.defining_lexicon import SAMPLING, Definer, cut_around, length_of
from tests.examples.scripts import scripts_of

TINY = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
KINDS = ("cat", "dog", "saw", "axe")
ROWS = [
    {
        "term": f"{KINDS[i % 4]}{i}",
        "context": f"the {KINDS[i % 4]}{i} is {'old ' * (i % 3)}here",
        "definition": f"a {KINDS[i % 4]} of kind {i}",
        "source": "made",
    }
    for i in range(10)
]


@pytest.fixture(scope="module")
def scripts():
    with scripts_of("lexicon", "generate", "in_context", "resumable", "train_expert") as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(scripts):
    return scripts.train_expert.train_tokenizer(ROWS, TINY["vocab_size"])


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


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def run(scripts, folder, monkeypatch, capsys):
    """run(output, *options) -> the rows written and what was said; of generate.py, or another script's main."""

    def run(output, *options, main=None, model="dense", rows="rows.jsonl"):
        given = ("--model_name_or_path", folder / model, "--test_files", folder / rows, "--output", output,
                 "--max_new_tokens", 6, "--batch_size", 4, *options)  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["script", *map(str, given)])
        (main or scripts.generate.main)()
        said = capsys.readouterr().out
        return (read(output) if Path(output).exists() else None), said

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
            [0, *tokenizer(prompt(row["term"], row["context"]), add_special_tokens=False)["input_ids"], 1]
            for row in own
        ]
        order = sorted(range(len(own)), key=lambda i: len(prompts[i]), reverse=True)
        T = max(map(len, prompts))
        ids = torch.tensor([[2] * (T - len(prompts[i])) + prompts[i] for i in order])
        torch.manual_seed(seed + start)
        made = model.generate(ids, attention_mask=(ids != 2).long(), max_new_tokens=6, do_sample=True, **SAMPLING)
        texts = [tokenizer.decode(own[:k], skip_special_tokens=True).strip() for own, k in
                 zip(made[:, T:], length_of(made[:, T:], 1), strict=True)]  # fmt: skip
        found += [texts[order.index(i)] for i in range(len(own))]
    return found


# --- the best of n ---


def test_the_best_of_one_is_plain_generation_under_the_same_seed(run, folder, tokenizer, tmp_path):
    plain = drawn_by_generate(folder, tokenizer, 7)
    for scorer in (("likelihood",), ("reward", "--reward_model", folder / "reward"), ("oracle",)):
        lines, _ = run(tmp_path / f"{scorer[0]}.jsonl", "--sample", "--seed", 7, "--scorer", *scorer)
        assert [line["generated"] for line in lines] == plain
    other, _ = run(tmp_path / "other.jsonl", "--sample", "--seed", 8)
    assert [line["generated"] for line in other] != plain
    greedy, said = run(tmp_path / "greedy.jsonl")
    define = pipeline("definition-modeling", model=str(folder / "dense"), max_new_tokens=6)
    assert [line["generated"] for line in greedy] == [one["definition"] for one in define(ROWS)]
    assert "10 rows in" in said and "a second" in said
    assert [{name: line[name] for name in ROWS[0]} for line in greedy] == ROWS
    assert all(set(line) == {*ROWS[0], "generated", "score"} for line in greedy)


def test_the_curve_is_of_the_first_samples_of_one_draw(run, folder, tmp_path):
    options = ("--best_of", 5, "--curve", 1, 3, 5, "--temperature", 2.0, "--reward_model", folder / "reward")
    lines, _ = run(tmp_path / "best.jsonl", *options, "--keep_samples")
    files = {n: read(tmp_path / f"best.best{n}.jsonl") for n in (1, 3, 5)}
    assert files[5] == lines and [line["term"] for line in lines] == [row["term"] for row in ROWS]
    for i, line in enumerate(lines):
        assert len(line["samples"]) == 5
        for n, own in files.items():
            first = line["samples"][:n]
            assert own[i]["score"] == max(sample["score"] for sample in first) and own[i]["samples"] == first
            assert {"definition": own[i]["generated"], "score": own[i]["score"]} in first
    scores = [[line["score"] for line in files[n]] for n in (1, 3, 5)]
    assert all(a <= b for low, high in zip(scores, scores[1:], strict=False) for a, b in zip(low, high, strict=True))
    assert scores[0] != scores[2]  # or the choice would be no choice
    plain, _ = run(tmp_path / "plain.jsonl", *options)
    assert [line["generated"] for line in plain] == [line["generated"] for line in lines] and "samples" not in plain[0]


def test_samples_stand_in_the_order_of_being_drawn_and_answers_by_score(folder, tokenizer):
    model = LlamaForCausalLM.from_pretrained(folder / "dense").eval()
    definer = Definer(model, tokenizer, best_of=6, num_definitions=6, temperature=3.0, max_new_tokens=4)
    torch.manual_seed(0)
    drawn = definer.draw(ROWS[:3])
    torch.manual_seed(0)
    best = definer(ROWS[:3])
    for samples, own in zip(drawn, best, strict=True):
        assert own == sorted(samples, key=lambda one: -one["score"])
    assert any(samples != own for samples, own in zip(drawn, best, strict=True))


def test_the_oracle_takes_the_nearest_to_any_reference_and_says_so(scripts, run, folder, tmp_path):
    samples, _ = run(tmp_path / "all.jsonl", "--best_of", 6, "--temperature", 3.0, "--keep_samples")
    rows = [
        {**row, "definition": line["samples"][4]["definition"]}
        for row, line in zip(ROWS, samples, strict=True)
        if line["samples"][4]["definition"]
    ]
    same = [{**row, "definition": "something else entirely"} for row in rows]
    write_rows(folder / "gold.jsonl", rows + same)  # the same rows again, of another definition
    options = ("--best_of", 6, "--temperature", 3.0, "--scorer", "oracle", "--max_rows", len(rows) + len(same))
    lines, said = run(tmp_path / "oracle.jsonl", *options, rows="gold.jsonl")
    assert "for analysis only" in said and all(line["oracle"] is True for line in lines)
    oracle = scripts.generate.oracle_of(rows + same)
    assert oracle(0, rows[0]["definition"]) == oracle(len(rows), rows[0]["definition"]) == pytest.approx(100)
    assert oracle(0, "quite another text") < 50
    kept, _ = run(tmp_path / "kept.jsonl", *options, "--keep_samples", rows="gold.jsonl")
    for i, line in enumerate(kept):
        values = [oracle(i, sample["definition"]) for sample in line["samples"]]
        assert [sample["score"] for sample in line["samples"]] == values
        assert (
            line["score"] == max(values)
            and line["generated"] == line["samples"][values.index(max(values))]["definition"]
        )


# --- interruptions ---


def test_an_interrupted_run_ends_in_the_same_files(run, tmp_path, scripts, monkeypatch):
    options = ("--best_of", 3, "--curve", 1, 3)
    run(tmp_path / "whole.jsonl", *options)
    names = ("whole.jsonl", "whole.best1.jsonl", "whole.best3.jsonl")
    whole = {name: (tmp_path / name).read_bytes() for name in names}
    monkeypatch.setattr(scripts.generate, "choose", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part" / "whole.jsonl", *options)
    monkeypatch.undo()
    part = (tmp_path / "part" / "whole.part").read_bytes()
    lines = part.split(b"\n")
    assert len(lines) == 11
    for done in (0, 3, 4, 9, 10):
        cut = tmp_path / str(done)
        cut.mkdir()
        (cut / "whole.part").write_bytes(b"".join(line + b"\n" for line in lines[:done]) + lines[done][:9])
        settings = (tmp_path / "part" / "whole.settings.json").read_text()
        (cut / "whole.settings.json").write_text(settings)
        _, said = run(cut / "whole.jsonl", *options)
        assert {name: (cut / name).read_bytes() for name in names} == whole and f"{10 - done} rows in" in said
        assert not (cut / "whole.part").exists()
    _, said = run(tmp_path / "whole.jsonl", *options)
    assert "stands already" in said


def test_a_file_of_other_settings_is_not_gone_on_with(run, capsys, tmp_path, folder):
    run(tmp_path / "a.jsonl")
    assert "seed=42 before, 1 now" in refused(run, capsys, tmp_path / "a.jsonl", "--seed", 1)
    write_rows(folder / "fewer.jsonl", ROWS[:3])
    error = refused(run, capsys, tmp_path / "a.jsonl", rows="fewer.jsonl")
    assert "rows=10 before, 3 now" in error and "rows_sha256" in error
    # what was refused before a row was drawn leaves nothing that the next command would trip over
    refused(run, capsys, tmp_path / "b.jsonl", "--embedder", "none")
    assert run(tmp_path / "b.jsonl")[0]


def test_definitions_of_a_model_trained_again_in_its_place_are_not_taken(run, capsys, tmp_path, folder):
    shutil.copytree(folder / "dense", tmp_path / "dense")
    run(tmp_path / "a.jsonl", model=tmp_path / "dense")
    shutil.copytree(tmp_path / "dense", tmp_path / "moved")
    (tmp_path / "moved" / "results.json").write_text("{}")
    assert "stands already" in run(tmp_path / "a.jsonl", model=tmp_path / "moved")[1]  # the same content
    model = LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "dense")
    assert "model_name_or_path=dense (" in refused(run, capsys, tmp_path / "a.jsonl", model=tmp_path / "dense")
    (tmp_path / "a.settings.json").unlink()
    assert "has no record of its settings" in refused(run, capsys, tmp_path / "a.jsonl")


def test_a_line_that_was_being_written_is_taken_off(scripts, tmp_path):
    path = tmp_path / "a.part"
    for text, lines in (("", 0), ("{}\n{", 1), ("{}\n{}\n", 2), ("{", 0)):
        path.write_text(text)
        assert scripts.resumable.whole_lines(path) == lines and path.read_text() == "{}\n" * lines
    assert scripts.resumable.whole_lines(tmp_path / "none") == 0


# --- mixtures ---


@pytest.fixture(scope="module")
def mixtures(folder, tokenizer):
    """A mixture of two with centroids and gates, and the embedder that they are of: a vector a word."""
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    except ImportError:  # before release 6
        from sentence_transformers.models import StaticEmbedding

    words = ["[UNK]", *sorted({word for row in ROWS for word in prompt(row["term"], row["context"]).split()})]
    words += [f"{kind}{i}" for i, kind in enumerate(KINDS * 3)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = torch.full((len(vocabulary), 2), 0.01)
    for word, i in vocabulary.items():
        vectors[i, int(word.startswith(("saw", "axe")))] += 1.0 if word.startswith(KINDS) else 0.0
    SentenceTransformer(modules=[StaticEmbedding(backend, embedding_weights=vectors.numpy())], device="cpu").save(
        str(folder / "embedder")
    )
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
    expected = [int(row["term"].startswith(("saw", "axe"))) for row in ROWS]
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
    assert "has neither centroids nor a gate" in refused(run, capsys, tmp_path / "a.jsonl", *routed, model="bare")
    write_rows(mixtures / "domains.jsonl", [{**row, "domain": i % 2} for i, row in enumerate(ROWS)])
    lines, _ = run(tmp_path / "b.jsonl", *routed, model="bare", rows="domains.jsonl")
    assert [line["domain"] for line in lines] == [i % 2 for i in range(10)] and "distance" not in lines[0]
    write_rows(mixtures / "others.jsonl", [{**row, "domain": 1 - i % 2} for i, row in enumerate(ROWS)])
    others, _ = run(tmp_path / "c.jsonl", *routed, model="bare", rows="others.jsonl")
    assert all(a["score"] != b["score"] for a, b in zip(lines, others, strict=True))


def test_routing_that_a_model_does_not_have_is_refused(run, capsys, mixtures, tmp_path):
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "domain")
    assert "is a 'llama' model, without experts to route. Leave out routing_policy" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "token", model="domain")
    assert "it has no model.layers.0.mlp.gate.weight" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--routing_policy", "domains", model="token")
    assert "Did you mean 'domain'?" in error
    error = refused(run, capsys, tmp_path / "a.jsonl", "--embedder", mixtures / "embedder")
    assert "has no centroids that --embedder could be for" in error


# --- what is counted, and what is refused ---


def test_absent_terms_and_long_contexts_are_counted(run, capsys, folder, tmp_path):
    long = {"term": "axe", "context": "so old " * 40 + "an axe " + "so old " * 40, "definition": "a tool"}
    write_rows(folder / "long.jsonl", [*ROWS[:3], long, {**ROWS[3], "context": "nothing"}])
    lines, said = run(tmp_path / "a.jsonl", rows="long.jsonl")
    assert "absent from its context in 1 of 5 rows" in said
    assert "1 of 5 contexts are longer than the model and are cut around their terms" in said
    assert lines[3]["context"] == long["context"]  # the row is as it was
    report = json.loads((tmp_path / "a.settings.json").read_text())["report"]
    assert (report["absent"], report["cut"], report["rows"]) == (1, 1, 5)
    assert report["model"] == str(folder / "dense")
    error = refused(run, capsys, tmp_path / "b.jsonl", "--on_long", "error", rows="long.jsonl")
    assert "The context of 'axe' has" in error
    assert cut_around("axe", "a b c axe d e", lambda piece: len(piece.split()) <= 3) == "c axe d"
    assert cut_around("axe", "a b", lambda piece: False) is None


@pytest.mark.parametrize(
    "options, said",
    [
        (("--best_of", 2, "--curve", 1, 4), "curve has 4, and best_of=2"),
        (("--scorer", "reward"), "scorer='reward' and reward_model=None: the one goes with the other"),
        (("--scorer", "bleu"), "scorer='bleu' is not known. Use likelihood, reward or oracle"),
        (("--best_of", 0), "best_of=0: it must be 1 or more"),
        (("--on_long", "keep"), "on_long='keep' is not known. Use cut or error"),
        (("--output", "a.txt"), "output='a.txt' is written as JSON Lines"),
        (("--test_files", "none.jsonl"), "none.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options, said, run, capsys, tmp_path):
    assert said in refused(run, capsys, tmp_path / "a.jsonl", *options)


# --- in context ---

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SHOTS = [
    {"term": "ox", "context": "an\nox  ploughs", "definition": "a strong\nanimal"},
    {"term": "cow", "context": "the cow", "definition": "it gives milk"},
]


def maker(scripts, tokenizer, room=1000, chat=False, on_long="cut"):
    return scripts.in_context.PromptMaker(tokenizer, room, chat, on_long)


def test_the_prompt_is_this_to_the_byte(scripts, tokenizer):
    text = (
        '"the cow" What is the definition of "cow"? it gives milk\n'
        '"an ox ploughs" What is the definition of "ox"? a strong animal\n'
        '"the cat0 is here" What is the definition of "cat0"?'
    )
    assert tokenizer.decode(maker(scripts, tokenizer)(SHOTS, ROWS[0])) == text
    assert scripts.in_context.plain_prompt([], ROWS[0]) == '"the cat0 is here" What is the definition of "cat0"?'
    talking = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ValueError, match="The tokenizer has no chat template"):
        maker(scripts, talking, chat=True)
    talking.chat_template = CHAT
    turns = (
        '<user>"the cow" What is the definition of "cow"?\n<assistant>it gives milk\n'
        '<user>"an ox ploughs" What is the definition of "ox"?\n<assistant>a strong animal\n'
        '<user>"the cat0 is here" What is the definition of "cat0"?\n<assistant>'
    )
    assert talking.decode(maker(scripts, talking, chat=True)(SHOTS, ROWS[0])) == turns


def test_a_bos_that_the_tokenizer_puts_stands_once_and_no_eos(scripts, tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = maker(scripts, other)(SHOTS, {**ROWS[0], "context": "a </s> b"})
    assert ids[0] == 0 and ids.count(0) == 1 and ids.count(1) == 0


def test_shots_without_room_are_dropped_the_furthest_first(scripts, tokenizer):
    whole = len(maker(scripts, tokenizer)(SHOTS, ROWS[0]))
    tight = maker(scripts, tokenizer, whole - 1)
    text = tokenizer.decode(tight(SHOTS, ROWS[0]))
    assert "ox" in text and "cow" not in text and (tight.short, tight.used, tight.cut) == (1, 1, 0)
    alone = len(maker(scripts, tokenizer)([], ROWS[0]))
    cut = maker(scripts, tokenizer, alone)
    long = {**ROWS[0], "context": "very " * 50 + ROWS[0]["context"] + " very" * 50}
    assert "cat0" in tokenizer.decode(cut(SHOTS, long)) and (cut.short, cut.cut) == (1, 1)
    with pytest.raises(ValueError, match="there is room for .* Use --on_long cut"):
        maker(scripts, tokenizer, alone, on_long="error")(SHOTS, long)
    with pytest.raises(ValueError, match="not even for the term"):
        maker(scripts, tokenizer, 3)(SHOTS, long)


def test_shots_are_different_and_never_the_row_itself(scripts):
    pick = scripts.in_context.pick
    row = {"term": "Ox", "context": "an  ox", "definition": "?"}
    train = [
        {"term": "ox", "context": "AN ox", "definition": "the answer"},  # its own term and context
        {"term": "cow", "context": "a", "definition": "d1"},
        {"term": "COW", "context": "b", "definition": "d2"},  # a term that is there
        {"term": "hen", "context": "a", "definition": "d3"},  # a context that is there
        {"term": "cock", "context": "c", "definition": "D1 "},  # a definition that is there
        {"term": "ox", "context": "another ox", "definition": "d4"},
        {"term": "pig", "context": "d", "definition": "d5"},
    ]
    assert pick(range(7), train, row, 9) == [train[1], train[5], train[6]]
    assert pick(range(7), train, row, 2) == [train[1], train[5]]
    drawn = list(scripts.in_context.random_order(40, 1, 3))
    assert sorted(drawn) == list(range(40)) and drawn == list(scripts.in_context.random_order(40, 1, 3))
    assert drawn != list(scripts.in_context.random_order(40, 1, 4)) and drawn != list(range(40))


@pytest.mark.parametrize("by_embedder", [False, True])
def test_retrieved_shots_are_the_nearest_rows(by_embedder, scripts, mixtures):
    args = SimpleNamespace(
        embedder=str(mixtures / "embedder") if by_embedder else None, embedding_cache=None, shots=[0, 3],
        shots_by="retrieved", seed=0,
    )  # fmt: skip
    test = [dict(row) for row in ROWS[:4]]
    for row, shots in zip(test, scripts.in_context.shots_of(test, ROWS, args), strict=True):
        assert len(shots) == 3 and all(shot["term"] != row["term"] for shot in shots)  # the row is in the training rows
        if by_embedder:
            assert {shot["term"][:3] in ("saw", "axe") for shot in shots[:2]} == {row["term"][:3] in ("saw", "axe")}
    test = [{"term": "cat5", "context": "the cat8 is old old here", "definition": "?"}]
    if not by_embedder:
        assert scripts.in_context.shots_of(test, ROWS, args)[0][0] == ROWS[8]


def test_a_line_end_ends_the_definition(scripts, folder, tokenizer):
    model = LlamaForCausalLM.from_pretrained(folder / "dense").eval()
    ends = scripts.in_context.line_ends(model, tokenizer)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert ends[0] == tokenizer.eos_token_id and set(newline) < set(ends) and len(ends) < 8
    prompts = [maker(scripts, tokenizer)(SHOTS, row) for row in ROWS[:3]]
    options = {"max_new_tokens": 8}
    definer = scripts.in_context.InContextDefiner(model, tokenizer, prompts, ends, **options)
    assert definer.text_of(tokenizer(" a thing\nmore", add_special_tokens=False)["input_ids"]) == "a thing"
    whole = model.generate(torch.tensor([prompts[0]]), max_new_tokens=8, do_sample=False, eos_token_id=-1)[0]
    third = int(whole[len(prompts[0]) + 2])
    earlier = whole[len(prompts[0]) : len(prompts[0]) + 2].tolist()
    assert third not in earlier
    stopped = scripts.in_context.InContextDefiner(model, tokenizer, prompts, [third], **options)
    one = stopped.draw(ROWS[:1])[0][0]
    assert one["definition"] == tokenizer.decode([*earlier, third], skip_special_tokens=True).split("\n")[0].strip()
    with torch.no_grad():
        log_p = model(whole[None, : len(prompts[0]) + 3]).logits[0].log_softmax(-1)
    place = range(len(prompts[0]), len(prompts[0]) + 3)
    mean = sum(log_p[t - 1, whole[t]] for t in place) / 3
    assert one["score"] == pytest.approx(float(mean.exp()), abs=1e-5)


def test_a_file_for_each_number_of_shots(scripts, run, capsys, folder, tmp_path):
    write_rows(folder / "train.jsonl", ROWS)
    options = ("--train_files", folder / "train.jsonl", "--shots", 0, 1, 2)
    main = scripts.in_context.main
    _, said = run(tmp_path / "icl.jsonl", *options, main=main)
    found = {k: read(tmp_path / f"icl.shots{k}.jsonl") for k in (0, 1, 2)}
    for lines in found.values():
        assert [{name: line[name] for name in ROWS[0]} for line in lines] == ROWS
        assert all("\n" not in line["generated"] and 0 < line["score"] <= 1 for line in lines)
    assert "2 shots: " in said and "have no room and are dropped" in said
    assert [line["score"] for line in found[0]] != [line["score"] for line in found[1]]
    report = json.loads((tmp_path / "icl.shots1.settings.json").read_text())
    assert report["settings"]["shots"] == 1 and report["report"]["with_own_term"] == 0
    _, said = run(tmp_path / "icl.jsonl", *options, 3, main=main)  # those that are there are left alone
    assert said.count("stands already") == 3 and (tmp_path / "icl.shots3.jsonl").exists()
    run(tmp_path / "again.jsonl", *options, main=main)
    assert all(
        (tmp_path / f"again.shots{k}.jsonl").read_bytes() == (tmp_path / f"icl.shots{k}.jsonl").read_bytes()
        for k in (0, 1, 2)
    )
    run(tmp_path / "other.jsonl", *options, "--seed", 1, main=main)
    assert read(tmp_path / "other.shots0.jsonl") == found[0] and read(tmp_path / "other.shots1.jsonl") != found[1]
    for more, error in (
        (("--shots_by", "near"), "shots_by='near' is not known"),
        (("--shots", "-1"), "shots=[-1]: name one or more"),
        (("--chat",), "has no chat template"),
    ):
        assert error in refused(run, capsys, tmp_path / "x.jsonl", *options[:2], *more, main=main)
    assert "there are no train_files" in refused(run, capsys, tmp_path / "x.jsonl", "--shots", 1, main=main)


def test_signs_that_break_lines_elsewhere_are_kept(run, folder, tmp_path):
    odd = {"term": "axe", "context": "an axe\u2028and\x85a saw", "definition": "a\u2029tool"}
    write_rows(folder / "odd.jsonl", [odd, ROWS[0]])
    lines, _ = run(tmp_path / "odd.jsonl", "--best_of", 2, "--curve", 1, rows="odd.jsonl")
    assert len(lines) == 2 and {name: lines[0][name] for name in odd} == odd
