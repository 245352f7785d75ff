"""A tiny model of every public class, with inputs or training rows: for tests of what all classes have in common."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from transformers import (
    BartConfig,
    BertConfig,
    DataCollatorForTokenClassification,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from keyphrase_tools.labels import tokenize_documents as tokenize_keyphrases
from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdEncoder,
    ExhirdForKeyphraseGeneration,
)
from modeling_hypernet import (
    DataCollatorForTextPairs,
    HypernetConfig,
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    HypernetModel,
    tokenize_pairs,
    tokenize_questions,
)
from modeling_lexicon import LexiconConfig, LexiconForCausalLM, LexiconForSequenceClassification, LexiconModel
from modeling_moesumm import MoeSummConfig, MoeSummForCausalLM, MoeSummForConditionalGeneration, MoeSummModel
from modeling_seke import SekeConfig, SekeForTokenClassification, SekeModel

from .modeling_exhird.conftest import document_rows, tiny_exhird, word_tokenizer
from .modeling_lexicon.conftest import POLICIES, tiny_lexicon
from .modeling_moesumm.conftest import tiny_moesumm
from .tools import as_rows

VOCABULARY, LENGTH = 130, 12


class Case(NamedTuple):
    """A class, a configuration of it, and the names of what its `forward` needs."""

    cls: type[PreTrainedModel]
    config: Callable
    inputs: tuple[str, ...]


def encoder_config() -> BertConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes)


def summariser_config() -> BartConfig:
    sizes = {"d_model": 16, "max_position_embeddings": 32, "pad_token_id": 1}
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
    }
    ids = {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return BartConfig(vocab_size=VOCABULARY, **sizes, **halves, **ids)


def decoder_config() -> LlamaConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    options = {"max_position_embeddings": 32, "tie_word_embeddings": True}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(vocab_size=VOCABULARY, **sizes, **options, **ids)


def seke_config() -> SekeConfig:
    return SekeConfig(text_config=encoder_config())


def hypernet_config() -> HypernetConfig:
    sizes = {"meta_embedding_size": 4, "meta_hidden_size": 8, "hidden_size": 8}
    labels = {0: "O", 1: "B-KEY", 2: "I-KEY"}
    return HypernetConfig(text_config=encoder_config(), cls_token_id=2, sep_token_id=3, id2label=labels, **sizes)


def exhird_config() -> ExhirdConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ExhirdConfig(vocab_size=VOCABULARY, max_phrases=3, **sizes)


def lexicon_config() -> LexiconConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LexiconConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=1, **sizes)


def moesumm_config(backbone: Callable = summariser_config) -> MoeSummConfig:
    return MoeSummConfig(
        text_config=backbone(), datasets=["news", "mail"], deputy_intermediate_size=8, deputy_init_std=0.5
    )


TEXT = ("input_ids", "attention_mask")
PAIR = (*TEXT, "token_type_ids")
CASES = {
    case.cls.__name__: case
    for case in (
        Case(SekeModel, seke_config, TEXT),
        Case(SekeForTokenClassification, seke_config, TEXT),
        Case(HypernetModel, hypernet_config, PAIR),
        Case(HypernetForTokenClassification, hypernet_config, (*PAIR, "word_start_mask")),
        Case(HypernetForSequenceClassification, hypernet_config, PAIR),
        Case(HypernetForQuestionAnswering, hypernet_config, PAIR),
        Case(ExhirdEncoder, exhird_config, TEXT),
        Case(ExhirdForKeyphraseGeneration, exhird_config, (*TEXT, "labels")),
        Case(MoeSummModel, moesumm_config, (*TEXT, "decoder_input_ids", "dataset_ids")),
        Case(MoeSummForConditionalGeneration, moesumm_config, (*TEXT, "decoder_input_ids", "dataset_ids")),
        Case(MoeSummForCausalLM, partial(moesumm_config, decoder_config), (*TEXT, "dataset_ids")),
        Case(LexiconModel, lexicon_config, TEXT),
        Case(LexiconForCausalLM, lexicon_config, TEXT),
        Case(LexiconForSequenceClassification, lexicon_config, TEXT),
    )
}


def make_model(name: str) -> PreTrainedModel:
    """The model of a case in eval mode, always with the same weights."""
    torch.manual_seed(0)
    case = CASES[name]
    return case.cls(case.config()).eval()


def make_inputs(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, the second of which is padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (2, LENGTH), generator=draw)
    ids[:, 0], ids[:, 4], ids[:, -1] = 2, 3, 3
    mask = torch.ones_like(ids)
    mask[1, -3:], ids[1, -4], ids[1, -3:] = 0, 3, 1
    segments = (torch.arange(LENGTH) > 4).long().expand(2, -1).contiguous()
    phrases = torch.full((2, 3, 4), -100)
    phrases[:, 0], phrases[:, 1], phrases[:, 2, :1] = torch.tensor([5, 9, 10, 4]), torch.tensor([6, 11, 4, -100]), 3
    every = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": segments,
        "word_start_mask": segments * mask,
        "labels": phrases,
        "decoder_input_ids": ids[:, :6],
        "dataset_ids": torch.tensor([0, 1]),
    }
    return {name: every[name] for name in CASES[name].inputs}


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output of a forward pass without gradients."""
    with torch.no_grad():
        return first_output(model(**inputs))


