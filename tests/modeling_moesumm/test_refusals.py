"""What is refused, by the type of the error and the name or value in it."""

import pytest
import torch
from transformers import BertConfig, DynamicCache, Gemma2Config, T5Config, T5ForConditionalGeneration, pipeline

from modeling_moesumm import (
    DataCollatorForMoeSumm,
    MoeSummConfig,
    MoeSummForCausalLM,
    MoeSummForConditionalGeneration,
    TemperatureSampler,
)
from modeling_moesumm.generation_moesumm import Summarizer
from tests.modeling_moesumm.conftest import backbone_config, tiny_backbone, tiny_moesumm, without
from tests.modeling_moesumm.summaries import small_tokenizer, writing_moesumm

ROW = {"document": "The river.", "summary": "River."}


def forward(texts, change):
    tiny_moesumm(main_expert=change.pop("main_expert", True))(**without(texts, "dataset_ids"), **change)


def decoder(texts, change):
    model = tiny_moesumm("llama")
    model(**{"input_ids": texts["input_ids"], "dataset": "news", **change})


def generate(texts, change):
    tiny_moesumm().generate(**without(texts, "dataset_ids"), **change)


def change_datasets(texts, change):
    model = tiny_moesumm()
    for method, arguments in change.items():
        for each in arguments:
            getattr(model, method)(**each)


def train_on_states(texts, change):
    model = tiny_moesumm()
    states = model.get_encoder()(texts["input_ids"], dataset="news")
    model(encoder_outputs=states, labels=texts["input_ids"], dataset="news")


def summarize(texts, change):
    dataset = change.pop("dataset", None)
    Summarizer(writing_moesumm(small_tokenizer()), small_tokenizer(), **change)(["River.", "Bridge."], dataset)


def default_lengths(texts, change):
    model = writing_moesumm(small_tokenizer())
    model.generation_config.update(max_length=9)
    Summarizer(model, small_tokenizer(), **change)


def run(texts, change):
    tokenizer = small_tokenizer()
    inputs = change.pop("inputs", "River.")
    pipeline("moe-summarization", model=writing_moesumm(tokenizer), tokenizer=tokenizer, device="cpu")(inputs, **change)


def collate(texts, change):
    tokenizer, rows = small_tokenizer(), change.pop("rows", [ROW])
    if change.pop("without_eos", False):
        tokenizer.eos_token = None
    backbone = change.pop("backbone", "bart")
    DataCollatorForMoeSumm(tokenizer, writing_moesumm(small_tokenizer(), backbone), **change)(rows)


def raw(config):
    return lambda texts, change: config(**change)


