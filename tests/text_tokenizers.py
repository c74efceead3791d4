"""Two small tokenizers, one of each family that language models use."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<bos>", "<eos>"]
_SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "one two three four five six seven eight nine ten; the end is not the end.",
    "你好，世界。 héllo wörld 👩‍👩‍👧 😀 naïve café",
]


def byte_level() -> Tokenizer:
    """Tokens are spelled bytes (GPT-2, Llama 3, Qwen); ids 0, 1, 2 are special."""
    return Tokenizer.from_str(_byte_level_json())


def space_marked() -> Tokenizer:
    """Tokens are characters, spaces are marks, the rest falls back to bytes (Llama 2, Gemma, Mistral)."""
    return Tokenizer.from_str(_space_marked_json())


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer.to_str()


@cache
def _space_marked_json() -> str:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁",
        "▁the",
        "▁c",
        "at",
        "▁s",
        "▁one",
        "the",
        "a",
        "b",
        "c",
        "e",
        "h",
        "o",
        "n",
        "s",
        "t",
        ",",
        "你",
    ]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *bytes_, *words])}
    merges = [("a", "t"), ("t", "h"), ("▁", "c"), ("▁", "s")]
    vocab |= {"th": len(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str()
