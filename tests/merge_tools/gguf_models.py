"""Tiny mixtures with tokenizers that llama.cpp has, for the tests of GGUF files."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from merge_tools import compose
from merge_tools.gguf_tokenizer import REST, WORDS

from .conftest import ROPES, recipe_of
from .test_families import save

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CORPUS = [
    "the owl is a bird of the night, and it is awake",
    "a sail, a mast and the wind: it's 1234 o'clock",
    "Möwe 鳥",
]
TEXTS = ["the owl and the 12345 ships", " two  spaces, it's\nA NEW line", "Möwe 鳥 🚀", "the end</s>"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# name -> (name in MODELS, kind of tokenizer, fields of the configuration)
CASES = {
    "llama, gpt-2": ("llama", "gpt-2", {}),
    "llama, llama-bpe, llama3 rope": ("llama", "llama-bpe", {"rope_parameters": ROPES["llama3"]}),
    "llama, sentencepiece, other heads": ("llama", "sentencepiece", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama, sentencepiece, linear rope": ("llama", "sentencepiece", {"rope_parameters": ROPES["linear"]}),
    "llama, qwen2, yarn": ("llama", "qwen2", {"rope_parameters": YARN}),
    "mistral, sentencepiece": ("mistral", "sentencepiece", {}),
    "qwen2, qwen2": ("qwen2", "qwen2", {}),
    "qwen2 tied, gpt-2": ("qwen2 tied", "gpt-2", {}),
    "qwen3, qwen2": ("qwen3", "qwen2", {}),
    "qwen3 tied, qwen2, yarn": ("qwen3", "qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
}


def byte_level(kind):
    """A byte-level BPE, split as by gpt-2, Llama 3 or Qwen2; Llama 3's puts <s> in front and keeps words that are tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    numbers = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if kind in numbers:
        split = pre_tokenizers.Split(Regex(WORDS + numbers[kind] + REST), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if kind == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def sentencepiece():
    """A BPE with byte fallback, as transformers converts SentencePiece's: it puts <s> and a space in front."""
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "a"),
        ("i", "n"),
        ("i", "s"),
        ("▁", "is"),
        ("o", "w"),
        ("ow", "l"),
    ]
    pieces = ["<unk>", *SPECIAL.values(), *(f"<0x{i:02X}>" for i in range(256)), "▁", *string.ascii_letters, *'"?.,;-']
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **SPECIAL)


def compose_case(folder, case, count=4, **options):
    """Composes experts of a case in `folder`; returns the folder of the mixture."""
    name, kind, changes = CASES[case]
    tokenizer = sentencepiece() if kind == "sentencepiece" else byte_level(kind)
    experts = [save(folder / f"expert {seed}", name, seed, tokenizer=tokenizer, **changes) for seed in range(count)]
    compose(recipe_of(experts, **options), folder / "mixture")
    return folder / "mixture"