config = raw(MoeSummConfig)
sampler = raw(TemperatureSampler)
model = raw(lambda **change: MoeSummForConditionalGeneration(MoeSummConfig(text_config=change)))
TABLE = [
    (config, {"num_deputies": 0}, ValueError, "num_deputies=0"),
    (config, {"num_deputies": "three"}, Exception, "num_deputies"),
    (config, {"deputy_intermediate_size": 0}, ValueError, "deputy_intermediate_size=0"),
    (config, {"margin_loss_coef": -1.0}, ValueError, "margin_loss_coef=-1.0"),
    (config, {"deputy_init_std": -0.1}, ValueError, "deputy_init_std=-0.1"),
    (config, {"datasets": []}, ValueError, r"datasets=\[\]"),
    (config, {"datasets": ["news", "news"]}, ValueError, r"datasets=\['news', 'news'\]"),
    (config, {"datasets": ["news", " "]}, ValueError, r"datasets=\['news', ' '\]"),
    (config, {"text_config": BertConfig()}, ValueError, "'bert'"),
    (config, {"text_config": Gemma2Config()}, ValueError, "'gemma2'.*Llama, Mistral, Qwen2 or Qwen3"),
    (config, {"gate_position": "ffn_output"}, ValueError, "gate_position='ffn_output'"),
    (config, {"margin_main": "models"}, ValueError, "margin_main='models'.*'model'"),
    (config, {"label_smoothing": 1}, ValueError, "label_smoothing=1"),
    (config, {"main_expert": False, "dataset_aware": True}, ValueError, "dataset_aware=True"),
    (config, {"main_expert": False, "margin_loss_coef": 1.0}, ValueError, "margin_loss_coef=1.0"),
    (config, {"main_expert": False, "deputy_intermediate_size": 8}, ValueError, "deputy_intermediate_size=8"),
    (model, backbone_config().to_dict() | {"model_type": "marian", "pad_token_id": 1}, ValueError, "MarianDecoderLayer"),
    (model, backbone_config().to_dict() | {"activation_function": "sigmoid"}, ValueError, "Sigmoid.*gelu, relu or silu"),
    (forward, {"dataset": "newz"}, ValueError, "dataset='newz'.*'news', 'letters', 'papers'"),
    (forward, {"dataset": ["news", "letters"]}, ValueError, "2 names for 4 rows"),
    (forward, {"dataset_ids": torch.tensor([0, 1, 2, 3])}, ValueError, "dataset_ids contains 3"),
    (forward, {"dataset_ids": torch.tensor([0, 1, -2, 0])}, ValueError, "dataset_ids contains -2"),
    (forward, {"dataset_ids": torch.tensor([0, 1])}, ValueError, r"dataset_ids .*\(2,\)"),
    (forward, {"dataset_ids": torch.rand(4)}, ValueError, "dataset_ids .*float32"),
    (forward, {"dataset": "news", "dataset_ids": torch.zeros(4).long()}, ValueError, "dataset='news' and dataset_ids"),
    (forward, {"deputy_id": 3}, ValueError, "deputy_id=3"),
    (forward, {"deputy_id": 0, "main_expert_only": True}, ValueError, "main_expert_only=True excludes deputy_id"),
    (forward, {"main_expert": False, "main_expert_only": True}, ValueError, "main_expert_only=True"),
    (forward, {"labels": torch.full((4, 41), 5)}, ValueError, "summaries have 41 tokens, more than 40"),
    (forward, {"labels": torch.ones(4, 3).long(), "dataset": "news", "cache": DynamicCache()}, ValueError, "labels with cache"),
    (train_on_states, {}, ValueError, "labels with encoder_outputs"),
    (decoder, {"input_ids": None}, ValueError, "Neither input_ids nor inputs_embeds"),
    (decoder, {"labels": torch.ones(4, 9).long(), "logits_to_keep": 3}, ValueError, "labels has 9 positions, and 3"),
    (generate, {"dataset_id": torch.zeros(4)}, ValueError, "dataset_id'"),
    (generate, {"max_length": 42}, ValueError, "42 tokens, more than 40"),
    (change_datasets, {"add_dataset": [{"name": "news"}]}, ValueError, "'news'"),
    (change_datasets, {"add_dataset": [{"name": ""}]}, ValueError, "''"),
    (change_datasets, {"add_dataset": [{"name": "radio", "init": "paper"}]}, ValueError, "init='paper'.*papers"),
    (change_datasets, {"remove_dataset": [{"name": "radio"}]}, ValueError, "dataset='radio'"),
    (change_datasets, {"remove_dataset": [{"name": x} for x in ("news", "letters", "papers")]}, ValueError, "dataset='papers'"),
    (summarize, {"max_length": 41}, ValueError, "max_length=41 .* 40"),
    (summarize, {"max_new_tokens": 40}, ValueError, "max_length=41 .* 40"),
    (summarize, {"max_length": 0.2}, ValueError, "max_length=0.2"),
    (summarize, {"max_length": True}, ValueError, "max_length=True"),
    (summarize, {"min_length": -1}, ValueError, "min_length=-1"),
    (summarize, {"min_length": "long"}, ValueError, "min_length='long'"),
    (summarize, {"max_length": 10, "min_length": 11}, ValueError, "min_length=11 exceeds max_length=10"),
    (default_lengths, {"min_length": 30}, ValueError, "min_length=30 exceeds max_length=9"),
    (summarize, {"on_long": "cut"}, ValueError, "on_long='cut'"),
    (summarize, {"batch_size": 0}, ValueError, "batch_size=0"),
    (summarize, {"num_return_sequences": 2, "num_beams": 2}, ValueError, "num_return_sequences=2"),
    (summarize, {"dataset_ids": torch.tensor([0, 1])}, ValueError, "dataset_ids"),
    (summarize, {"dataset": ["news", "newz"]}, ValueError, "dataset='newz'.*'news'"),
    (summarize, {"num_beems": 2}, ValueError, "num_beems"),
    (run, {"inputs": 3}, TypeError, r"got 3 \(int\)"),
    (run, {"inputs": {"document": "River."}}, TypeError, r"\(dict\)"),
    (run, {"inputs": ["River.", "  \n\t "]}, ValueError, "Text 1 is empty"),
    (run, {"inputs": ["River.", b"River."]}, TypeError, "Text 1 .* bytes"),
    (run, {"inputs": ["River.", None]}, TypeError, "Text 1 .* NoneType"),
    (run, {"dataset": "radio"}, ValueError, "dataset='radio'"),
    (run, {"inputs": ["River."], "dataset": ["news", "news"]}, ValueError, "2 names for 1 texts"),
    (run, {"max_lenght": 10}, ValueError, "max_lenght"),
    (collate, {"max_target_length": 41}, ValueError, "max_target_length=41 .* 40"),
    (collate, {"max_length": 99, "backbone": "llama"}, ValueError, "max_length=99"),
    (collate, {"max_target_length": 1, "backbone": "llama"}, ValueError, "max_target_length=1 "),
    (collate, {"on_long": "window"}, ValueError, "on_long='window'"),
    (collate, {"without_eos": True, "backbone": "llama"}, ValueError, "eos_token=None"),
    (collate, {"rows": [ROW, {"document": " "}]}, ValueError, "Row 1 .*'document'"),
    (collate, {"rows": [ROW, {"summary": "x"}]}, ValueError, r"Row 1 .*'document' .*\['summary'\]"),
    (collate, {"rows": [{**ROW, "summary": None}, ROW]}, ValueError, "Row 0 .*'summary'"),
    (collate, {"rows": [{**ROW, "dataset": "radio"}]}, ValueError, "dataset='radio'"),
    (sampler, {"names": []}, ValueError, "rows"),
    (sampler, {"names": ["a"], "strategy": "random"}, ValueError, "strategy='random'"),
    (sampler, {"names": ["a"], "strategy": "temperature", "temperature": 0}, ValueError, "temperature=0"),
]  # fmt: skip


