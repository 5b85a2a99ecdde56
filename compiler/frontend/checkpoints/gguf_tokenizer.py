"""The tokenizer in a GGUF file's metadata, rebuilt as a tokenizer.json.

Two families: byte-level BPE ("gpt2") with the pre-tokenizer that the file names, and sentencepiece
BPE ("llama") with a score a piece. Other pre-tokenizers are refused: they'd give other ids in
silence.
"""

from collections.abc import Mapping
from typing import Any

from ropeway.compiler.errors import CheckpointError
from ropeway.runtime.text.assets import TokenizerAssets, TokenizerSettings

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"),
    "qwen2": _WORDS.format(digits=r"\p{N}"),
}
_GPT2 = ("gpt-2", "gpt2", "default", "smollm")


def read_gguf_tokenizer(file: str, metadata: Mapping[str, Any]) -> TokenizerAssets | None:
    """The file's tokenizer, None if it holds none. Raises CheckpointError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{file}: the tokenizer lists no tokens")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file}: {len(tokens)} tokens have {len(types)} types")
    if kind == "gpt2":
        data = _byte_level(file, metadata, tokens)
    elif kind == "llama":
        data = _sentencepiece(file, metadata, tokens)
    else:
        raise CheckpointError(f"{file}: tokenizer {kind!r} isn't supported (gpt2 and llama are)")
    return TokenizerAssets(
        tokenizer_json=_with_added(data, tokens, types), settings=_settings(metadata, tokens)
    )


def _byte_level(file: str, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import (  # noqa: PLC0415 -- not needed without a tokenizer
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    split = metadata.get("tokenizer.ggml.pre", "default")
    if split not in _SPLITS and split not in _GPT2:
        known = ", ".join([*_GPT2, *_SPLITS])
        raise CheckpointError(
            f"{file}: pre-tokenizer {split!r} isn't known (known: {known}); give the Hugging Face "
            "directory instead, whose tokenizer.json says how to split"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise CheckpointError(f"{file}: the tokenizer's merges aren't pairs; the file is damaged")
    vocabulary = _vocabulary(file, tokens)
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe")
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in _GPT2)
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif split in _SPLITS:
        words = pre_tokenizers.Split(Regex(_SPLITS[split]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: str, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers  # noqa: PLC0415 -- as above

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{file}: the tokenizer's scores don't match its tokens")
    vocabulary = _vocabulary(file, tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    leading = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if leading:
        spaces.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best piece first: what sentencepiece merges."""
    ranked = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[index], vocabulary[left], vocabulary[right])
                ranked.append((order, (left, right)))
    ranked.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ranked]


def _vocabulary(file: str, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file}: the tokenizer lists a token twice; the file is damaged")
    return vocabulary


def _with_added(tokenizer: Any, tokens: list[str], types: list[int]) -> bytes:
    """The tokenizer's JSON, control tokens special, user-defined ones kept whole."""
    from tokenizers import AddedToken  # noqa: PLC0415 -- as above

    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    special = [token for token in added if token.special]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([token for token in added if not token.special])
    return str(tokenizer.to_str()).encode()


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> TokenizerSettings:
    def token_id(role: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    ids = {
        "bos": token_id("bos"),
        "eos": token_id("eos"),
        "pad": token_id("padding"),
        "unk": token_id("unknown"),
    }
    ends = [ids["eos"], token_id("eot"), token_id("eom")]
    by_default = metadata.get("tokenizer.ggml.model") == "llama"
    by_default |= metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSettings(
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
        unk_id=ids["unk"],
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))
        and ids["bos"] is not None,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={
            f"{role}_token": tokens[index] for role, index in ids.items() if index is not None
        },
    )
