"""What is refused, by the type of the error and the name or value in it."""

import pytest
import torch
from transformers import BertConfig, DynamicCache, Gemma2Config, T5Config, T5ForConditionalGeneration, pipeline

from modeling_moesumm import (
    DataCollatorForMoeSumm,
    MoeSummConfig,
    MoeSummForConditionalGeneration,
    TemperatureSampler,
)
from tests.modeling_moesumm.conftest import backbone_config, tiny_backbone, tiny_moesumm
from tests.modeling_moesumm.summaries import small_tokenizer, writing_moesumm

ROW = {"document": "The river.", "summary": "River."}
ONES = torch.ones(4, 9).long()
TEXTS = {"input_ids": 5 * ONES, "attention_mask": ONES}


def config(**change):
    MoeSummForConditionalGeneration(MoeSummConfig(**{"text_config": backbone_config(), **change}))


def forward(main_expert=True, train=False, backbone="bart", **change):
    tiny_moesumm(backbone, main_expert=main_expert).train(train)(**{**TEXTS, **change})


def change_datasets(method, *all_arguments):
    model = tiny_moesumm()
    for arguments in all_arguments:
        getattr(model, method)(*arguments)


def train_on_states(model):
    model(encoder_outputs=model.get_encoder()(ONES, dataset="news"), labels=ONES, dataset="news")


def run(inputs=("River.",), default=None, **change):
    model, tokenizer = writing_moesumm(small_tokenizer()), small_tokenizer()
    model.generation_config.update(max_length=default)
    pipeline("moe-summarization", model=model, tokenizer=tokenizer, device="cpu")(inputs, **change)


def collate(rows=(ROW,), backbone="bart", without_eos=False, **change):
    tokenizer = small_tokenizer()
    if without_eos:
        tokenizer.eos_token = None
    DataCollatorForMoeSumm(tokenizer, writing_moesumm(small_tokenizer(), backbone), **change)(list(rows))