def first_output(outputs) -> torch.Tensor:
    """The first tensor of the outputs that is not a loss."""
    for name in ("logits", "start_logits", "last_hidden_state"):
        if outputs.get(name) is not None:
            return outputs[name]
    return outputs[1]


# --- models to train -------------------------------------------------------------------------------------------------


@dataclass
class Trainable:
    """A kind of model with what its training needs.

    Args:
        make: `make(**options)` is a new model in eval mode, always with the same weights.
        rows: training rows.
        collate: the data collator.
        tokenizer: the Trainer's `processing_class`.
        output: the output that `forward` computes from the inputs alone.
        over: the column over whose tokens this output is; `None` for one output per row.
        regularized: options of `make` with dropout.
        balanced: options of `make` with all additional losses.
        steps, rate: training steps after which the loss is clearly lower, and their learning rate.
        falls_to: the share of the first losses that the last ones stay below.
        first_label: the first token whose label counts; `None` for a loss that is a mean over rows.
    """

    make: Callable
    rows: list[dict]
    collate: Callable = default_data_collator
    tokenizer: object = None
    output: str = "logits"
    over: str | None = "attention_mask"
    regularized: dict = field(default_factory=dict)
    balanced: dict = field(default_factory=dict)
    steps: int = 25
    rate: float = 5e-3
    falls_to: float = 0.7
    first_label: int | None = 0

    def batch(self, size: int = 4) -> dict[str, torch.Tensor]:
        """The first rows."""
        return dict(self.collate([dict(row) for row in self.rows[:size]]))

    def row(self, i: int, shorter: int = 0) -> dict:
        """A row; of rows as tensors, the text without its first tokens."""
        size = len(self.rows[i]["input_ids"])
        return {
            name: x[shorter:] if torch.is_tensor(x) and x.dim() and len(x) == size else x
            for name, x in self.rows[i].items()
        }

    def labels_in(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """`num_items_in_batch`, as the Trainer counts it."""
        return None if self.first_label is None else (batch["labels"][:, self.first_label :] != -100).sum()

    def read(self, model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The output of a forward pass without gradients."""
        with torch.no_grad():
            return model(**batch)[self.output]


TITLES = ["graph cut", "learning", None, "network cuts"] * 6
TEXTS = [
    "the graph cut of the network",
    "learning in graph networks is the problem",
    "cuts and networks",
    "the problem of learning the graph cut for the network and the network cuts",
] * 6


def make_trainer(model, rows, folder, *, trainer=Trainer, arguments=TrainingArguments, parts=None, **options):
    """A Trainer on the CPU that logs every step and saves nothing; `parts` are its other arguments."""
    defaults = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "logging_steps": 1}
    defaults |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = arguments(output_dir=str(folder), **{**defaults, **options})
    return trainer(model, arguments, train_dataset=rows, **(parts or {}))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def trainable_seke(backbone: str, fixture: Callable) -> Trainable:
    tokenizer = fixture("tiny_tokenizer")
    gold = [["graph cut", "network"], ["graph networks", "learning"], ["cuts"], ["graph cut", "network cuts"]] * 6
    columns = tokenize_keyphrases({"text": TEXTS, "keyphrases": gold}, tokenizer)
    balanced = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1}
    collate = DataCollatorForTokenClassification(tokenizer)
    return Trainable(partial(fixture("tiny_seke"), backbone), as_rows(columns), collate, tokenizer, balanced=balanced)


def trainable_hypernet(kind: str, fixture: Callable) -> Trainable:
    """Every head once and every encoder once: they do not depend on each other."""
    tokenizer, backbone = (
        fixture("tiny_tokenizer"),
        {"classes": "deberta-v2", "answers": "modernbert"}.get(kind, "bert"),
    )
    pairs = tokenize_pairs(TITLES, TEXTS, tokenizer)
    if kind == "tags":
        masks = zip(pairs["input_ids"], pairs["main_mask"], strict=True)
        tags = [[(i % 3 > 0) + 0 if main else -100 for i, main in zip(*row, strict=True)] for row in masks]
        for row in tags:  # make valid BIO: B is followed by I
            row[:] = [2 if label == 1 and before >= 1 else label for label, before in zip(row, [0, *row], strict=False)]
        columns = {**pairs, "labels": tags}
    elif kind == "classes":
        columns = {**pairs, "labels": [i % 4 for i in range(len(TEXTS))]}
    else:
        answers = [{"text": [text.split()[-1]], "answer_start": [text.rindex(" ") + 1]} for text in TEXTS]
        questions = {"question": [title or "of" for title in TITLES], "context": TEXTS, "answers": answers}
        columns = tokenize_questions(questions, tokenizer, max_seq_len=60, doc_stride=8)
    return Trainable(
        partial(fixture("tiny_hypernet"), kind, backbone),
        as_rows(columns),
        DataCollatorForTextPairs(tokenizer),
        tokenizer,
        output="start_logits" if kind == "answers" else "logits",
        over=None if kind == "classes" else "attention_mask",
        steps=40,
        rate=0.02,
        first_label=0 if kind == "tags" else None,
    )


def trainable_exhird(kind: str, fixture: Callable) -> Trainable:
    return Trainable(
        partial(tiny_exhird, kind, exclusive_loss_coef=1.0),
        document_rows() * 2,
        DataCollatorForKeyphraseGeneration(word_tokenizer()),
        word_tokenizer(),
        output="log_probs",
        over="labels",
        regularized={"dropout": 0.1},
        steps=50,
        rate=0.02,
        falls_to=0.4,
        first_label=None,
    )


def trainable_moesumm(backbone: str, fixture: Callable) -> Trainable:
    """Texts of three datasets and of none: the summary is one token of the text's dataset, repeated."""
    torch.manual_seed(0)
    rows = []
    for i in range(24):
        dataset = i % 4 - 1
        ids = torch.randint(20, 64, (7,))
        ids[-1] = 2
        labels = torch.tensor([10 + dataset, 10 + dataset, 10 + dataset, 2])
        labels[1 : 1 + i // 4 % 4] = -100  # so that batches have different numbers of labels
        rows.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "dataset_ids": dataset}
        )
    make = partial(tiny_moesumm, main_expert=False) if backbone == "flat" else partial(tiny_moesumm, backbone)
    dropout = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    return Trainable(make, rows, over="labels", regularized={"changes": dropout}, falls_to=0.6)


def trainable_moesumm_causal(backbone: str, fixture: Callable) -> Trainable:
    """The same texts, each with its summary in one sequence."""
    rows = []
    for row in trainable_moesumm("bart", fixture).rows:
        ids = torch.cat([row["input_ids"], row["labels"].masked_fill(row["labels"] == -100, 2)])
        labels = torch.cat([torch.full_like(row["input_ids"], -100), row["labels"]])
        mask = torch.ones_like(ids)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "dataset_ids": row["dataset_ids"]})
    make = partial(tiny_moesumm, backbone)
    return Trainable(make, rows, regularized={"changes": {"attention_dropout": 0.1}}, falls_to=0.6, first_label=1)


