"""Opens the keyphrase pipeline by the options --model, --device and --dtype."""


def open_extractor(model: str | None = None, *, device: str | None = None, dtype: str = "float32", **options):
    """The keyphrase pipeline of a model.

    Args:
        model: folder or Hub id of a token classifier, or default (if there is none) or tiny.
        device: such as "cuda:0"; by default the pipeline chooses.
        dtype: the name of a data type, such as "bfloat16".
        options: of `pipeline`, such as `backend` and `trust_remote_code`.

    Raises:
        OSError: if the model cannot be opened.
        ValueError: for a device or data type that is not available.
    """
    import torch

    from run_tools.loading import open_pipeline
    from run_tools.packaged import locate_model

    model = locate_model(model)
    options |= {"dtype": dtype} | ({} if device is None else {"device": torch.device(device)})
    return open_pipeline("keyphrase-extraction", model, **options)
