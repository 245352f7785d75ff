"""The settings of a run: what its result depends on."""

import json
from dataclasses import asdict

from transformers import TrainingArguments

from run_tools.fingerprints import fingerprint, named_fingerprint
from run_tools.versions import __version__

# settings that name a model or a dataset: a folder is compared by its content
PATH_SETTINGS = ("backbone", "start_from", "teacher", "model_name_or_path", "dataset_name")
# settings that do not affect the result
IGNORED = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "show", "states_dir",
    "generation_batch_size", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
    "logging_nan_inf_filter", "log_level", "log_level_replica", "include_num_input_tokens_seen", "disable_tqdm",
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
    "hub_revision", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches",
    "eval_use_gather_object", "batch_eval_metrics", "save_total_limit", "save_only_model", "save_on_each_node",
    "enable_jit_checkpoint", "use_cpu", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "torch_empty_cache_steps",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "skip_memory_metrics", "debug", "do_train",
    "do_eval", "do_predict", "local_rank", "ddp_timeout", "ddp_backend", "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters", "ddp_static_graph", "restore_callback_states_from_checkpoint",
}  # fmt: skip


def collect_settings(command: str, *arguments, **more) -> dict:
    """Everything that the result of a command such as `seke/train.py` depends on, as JSON.

    Args:
        arguments: dataclasses. Settings in IGNORED are left out; files and PATH_SETTINGS are stored as fingerprints.
        more: computed settings, which replace those of the arguments.
    """
    settings: dict = {"script": command, "lexperts": __version__}
    for group in arguments:
        training = isinstance(group, TrainingArguments)
        if training:
            settings["processes"] = group.world_size * max(1, group.n_gpu)
        for name, value in (group.to_dict() if training else asdict(group)).items():
            if name in IGNORED or name in more:
                continue
            if value and (name.endswith("_files") or name == "datasets"):
                value = [named_fingerprint(path) for path in value]
            elif isinstance(value, str) and name in PATH_SETTINGS:
                value = fingerprint(value)
            settings[name] = value
    return json.loads(json.dumps(settings | more, default=str))
