"""MoverScore and MAUVE of definitions, each by a model of the user's choice.

Letters: n pairs, k words of a text, d hidden size.
"""

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import log

import numpy as np
import torch
from scipy.spatial.distance import cdist
from tqdm import tqdm
from transformers import AutoModel

from run_tools.model_loading import open_model, open_tokenizer
from run_tools.model_options import parse_device

from ..common.bertscore import in_chunks
from .scores import Pair, facts_of

MOVER_LAYERS = 5


class TextEncoder:
    """A model and its tokenizer, which pads with EOS if it has no padding token.

    Attributes:
        limit: the most tokens of a text; longer ones are truncated.
    """

    def __init__(self, model: str, batch_size: int, limit: int, default: int):
        self.batch_size, self.tokenizer = batch_size, open_tokenizer(model)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = open_model(AutoModel, model, new=("pooler.",)).to(parse_device(None)).eval()
        positions = getattr(self.model.config, "max_position_embeddings", None) or default
        self.limit = min(positions, self.tokenizer.model_max_length, limit)

    @torch.no_grad()
    def encode(self, texts: Iterable[str], layers: int) -> Iterator[tuple[list[str], torch.Tensor, torch.Tensor]]:
        """The different texts in batches of similar lengths, with their mask (B, T) and the last hidden states (layers, B, T, d)."""
        unique = sorted(set(texts), key=len)
        for start in range(0, len(unique), self.batch_size):
            own = unique[start : start + self.batch_size]
            batch = self.tokenizer(own, truncation=True, max_length=self.limit, padding=True, return_tensors="pt")
            states = self.model(**batch.to(self.model.device), output_hidden_states=True).hidden_states
            yield own, batch["attention_mask"], torch.stack(states[-layers:])


def power_means(layers: torch.Tensor) -> torch.Tensor:
    """Hidden states (L, k, d) -> (k, 3 d): minimum, mean and maximum over the layers, each of norm 1, concatenated and of norm 1."""
    layers = torch.nn.functional.normalize(layers.float(), dim=-1)
    joined = torch.cat([layers.amin(0), layers.mean(0), layers.amax(0)], -1)
    return torch.nn.functional.normalize(joined, dim=-1)


