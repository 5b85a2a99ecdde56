"""Deltas together are the whole decode, and each delta is whole characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers
from support.tiny_tokenizers import library_decode

from ropeway.runtime.text.detokenizer import ByteDetokenizer
from ropeway.runtime.text.tokenizer import Tokenizer

BYTE_LEVEL = tiny_tokenizers.byte_level()
SENTENCEPIECE = tiny_tokenizers.sentencepiece()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "spm"])

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
TEXTS = [
    FAMILY,
    f"a{FAMILY}b {FAMILY}{FAMILY}",
    "\U0001f1f9\U0001f1ed flag, e\u0301 combined",
    "ภาษาไทยนั้นงาม",
    "日本語 and 中文",
    " leading and trailing  ",
    "the cat\n\nsat\ttabs",
    "\x00\x01 control",
    "",
]
pieces = st.sampled_from(
    ["the", " cat", " ", "é", "ไทย", "中", FAMILY, "\n", "x", "<|im_end|>", "\x00"]
)
texts = st.lists(pieces, max_size=12).map("".join)


def deltas(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [], skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer._inner.encode(text, add_special_tokens=False).ids)


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = plain_ids(tokenizer, text)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == text == library_decode(tokenizer, ids)
    assert not any("\ufffd" in part for part in parts)
    assert tokenizer.decode(ids) == text


@BOTH
def test_emoji_is_held_until_whole(tokenizer: Tokenizer) -> None:
    ids = plain_ids(tokenizer, "\U0001f600")
    assert [p for p in deltas(tokenizer, ids) if p] == ["\U0001f600"]
    parts = deltas(tokenizer, ids[:-1])
    assert "".join(parts[:-1]) in ("", " ")
    assert set(parts[-1]) == {"\ufffd"}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_truncation_shows_as_the_library_shows_it(cut: int) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = plain_ids(tokenizer, "the\U0001f600")
        while tokenizer.decode(ids).endswith("\U0001f600"):
            ids.pop()
        ids = ids[: len(ids) - (3 - cut)]
        assert "\ufffd" in library_decode(tokenizer, ids)
        assert "".join(deltas(tokenizer, ids)) == library_decode(tokenizer, ids)


@settings(max_examples=300, deadline=None)
@given(text=texts, skip=st.booleans(), data=st.data())
def test_any_split_into_prompt_and_output(text: str, skip: bool, data: st.DataObject) -> None:
    """Prompt text and output text make the whole; a character belongs to whoever completed it."""
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = plain_ids(tokenizer, text)
        at = data.draw(st.integers(0, len(ids)))
        whole = library_decode(tokenizer, ids, skip)
        prompt = tokenizer.detokenizer((), skip)
        before = "".join(map(prompt.push, ids[:at]))
        parts = deltas(tokenizer, ids[at:], ids[:at], skip)
        # A prompt that is only the dropped leading space shows as nothing, and the space is gone.
        assert before + "".join(parts) == whole


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=30), skip=st.booleans())
def test_any_ids_of_byte_level(ids: list[int], skip: bool) -> None:
    """Garbage too: invalid bytes, added tokens, ids past the vocabulary."""
    joined = "".join(deltas(BYTE_LEVEL, ids, skip=skip))
    assert joined == library_decode(BYTE_LEVEL, ids, skip)
    assert joined == BYTE_LEVEL.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=30), skip=st.booleans())
def test_any_ids_of_sentencepiece(ids: list[int], skip: bool) -> None:
    """The library turns a whole run of byte tokens into U+FFFD when one character of it is broken;
    we, who must not hold a long run back, only the broken one. Valid runs are equal."""
    joined = "".join(deltas(SENTENCEPIECE, ids, skip=skip))
    assert joined == SENTENCEPIECE.decode(ids, skip)
    theirs = library_decode(SENTENCEPIECE, ids, skip)
    if "\ufffd" not in joined:
        assert joined == theirs
    else:
        assert "\ufffd" in theirs
        assert len(joined) <= len(theirs)


def test_prompt_that_ends_inside_a_character() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = plain_ids(tokenizer, "cat \U0001f600")
        parts = deltas(tokenizer, [*ids[-1:], *plain_ids(tokenizer, "x")[-1:]], ids[:-1])
        assert parts[0] == "\U0001f600"  # completed by the output, and nothing of "cat "
        assert parts[1] == "x"


def test_prompt_inside_a_character_that_is_not_completed() -> None:
    ids = plain_ids(BYTE_LEVEL, "\U0001f600")
    parts = deltas(BYTE_LEVEL, plain_ids(BYTE_LEVEL, "x"), ids[:-1])
    assert parts == ["\ufffdx", ""]


def test_leading_space_depends_on_what_the_prompt_shows() -> None:
    ids = plain_ids(SENTENCEPIECE, "the cat")
    assert "".join(deltas(SENTENCEPIECE, ids)) == "the cat"
    assert "".join(deltas(SENTENCEPIECE, ids, plain_ids(SENTENCEPIECE, "on"))) == " the cat"
    # A prompt of <s> alone shows nothing when special tokens are skipped.
    assert "".join(deltas(SENTENCEPIECE, ids, [1])) == "the cat"
    assert "".join(deltas(SENTENCEPIECE, ids, [1], skip=False)) == " the cat"


@pytest.mark.parametrize(
    ("skip", "expected"), [(True, "ab<think>"), (False, "a<|im_end|>b<think>")]
)
def test_special_tokens_skipped_or_not(skip: bool, expected: str) -> None:
    ids = BYTE_LEVEL.encode("a<|im_end|>b<think>")
    assert 2 in ids
    assert "".join(deltas(BYTE_LEVEL, ids, skip=skip)) == expected
    assert BYTE_LEVEL.decode(ids, skip) == expected
    assert BYTE_LEVEL.is_special(2)
    assert not BYTE_LEVEL.is_special(ids[-1])


def test_many_added_tokens() -> None:
    names = [f"<extra_{i}>" for i in range(3000)]
    tokenizer = tiny_tokenizers.byte_level(added=names)
    text = "the <extra_0><extra_2999>\U0001f600<extra_17> cat"
    ids = tokenizer.encode(text)
    assert len([i for i in ids if i >= tokenizer.vocab_size - 3000]) == 3
    assert "".join(deltas(tokenizer, ids)) == text == library_decode(tokenizer, ids)


def test_windows_for_other_decoders() -> None:
    tokenizer = tiny_tokenizers.words()
    ids = [1, 2, 3, 4, 1, 5, 0, 1, 2]
    assert "".join(deltas(tokenizer, ids)) == library_decode(tokenizer, ids)
    assert deltas(tokenizer, ids[2:4], ids[:2]) == [" sat", " on", ""]
    assert tokenizer.token_text(2) == "cat"


def test_each_token_is_looked_at_once() -> None:
    """O(1) a token, whatever the length of prompt and output."""
    seen: list[int] = []

    def piece(token: int) -> bytes:
        seen.append(token)
        return b"\xf0\x9f\x98\x80"[token % 4 : token % 4 + 1]

    detokenizer = ByteDetokenizer(piece, range(100_000))
    assert len(seen) <= 3
    seen.clear()
    text = "".join(map(detokenizer.push, range(4000)))
    assert len(seen) == 4000
    assert text == "\U0001f600" * 1000


def test_token_text() -> None:
    ids = plain_ids(BYTE_LEVEL, "the cat\U0001f600")
    assert BYTE_LEVEL.token_text(ids[0]) == "the"
    assert BYTE_LEVEL.token_text(ids[-1]) == "\ufffd"
    assert BYTE_LEVEL.token_text(2) == "<|im_end|>"
    assert BYTE_LEVEL.token_text(10**6) == ""
    assert SENTENCEPIECE.token_text(plain_ids(SENTENCEPIECE, "the")[0]) == " the"
