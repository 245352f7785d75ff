"""What every trainable class keeps, for all its backbones, heads and policies: forward, backward, Trainer, processes."""

import copy

import numpy as np
import pytest
import torch
import transformers
from peft import (
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForTokenClassification,
    PeftModel,
    get_peft_model,
)
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForTokenClassification, pipeline, set_seed

from modeling_exhird import ExhirdTokenizer

from .modeling_hypernet.conftest import tiny_hypernet  # noqa: F401  (a fixture)
from .tiny_models import BY_DAY, ONE_EACH, ONE_LAYER, TRAINABLE, make_trainable, make_trainer, weights
from .tools import by_day, run_by_torchrun

# of ExHiRD's encoder
TRANSFORMER_OPTIONS = [
    {},
    {"relative_attention": "separate", "use_top_k": False},
    {"relative_attention": "none"},
    {"relative_attention": None, "use_lead": False, "use_window": False, "use_top_k": False},
]
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:`is_gradient_checkpointing`")


@pytest.fixture
def trainable(request):
    return make_trainable(request.param, request.getfixturevalue)


def for_each(names=TRAINABLE, every_day=BY_DAY):
    cases = [pytest.param(name, marks=by_day(name in every_day)) for name in names]
    return pytest.mark.parametrize("trainable", cases, indirect=True)


def with_options(options):
    """Every model, and those of a family with each of its options."""
    own = {name: options.get(name) or options.get(name.split()[0], [{}]) for name in TRAINABLE}
    cases = [pytest.param(name, case, marks=by_day(name in BY_DAY)) for name in TRAINABLE for case in own[name]]
    return pytest.mark.parametrize("trainable, options", cases, indirect=["trainable"])


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def without_randomness(model):
    """In training mode, without dropout and routing noise: two ways through the same batch agree."""
    for module in model.modules():
        for name in ("p", "dropout", "drop_prob", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name, p in model.named_parameters():
        if ".noise." in name:
            torch.nn.init.constant_(p, -1e4 if name.endswith("bias") else 0)
    return model.train()


def trainer_of(model, trainable, folder, **options):
    parts = {"data_collator": trainable.collate, "processing_class": trainable.tokenizer}
    return make_trainer(model, trainable.rows, folder, parts=parts, **options)


# --- forward and backward passes -------------------------------------------------------------------------------------


@for_each()
def test_two_eval_passes_agree_bit_for_bit(trainable):
    model, batch = trainable.make(**trainable.regularized), trainable.batch()
    assert torch.equal(trainable.read(model, batch), trainable.read(model, batch))
    model.train()
    assert not torch.equal(trainable.read(model, batch), trainable.read(model, batch))


@with_options({"MoeSumm": [{}, {"dataset_aware": False}]})
def test_saved_and_loaded_it_gives_the_same(trainable, options, tmp_path):
    model, batch = trainable.make(**options), trainable.batch()
    model.save_pretrained(tmp_path)
    again = getattr(transformers, model._auto_class).from_pretrained(tmp_path)
    assert type(again) is type(model)
    expected = trainable.read(model, batch)
    assert_close(trainable.read(again, batch), expected, rtol=0, atol=1e-5)  # weights in a mapped file: other addresses
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(1.5)  # negative control
    assert not torch.allclose(trainable.read(again, batch), expected, atol=1e-4)
    bare, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(bare) is not type(model)
    assert not info["missing_keys"]
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "copy_ids", "word_start_mask")}
    if "encoder_last_hidden_state" in (outputs := model(**batch)):
        is_encoder = trainable.output == "log_probs"
        found = bare.eval()(**inputs, **({} if is_encoder else {"decoder_input_ids": batch["input_ids"]}))
        name = "last_hidden_state" if is_encoder else "encoder_last_hidden_state"
        assert_close(found[name], outputs.encoder_last_hidden_state, rtol=0, atol=1e-5)