TABLE = [
    (config, {"num_deputies": 0}, "num_deputies=0"),
    (config, {"margin_loss_coef": -1.0}, "margin_loss_coef=-1.0"),
    (config, {"datasets": []}, r"datasets=\[\]"),
    (config, {"datasets": ["news", "news"]}, r"datasets=\['news', 'news'\]"),
    (config, {"text_config": BertConfig()}, "'bert'"),
    (config, {"text_config": Gemma2Config()}, "'gemma2'.*Llama, Mistral, Qwen2 or Qwen3"),
    (config, {"gate_position": "ffn_output"}, "gate_position='ffn_output'"),
    (config, {"margin_main": "models"}, "margin_main='models'.*'model'"),
    (config, {"label_smoothing": 1}, "label_smoothing=1"),
    (config, {"main_expert": False, "dataset_aware": True}, "dataset_aware=True"),
    (config, {"main_expert": False, "margin_loss_coef": 1.0}, "margin_loss_coef=1.0"),
    (config, {"text_config": backbone_config().to_dict() | {"model_type": "marian", "pad_token_id": 1}}, "MarianDecoderLayer"),
    (config, {"text_config": backbone_config().to_dict() | {"activation_function": "sigmoid"}}, "Sigmoid.*gelu, relu or silu"),
    (forward, {"dataset": "newz"}, "dataset='newz'.*'news', 'letters', 'papers'"),
    (forward, {"dataset": ["news", "letters"]}, "2 names for 4 rows"),
    (forward, {"dataset_ids": torch.tensor([0, 1, 2, 3])}, "dataset_ids contains 3"),
    (forward, {"dataset_ids": torch.tensor([0, 1, -2, 0])}, "dataset_ids contains -2"),
    (forward, {"dataset_ids": torch.tensor([0, 1])}, r"dataset_ids .*\(2,\)"),
    (forward, {"dataset": "news", "dataset_ids": torch.zeros(4).long()}, "dataset='news' and dataset_ids"),
    (forward, {"main_expert": False, "main_expert_only": True}, "main_expert_only=True"),
    (forward, {"labels": torch.full((4, 41), 5)}, "summaries have 41 tokens, more than 40"),
    (forward, {"labels": ONES, "dataset": "news", "cache": DynamicCache()}, "labels with cache"),
    # what the Trainer's own label smoothing calls, which would drop the margin
    (forward, {"train": True, "num_items_in_batch": 9, "dataset": "news"}, "labels=None.*margin_loss_coef=1"),
    (forward, {"input_ids": torch.full((1, 100_000), 5)}, "texts have 100000 tokens, more than 40"),
    (lambda: train_on_states(tiny_moesumm()), {}, "labels with encoder_outputs"),
    (forward, {"input_ids": None, "backbone": "llama"}, "Neither input_ids nor inputs_embeds"),
    (forward, {"backbone": "llama", "labels": ONES, "logits_to_keep": 3}, "labels has 9 positions, and 3"),
    (lambda **change: tiny_moesumm().generate(**TEXTS, **change), {"dataset_id": torch.zeros(4)}, "dataset_id'"),
    (lambda **change: tiny_moesumm().generate(**TEXTS, **change), {"max_length": 42}, "42 tokens, more than 40"),
    (lambda **names: tiny_moesumm("llama").generate_batch([[5, 6]], **names), {"dataset": "news"}, "datasets belong to rows"),
    (lambda **names: tiny_moesumm("llama").generate_batch([[5, 6]], **names), {"dataset_ids": ONES[0, :1]}, "datasets belong to rows"),
    (change_datasets, ["add_dataset", ["news"]], "'news'"),
    (change_datasets, ["add_dataset", ["radio", "paper"]], "init='paper'.*papers"),
    (change_datasets, ["remove_dataset", ["radio"]], "dataset='radio'"),
    (change_datasets, ["remove_dataset", ["news"], ["letters"], ["papers"]], "dataset='papers'"),
    (run, {"max_new_tokens": 40}, "max_length=41 .* 40"),
    (run, {"max_length": 0.2}, "max_length=0.2"),
    (run, {"default": 9, "min_length": 30}, "min_length=30 exceeds max_length=9"),
    (run, {"on_long": "cut"}, "on_long='cut'"),
    (run, {"batch_size": 0}, "batch_size=0"),
    (run, {"num_beems": 2}, "num_beems"),
    (run, {"inputs": ("River.", "  \n\t ")}, "Text 1 is empty"),
    (run, {"dataset": ["news", "news"]}, "2 names for 1 texts"),
    (collate, {"max_target_length": 41}, "max_target_length=41 .* 40"),
    (collate, {"max_length": 99, "backbone": "llama"}, "max_length=99"),
    (collate, {"max_target_length": 1, "backbone": "llama"}, "max_target_length=1 "),
    (collate, {"without_eos": True, "backbone": "llama"}, "eos_token=None"),
    (collate, {"rows": [ROW, {"document": " "}]}, "Row 1 .*'document'"),
    (collate, {"rows": [{**ROW, "summary": None}, ROW]}, "Row 0 .*'summary'"),
    (TemperatureSampler, {"names": []}, "rows"),
    (TemperatureSampler, {"names": "a", "strategy": "random"}, "strategy='random'"),
    (TemperatureSampler, {"names": "a", "strategy": "temperature", "temperature": 0}, "temperature=0"),
]  # fmt: skip
WRONG_TYPES = [({"document": "River."}, r"\(dict\)"), (("River.", b"River."), "Text 1 .* bytes")]
TABLE = [(*row, ValueError) for row in TABLE]
TABLE += [(run, {"inputs": inputs}, named, TypeError) for inputs, named in WRONG_TYPES]
TABLE += [(lambda: tiny_moesumm().backbone(**TEXTS), {}, "without routing", RuntimeError)]


@pytest.mark.parametrize("call, change, fragment, kind", TABLE, ids=lambda one: one[:20] if type(one) is str else "")
def test_it_is_refused(call, change, fragment, kind):
    with pytest.raises(kind, match=fragment):
        call(**change) if isinstance(change, dict) else call(*change)


def test_backbones_of_another_kind_are_refused(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    tiny_backbone("llama").save_pretrained(tmp_path / "llama")
    for kind, fragment in (("t5", "T5ForConditionalGeneration"), ("llama", "model_type='llama'.*MoeSummForCausalLM")):
        with pytest.raises(OSError, match=fragment):
            MoeSummForConditionalGeneration.from_backbone(tmp_path / kind, ["news"])
