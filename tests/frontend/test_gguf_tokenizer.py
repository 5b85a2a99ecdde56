"""Tokenizers rebuilt from GGUF metadata, against tokenizers that split as published."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.gguf_tokenizer import read_gguf_tokenizer

TEXTS = [
    "Hello world, it's 12345 o'clock!\n\n  Two  spaces\tand a tab.",
    "naïve café ﬁne — “quotes” 你好 мир 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2  # 3.14159\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    " ",
    "",
]
CORPUS = TEXTS * 5 + ["the quick brown fox jumps over the lazy dog " * 3, "12 345 6789 the the"]
# What the published tokenizer.json files split by (Llama 3 and Qwen 2).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def words(pattern: str) -> Any:
    split = Split(Regex(pattern), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


PRE = {
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "gpt-2": ByteLevel(add_prefix_space=False),
    "llama-bpe": words(LLAMA3),
    "qwen2": words(QWEN2),
}


def trained(pre: str) -> Tokenizer:
    """A small byte-level BPE with special tokens, trained with the published splitting."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE[pre]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=special),
    )
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    import json  # noqa: PLC0415

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if index < 2 else 1 for _, index in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_ids_are_those_of_the_published_splitting(pre: str) -> None:
    oracle = trained(pre)
    assets = read_gguf_tokenizer("m.gguf", metadata_of(oracle, pre))
    assert assets is not None
    own = Tokenizer.from_buffer(assets.tokenizer_json)
    for text in TEXTS:
        ids = own.encode(text).ids
        if pre != "qwen2" or text.isascii():  # Qwen normalizes to NFC, which the oracle doesn't
            assert ids == oracle.encode(text).ids
        assert own.decode(ids, skip_special_tokens=False) == text or pre == "qwen2"
    settings = assets.settings
    assert (settings.bos_id, settings.eos_id, settings.eos_ids) == (0, 1, (1,))
    assert settings.chat_template == "{{ messages }}"
    assert settings.special_tokens["eos_token"] == "<|im_end|>"
    assert settings.add_bos == (pre == "llama-bpe")


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words_by_score = ["▁t", "he", "▁the", "▁a", "at", "▁cat"]
    letters = list("▁thecas")
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(words_by_score))]
    scores += [-100.0 - i for i in range(len(letters))]
    tokens = pieces + words_by_score + letters
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assets = read_gguf_tokenizer("m.gguf", metadata)
    assert assets is not None
    own = Tokenizer.from_buffer(assets.tokenizer_json)
    assert own.encode("the cat").tokens == ["▁the", "▁", "c", "at"]  # no c+at, no ▁c in the pieces
    assert own.encode("thé").tokens == ["▁t", "h", "<0xC3>", "<0xA9>"]
    for text in ("the cat", "thé 🙂 cat", "  two"):
        assert own.decode(own.encode(text).ids) == text
    assert assets.settings.add_bos
    assert assets.settings.bos_id == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "pre-tokenizer 'mystery'"),
        ({"tokenizer.ggml.model": "wordpiece"}, "'wordpiece' isn't supported"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges aren't pairs"),
        ({"tokenizer.ggml.token_type": [1]}, "types"),
        ({"tokenizer.ggml.tokens": None}, "no tokens"),
    ],
)
def test_damaged_tokenizers_are_refused(change: dict[str, Any], message: str) -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2") | change
    with pytest.raises(CheckpointError, match=message):
        read_gguf_tokenizer("m.gguf", metadata)


def test_no_tokenizer_is_none() -> None:
    assert read_gguf_tokenizer("m.gguf", {}) is None