@for_each()
def test_what_a_checkpoint_lacks_is_initialised(trainable):
    """Raw parameters that no initialiser knows stay memory garbage after from_pretrained."""
    full = trainable.make()
    kept = next(name for name, p in full.named_parameters() if p is full.get_input_embeddings().weight)
    loaded = type(full).from_pretrained(None, config=full.config, state_dict={kept: full.get_parameter(kept)})
    for name, p in loaded.named_parameters():
        assert torch.isfinite(p).all() and p.abs().max() < 10, name
        zero = "bias" in name.rpartition(".")[2] or "lora_B" in name
        if not zero and "norm" not in name.lower() and p.numel() > 1:
            assert p.std() > 1e-4, name
    assert torch.equal(loaded.get_parameter(kept), full.get_parameter(kept))
    assert torch.isfinite(loaded(**trainable.batch()).loss)


@with_options(
    {
        "SEKE": [{}, {"use_moe": False}, {"use_rnn": False}, {"use_moe": False, "use_rnn": False}],
        "hypernet": [{}, {"bidirectional": True, "meta_hidden_size": None}],
        "ExHiRD": [{}, {"exclusive_loss_coef": 0}],
        "ExHiRD transformer": TRANSFORMER_OPTIONS,
    }
)
def test_every_trainable_parameter_gets_a_gradient(trainable, options):
    model = trainable.make(**options).train()
    model(**trainable.batch()).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())
    if isinstance(trainable.tokenizer, ExhirdTokenizer):  # no other gradient is 0
        silent = {name for name, gradient in gradients(model).items() if not gradient.any()}
        assert {name for name in silent if "backbone" not in name} <= {"decoder.phrase_input.weight"}


@for_each()
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, trainable):
    calls = []
    for checkpointing in (False, True):
        model, ran = without_randomness(trainable.make(**trainable.balanced)), []
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        model(**trainable.batch()).loss.backward()
        calls.append((len(ran), gradients(model)))
    (once, expected), (again, found) = calls
    assert again > once  # it was on: layers ran again in the backward pass
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


@for_each(every_day=ONE_EACH)
@pytest.mark.parametrize("reentrant", [None, pytest.param(False, marks=pytest.mark.nightly), True])
def test_two_forward_passes_before_one_backward_pass_do_not_mix(reentrant, trainable):
    found, batches = [], (trainable.batch(4), trainable.batch(2))
    for together in (True, False):
        model = without_randomness(trainable.make(**trainable.balanced))
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if together:
            (model(**batches[0]).loss + model(**batches[1]).loss).backward()
        else:
            for batch in batches:
                model(**batch).loss.backward()
        found.append(gradients(model))
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@for_each()
def test_bf16_trains_and_stays_near_float32(trainable):
    model, batch = trainable.make(), trainable.batch()
    exact = model(**batch).loss
    half = copy.deepcopy(model).to(torch.bfloat16)
    rounded = half(**batch)
    rounded.loss.backward()
    assert rounded.loss.dtype == torch.float32
    assert all(torch.isfinite(gradient).all() for gradient in gradients(half).values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**batch)
    mixed.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    for loss in (rounded.loss, mixed.loss):
        assert_close(loss.float(), exact, rtol=0.05, atol=0.05)


FLOAT32_LOSS = ("Lexicon", "MoeSummCausal", "MoeSumm flat")  # Llama's own


@for_each([name for name in TRAINABLE if not name.startswith(FLOAT32_LOSS)])
def test_a_model_in_float64_has_its_loss_in_float64(trainable):
    """A step of 1e-9 changes a smooth loss by its gradient; float32 would drown this in rounding."""
    model, batch = trainable.make(**trainable.balanced).double(), trainable.batch()
    outputs = model(**batch)
    assert outputs.loss.dtype == outputs[trainable.output].dtype == torch.float64
    outputs.loss.backward()
    p = max((p for p in model.parameters() if p.grad is not None and p.dim() == 2), key=lambda p: p.grad.abs().max())
    at = np.unravel_index(p.grad.abs().argmax(), p.shape)
    with torch.no_grad():
        p[at] += 1e-9
        moved = model(**batch).loss - outputs.loss
    assert_close(moved / 1e-9, p.grad[at], rtol=1e-4, atol=1e-6)