def trainable_lexicon(policy: str, fixture: Callable) -> Trainable:
    """Texts of two domains: in each the answer is one token, repeated."""
    torch.manual_seed(0)
    rows = []
    for i in range(24):
        domain = i % 2
        ids = torch.cat([torch.randint(3, 24, (4,)) + 24 * domain, torch.full((4,), 5 + domain)])
        labels = ids.clone()
        labels[: 4 + i // 2 % 4] = -100
        row = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if policy == "domain":
            row["domain_ids"] = domain
        if policy == "classes":
            row["labels"] = i % 3
        rows.append(row)
    if policy == "classes":
        make = partial(tiny_lexicon, LexiconForSequenceClassification, num_labels=3)
    else:
        make = partial(tiny_lexicon, policy=policy)
    return Trainable(
        make,
        rows,
        over=None if policy == "classes" else "attention_mask",
        regularized={"attention_dropout": 0.1},
        balanced={"router_aux_loss_coef": 0.5},
        falls_to=0.7 if policy == "classes" else 0.3,
        first_label=None if policy == "classes" else 1,
    )


FAMILIES = {
    "SEKE": (trainable_seke, ("bert", "deberta-v2", "modernbert")),
    "hypernet": (trainable_hypernet, ("tags", "classes", "answers")),
    "ExHiRD": (trainable_exhird, ("transformer", "bigru")),
    "MoeSumm": (trainable_moesumm, ("bart", "pegasus", "flat")),
    "MoeSummCausal": (trainable_moesumm_causal, ("llama", "qwen3")),
    "Lexicon": (trainable_lexicon, (*POLICIES, "classes")),
}
ONE_LAYER = {  # options of `make`
    "ExHiRD": {"num_hidden_layers": 1},
    "Lexicon": {"num_hidden_layers": 1},
    "MoeSumm": {"changes": {"encoder_layers": 1, "decoder_layers": 1}},
    "MoeSummCausal": {"changes": {"num_hidden_layers": 1}},
}
TRAINABLE = [f"{family} {kind}" for family, (_, kinds) in FAMILIES.items() for kind in kinds]
# the kinds of every run of the tests, which differ in their code, and for what takes long one of each; the others run at night
ONE_EACH = ("SEKE bert", "hypernet tags", "ExHiRD bigru", "MoeSumm bart", "MoeSummCausal llama", "Lexicon token")
BY_DAY = (*ONE_EACH, "hypernet classes", "hypernet answers", "ExHiRD transformer", "Lexicon domain")


def make_trainable(name: str, fixture: Callable) -> Trainable:
    """What `TRAINABLE` names; `fixture` is `request.getfixturevalue` of a module with the fixtures of all packages."""
    family, kind = name.split()
    return FAMILIES[family][0](kind, fixture)
