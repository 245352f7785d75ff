"""Trains a reward model that ranks a model's own definitions (LM-Lexicon, Sect. 3.4), for the best of n samples.

    lexperts train lexicon-reward --model-name-or-path runs/mixture --reward-base runs/lexicon-base \\
        --train-files train.jsonl --validation-files validation.jsonl --output-dir runs/reward

Definitions are sampled from the model for each row. With --chosen gold (the paper's way), the gold definition is preferred to
the most likely wrong samples. With --chosen nearest, the sample nearest to the gold definition by BLEU is preferred to the
furthest ones, so that the reward learns from samples only. Pairs that were sampled with the same
settings are kept, also by --overwrite-output-dir true.
"""

from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainingArguments, set_seed

from run_tools.fingerprints import digest, fingerprint
from run_tools.model_loading import open_model, open_tokenizer
from run_tools.model_options import describe_load_errors
from run_tools.resume import ResumableJsonl
from run_tools.versions import __version__

from ..common.arguments import RunFolderArguments
from ..common.causal_training import print_rank0, training_command
from ..common.run_folder import open_run
from ..common.training import trainer_options
from .arguments import RewardArguments
from .rewards import RewardTrainer, collate_pairs, encode_pairs, pair_accuracy, write_pairs
from .training import load_rows


def prepare(args: RewardArguments, folder_args: RunFolderArguments, training_args: TrainingArguments):
    """Samples definitions and makes pairs -> the trainer and the run folder."""
    rows_by_split, overwrite = load_rows(args), folder_args.overwrite_output_dir
    folder = open_run("lexicon/train_reward.py", training_args, args, overwrite=overwrite)
    with describe_load_errors("--model-name-or-path", args.model_name_or_path):
        tokenizer = open_tokenizer(args.model_name_or_path)
    output, columns, model = Path(training_args.output_dir), {}, None
    for split, rows in rows_by_split.items():
        rows = rows[: args.max_rows]
        options = {"samples": args.samples, "kept": args.kept, "chosen": args.chosen, "seed": training_args.seed}
        options |= {"max_new_tokens": args.max_new_tokens, "batch_size": args.sampling_batch_size}
        settings = {**options, "rows": digest(rows), "lexperts": __version__}
        settings["model"] = fingerprint(args.model_name_or_path)
        file = ResumableJsonl(output / f"pairs_{split}.jsonl", settings)
        if not file.is_complete(overwrite):
            if model is None:
                model = open_model(AutoModelForCausalLM, args.model_name_or_path).to(training_args.device).eval()
            write_pairs(model, tokenizer, rows, file, **options)
        columns[split], too_long = encode_pairs(file.path, tokenizer, args.max_length)
        print_rank0(
            f"{split}: {len(columns[split]['chosen']):,} pairs of {len(rows):,} rows; {too_long:,} too long and dropped"
        )
    set_seed(training_args.seed)  # for the new head, whether or not anything was sampled before
    with describe_load_errors("--reward-base", args.reward_base):
        reward = open_model(AutoModelForSequenceClassification, args.reward_base, num_labels=1, new=("score.",))
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    reward.config.pad_token_id = padding
    training_args.remove_unused_columns = False
    pairs = {split: Dataset.from_dict(own) for split, own in columns.items()}
    options = trainer_options(reward, training_args, pairs, partial(collate_pairs, padding=padding), tokenizer)
    return RewardTrainer(**options, compute_metrics=pair_accuracy), folder


main = training_command(
    "lexicon",
    "train_reward",
    prepare,
    "eval_accuracy",
    "the chosen definition has the larger reward in {:.1%} of pairs",
)