COMPILED = ("SEKE bert", "hypernet tags", "hypernet answers", "ExHiRD transformer", "ExHiRD bigru", "MoeSumm bart",
            "MoeSummCausal llama", "Lexicon token", "Lexicon sequence_soft", "Lexicon sequence_hard", "Lexicon domain")  # fmt: skip


@for_each(COMPILED, every_day=())
def test_torch_compile_changes_nothing(trainable, request, backbone_config):
    family = request.node.callspec.params["trainable"].split()[0]
    whole = family in ("MoeSumm", "MoeSummCausal", "Lexicon")
    encoder = backbone_config("modernbert" if trainable.output == "start_logits" else "bert", num_hidden_layers=1)
    options = {**trainable.balanced, **ONE_LAYER.get(family, {"text_config": encoder})}
    models = [trainable.make(**options) for _ in range(2)]
    unrolled = "labels" if family == "ExHiRD" else "input_ids"  # over whose steps loops run
    trainable.rows = sorted(trainable.rows, key=lambda row: len(row[unrolled]))
    batch = trainable.batch(2) | ({"use_cache": False} if family in ("Lexicon", "MoeSummCausal") else {})
    torch._dynamo.reset()
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=whole)
    expected, found = models[0](**batch), compiled(**batch)
    assert_close(found[trainable.output], expected[trainable.output], rtol=0, atol=1e-5)
    assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)
    for outputs in (expected, found):
        outputs.loss.backward()
    assert_close(gradients(models[1]), gradients(models[0]), rtol=1e-4, atol=1e-5)


@for_each([name for name in TRAINABLE if name.split()[1] not in ("classes", "answers")])
def test_a_batch_without_labels_has_a_loss_of_zero(trainable):
    model, batch = trainable.make().train(), trainable.batch()
    loss = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss
    loss.backward()
    assert loss == 0 and all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


@for_each(["SEKE bert", "hypernet tags", "MoeSumm bart", "MoeSummCausal llama", "Lexicon token", "Lexicon domain"])
@pytest.mark.parametrize("balanced", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(balanced, trainable):
    """With `num_items_in_batch`, as the Trainer passes it, the parts of a step sum to the step."""
    model, batch = trainable.make(**(trainable.balanced if balanced else {})), trainable.batch()
    items = trainable.labels_in(batch)
    whole = model(**batch, num_items_in_batch=items).loss
    assert_close(whole, model(**batch).loss)
    parts = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(4)]
    summed = sum(model(**part, num_items_in_batch=items).loss for part in parts)
    # a balance loss is a product of two averages and so not additive: near, not equal
    assert_close(summed, whole, rtol=0.2 if balanced else 1e-5, atol=1e-6)


# --- the stock Trainer ------------------------------------------------------------------------------------------------


@for_each(every_day=ONE_EACH[::3])  # the packages' own tests train, too
def test_the_stock_trainer_lowers_the_loss_and_predicts(trainable, tmp_path):
    options = {"max_steps": trainable.steps, "learning_rate": trainable.rate}
    trainer = trainer_of(trainable.make(), trainable, tmp_path, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < trainable.falls_to * sum(losses[:3])
    predicted = trainer.predict(trainable.rows[:4])
    expected = trainable.read(trainer.model, trainable.batch())
    answers = trainable.output == "start_logits"
    logits = predicted.predictions[0] if answers else predicted.predictions  # alone: no routes, margins or caches
    assert len(predicted.predictions) == (2 if answers else 4)
    assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)
    assert answers or trainer.label_names == ["labels"]


RESUMED = {name: name.startswith(("SEKE", "hypernet tags")) for name in TRAINABLE}  # whether also as an adapter


