"""Tiny mixtures with tokenizers that llama.cpp has, for the tests of GGUF files."""

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from merge_tools import compose
from merge_tools.gguf_tokenizer import REST, WORDS

from .conftest import ROPES, SIZES, randomize, recipe_of

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MERGES = [tuple(pair.split()) for pair in ("t h", "th e", "▁ the", "▁ a", "i n", "i s", "▁ is", "o w", "ow l", "1 2")]
# name -> (model_type, kind of tokenizer, fields of the configuration)
CASES = {
    "llama, gpt-2": ("llama", "gpt-2", {"head_dim": 16}),
    "llama, llama-bpe, llama3 rope": ("llama", "llama-bpe", {"rope_parameters": ROPES["llama3"]}),
    "llama, linear rope, one key": ("llama", "default", {"rope_parameters": ROPES["linear"], "num_key_value_heads": 1}),
    "mistral, yarn, window": ("mistral", "default", {"rope_parameters": ROPES["yarn"], "sliding_window": 64}),
    "qwen2 tied, bfloat16": ("qwen2", "qwen2", {"tie_word_embeddings": True, "vocab_size": 400}),
    "qwen3, yarn": ("qwen3", "qwen2", {"head_dim": 16, "rope_parameters": ROPES["yarn"]}),
}


def byte_level(kind):
    """A byte-level BPE, split as by gpt-2, Llama 3 or Qwen2; Llama 3's puts <s> in front and keeps words that are tokens."""
    merges = [(first.replace("▁", "Ġ"), second) for first, second in MERGES]
    pieces = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt-2")
    if kind != "gpt-2":
        pattern = WORDS + {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[kind] + REST
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    if kind == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def sentencepiece():
    """A BPE with byte fallback, as transformers converts SentencePiece's: it puts <s> and a space in front."""
    pieces = ["<unk>", *SPECIAL.values(), *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *map("".join, MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **SPECIAL)


def compose_case(folder, case, count=4):
    """Composes experts of a case, or of a model_type, in `folder`. Returns the folder of the mixture."""
    model_type, kind, changes = CASES.get(case, (case, "gpt-2", {}))
    tokenizer = sentencepiece() if kind == "default" else byte_level(kind)
    config = AutoConfig.for_model(model_type, **{**SIZES, "vocab_size": len(tokenizer), **changes})
    experts = [folder / f"expert {seed}" for seed in range(count)]
    for seed, expert in enumerate(experts):
        randomize(AutoModelForCausalLM.from_config(config), seed).save_pretrained(expert)
        tokenizer.save_pretrained(expert)
    compose(recipe_of(experts, dtype="bfloat16" if "bfloat16" in case else None), folder / "mixture")
    return folder / "mixture"
