"""pipeline("definition-modeling"): of dense Llamas and mixtures, alone and in batches, one answer and the best of several."""

import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast, pipeline

from modeling_lexicon import format_prompt
from modeling_lexicon.generation_lexicon import DefinitionGenerator, distinct_definitions, generated_lengths
from modeling_lexicon.terms_lexicon import is_in_context, truncate_context_around

from .conftest import tiny_lexicon, tiny_llama

ROWS = [
    {"term": "bank", "context": "They sat on the bank of the river."},
    {"term": "cut", "context": "a cut"},
    {"term": "graph", "context": "The graph of the network is cut where the flow is least."},
]
LETTERS = 256


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


SIZES = {
    "vocab_size": LETTERS + 3, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense():
    return tiny_llama(**SIZES).eval()


@pytest.fixture(scope="module")
def define(dense, tokenizer):
    return pipeline("definition-modeling", model=dense, tokenizer=tokenizer, max_new_tokens=8)


def encoded(tokenizer, row):
    ids = tokenizer(format_prompt(row["term"], row["context"]), add_special_tokens=False)["input_ids"]
    return torch.tensor([[0, *ids, 1]])


def test_a_definition_is_what_generate_writes_and_its_score_what_the_model_thinks(define, dense, tokenizer):
    for row, found in zip(ROWS, define(ROWS), strict=True):
        ids = encoded(tokenizer, row)
        written = dense.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[
            0, ids.shape[1] :
        ]
        written = written[: generated_lengths(written[None], 1)[0]]
        with torch.no_grad():
            logits = dense(torch.cat([ids, written[None]], 1)).logits[0, ids.shape[1] - 1 : -1]
        log_p = logits.log_softmax(-1).gather(1, written[:, None]).mean()
        assert found == {
            "term": row["term"],
            "definition": tokenizer.decode(written, skip_special_tokens=True).strip(),
            "score": pytest.approx(math.exp(log_p), abs=1e-5),
        }


def test_the_size_of_batches_changes_nothing(define):
    expected = define(ROWS)
    for size in (1, 2):
        for one, two in zip(define(ROWS, batch_size=size), expected, strict=True):
            assert one["definition"] == two["definition"] and one["score"] == pytest.approx(two["score"], abs=1e-5)
    assert define(ROWS[0])["definition"] == expected[0]["definition"]


def test_the_best_of_one_sample_is_that_sample(define, dense, tokenizer):
    ids = encoded(tokenizer, ROWS[0])
    torch.manual_seed(3)
    options = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05, "do_sample": True}
    written = dense.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **options)[0, ids.shape[1] :]
    torch.manual_seed(3)
    found = define(ROWS[0], do_sample=True)
    assert found["definition"] == tokenizer.decode(written, skip_special_tokens=True).strip()


def test_the_best_are_the_likeliest_samples_in_their_order(define):
    torch.manual_seed(0)
    found = define(ROWS[:2], best_of=6, num_definitions=6, temperature=3.0)
    for own in found:
        scores = [one["score"] for one in own]
        assert len(own) == 6 and scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    torch.manual_seed(0)
    for own, best in zip(found, define(ROWS[:2], best_of=6, temperature=3.0), strict=True):
        assert best == own[0]


