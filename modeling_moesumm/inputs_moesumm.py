"""What a pass over texts and summaries needs: tokens that the encoder and the decoder have positions for, and labels."""

import torch


def source_tokens(config, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The texts, (B, S) or (B, S, d), of a length that the encoder can read."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError("Neither input_ids nor inputs_embeds nor encoder_outputs were given. Pass one of them.")
    length, limit = tokens.shape[1], config.max_position_embeddings
    if not length:
        raise ValueError(
            "The texts have no tokens at all. Leave out empty texts, or keep the tokenizer's special tokens."
        )
    if limit is not None and length > limit:
        raise ValueError(
            f"The texts have {length} tokens, and the encoder has positions for {limit}. Cut them (in the tokenizer: "
            f"truncation=True, max_length={limit}), or summarise them piece by piece."
        )
    return tokens


def check_target(config, tokens: torch.Tensor | None, written: int):
    limit = config.max_position_embeddings
    if tokens is not None and limit is not None and written + tokens.shape[1] > limit:
        raise ValueError(
            f"The summaries have {written + tokens.shape[1]} tokens, and the decoder has positions for {limit}. Cut "
            f"them (in the tokenizer: truncation=True, max_length={limit})."
        )


def check_has_source(encoder_outputs, past_key_values):
    for name, value in (("encoder_outputs", encoder_outputs), ("past_key_values", past_key_values)):
        if value is not None:
            raise ValueError(
                f"labels with {name}: the margin loss needs the encoder's states without deputies as well. Pass "
                "input_ids, or set config.margin_loss_coef = 0 or config.margin_main = 'last_layer'."
            )


def check_has_labels(config, decoder_input_ids):
    """Of a training step under the Trainer, which has taken the labels away."""
    if config.margin_loss_coef or decoder_input_ids is None:
        raise ValueError(
            f"labels=None in a training step with margin_loss_coef={config.margin_loss_coef}: under "
            "label_smoothing_factor or compute_loss_func the Trainer keeps the labels, and the margin loss cannot be "
            "computed. Set label_smoothing_factor=0 and model.config.label_smoothing=0.1; for a loss of your own set "
            "model.config.margin_loss_coef=0 and pass decoder_input_ids."
        )


def written_tokens(cache) -> int:
    """Tokens that the decoder's cache holds; not read where that would break a compiled graph."""
    return 0 if cache is None or torch.compiler.is_compiling() else int(cache.get_seq_length())
