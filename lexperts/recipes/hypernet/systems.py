"""The models that the commands train, the hypernetwork and its baselines, and their Trainers."""

from pathlib import Path

from torch.utils.data import SequentialSampler
from transformers import Trainer

from keyphrase_tools.loading import describe_load_errors
from modeling_hypernet import (
    CachedEncoderDataset,
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
    HypernetModel,
)
from run_tools import model_loading
from run_tools.backbones import resolve_backbone
from run_tools.fingerprints import fingerprint

from ..common.run_folder import open_run
from ..common.training import separate_rate
from .arguments import DataArguments, ModelArguments
from .baselines import BiLstmModel, PlainModel, TitleGuidedModel

MODELS = {"hypernet": HypernetModel, "bilstm": BiLstmModel, "title_guided": TitleGuidedModel, "plain": PlainModel}
HEADS = {
    "keyphrases": HypernetForTokenClassification,
    "classes": HypernetForSequenceClassification,
    "answers": HypernetForQuestionAnswering,
}
NOT_CONFIG_FIELDS = ("backbone", "reader", "backbone_lr")


def build_model(head: str, args: ModelArguments, backbone: str, **options):
    """A head on the hypernetwork or a baseline, on a pretrained backbone."""
    cls = HEADS[head]
    if args.reader != "hypernet":
        model_class = MODELS[args.reader]
        cls = type(f"{model_class.__name__}{cls.__name__}", (cls,), {"model_class": model_class, "_auto_class": None})
    fields = {name: value for name, value in vars(args).items() if name not in NOT_CONFIG_FIELDS}
    return cls.from_backbone(backbone, **fields, **options)


def open_tokenizer(backbone: str, max_length: int):
    """The backbone's tokenizer. Its maximum length is saved with it, so pipelines use that of training."""
    with describe_load_errors("--backbone", backbone):
        tokenizer = model_loading.open_tokenizer(backbone)
    tokenizer.model_max_length = max_length
    return tokenizer


def cache_states(model, rows: dict, collator, args: DataArguments, output_dir: str) -> dict:
    """Adds the states of a frozen backbone to the rows of each split, if `--cache-states` asks for it."""
    if not (args.cache_states and model.config.freeze_backbone):
        return rows
    folder = Path(args.states_dir or output_dir)
    return {
        split: CachedEncoderDataset(model, own, collator, folder / f"states-{split}") for split, own in rows.items()
    }


def open_folder(command: str, model_args: ModelArguments, data_args: DataArguments, folder_args, training_args):
    """The run folder, and the folder or Hub id of the backbone."""
    backbone = resolve_backbone(model_args.backbone)
    options = {"overwrite": folder_args.overwrite_output_dir, "clear": ("states*",), "backbone": fingerprint(backbone)}
    return open_run(f"hypernet/{command}.py", training_args, model_args, data_args, **options), backbone


class TwoRatesTrainer(Trainer):
    """The Trainer with a separate learning rate for the backbone."""

    backbone_lr: float

    def create_optimizer(self, *args, **kwargs):
        """As in transformers; moves the backbone's parameters to groups with `backbone_lr`."""
        optimizer = super().create_optimizer(*args, **kwargs)
        separate_rate(optimizer, self.model.base_model.backbone.parameters(), self.backbone_lr)
        return optimizer


class ViterbiTrainer(TwoRatesTrainer):
    """Evaluates the most likely paths, as the pipeline does: predictions are logits and paths, in the order of the rows."""

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)  # the stock Trainer sorts by length if training does

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As in transformers, with the paths of `decode`."""
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():  # accelerate wraps only forward
            paths, outputs = self.accelerator.unwrap_model(model).decode(**inputs, return_outputs=True)
        return outputs.loss, None if prediction_loss_only else (outputs.logits, paths), inputs.get("labels")
