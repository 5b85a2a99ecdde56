"""What an artifact keeps of a tokenizer: its tokenizer.json and a small settings record.

Written by the compiler's frontend, read by the runtime; both sides go through this module. Ids that
a model doesn't have are None, never -1. Nothing here imports tokenizers or jinja2.
"""

import msgspec

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "settings.json"


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of a tokenizer's behaviour that tokenizer.json doesn't say.

    `eos_ids` are all ids that end a generation (generation_config's list, else `eos_id` alone).
    `add_bos`: a plain prompt begins with `bos_id`; the reader adds it only where the tokenizer's
    own post-processor hasn't, so it never stands twice. A rendered chat template is encoded without
    special tokens being added: the template writes its own.
    `special_tokens` maps the names that chat templates use (bos_token, eos_token, pad_token,
    unk_token) to their text.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)


class TokenizerAssets(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer as an artifact stores it: the bytes of a tokenizer.json and its settings."""

    tokenizer_json: bytes
    settings: TokenizerSettings

    def files(self) -> dict[str, bytes]:
        """File name (within the artifact's tokenizer folder) -> content."""
        settings = msgspec.json.format(msgspec.json.encode(self.settings, order="deterministic"))
        return {TOKENIZER_FILE: self.tokenizer_json, SETTINGS_FILE: settings}


def read_settings(data: bytes) -> TokenizerSettings:
    """Decodes settings.json; raises msgspec.ValidationError for unknown fields or wrong types."""
    return msgspec.json.decode(data, type=TokenizerSettings)
