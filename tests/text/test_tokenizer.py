"""Prompts to ids: BOS once, special tokens, bad text."""

import pytest
from support import tiny_tokenizers

from ropeway.compiler.errors import ArtifactError, RequestError
from ropeway.runtime.text.assets import TokenizerAssets, TokenizerSettings
from ropeway.runtime.text.tokenizer import Tokenizer


def test_bos_stands_once() -> None:
    spm = tiny_tokenizers.sentencepiece()
    assert spm.encode("the")[0] == 1
    assert spm.encode("the").count(1) == 1
    assert spm.encode("<s>the").count(1) == 1
    assert spm.encode("")[:2] == [1]
    assert tiny_tokenizers.sentencepiece(add_bos=False).encode("the").count(1) == 0


def test_plain_prompts_may_hold_special_tokens() -> None:
    ids = tiny_tokenizers.byte_level().encode("a<|im_end|>")
    assert ids[-1] == 2 and len(ids) == 2


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_lone_surrogates_are_refused(text: str) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    with pytest.raises(RequestError, match="prompt") as caught:
        tokenizer.encode(text)
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_nul_is_text() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.decode(tokenizer.encode("a\x00b")) == "a\x00b"


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"\xff", b'{"model": 1}'])
def test_a_damaged_file_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json can't be read"):
        Tokenizer.from_assets(TokenizerAssets(tokenizer_json=data, settings=TokenizerSettings()))


def test_truncation_in_the_file_is_not_applied() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer._inner.enable_truncation(2)
    again = Tokenizer(tokenizer._inner.to_str().encode(), tokenizer.settings)
    assert len(again.encode("the cat sat on the mat")) > 2