@pytest.mark.parametrize(
    "trainable, lora",
    [
        pytest.param(name, lora, marks=by_day(name in ("SEKE bert", "Lexicon token")))
        for name, is_adapted in RESUMED.items()
        for lora in (False, True)[: 1 + is_adapted]
    ],
    indirect=["trainable"],
)
@pytest.mark.filterwarnings("ignore:An adapter over")
def test_a_resumed_run_has_the_weights_of_an_unbroken_one_bit_for_bit(trainable, lora, tmp_path):
    def train(checkpoint=None):
        set_seed(5)
        model = trainable.make(**trainable.regularized)
        model = get_peft_model(model, model.lora_config(r=4)) if lora else model
        start, options = weights(model), {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, "seed": 5}
        trainer = trainer_of(model, trainable, tmp_path, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 6
        return start, weights(model)

    start, expected = train()
    _, found = train(str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(expected[name], start[name]) for name in expected)  # negative control


AUTO_PEFT = {
    "TOKEN_CLS": AutoPeftModelForTokenClassification,
    "SEQ_2_SEQ_LM": AutoPeftModelForSeq2SeqLM,
    "CAUSAL_LM": AutoPeftModelForCausalLM,
}
ADAPTED = [
    *((name, {}) for name in ("SEKE bert", "SEKE deberta-v2", "SEKE modernbert", "hypernet tags")),
    *((name, {"r": 4}) for name in ("MoeSumm bart", "MoeSummCausal llama", "Lexicon token", "Lexicon sequence_soft")),
    ("Lexicon sequence_hard", {"r": 4, "modules_to_save": ["mlp"]}),
]


@pytest.mark.parametrize(
    "trainable, options",
    [pytest.param(name, options, marks=by_day(name in ONE_EACH)) for name, options in ADAPTED],
    indirect=["trainable"],
)
def test_adapters_train_whole_heads_and_open_by_the_auto_class_of_their_task(trainable, options, tmp_path):
    trainable.make().save_pretrained(tmp_path / "base")
    kind, batch, folder = type(trainable.make()), trainable.batch(), tmp_path / "adapter"
    model = kind.from_pretrained(tmp_path / "base")
    config = model.lora_config(**options)
    adapted = get_peft_model(model, config).eval()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    for part in ("lora_A", "lora_B", *(set(config.modules_to_save) - {"score"})):  # "score" is peft's
        assert any(part in name for name in trained), part
    assert all("lora_" in name or ".modules_to_save." in name for name in trained)
    with torch.no_grad():
        for p in trained.values():
            p.add_(0.1 * torch.randn_like(p))
    adapted.save_pretrained(folder)
    expected = trainable.read(adapted, batch)
    assert not torch.allclose(expected, trainable.read(trainable.make(), batch), atol=1e-3)
    if config.task_type is None:
        opened = AutoPeftModel.from_pretrained(folder, import_allowlist=[kind.__module__])
    else:
        opened = AUTO_PEFT[config.task_type].from_pretrained(folder)
    models = [opened, PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), folder)]
    if config.task_type == "TOKEN_CLS":
        models.append(AutoModelForTokenClassification.from_pretrained(folder))
    for again in models:
        assert_close(trainable.read(again.eval(), batch), expected, rtol=0, atol=1e-5)
    if kind.__name__.startswith("Seke"):
        tagger = pipeline("token-classification", model=str(folder), tokenizer=trainable.tokenizer)
        assert tagger("the graph cut") is not None


@for_each(["SEKE bert", "hypernet tags", "MoeSumm bart", "MoeSummCausal llama"])
def test_an_adapter_over_a_model_that_was_never_saved_is_warned_about(trainable, tmp_path, recwarn):
    model = trainable.make()
    model.save_pretrained(tmp_path)
    for backbone in ("", "microsoft/deberta-v3-base"):  # the backbone is not this model
        model.name_or_path = model.config.text_config.name_or_path = backbone
        with pytest.warns(UserWarning, match="records its base"):
            config = model.lora_config(target_modules=["dense"])
        assert (config.r, config.lora_alpha, config.target_modules) == (16, 16, {"dense"})
    recwarn.clear()
    type(model).from_pretrained(tmp_path).lora_config()
    assert not [warning for warning in recwarn if "records its base" in str(warning.message)]


