"""Tiny real tokenizers, built on the spot with the `tokenizers` library."""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ropeway.runtime.text.assets import TokenizerSettings
from ropeway.runtime.text.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat, the cat ran",
    "Hello world! Hello there, hello again.",
    "ภาษาไทย ภาษา ไทย",
    "日本語 中文 中文",
    "user assistant system 12345",
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(
    *,
    template: str | None = CHATML,
    added: Sequence[str] = ("<think>", "</think>"),
    special: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
    add_bos: bool = False,
) -> Tokenizer:
    """GPT-2's kind. Ids 0, 1, 2 are SPECIALS; `added` are tokens that aren't special, and `special`
    more that are."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    settings = TokenizerSettings(
        bos_id=0,
        eos_id=2,
        eos_ids=(2,),
        add_bos=add_bos,
        chat_template=template,
        special_tokens=dict(names or {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}),
    )
    return Tokenizer(inner.to_str().encode(), settings)


def sentencepiece(*, template: str | None = None, add_bos: bool = True) -> Tokenizer:
    """Llama 2's kind: a space mark, byte fallback, a stripped leading space. <s> is 1, </s> 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters = sorted(set("".join([*CORPUS[:2], "aeiou [INST]/"])) - {" "})
    words = ["the", "cat", "Hello", "hello", "sat"]
    pieces += ["\u2581", *letters]
    merges: list[tuple[str, str]] = []
    for word in words:
        left = "\u2581"
        for letter in word:
            if (left, letter) not in merges:
                merges.append((left, letter))
            left += letter
            pieces += [left] if left not in pieces else []
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    settings = TokenizerSettings(
        bos_id=1,
        eos_id=2,
        eos_ids=(2,),
        add_bos=add_bos,
        chat_template=template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    return Tokenizer(inner.to_str().encode(), settings)


def words() -> Tokenizer:
    """Whole words and no decoder: the kind that has to be decoded by windows."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "the", "cat", "sat", "on", "mat"])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(inner.to_str().encode(), TokenizerSettings())


def library_decode(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    """What the `tokenizers` library itself decodes: the oracle."""
    return str(tokenizer._inner.decode(list(ids), skip_special_tokens=skip))