WAYS = {
    "greedy": {},
    "sampling": {"best_of": 4, "temperature": 3.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "beams": {"num_beams": 3, "repetition_penalty": 1.5},
    "several beams": {"num_beams": 3, "best_of": 2, "do_sample": False, "length_penalty": 0.2},
    "sampled beams": {"num_beams": 3, "best_of": 3, "temperature": 2.0},
    "looked up": {"prompt_lookup_num_tokens": 3},
    "all logits": {"best_of": 3, "synced_gpus": False},
    "all logits of beams": {"num_beams": 3, "best_of": 2, "do_sample": False, "synced_gpus": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_are_those_of_the_written_tokens_by_the_models_own_logits(way, dense, tokenizer):
    """Recomputed from the text by one pass over it, and, where `generate` keeps all logits in order, from these."""
    generator = DefinitionGenerator(dense, tokenizer, max_new_tokens=8, **WAYS[way])
    generator.ends = [1, *range(150, 259)]  # many ends: rows stop at different lengths
    prompts = [generator.build_prompt(row["term"], row["context"]) for row in ROWS]
    prompts = prompts[:1] if way == "looked up" else prompts
    seen, generate = [], dense.generate

    def keep(**options):
        seen.append(generate(**options))
        return seen[-1]

    dense.generate = keep
    try:
        torch.manual_seed(5)
        found = generator._generate_batch(prompts, None)
    finally:
        del dense.generate
    start, n = max(map(len, prompts)), generator.best_of
    written = seen[0].sequences[:, start:]
    lengths = generated_lengths(written, generator.ends)
    assert way in ("greedy", "beams", "looked up") or len(set(lengths)) > 1
    for i, score in enumerate(score for own in found for _, score in own):
        prompt, own = prompts[i // n], written[i, : lengths[i]]
        with torch.no_grad():
            logits = dense(torch.tensor([prompt + own.tolist()])).logits[0, len(prompt) - 1 : -1]
        assert score == pytest.approx(logits.log_softmax(-1).gather(1, own[:, None]).mean().exp().item(), abs=2e-6)
    if way in ("greedy", "sampling"):  # the formula over all logits, kept by the same draws
        torch.manual_seed(5)
        generator.options["synced_gpus"] = False
        assert generator._generate_batch(prompts, None) == found


@pytest.mark.parametrize("reward", [False, True])
def test_the_memory_of_a_step_is_given_back_with_the_step(reward, dense, tokenizer):
    """Tensors of the vocabulary's size alive at each step: no more at the last than at the second."""
    alive = []

    def count(*_):
        alive.append(sum(type(x) is torch.Tensor and x.shape == (8, LETTERS + 3) for x in gc.get_objects()))
        return torch.zeros(8, dtype=torch.bool)

    scorer = (
        LlamaForSequenceClassification(LlamaConfig(**dense.config.to_dict() | {"num_labels": 1})) if reward else None
    )
    generator = DefinitionGenerator(
        dense, tokenizer, best_of=8, max_new_tokens=6, reward_model=scorer, stopping_criteria=[count]
    )
    generator(ROWS[:1])
    assert len(alive) >= 5 and max(alive[1:]) == alive[1] <= 4


def test_definitions_differ_and_an_empty_one_is_the_last_resort(define):
    def samples(*pairs):
        return [{"definition": text, "score": score} for text, score in pairs]

    found = distinct_definitions(samples(("a", 0.1), ("b", 0.3), ("a", 0.4), ("", 0.9), ("b", 0.3)))
    assert found == samples(("a", 0.4), ("b", 0.3))
    assert distinct_definitions(samples(("", 0.2), ("", 0.5))) == samples(("", 0.5))
    torch.manual_seed(0)
    several = define(ROWS[0], best_of=8, num_definitions=8, temperature=0.05)  # nearly the same eight times
    texts = [one["definition"] for one in several]
    assert 1 <= len(texts) < 8 and len(set(texts)) == len(texts)


def test_a_reward_model_chooses_by_prompt_and_definition(define, dense, tokenizer, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(**dense.config.to_dict() | {"num_labels": 1, "architectures": None})
    reward = LlamaForSequenceClassification(config).eval()
    reward.save_pretrained(tmp_path)
    torch.manual_seed(0)
    found = define(ROWS[0], best_of=5, num_definitions=5, reward_model=tmp_path, temperature=3.0, max_new_tokens=4)
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    torch.manual_seed(0)
    likely = define(ROWS[0], best_of=5, num_definitions=5, temperature=3.0, max_new_tokens=4)
    assert sorted(one["definition"] for one in likely) == sorted(one["definition"] for one in found)
    generator = DefinitionGenerator(dense, tokenizer, reward_model=reward)
    row = encoded(tokenizer, ROWS[0])[0].tolist()
    short, long = row + [5, 1], row + [7, 8, 9, 1]
    with torch.no_grad():
        alone = [float(reward(torch.tensor([own])).logits) for own in (short, long)]
    assert generator.compute_rewards([short, long], 2) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(OSError, match="reward_model='.*nowhere'"):
        define(ROWS[0], best_of=2, reward_model=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="num_labels=2"):
        define(
            ROWS[0],
            reward_model=LlamaForSequenceClassification(LlamaConfig(**dense.config.to_dict() | {"num_labels": 2})),
        )


@pytest.mark.parametrize("own", [2, 1, 0, 100, None, -1])
def test_a_reward_does_not_depend_on_its_batch(own, dense, tokenizer):
    torch.manual_seed(1)
    config = LlamaConfig(**dense.config.to_dict() | {"num_labels": 1, "pad_token_id": None})
    reward = LlamaForSequenceClassification(config).eval()
    reward.config.pad_token_id = own
    generator = DefinitionGenerator(dense, tokenizer, reward_model=reward)
    samples = [encoded(tokenizer, row)[0].tolist() + [i + 5, 1] for i, row in enumerate(ROWS)]
    alone = [generator.compute_rewards([sample], 2)[0] for sample in samples]
    assert len(set(alone)) == 3 and generator.compute_rewards(samples, 2) == pytest.approx(alone, abs=1e-5)


def test_a_reward_model_with_too_few_tokens_is_refused(dense, tokenizer):
    sizes = {"num_labels": 1, "vocab_size": LETTERS}
    reward = LlamaForSequenceClassification(LlamaConfig(**dense.config.to_dict() | sizes))
    with pytest.raises(ValueError, match="vocab_size=256, and the tokenizer needs 259"):
        DefinitionGenerator(dense, tokenizer, reward_model=reward)


def embed(texts):
    return torch.tensor([[1.0, 0.0] if "river" in text else [0.0, 2.0] for text in texts])


@pytest.fixture(scope="module")
def routed(tokenizer):
    model = tiny_lexicon(policy="domain", centroid_size=2, **SIZES).eval()
    model.domain_centroids.fill_(-5.0)
    model.domain_centroids[:2] = torch.tensor([[0.0, 0.7], [0.9, 0.0]])
    return model


def test_centroids_choose_the_expert_and_the_answer_says_so(routed, tokenizer):
    define = pipeline("definition-modeling", model=routed, tokenizer=tokenizer, max_new_tokens=8)
    found = define(ROWS, embedder=embed)
    assert [(one["domain"], one["distance"]) for one in found] == [
        (1, pytest.approx(0.1)),
        (0, pytest.approx(0.3)),
        (0, pytest.approx(0.3)),
    ]
    given = define(ROWS, domain_ids=[1, 0, 0])
    assert [one["definition"] for one in given] == [one["definition"] for one in found] and "domain" not in given[0]
    other = define(ROWS, domain_ids=0)
    assert other[0]["score"] != given[0]["score"] and other[1]["score"] == pytest.approx(given[1]["score"], abs=1e-5)
    batches, generate = [], routed.generate
    routed.generate = lambda *given, **more: batches.append(more["domain_ids"].tolist()) or generate(*given, **more)
    several = define(ROWS * 2, domain_ids=[1, 0, 0] * 2, batch_size=2)
    del routed.generate
    assert batches == [[0, 0], [0, 0], [1, 1]]  # a batch reads one expert where it can
    assert [one["definition"] for one in several] == 2 * [one["definition"] for one in given]
    assert define(ROWS, domain_ids=np.int64(0)) == other and define(ROWS, domain_ids=np.array([1, 0, 0])) == given
    assert list(define(iter(ROWS), domain_ids=[1, 0, 0, 0])) == given  # how many there are is not known in advance
    for rows, count, ids in (
        (ROWS, 3, [0, 1]),
        (iter(ROWS), 3, [0, 1]),
        (ROWS[:2], 2, [1, 0, 0]),
        (ROWS[0], 1, [1, 0]),
    ):
        with pytest.raises(ValueError, match=f"domain_ids has {len(ids)} values for {count} rows"):
            list(define(rows, domain_ids=ids))


@pytest.mark.parametrize("policy", ["token", "sequence_hard", "sequence_soft"])
def test_other_policies_answer_too(policy, tokenizer):
    define = pipeline("definition-modeling", model=tiny_lexicon(policy=policy, **SIZES).eval(), tokenizer=tokenizer)
    together = define(ROWS, max_new_tokens=6)
    for row, one in zip(ROWS, together, strict=True):
        alone = define(row, max_new_tokens=6)
        assert alone["definition"] == one["definition"] and alone["score"] == pytest.approx(one["score"], abs=1e-5)


def test_a_context_without_room_is_cut_around_its_term(define, dense, tokenizer, caplog):
    words = [f"w{i}" for i in range(300)]
    words[200] = "Bank,"
    row = {"term": "bank", "context": " ".join(words)}
    generator = DefinitionGenerator(dense, tokenizer, max_new_tokens=8)
    with caplog.at_level("WARNING", logger="transformers_modules"):
        text = tokenizer.decode(generator.build_prompt("bank", row["context"]), skip_special_tokens=True)
    assert "Bank," in text and "w199" in text and "w201" in text and "w0 " not in text and "w299" not in text
    assert 200 < len(generator.build_prompt("bank", row["context"])) <= 248
    assert define(row)["definition"] is not None
    with pytest.raises(ValueError, match="'bank'.*256.*8"):
        define(row, on_long="error")
    with pytest.raises(ValueError, match="max_new_tokens=250"):
        define(row, max_new_tokens=250)


WRITTEN = [
    ("bank", "bank"), ("U.S.", "U.S."), ("U.S.", "(U.S.,"), (".NET", ".net"), ("Acme, Inc.", "Acme, Inc."),
    ("Acme Inc", "Acme, Inc."), ("bank", "“bank”"), ("“bank”", "bank"), ("bank", "*bank*"), ("*bank*", "bank"),
    ("bank", "river/bank"), ("bank", "bank—of"), ("bank", "l’bank’"), ("C++", "C++."), ("…", "…"), ("Straße", "x/STRASSE!"),
    ("to  prune", "pruned,"), ("नदी", "नदी।"), ("銀行", "銀行"), ("銀行", "“銀行”の"),
]  # fmt: skip
FILLER = {" ": "wxyz ßİ.—", "": "河岸にある。"}


@given(st.sampled_from(WRITTEN), st.sampled_from(list(FILLER)), st.data())
@settings(max_examples=300, deadline=None)
def test_a_truncated_context_has_its_term(pair, space, data):
    term, written = pair
    before, after = (space.join(data.draw(st.text(FILLER[space], min_size=50, max_size=300)).split()) for _ in "ab")
    context = f"{before}{space}{written}{space}{after}"
    found = is_in_context(term, context)
    assert found or (space == "" and term not in written)  # other forms are found among words only
    assume(found)
    limit = data.draw(st.integers(len(written), 49))
    window = truncate_context_around(term, context, lambda text: len(text) <= limit)
    assert is_in_context(term, window) and len(window) <= limit and window in " ".join(context.split())


@pytest.mark.parametrize(
    "term, context, kept, dropped",
    [
        ("U.S.", "far " * 300 + "the U.S. army" + " off" * 300, "the U.S. army", "of its 603 words that are furthest from the term"),
        ("銀行", "銀行は河の岸にある。" * 30, "銀行", "of its 300 characters that are furthest from the term"),
        ("gong", "bell " + "far " * 300, '"bell far', "of its 301 words that are furthest from the start"),
        ("鐘", "河の岸にある。" * 40, '"河の岸', "of its 280 characters that are furthest from the start"),
    ],
)  # fmt: skip
def test_what_a_truncated_context_lacks_is_counted(term, context, kept, dropped, dense, tokenizer, caplog):
    generator = DefinitionGenerator(dense, tokenizer, max_new_tokens=8)
    with caplog.at_level("WARNING", logger="transformers_modules"):
        ids = generator.build_prompt(term, context)
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    window = prompt[1 : prompt.index('" What is')]
    size = len(window.split()) if "words" in dropped else len(window)
    total = int(dropped.split()[2])
    assert kept in prompt and 230 < len(ids) <= 248 and window in context
    assert f"the {total - size} {dropped} are dropped" in caplog.text


@pytest.mark.parametrize(
    "given, options, kind, message",
    [
        ("bank", {}, TypeError, r"got 'bank' \(str\)"),
        (3, {}, TypeError, r"got 3 \(int\)"),
        ([ROWS[0], {"term": "a"}], {}, TypeError, "Row 1 is {'term': 'a'}. Pass"),
        ({"term": "", "context": "a"}, {}, TypeError, "Row 0 is"),
        (ROWS, {"best_of": 0}, ValueError, "best_of=0"),
        (ROWS, {"best_of": 1, "num_definitions": 2}, ValueError, "num_definitions=2 exceeds best_of=1"),
        (ROWS, {"on_long": "window"}, ValueError, "on_long='window'"),
    ],
)
def test_wrong_inputs_are_reported(given, options, kind, message, define):
    with pytest.raises(kind, match=message):
        define(given, **options)


def test_special_tokens_names_in_a_text_are_plain_text(define, dense, tokenizer):
    ids = DefinitionGenerator(dense, tokenizer).build_prompt("</s>", "a <s> b")
    assert ids.count(0) == 1 and ids.count(1) == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_probabilities_that_are_nan_are_an_error(tokenizer, options):
    model = tiny_llama(**SIZES).eval()
    model.model.norm.weight.data.fill_(torch.nan)
    define = pipeline("definition-modeling", model=model, tokenizer=tokenizer, max_new_tokens=8)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        define(ROWS[0], **options)
