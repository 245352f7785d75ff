"""What a router knows before it is trained: noise, nothing, or the vectors that its experts' texts bring to it.

Gate of expert e: row e of (E, d). For `hidden` it is the mean, over e's prompts, of the vector that the router will
really see: the input of the module it routes, behind the norm, padding left out.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .errors import MergeError
from .llama import LlamaShape, RoutedPart, gated_parts
from .recipe import ExpertRecipe, Recipe
from .sources import Source

STD = 0.02  # N(0, 1) would give logits of the size of sqrt(d), and a router that is sure of nothing it knows
SAMPLES = 256  # rows of an expert's cluster that its centroid is measured on
PROMPTS_SHOWN = 2  # of each expert, in the model card
CARD_WIDTH = 80
BATCH_TOKENS = 4096


@dataclass
class Gates:
    """Gate's name -> (E, d) float32, and for the record what was seen while they were made."""

    values: dict[str, np.ndarray]
    info: dict = field(default_factory=dict)


def make_gates(recipe: Recipe, base: Source, *, low_memory: bool = False) -> Gates:
    """The gates of a recipe.

    Args:
        base: the model that is run over prompts or samples, where the mode needs it.
        low_memory: one layer in memory at a time, instead of the whole model.
    """
    shape = LlamaShape.of(base.config)
    parts = gated_parts(recipe, shape.layers)
    count = len(recipe.experts)
    mode = recipe.gate_mode
    if mode == "zeros":
        return Gates({p.gate: np.zeros((count, p.input_size(shape)), np.float32) for p in parts}, {"mode": mode})
    if mode in ("random", "none"):
        values = {
            p.gate: np.stack([random_row(recipe.seed, p, e, p.input_size(shape)) for e in range(count)]) for p in parts
        }
        return Gates(values, {"mode": mode})
    groups = [texts_of(recipe, expert) for expert in recipe.experts]
    return measured(recipe, base, parts, groups, low_memory)


def random_row(seed: int, part: RoutedPart, expert: int, width: int) -> np.ndarray:
    """N(0, 0.02), by router and expert: a further expert leaves the rows of the others as they are."""
    key = [seed, part.layer, *part.part.encode(), expert]
    return (np.random.default_rng(key).standard_normal(width) * STD).astype(np.float32)


def texts_of(recipe: Recipe, expert: ExpertRecipe) -> tuple[list[str], list[str]]:
    """(texts that belong to the expert, texts that do not)."""
    if recipe.gate_mode == "centroid":
        return read_samples(Path(expert.samples), recipe.seed), []
    return expert.positive_prompts, expert.negative_prompts