# --- several processes ------------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import copy, re, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)
folder, results = sys.argv[1], {}
arguments = TrainingArguments(folder, max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
                              save_strategy="no", disable_tqdm=True)
rank, mesh = arguments.process_index, dist.device_mesh.init_device_mesh("cpu", (2,))
assert arguments.world_size == dist.get_world_size() == 2
for name, (model, rows, collate, batch, items, sharded) in torch.load(f"{folder}/cases.pt", weights_only=False).items():
    if rows:
        trainer = Trainer(copy.deepcopy(model), arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        trainer.save_model(f"{folder}/{name}")
        assert trainer.state.global_step == 2
    mine = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
    mine |= {} if items is None else {"num_items_in_batch": items}
    scale = 1 if items is None else 2  # sums over processes, of which a mean is taken

    replicated = copy.deepcopy(model)
    if "MoeSumm" in name:  # it wants every parameter used once
        replicated.gradient_checkpointing_enable({"use_reentrant": True})
    parallel = DistributedDataParallel(replicated)
    (parallel(**mine).loss * scale).backward()
    results[name] = [{n: p.grad for n, p in replicated.named_parameters() if p.requires_grad}]
    if sharded:
        for part, module in model.named_modules():
            if re.fullmatch(sharded, part):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert sum(p.to_local().numel() for p in model.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())
        (model(**mine).loss * scale).backward()
        results[name].append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        results[name].append({n: p.full_tensor().detach() for n, p in model.named_parameters()})
if rank == 0:
    torch.save(results, f"{folder}/results.pt")
dist.destroy_process_group()
"""
FULLY_SHARDED = {
    "SEKE": r"moe|rnn",
    "MoeSumm": r"backbone\.model\.(en|de)coder\.layers\.\d+",
    "MoeSummCausal": r"backbone\.model\.layers\.\d+",
    "Lexicon": r"model\.layers\.\d+",
}
WITH_TRAINER = ("SEKE bert", "hypernet tags", "ExHiRD bigru", "MoeSumm bart", "MoeSummCausal llama", "Lexicon token")
FROZEN = ("hypernet tags",)


@pytest.mark.nightly
def test_two_processes_replicated_or_sharded_have_the_gradients_of_one(request, tmp_path):
    """All kinds in one torchrun: a new process imports for some seconds."""
    cases, models = {}, {}
    names = [(name, {}) for name in TRAINABLE] + [(name, {"freeze_backbone": True}) for name in FROZEN]
    for name, options in names:
        trainable = make_trainable(name, request.getfixturevalue)
        case, batch = name + " frozen" * bool(options), trainable.batch()
        if "dataset_ids" in batch:  # the second process has none: its deputies get zeros, and no process waits for them
            batch["dataset_ids"] = torch.tensor([0, 2, -1, -1])
        items, sharded = trainable.labels_in(batch), FULLY_SHARDED.get(name.split()[0])
        models[case] = model = without_randomness(trainable.make(**options))
        rows = trainable.rows if case in WITH_TRAINER else None
        cases[case] = (copy.deepcopy(model), rows, trainable.collate, batch, items, sharded)
    torch.save(cases, tmp_path / "cases.pt")
    run_by_torchrun(TWO_PROCESSES, tmp_path)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    assert set(results) == set(cases)
    for case, found in results.items():
        *_, batch, items, _ = cases[case]
        models[case](**batch, **({} if items is None else {"num_items_in_batch": items})).loss.backward()
        for ours in found[:2]:
            assert_close(ours, gradients(models[case]), rtol=1e-4, atol=1e-5, msg=lambda text, case=case: case + text)
        torch.optim.SGD(models[case].parameters(), lr=0.1).step()
        for ours in found[2:]:
            expected = dict(models[case].named_parameters())
            assert_close(ours, expected, rtol=1e-4, atol=1e-5, msg=lambda text, case=case: case + text)
    for name in WITH_TRAINER:
        type(models[name]).from_pretrained(tmp_path / name)
