"""The token head's logits: those of words' first tokens, whatever the labels, in training and in eval, in every pipeline."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.testing import assert_close
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from keyphrase_tools.labels import tokenize_documents
from lexperts_lite.windows import encode_windows
from lexperts_lite.words import split_words
from modeling_hypernet import DataCollatorForTextPairs, HypernetForTokenClassification
from modeling_hypernet.word_starts_hypernet import WordStarts, token_kinds

from .conftest import KINDS

TITLE = "graph cuts"
TEXT = "Graph cuts (and networks) in semi-supervised learning: the problem of learning graph/network zebras, of yaks."
each_kind = pytest.mark.parametrize("kind", KINDS)


def logits_of(outputs):
    return torch.stack([outputs.start_logits, outputs.end_logits]) if "start_logits" in outputs else outputs.logits


def without_dropout(model):
    for module in model.modules():
        for name in ("p", "dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@each_kind
def test_labels_change_no_logits(kind, tiny_hypernet, batch, target):
    model = tiny_hypernet(kind)
    labelled = target(kind, batch)
    if kind == "tags":  # as in training data: a label on some tokens only
        labelled["labels"][:, ::2] = -100
    with torch.no_grad():
        for model.training in (False, True):
            assert torch.equal(logits_of(without_dropout(model)(**labelled)), logits_of(model(**batch)))


def first_tokens(text, tokenizer):
    """The words' first sub-tokens by the text itself, as the keyphrase pipeline and training rows have them."""
    (window,) = encode_windows([text], [[(start, end) for _, start, end in split_words(text)]], tokenizer)
    return torch.from_numpy(window.word_starts >= 0)[None]


def test_the_stock_pipeline_scores_first_sub_tokens_as_our_own_does(tiny_hypernet, tiny_tokenizer):
    model, tokenizer = tiny_hypernet(), copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 64
    text = TEXT[:60]
    inputs, starts = tokenizer(text, return_tensors="pt"), first_tokens(text, tokenizer)
    with torch.no_grad():
        p = model(**inputs, word_start_mask=starts).logits.softmax(-1)[0]
    stock = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])
    actual = {entry["index"]: entry for entry in stock(text)}
    scored = [i for i in range(p.shape[0]) if starts[0, i]]
    assert 5 < len(scored) < len(actual)
    for i, entry in actual.items():
        expected = p[i].max() if starts[0, i] else torch.tensor(1.0)
        assert entry["entity"] == model.config.id2label[int(p[i].argmax())]
        assert_close(torch.tensor(entry["score"]), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.decode(**inputs), model.decode(**inputs, word_start_mask=starts))


def test_the_stock_pipeline_joins_the_words_of_a_phrase(tiny_hypernet, tiny_tokenizer):
    """With aggregation_strategy="first" a word has its first token's label."""
    model = tiny_hypernet()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 0.0, 2.0]))
        model.crf.start.copy_(torch.tensor([0.0, 5.0, -5.0]))
    stock = pipeline("token-classification", model=model, tokenizer=tiny_tokenizer, aggregation_strategy="first")
    assert [(entry["start"], entry["end"]) for entry in stock("yaks in zebras")] == [(0, 14)]


CORPUS = [
    TEXT,
    "Bayes's 2.5 networks don't graze: 1, 2 (graph) cuts; zebras and 10.25 yaks, in the year 1999.",
    "über Graphen, größer als 中文 ist",
] * 4


def fast(model, pre_tokenizer, trainer, decoder=None, normalizer=None):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(CORPUS, trainer)
    special = [("[CLS]", backend.token_to_id("[CLS]")), ("[SEP]", backend.token_to_id("[SEP]"))]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **names)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