@pytest.mark.parametrize(
    "call, change, kind, fragment", TABLE, ids=[f"{i}-{row[3][:20]}" for i, row in enumerate(TABLE)]
)
def test_it_is_refused(call, change, kind, fragment, texts):
    with pytest.raises(kind, match=fragment):
        call(texts, dict(change))


def test_a_text_that_is_longer_than_the_positions_is_refused():
    for call in (tiny_moesumm(), tiny_moesumm().get_encoder()):
        with pytest.raises(ValueError, match="texts have 100000 tokens, more than 40"):
            call(torch.full((1, 100_000), 5))


def test_the_backbone_itself_is_not_to_be_called(texts):
    with pytest.raises(RuntimeError, match="without routing"):
        tiny_moesumm().backbone(**without(texts, "dataset_ids"))


def test_backbones_of_another_kind_or_size_are_refused(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    for kind in ("llama", "bart"):
        tiny_backbone(kind).save_pretrained(tmp_path / kind)
    seq2seq, causal = MoeSummForConditionalGeneration, MoeSummForCausalLM
    for cls, folder, fragment in (
        (seq2seq, "t5", "T5ForConditionalGeneration"),
        (seq2seq, "llama", "model_type='llama'.*MoeSummForCausalLM"),
        (causal, "bart", "model_type='bart'.*MoeSummForConditionalGeneration"),
    ):
        with pytest.raises(OSError, match=fragment):
            cls.from_backbone(tmp_path / folder, ["news"])
    with pytest.raises((RuntimeError, ValueError, OSError), match=r"mismatch|size"):
        seq2seq.from_pretrained(tmp_path / "bart", config=MoeSummConfig(text_config=backbone_config(d_model=32)))
