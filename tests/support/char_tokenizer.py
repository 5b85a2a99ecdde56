"""A tokenizer of 97 ids for the toy model: one printable ASCII character each, and two specials."""

import tokenizers

from ropeway.runtime.text.assets import TokenizerSettings
from ropeway.runtime.text.tokenizer import Tokenizer

CHARACTERS = [chr(code) for code in range(32, 127)]
END, TURN = 95, 96
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)


def char_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Id i is chr(32 + i); 95 is <end>, 96 is <turn>."""
    vocab = {("Ġ" if char == " " else char): i for i, char in enumerate(CHARACTERS)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>", "<turn>"])
    settings = TokenizerSettings(eos_id=END, eos_ids=(END,), chat_template=template)
    return Tokenizer(inner.to_str().encode(), settings)


def text_of(ids: list[int]) -> str:
    """The text of ids, specials hidden."""
    return "".join(CHARACTERS[i] for i in ids if i < 95)
