"""Text to token ids and back, over the `tokenizers` library.

Special tokens: a plain prompt is the caller's own, so "<|im_end|>" in it is that token. In a chat
only the template writes special tokens; the same characters in a message stay text.
"""

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ropeway.compiler.errors import ArtifactError, RequestError
from ropeway.runtime.text.assets import TokenizerAssets, TokenizerSettings
from ropeway.runtime.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    decode_all,
)
from ropeway.runtime.text.literal import SpecialTexts
from ropeway.runtime.text.pieces import rules_of

if TYPE_CHECKING:
    import tokenizers

    from ropeway.runtime.text.chat_template import ChatTemplate, RenderedChat


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Description(msgspec.Struct):
    """The part of a tokenizer.json that the library doesn't tell; reading no more is fast."""

    added_tokens: list[_AddedToken] | None = None
    decoder: dict[str, Any] | None = None


class Tokenizer:
    """A model's tokenizer; safe to share between threads.

    Raises ArtifactError when the tokenizer.json can't be read.
    """

    def __init__(self, tokenizer_json: bytes, settings: TokenizerSettings) -> None:
        # Here: whoever loads an engine parses while weights are read, and the import is part of it.
        import tokenizers  # noqa: PLC0415

        try:
            # A sixth faster than from_buffer.
            self._inner = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
            description = msgspec.json.decode(tokenizer_json, type=_Description)
        except Exception as error:  # the library raises plain Exception for any bad file
            raise ArtifactError(
                f"tokenizer.json can't be read: {error}: compile the model again"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self.settings = settings
        self._specials = [t for t in description.added_tokens or [] if t.special]
        self._hidden = frozenset(t.id for t in self._specials)
        self._rules = rules_of(description.decoder)
        self._pieces: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None
        self._literal: _LiteralEncoder | None = None

    @classmethod
    def from_assets(cls, assets: TokenizerAssets) -> "Tokenizer":
        """The tokenizer that an artifact or a checkpoint holds."""
        return cls(assets.tokenizer_json, assets.settings)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model may have more logits."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, if the model has one."""
        return self.settings.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation."""
        return self.settings.eos_ids

    def serialized(self) -> str:
        """The tokenizer.json that this tokenizer works by, without truncation and padding."""
        return str(self._inner.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A plain prompt's ids: special tokens in it are recognised, BOS stands first (once) where
        the model wants it, unless `add_special_tokens` is off. Raises RequestError (field "prompt")
        for text that isn't Unicode."""
        ids = self._encode(self._inner, text, "prompt", add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return ids
        bos = self.settings.bos_id
        if bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            return ids[1:]  # the text began with the BOS text already
        return [bos, *ids] if self.settings.add_bos and ids[:1] != [bos] else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """The ids of a chat, through the model's chat template; nothing is added to what it writes.

        Special tokens in the messages' text stay text. Raises RequestError for a model without a
        template and for messages that the template refuses.
        """
        return self.encode_rendered(
            self.render_chat(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
            )
        )

    def encode_rendered(self, rendered: "RenderedChat") -> list[int]:
        """The ids of a rendered chat: only its `spans` are special tokens, or all if they are
        None."""
        if rendered.spans is None:
            ids = self._encode(self._inner, rendered.text, "messages", add_special_tokens=False)
        else:
            ids = self._literal_encoder().encode(self, rendered)
        bos = self.settings.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> "RenderedChat":
        """The text of a chat, before it is encoded."""
        if self.settings.chat_template is None:
            raise RequestError(
                "messages",
                "this model has no chat template: generate from a prompt that you wrote yourself",
            )
        if self._template is None:
            # jinja2 takes 30 ms to import, which only chats need.
            from ropeway.runtime.text.chat_template import ChatTemplate  # noqa: PLC0415

            self._template = ChatTemplate(
                self.settings.chat_template,
                self.settings.special_tokens,
                SpecialTexts(t.content for t in self._specials),
            )
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids on their own; exactly what the deltas of a detokenizer add up to."""
        return decode_all(self.detokenizer((), skip_special_tokens), ids)

    def detokenizer(
        self, prompt: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental decoder for what follows `prompt`. Ids without a token show nothing."""
        if self._rules is None:

            def decode(ids: list[int]) -> str:
                return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))

            return WindowDetokenizer(decode, prompt)
        shown = self._visible_piece if skip_special_tokens else self._piece
        return ByteDetokenizer(shown, prompt, strip=self._rules.strip, each=self._rules.fallback)

    def token_text(self, token: int) -> str:
        """One token as text, for logprobs: U+FFFD where it holds only a part of a character."""
        if self._rules is None:
            return str(self._inner.decode([token], skip_special_tokens=False))
        return self._piece(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """One token as bytes, which may be a part of a character; b"" for an id without a token."""
        return self.token_text(token).encode() if self._rules is None else self._piece(token)

    def is_special(self, token: int) -> bool:
        """Whether skip_special_tokens hides the token."""
        return token in self._hidden

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            text = self._inner.id_to_token(token) if 0 <= token < 1 << 31 else None
            piece = b"" if text is None or self._rules is None else self._rules.piece(text)
            self._pieces[token] = piece
        return piece

    def _visible_piece(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._piece(token)

    @staticmethod
    def _encode(
        inner: "tokenizers.Tokenizer", text: str, field: str, *, add_special_tokens: bool
    ) -> list[int]:
        try:
            text.encode("utf-8")
        except (UnicodeEncodeError, AttributeError) as error:
            raise RequestError(field, f"must be Unicode text: {error}") from error
        return list(inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def _literal_encoder(self) -> "_LiteralEncoder":
        with self._lock:
            if self._literal is None:
                self._literal = _LiteralEncoder(self._inner, self._specials)
            return self._literal


class _LiteralEncoder:
    """Encodes a chat in one go with only the template's special tokens taken as such.

    A copy of the tokenizer reads special tokens as ordinary text and knows an alias for each, of
    characters that nobody can guess; the template's are written as aliases.
    """

    def __init__(self, inner: "tokenizers.Tokenizer", specials: Iterable[_AddedToken]) -> None:
        import tokenizers  # noqa: PLC0415 - see Tokenizer

        self._copy = tokenizers.Tokenizer.from_str(inner.to_str())
        self._copy.encode_special_tokens = True
        self._alias: dict[str, str] = {}
        self._real: dict[int, int] = {}
        for special in specials:
            alias = "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(8))
            token = tokenizers.AddedToken(
                alias,
                special=False,
                normalized=False,
                single_word=special.single_word,
                lstrip=special.lstrip,
                rstrip=special.rstrip,
            )
            self._copy.add_tokens([token])
            self._alias[special.content] = alias
            added = self._copy.token_to_id(alias)
            if added is not None:
                self._real[added] = special.id

    def encode(self, tokenizer: Tokenizer, chat: "RenderedChat") -> list[int]:
        parts, end = [], 0
        for start, stop in chat.spans or ():
            parts += [chat.text[end:start], self._alias[chat.text[start:stop]]]
            end = stop
        parts.append(chat.text[end:])
        ids = tokenizer._encode(self._copy, "".join(parts), "messages", add_special_tokens=False)
        return [self._real.get(token, token) for token in ids]
