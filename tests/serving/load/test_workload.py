"""Prompts: lengths like ShareGPT's, exact ids, and files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropeway.compiler.errors import InputError
from ropeway.serving.load.workload import Ask, Synthetic, read_workload, sharegpt_lengths


def test_lengths_have_the_published_means_and_keep_the_cuts() -> None:
    lengths = np.array(sharegpt_lengths(20_000, 10**6, seed=0))
    assert 215 < lengths[:, 0].mean() < 230
    assert 185 < lengths[:, 1].mean() < 205
    assert lengths.min() >= 4
    assert lengths[:, 0].max() <= 1024
    assert lengths.sum(axis=1).max() <= 2048
    # Log-normal: in logarithms, as far above the median as below it. The cuts take a little.
    low, middle, high = np.percentile(np.log(lengths[:, 1]), (16, 50, 84))
    assert middle - low == pytest.approx(high - middle, rel=0.1)


def test_lengths_fit_a_short_context() -> None:
    lengths = sharegpt_lengths(500, 96, seed=0)
    assert len(lengths) == 500
    assert max(sum(pair) for pair in lengths) <= 96
    assert sharegpt_lengths(500, 96, seed=0) == lengths
    with pytest.raises(InputError, match="--prompt-tokens"):
        sharegpt_lengths(5, 20, seed=0)


def test_prompts_are_of_their_lengths_and_new_in_each_turn() -> None:
    words = Synthetic([(5, 3), (9, 1)], seed=1)
    first = words.asks(1)
    assert [len(str(ask.prompt).split()) for ask in first] == [5, 9]
    assert [ask.max_tokens for ask in first] == [3, 1]
    assert first == words.asks(1)
    assert first != words.asks(2)
    ids = Synthetic([(5, 3)], seed=1, ids=[7, 8, 9]).asks(1)[0].prompt
    assert len(ids) == 5
    assert set(ids) <= {7, 8, 9}
    [message] = Synthetic([(2, 3)], seed=1, chat=True).asks(1)[0].prompt
    assert message["role"] == "user"
    assert len(message["content"].split()) == 2


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_a_file_is_read_in_the_order_of_its_moments(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"prompt": "later", "at": 2.5, "max_tokens": 3},
        "",
        {"prompt": [1, 2], "at": 0, "extra": {"top_k": 1}},
    )
    assert read_workload(path, chat=False).asks(1) == [
        Ask([1, 2], 128, 0.0, {"top_k": 1}),
        Ask("later", 3, 2.5),
    ]


def test_a_prompt_becomes_a_message_for_chat(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "chat.jsonl", {"prompt": "hello"}, {"messages": messages})
    first, second = read_workload(path, chat=True).asks(1)
    assert first.prompt == [{"role": "user", "content": "hello"}]
    assert second.prompt == messages


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2"),
        ({"promt": "x"}, "did you mean `prompt`"),
        ({"prompt": "x", "messages": []}, "either"),
        ({}, "either"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "at": -1}, "at"),
        ({"prompt": "x", "at": 1}, "some lines only"),
        ({"messages": [{"role": "user", "content": "x"}]}, "need --chat"),
        ("[1]", "line 2"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(InputError, match=what):
        read_workload(path, chat=False)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path / "bytes", write(tmp_path / "empty", "")):
        with pytest.raises(InputError, match="--workload"):
            read_workload(path, chat=False)
    ids = write(tmp_path / "ids", {"prompt": [1, 2]})
    with pytest.raises(InputError, match="--chat"):
        read_workload(ids, chat=True)