BYTES = pre_tokenizers.ByteLevel.alphabet()
TOKENIZERS = {
    "WordPiece": lambda: fast(
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordPieceTrainer(vocab_size=110, special_tokens=SPECIAL),
        normalizer=normalizers.BertNormalizer(),
    ),
    "byte-level BPE": lambda: fast(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=BYTES),
        decoders.ByteLevel(),
    ),
    "Unigram": lambda: fast(
        models.Unigram(),
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="[UNK]"),
        decoders.Metaspace(),
    ),
    "BPE with word ends": lambda: fast(
        models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.BpeTrainer(vocab_size=125, special_tokens=SPECIAL, end_of_word_suffix="</w>"),
    ),
    "whole words": lambda: fast(
        models.WordLevel(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordLevelTrainer(special_tokens=SPECIAL),
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_determine_where_words_begin(kind):
    tokenizer = TOKENIZERS[kind]()
    starts = WordStarts(len(tokenizer) + 3)
    starts.kinds.copy_(token_kinds(tokenizer, len(starts.kinds)))
    num_starts = num_tokens = 0
    for text in CORPUS[:3]:
        if kind == "BPE with word ends":
            text = text.translate({ord(sign): " " for sign in "'."})
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = first_tokens(text, tokenizer)
        assert torch.equal(starts(ids), expected), tokenizer.convert_ids_to_tokens(
            ids[0][starts(ids)[0] != expected[0]]
        )
        num_starts, num_tokens = num_starts + int(expected.sum()), num_tokens + int((ids > 3).sum())
    assert (
        kind == "whole words" or num_starts < num_tokens - 10
    )  # negative control: not every token of the text begins a word


def test_without_a_table_or_ids_a_mask_is_required(tiny_hypernet, batch):
    model = tiny_hypernet()
    embeds = model.get_input_embeddings()(batch["input_ids"])
    masks = {"main_mask": batch["token_type_ids"], "word_start_mask": batch["token_type_ids"]}
    inputs = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    with pytest.raises(ValueError, match="word_start_mask=None.*input_ids"):
        model(**inputs, main_mask=masks["main_mask"])
    assert torch.isfinite(model(**inputs, **masks).logits).all()
    with pytest.raises(ValueError, match=r"word_start_mask has the shape \(3, 1\)"):
        model(**batch, word_start_mask=masks["word_start_mask"][:, :1])
    bare = HypernetForTokenClassification(type(model.config)(**{**model.config.to_dict(), "has_word_starts": False}))
    for call in (bare, bare.decode):
        with pytest.raises(ValueError, match="word_start_mask=None and the model has no table"):
            call(**batch)
    assert torch.isfinite(bare(**batch, word_start_mask=masks["word_start_mask"]).logits).all()


def test_a_tokenizer_that_does_not_match_is_named(tiny_hypernet, tiny_tokenizer):
    model = tiny_hypernet()
    larger = copy.deepcopy(tiny_tokenizer)
    larger.add_tokens(["covid"])
    with pytest.raises(ValueError, match="122 tokens"):
        model.set_word_starts(larger)
    with pytest.raises(ValueError, match="NoneType"):
        model.set_word_starts(None)


def test_the_table_is_saved_with_the_model_and_grows_with_it(tiny_hypernet, tiny_tokenizer, saved_encoder, tmp_path):
    model, tokenizer = HypernetForTokenClassification.from_backbone(saved_encoder()), copy.deepcopy(tiny_tokenizer)
    assert torch.equal(model.word_starts.kinds, tiny_hypernet().word_starts.kinds) and model.config.has_word_starts
    tokenizer.add_tokens(["covid"])
    model.resize_token_embeddings(len(tokenizer) + 7)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = HypernetForTokenClassification.from_pretrained(tmp_path)
    assert torch.equal(again.word_starts.kinds, model.word_starts.kinds) and len(model.word_starts.kinds) == 129
    ids = tokenizer("covid in zebras covid", return_tensors="pt")["input_ids"]
    assert again.word_starts(ids).int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0]]


def test_the_stock_trainer_and_collator_learn_from_labels_alone(tiny_hypernet, tiny_tokenizer, tmp_path):
    rows = tokenize_documents(
        {"text": [TEXT[:40], TEXT[40:80]] * 8, "keyphrases": [["graph cuts"], ["networks"]] * 8}, tiny_tokenizer
    )
    names = ("input_ids", "attention_mask", "labels")
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(rows[name] for name in names), strict=True)]
    options = {"max_steps": 30, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    trainer = Trainer(
        tiny_hypernet(),
        TrainingArguments(str(tmp_path), logging_steps=1, disable_tqdm=True, label_names=["labels"], **options),
        train_dataset=rows,
        data_collator=DataCollatorForTokenClassification(tiny_tokenizer),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    predicted = trainer.predict(rows[:2])
    with torch.no_grad():
        batch = DataCollatorForTextPairs(tiny_tokenizer)(
            [{**row, "labels": [-100] * len(row["labels"])} for row in rows[:2]]
        )
        assert_close(torch.from_numpy(predicted.predictions), trainer.model(**batch).logits)
