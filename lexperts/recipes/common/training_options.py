"""The valid values of the options of transformers.TrainingArguments, which has none itself; imports no torch."""

from run_tools.option_values import LARGEST_SEED, Limits

COUNT, NUMBER, SHARE = Limits(least=1), Limits(least=0), Limits(least=0, below=1)
SEED = Limits(least=0, most=LARGEST_SEED)
STEPS = Limits(above=0)  # a number of steps, or below 1 a fraction of all steps

TRAINING_LIMITS = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
            "eval_accumulation_steps", "torch_empty_cache_steps", "dataloader_prefetch_factor", "ddp_timeout",
            "ddp_bucket_cap_mb",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "warmup_steps", "eval_delay",
            "neftune_noise_alpha", "save_total_limit", "dataloader_num_workers",
        ),
        NUMBER,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor", "warmup_ratio"), SHARE),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), STEPS),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    **dict.fromkeys(("max_steps", "local_rank"), Limits(least=-1)),
    "num_train_epochs": Limits(least=0, most=1e6),
}  # fmt: skip
# JSON objects, or files that hold them
JSON_OPTIONS = (
    "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "accelerator_config",
    "fsdp_config", "deepspeed", "parallelism_config", "liger_kernel_config",
)  # fmt: skip
TRAINING_KINDS = {
    "output_dir": "output folder", "resume_from_checkpoint": "checkpoint", "report_to": "tracker",
    "hub_model_id": "repository",
}  # fmt: skip