def read_samples(path: Path, seed: int, count: int = SAMPLES) -> list[str]:
    """Texts of a .txt (one per line) or .jsonl file (`text`, `prompt`, or `term` and `context`); `count` drawn at random.

    Lines end at line feeds alone: other separators of Unicode occur inside texts.
    """
    if not path.is_file():
        raise MergeError(f"There is no file of samples {str(path)!r}.")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise MergeError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}). Convert it.") from error
    texts = []
    for number, line in enumerate((line.removesuffix("\r") for line in lines), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                line = row.get("text") or row.get("prompt") or definition_prompt(row["term"], row["context"])
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise MergeError(f"{path}, line {number}: no row with text, prompt, or term and context.") from error
        texts.append(line)
    if not texts:
        raise MergeError(f"{path} holds no samples.")
    if len(texts) > count:
        chosen = np.random.default_rng(seed).choice(len(texts), count, replace=False)
        texts = [texts[i] for i in sorted(chosen)]
    return texts


def definition_prompt(term: str, context: str) -> str:
    """LM-Lexicon's prompt, without the special tokens, which are the tokenizer's."""
    return f'"{context}" What is the definition of "{term}"?'


def measured(
    recipe: Recipe, base: Source, parts: list[RoutedPart], groups: list[tuple[list[str], list[str]]], low_memory: bool
) -> Gates:
    """Gates from texts, by one run of the base model over all of them."""
    tokens = tokenize(base, [text for pair in groups for texts in pair for text in texts])
    if recipe.gate_mode == "cheap_embed":
        means = mean_embeddings(base, parts, tokens)
    else:
        means = mean_inputs(base, parts, tokens, low_memory)
    values, at = {}, 0
    spans = []
    for positive, negative in groups:
        spans.append((at, at + len(positive), at + len(positive) + len(negative)))
        at = spans[-1][2]
    # a sample's rows count by their tokens, a prompt counts as one
    weights = np.array([len(t) if recipe.gate_mode == "centroid" else 1 for t in tokens], np.float64)
    for part in parts:
        rows = []
        for start, middle, stop in spans:
            row = np.average(means[part.gate][start:middle], axis=0, weights=weights[start:middle])
            if stop > middle:
                row = row - np.average(means[part.gate][middle:stop], axis=0, weights=weights[middle:stop])
            rows.append(row)
        values[part.gate] = np.stack(rows).astype(np.float32)
    shown = []
    for (positive, _), (start, _, _) in zip(groups, spans, strict=True):
        for offset, text in enumerate(positive[:PROMPTS_SHOWN]):
            shown.append((shorten(text), {p.gate: means[p.gate][start + offset] for p in parts}))
    info = {"mode": recipe.gate_mode, "model": base.given, "experts": recipe.names}
    if shown:
        info["prompts"] = first_choices(values, shown)
    return Gates(values, info)


def shorten(text: str) -> str:
    return text if len(text) <= CARD_WIDTH else text[: CARD_WIDTH - 1] + "…"


def first_choices(gates: dict[str, np.ndarray], prompts: list[tuple[str, dict[str, np.ndarray]]]) -> list[dict]:
    """For each prompt the share of routers that put its mean vector to each expert."""
    rows = []
    for text, vectors in prompts:
        chosen = [int(np.argmax(gates[name] @ vector)) for name, vector in vectors.items()]
        count = len(next(iter(gates.values())))
        rows.append({"prompt": text, "shares": [round(chosen.count(e) / len(chosen), 4) for e in range(count)]})
    return rows


def tokenize(base: Source, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, special tokens as the base's tokenizer adds them; none cut."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base.folder)
    except (OSError, ValueError):
        try:
            tokenizer = AutoTokenizer.from_pretrained(base.checkpoint.folder)
        except (OSError, ValueError) as error:
            raise MergeError(
                f"Gates from texts need a tokenizer, and {base.name} ({base.given}) brings none that opens. Give a "
                "base_model with its tokenizer, or use gate_mode: random."
            ) from error
    longest = base.config.get("max_position_embeddings") or 2048
    tokens = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    for text, ids in zip(texts, tokens, strict=True):
        if not ids:
            raise MergeError("A prompt is empty: it says nothing about its expert. Remove it.")
        if len(ids) > longest:
            raise MergeError(
                f"The prompt {shorten(text)!r} has {len(ids)} tokens, and the model reads {longest}. Shorten it."
            )
    return tokens


def mean_embeddings(base: Source, parts: list[RoutedPart], tokens: list[list[int]]) -> dict[str, np.ndarray]:
    """The same for every router: the mean of a text's token embeddings."""
    import torch

    from .dense import embed

    shape = LlamaShape.of(base.config)
    for part in parts:
        if part.input_size(shape) != shape.hidden_size:
            raise MergeError(
                f"gate_mode: cheap_embed has no vectors for {part.part}, which reads no hidden states. Use hidden."
            )
    means = np.stack([embed(base, torch.tensor([ids]))[0].double().mean(0).numpy() for ids in tokens])
    return {part.gate: means for part in parts}


def mean_inputs(
    base: Source, parts: list[RoutedPart], tokens: list[list[int]], low_memory: bool
) -> dict[str, np.ndarray]:
    """The mean vector that each text brings to each router: gate's name -> (texts, d)."""
    import torch

    from .dense import layers_one_by_one, load_dense

    batches = in_batches(tokens)
    inputs = [pad([tokens[i] for i in batch]) for batch in batches]
    sums: dict[str, list] = {part.gate: [] for part in parts}
    current: list[torch.Tensor] = []  # the mask of the batch that runs

    def listen(module: torch.nn.Module, gate: str):
        def hook(_, args, kwargs):
            x = (args[0] if args else next(iter(kwargs.values()))).double()
            mask = current[0][..., None].double()
            sums[gate].append(((x * mask).sum(1) / mask.sum(1)).numpy())

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with torch.no_grad():
        if low_memory:
            for number, layer in enumerate(layers_one_by_one(base, [ids for ids, _ in inputs])):
                masks = iter([mask for _, mask in inputs])
                layer.register_forward_pre_hook(lambda *_, masks=masks: current.__setitem__(slice(None), [next(masks)]))
                for part in parts:
                    if part.layer == number:
                        listen(layer.get_submodule(part.module.split(".", 3)[3]), part.gate)
        else:
            model = load_dense(base)
            for part in parts:
                listen(model.get_submodule(part.module), part.gate)
            for ids, mask in inputs:
                current[:] = [mask]
                model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    order = np.argsort([i for batch in batches for i in batch])
    return {gate: np.concatenate(rows)[order] for gate, rows in sums.items()}


def in_batches(tokens: list[list[int]]) -> list[list[int]]:
    """Indices of texts, those of like length together, at most BATCH_TOKENS a batch with its padding."""
    batches: list[list[int]] = []
    for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
        if not batches or (len(batches[-1]) + 1) * len(tokens[i]) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


def pad(rows: list[list[int]]):
    """-> ids and mask, (B, T), padded on the right, where causal attention does not see it."""
    import torch

    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask
