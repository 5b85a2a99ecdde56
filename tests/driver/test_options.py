"""What `compile` takes, and how it refuses the rest: before any work, naming the argument."""

import subprocess
import sys

import pytest

import ropeway
from ropeway.compiler.driver.options import check_options
from ropeway.compiler.errors import InputError, TargetError

DECODE = ropeway.Bucket("decode", 4, 4, 4)
MIXED = ropeway.Bucket("mixed", 64, 4, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"max_model_len": 0}, ("max_model_len", "0")),
        ({"max_model_len": True}, ("max_model_len", "True")),
        ({"max_num_batched_tokens": -1}, ("max_num_batched_tokens", "-1")),
        ({"buckets": []}, ("buckets", "empty")),
        ({"buckets": [8]}, ("buckets", "8", "Bucket")),
        ({"buckets": [DECODE]}, ("buckets", "mixed")),
        ({"buckets": [MIXED]}, ("buckets", "decode")),
        ({"buckets": [MIXED, ropeway.Bucket("decode", 4, 3, 4)]}, ("decode-4", "tokens =")),
        ({"buckets": [DECODE, ropeway.Bucket("mixed", 4, 5, 4)]}, ("mixed-4x5x4", "impossible")),
        ({"buckets": [DECODE, ropeway.Bucket("mixed", 4096, 4, 4)]}, ("4096", "2048")),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        ropeway.compile("nowhere", **arguments)
    for word in words:
        assert word in str(caught.value)


def test_unknown_target_names_the_installed_ones() -> None:
    with pytest.raises(TargetError, match="cpu"):
        ropeway.compile("nowhere", target="abacus")


def test_dtype_spellings() -> None:
    import torch  # noqa: PLC0415

    for given, name in [
        ("bfloat16", "bf16"),
        ("bf16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("float32", "f32"),
        (torch.float32, "f32"),
    ]:
        assert check_options("cpu", given, None, None, 64).dtype == name


def test_default_buckets_keep_to_the_budget() -> None:
    buckets = check_options("cpu", "bf16", None, None, 48).buckets
    assert [b.tokens for b in buckets if b.kind == "decode"] == [1, 2, 4, 8, 16, 32, 48]
    assert [b.tokens for b in buckets if b.kind == "mixed"] == [48]


def test_facade_is_lazy_and_complete() -> None:
    code = (
        "import sys, ropeway; "
        "assert not {'torch', 'numpy', 'msgspec', 'sympy'} & sys.modules.keys(); "
        "names = ('compile', 'load', 'LLM', 'SamplingParams', 'Program', 'errors', '__version__'); "
        "assert set(names) <= set(dir(ropeway)); "
        "assert all(getattr(ropeway, name) for name in ropeway.__all__ if name != 'Pipeline'); "
        "assert not {'torch', 'sympy'} & sys.modules.keys(), 'torch or sympy came along'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_facade_refuses_unknown_names() -> None:
    with pytest.raises(AttributeError, match="'ropeway' has no attribute 'Lmm'"):
        _ = ropeway.Lmm
