"""Terms in contexts as prompts, their definitions by `generate`, and which of several is the best.

Letters: B rows, n samples of a row, T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from .data_lexicon import prompt
from .domains_lexicon import open_embedder

logger = logging.get_logger(__name__)

SAMPLING = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
ON_LONG = ("cut", "error")
# Arguments that `generate` does not pass on to a loop of ours. With them it keeps all logits to the end.
OTHER_LOOPS = (
    *("assistant_model", "assistant_tokenizer", "assistant_early_exit", "prompt_lookup_num_tokens", "custom_generate"),
    *("tokenizer", "streamer", "synced_gpus"),
)


def check_row(row, number: int) -> tuple[str, str]:
    """A row -> term and context.

    Raises:
        TypeError: for a row of another form.
    """
    if isinstance(row, Mapping) and all(
        isinstance(row.get(name), str) and row[name].strip() for name in ("term", "context")
    ):
        return row["term"], row["context"]
    raise TypeError(
        f"Row {number} is {row!r:.80}. Pass {{'term': ..., 'context': ...}}, both texts that are not empty."
    )


class Definer:
    """Writes definitions; its arguments are those of `DefinitionModelingPipeline`.

    Raises:
        ValueError: for options that cannot be, and a tokenizer without BOS or EOS.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        best_of: int = 1,
        num_definitions: int = 1,
        reward_model=None,
        domain_ids: int | Sequence[int] | None = None,
        embedder=None,
        max_new_tokens: int = 64,
        on_long: str = "cut",
        **generate_kwargs,
    ):
        for name, value in (
            ("best_of", best_of),
            ("num_definitions", num_definitions),
            ("max_new_tokens", max_new_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be 1 or more.")
        if num_definitions > best_of:
            raise ValueError(
                f"num_definitions={num_definitions} of best_of={best_of} samples. Use best_of={num_definitions} or more."
            )
        if on_long not in ON_LONG:
            raise ValueError(f"on_long={on_long!r} is not known. Use one of {', '.join(map(repr, ON_LONG))}.")
        self.model, self.tokenizer, self.best_of, self.num_definitions = model, tokenizer, best_of, num_definitions
        self.ends = self.end_tokens()
        self.reward, self.domain_ids, self.embedder = open_reward(reward_model, model.device), domain_ids, embedder
        self.max_new_tokens, self.on_long = max_new_tokens, on_long
        sampled = best_of > 1 or generate_kwargs.get("do_sample", False)
        # a greedy answer has no use for what a checkpoint says of sampling
        plain = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
        self.options = {"do_sample": sampled, **(SAMPLING if sampled else plain), **generate_kwargs}
        self.limit = getattr(model.config, "max_position_embeddings", None) or 10**9

    def end_tokens(self) -> list[int]:
        """The tokens that end a definition.

        Raises:
            ValueError: for a tokenizer that cannot write the prompt.
        """
        if self.tokenizer.bos_token_id is None or self.tokenizer.eos_token_id is None:
            raise ValueError(
                "The tokenizer has no BOS or no EOS, and the prompt begins with the one and ends in the other."
            )
        return [self.tokenizer.eos_token_id]

    def __call__(self, rows: Sequence[Mapping], first: int = 0, batch_size: int = 8) -> list:
        """Rows -> their definitions, in order; `first` is the first one's number, for messages.

        With `num_definitions` above 1, a list of distinct definitions per row, which is shorter where there are fewer
        distinct samples.
        """
        found = []
        for drawn in self.draw(rows, first, batch_size):
            best = distinct_definitions(drawn)[: self.num_definitions]
            found.append(best if self.num_definitions > 1 else best[0])
        return found

    def draw(self, rows: Sequence[Mapping], first: int = 0, batch_size: int = 8) -> list[list[dict]]:
        """Rows -> for each all `best_of` answers, in the order in which they were drawn."""
        checked = [check_row(row, first + i) for i, row in enumerate(rows)]
        prompts = self.prompts(checked, first)
        domains = self.domains(checked, first)
        # rows of one domain together: a batch then reads the weights of one expert
        experts = [0] * len(rows) if domains is None else domains["ids"].tolist()
        order = sorted(range(len(rows)), key=lambda i: (experts[i], -len(prompts[i])))
        found: list = [None] * len(rows)
        for start in range(0, len(order), batch_size):
            own = order[start : start + batch_size]
            ids = None if domains is None else domains["ids"][own]
            for i, answers in zip(own, self.define([prompts[i] for i in own], ids), strict=True):
                more = (
                    {}
                    if domains is None or domains["distances"] is None
                    else {"domain": int(domains["ids"][i]), "distance": round(float(domains["distances"][i]), 6)}
                )
                found[i] = [
                    {"term": checked[i][0], "definition": text, "score": score, **more} for text, score in answers
                ]
        return found

    def prompts(self, rows: list[tuple[str, str]], first: int) -> list[list[int]]:
        """Terms and contexts, the first of which has the number `first` -> token ids."""
        return [self.prompt_ids(*row) for row in rows]

    def prompt_ids(self, term: str, context: str) -> list[int]:
        """BOS prompt EOS; a context without room loses words on both sides of the term.

        Raises:
            ValueError: under "error", or where not even the term has room.
        """
        room = self.limit - self.max_new_tokens
        ids = self.encode(term, context)
        if len(ids) <= room:
            return ids
        message = f"The context of {term!r:.60} has {len(ids):,} tokens, and the model {self.limit:,} positions"
        if self.on_long == "error":
            raise ValueError(
                f"{message}, {self.max_new_tokens} of them for the definition. Use on_long='cut', or shorten it."
            )
        piece = cut_around(term, context, lambda piece: len(self.encode(term, piece)) <= room)
        if piece is None:
            raise ValueError(
                f"{message}: not even the term has room beside max_new_tokens={self.max_new_tokens}. Use fewer."
            )
        words, kept = len(context.split()), len(piece.split())
        logger.warning(
            f"{message}; {words - kept:,} of its {words:,} words, those furthest from the term, are not read."
        )
        return self.encode(term, piece)

    def encode(self, term: str, context: str) -> list[int]:
        question = self.tokenizer(
            prompt(term, context), add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return [self.tokenizer.bos_token_id, *question["input_ids"], self.tokenizer.eos_token_id]

    def domains(self, rows: list[tuple[str, str]], first: int) -> dict | None:
        """-> ids (B,) of the experts and distances (B,) to their centroids, or `None` where nobody chooses beforehand."""
        if self.domain_ids is not None:
            given = self.domain_ids
            ids = [given] * len(rows) if isinstance(given, int) else list(given)[first : first + len(rows)]
            if len(ids) != len(rows):
                raise ValueError(
                    f"There are {len(ids)} domain_ids for {len(rows)} rows. Pass one for all, or one each."
                )
            return {"ids": torch.tensor(ids), "distances": None}
        centroids = getattr(self.model, "domain_centroids", None)
        if getattr(self.model.config, "routing_policy", None) != "domain" or centroids is None or not centroids.any():
            return None
        texts = [prompt(term, context) for term, context in rows]
        if self.embedder is None or isinstance(self.embedder, str):  # opened once, not for every batch
            self.embedder = open_embedder(self.embedder or self.model.config.embedder)
        ids, distances = self.model.assign_domains(texts, self.embedder, return_distances=True)
        return {"ids": ids, "distances": distances.gather(1, ids[:, None])[:, 0]}

    @torch.no_grad()
    def define(self, prompts: list[list[int]], domain_ids: torch.Tensor | None) -> list[list[tuple[str, float]]]:
        """Prompts -> for each its definitions and their scores, as they were drawn."""
        B, n, T = len(prompts), self.best_of, max(map(len, prompts))
        pad = self.ends[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        device = self.model.device
        ids = torch.tensor([[pad] * (T - len(own)) + own for own in prompts], device=device)
        mask = torch.tensor([[0] * (T - len(own)) + [1] * len(own) for own in prompts], device=device)
        routed = {} if domain_ids is None else {"domain_ids": domain_ids.to(device)}
        chosen, scored = ChosenLogProbs(), {}
        if self.reward is None:
            kept = is_distributed() or any(self.options.get(name) is not None for name in OTHER_LOOPS)
            scored = {"output_logits": True} if kept else {"custom_generate": chosen.generate}
        made = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.max_new_tokens,
            num_return_sequences=n,
            pad_token_id=pad,
            eos_token_id=self.ends,
            return_dict_in_generate=True,
            **scored,
            **routed,
            **self.options,
        )
        written = made.sequences[:, T:]  # (B n, t)
        lengths = length_of(written, self.ends)
        texts = [self.text_of(own[:k]) for own, k in zip(written, lengths, strict=True)]
        if self.reward is not None:
            whole = [
                prompts[i // n] + own[:k].tolist() for i, (own, k) in enumerate(zip(written, lengths, strict=True))
            ]
            scores = self.rewards(whole, pad)
        else:
            beam_indices = getattr(made, "beam_indices", None)
            log_p = (
                log_probs(made.logits, written, beam_indices) if kept else chosen.token_log_probs(written, beam_indices)
            )
            scores = [math.exp(value) for value in mean_inside(log_p, lengths).tolist()]
        answers = [(text, round(score, 6)) for text, score in zip(texts, scores, strict=True)]
        return [answers[b * n : (b + 1) * n] for b in range(B)]

    def text_of(self, written: torch.Tensor) -> str:
        """The definition that these tokens are."""
        return self.tokenizer.decode(written, skip_special_tokens=True).strip()

    def rewards(self, rows: list[list[int]], pad: int) -> list[float]:
        """Prompts with their definitions -> r (B n,)."""
        T, device = max(map(len, rows)), self.reward.device
        if self.reward.config.pad_token_id is None:
            self.reward.config.pad_token_id = pad
        ids = torch.tensor([own + [pad] * (T - len(own)) for own in rows], device=device)
        mask = torch.tensor([[1] * len(own) + [0] * (T - len(own)) for own in rows], device=device)
        return self.reward(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()


def cut_around(term: str, context: str, has_room: Callable[[str], bool]) -> str | None:
    """The widest piece of a context around its term that has room; `None` where not even the term has."""
    words = context.split()
    wanted = term.lower().split()
    lowered = [word.strip(".,;:!?\"'()").lower() for word in words]
    places = [i for i in range(len(words)) if lowered[i : i + len(wanted)] == wanted]
    middle, found = (places[0] if places else 0), None
    low, high = 0, len(words)
    while low <= high:
        width = (low + high) // 2
        piece = " ".join(words[max(0, middle - width) : middle + width + len(wanted)])
        if has_room(piece):
            found, low = piece, width + 1
        else:
            high = width - 1
    return found


def open_reward(reward_model, device):
    """A model of one label, or its place -> the model in eval mode."""
    if reward_model is None:
        return None
    if isinstance(reward_model, str | Path):
        try:
            reward_model = AutoModelForSequenceClassification.from_pretrained(reward_model)
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise OSError(
                f"reward_model {str(reward_model)!r} could not be opened: {cause:.300} It is the folder of a model with one label, "
                "or a Hub id."
            ) from error
    if reward_model.config.num_labels != 1:
        raise ValueError(
            f"The reward model has {reward_model.config.num_labels} labels, and a reward is one number. Load or train it with "
            "num_labels=1."
        )
    return reward_model.to(device).eval()


def length_of(written: torch.Tensor, eos: int | Sequence[int]) -> list[int]:
    """(B, t) -> tokens of each row up to its EOS (or the first of several such tokens), which counts, or all."""
    ends = torch.isin(written, torch.as_tensor(eos, device=written.device)).int()
    return torch.where(ends.any(1), ends.argmax(1) + 1, written.shape[1]).tolist()


def is_distributed() -> bool:
    """Whether several processes may hold parts of the model: `generate` then keeps their loops in step."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


class ChosenLogProbs(LogitsProcessor):
    """Log-probabilities of the tokens that `generate` chooses, by the model's own logits, computed step by step.

    As the first processor it reads each step's logits before any other changes them, and drops them once the step's
    tokens are chosen: its memory does not grow with the vocabulary. One object serves one call of
    `generate(custom_generate=self.generate)`.
    """

    def __init__(self):
        self.beams, self.log_p, self.steps = 1, None, []

    def generate(self, model, input_ids, *, logits_processor, stopping_criteria, generation_config, **options):
        """The loop of sampling or of beams, as `generate` would have run it."""
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
        """A step's logits (rows, V), or their log-softmax, of R * beams rows -> the same."""
        self.log_p = scores.log_softmax(-1)
        return scores

    def record_tokens(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        """Reads the last tokens: one for each row, or with beams the candidates (R K, t). It stops nothing."""
        log_p = self.log_p.unflatten(0, (-1, self.beams))  # (R, beams, V)
        tokens = input_ids[:, -1].view(len(log_p), -1)  # (R, K)
        self.steps.append((tokens, log_p.gather(2, tokens[:, None].expand(-1, self.beams, -1))))  # (R, beams, K)
        self.log_p = None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def token_log_probs(self, written: torch.Tensor, beam_indices: torch.Tensor | None = None) -> torch.Tensor:
        """Written tokens (B, t), and with beams the rows that they come from (B, t) -> their log-probabilities (B, t)."""
        found = []
        for t, (tokens, log_p) in enumerate(self.steps[: written.shape[1]]):
            if beam_indices is None:
                found.append(log_p[:, 0, 0])
                continue
            row = beam_indices[:, t].clamp(min=0)  # -1 behind an end
            batch, beam = row // self.beams, row % self.beams
            found.append(log_p[batch, beam, (tokens[batch] == written[:, t, None]).int().argmax(1)])
        return torch.stack(found, 1)


def log_probs(
    logits: Sequence[torch.Tensor], written: torch.Tensor, beam_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities (B, t) of the written tokens (B, t), from the logits of all steps: t tensors (B, V), or with
    beams (B * beams, V) and the rows that the tokens come from (B, t)."""
    found = []
    for t, step in enumerate(logits[: written.shape[1]]):
        if beam_indices is not None:
            step = step[beam_indices[:, t].clamp(min=0)]
        found.append(step.float().log_softmax(-1).gather(1, written[:, t, None])[:, 0])
    return torch.stack(found, 1)


def mean_inside(log_p: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """log p (B, t) -> the mean over each row's first so many tokens (B,)."""
    count = torch.tensor(lengths, device=log_p.device)
    outside = torch.arange(log_p.shape[1], device=log_p.device) >= count[:, None]
    return log_p.masked_fill(outside, 0).sum(1) / count


def distinct_definitions(samples: list[dict]) -> list[dict]:
    """Samples of one row -> one for each text, with its best score, best first; without the empty text, unless all
    samples are empty."""
    distinct: dict[str, dict] = {}
    for one in sorted(samples, key=lambda one: -one["score"]):
        distinct.setdefault(one["definition"], one)
    return [one for text, one in distinct.items() if text] or list(distinct.values())