class MoverScore:
    """MoverScore with 1-grams (Zhao et al. 2019, Sect. 3): 1 - the word mover's distance of two texts' words.

    A word's vector is that of its first token, the power means of the last five layers; its mass is its share of the text's
    inverse document frequencies. These are counted in the gold definitions for both texts: a text scores 100 with itself, and
    a row's score depends on no other prediction (the authors' code also counts the predictions). The distance of two words is
    Euclidean, and the optimal transport is exact. Punctuation and further tokens of a word have no mass. Implemented from the
    paper, because the authors' package does not run with current libraries.
    """

    def __init__(self, model: str, gold: Sequence[str], batch_size: int = 64):
        import ot

        self.transport, self.encoder = ot.emd2, TextEncoder(model, batch_size, 10**9, 512)
        if not self.encoder.tokenizer.is_fast:
            raise ValueError(
                f"--moverscore-model {model} has a slow tokenizer, without word boundaries. Use a model with a fast one."
            )
        self.layers = min(MOVER_LAYERS, self.encoder.model.config.num_hidden_layers)
        # log((N + 1) / (df + 1)) of each token in N texts; it is log(N + 1) for others
        counts = Counter(token for _, ids in self.words(gold) for token in set(ids))
        self.idf = {token: log((len(gold) + 1) / (count + 1)) for token, count in counts.items()}
        self.unseen = log(len(gold) + 1)
        settings = f"1-grams, {model}, power means of its last {self.layers} layers, IDF of the gold definitions, Euclidean; transport by POT"
        self.facts = facts_of("POT", settings) | {"package": "this script, POT"}

    def words(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Texts -> for each the positions and ids of the first tokens of its words, without punctuation."""
        words = []
        encoded = self.encoder.tokenizer(list(texts), truncation=True, max_length=self.encoder.limit)
        for encoding in encoded.encodings:
            positions, previous = [], None
            for i, word in enumerate(encoding.word_ids):
                signs = encoding.tokens[i].strip("\u0120\u2581")  # without the marker of a space before it
                if word is not None and word != previous and not all(sign in string.punctuation for sign in signs):
                    positions.append(i)
                previous = word
            words.append((positions, [encoding.ids[i] for i in positions]))
        return words

    def vectors(self, texts: Iterable[str]) -> dict[str, tuple[np.ndarray, list[int]]]:
        """Texts -> for each the vectors of its words (k, 3 d) and their ids."""
        vectors, left = {}, self.encoder.tokenizer.padding_side == "left"
        for own, mask, layers in self.encoder.encode(texts, self.layers):
            for b, (text, (positions, ids)) in enumerate(zip(own, self.words(own), strict=True)):
                shift = int((mask[b] == 0).sum()) if left else 0
                columns = torch.tensor([i + shift for i in positions], dtype=torch.long, device=layers.device)
                vectors[text] = power_means(layers[:, b, columns]).cpu().numpy(), ids
        return vectors

    def __call__(self, pairs: Sequence[Pair]) -> np.ndarray:
        """n pairs -> scores (n,) in per cent; 0 for a text without words."""
        scores = []
        for chunk in in_chunks(pairs, "MoverScore"):
            vectors = self.vectors([text for pair in chunk for text in pair])
            scores += [self.score(*(vectors[text] for text in pair)) for pair in chunk]
        return 100 * np.array(scores)

    def score(self, ours: tuple[np.ndarray, list[int]], theirs: tuple[np.ndarray, list[int]]) -> float:
        """1 - the transport distance of two texts."""
        if not ours[1] or not theirs[1]:
            return 0.0
        masses = (mass(ids, self.idf, self.unseen) for _, ids in (ours, theirs))
        return 1 - float(self.transport(*masses, cdist(ours[0], theirs[0])))


def mass(ids: Sequence[int], idf: dict[int, float], unseen: float) -> np.ndarray:
    """Words -> their shares (k,) of the inverse document frequencies; equal shares if all of them are 0."""
    values = np.array([idf.get(token, unseen) for token in ids])
    return values / values.sum() if values.sum() > 0 else np.full(len(ids), 1 / len(ids))


class Mauve:
    """MAUVE (Pillutla et al. 2021) of all predictions and all gold definitions, by its authors' package with its settings.

    A text's features are the last layer's hidden state at its last token, as in the package, which only loads models with gpt2
    or bert in their names.
    """

    def __init__(self, model: str, batch_size: int = 64):
        from mauve import compute_mauve

        self.compute, self.encoder = compute_mauve, TextEncoder(model, batch_size, 1024, 1024)
        self.encoder.tokenizer.padding_side = "right"
        settings = f"{model}, last layer at the last token, buckets n / 10, scaling factor 5, seed 25"
        self.facts = facts_of("mauve-text", settings)

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """n texts -> (n, d); an empty text is replaced by the end-of-text token."""
        filler, features = self.encoder.tokenizer.eos_token or self.encoder.tokenizer.sep_token, {}
        batches = self.encoder.encode((text or filler for text in texts), 1)
        for own, mask, states in tqdm(batches, desc="MAUVE", unit="batch", leave=False):
            rows = states[0, torch.arange(len(own)), mask.sum(1) - 1]  # (B, d)
            features |= dict(zip(own, rows.float().cpu().numpy(), strict=True))
        return np.stack([features[text or filler] for text in texts])

    def __call__(self, predictions: Sequence[str], references: Sequence[str]) -> float:
        """MAUVE in per cent, near 100 for texts with the same distribution."""
        return 100 * float(
            self.compute(p_features=self.features(references), q_features=self.features(predictions)).mauve
        )
