"""Print and parse are inverses for any module, and any text parses or says why it doesn't."""

import math
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.random_modules import modules

from ropeway.compiler import ir
from ropeway.compiler.errors import IRSyntaxError
from ropeway.compiler.ir.fingerprint import fingerprint
from ropeway.compiler.ops.verifier import verify

RELAXED = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

LLAMA = """module @smollm2 format 1 {
  dims { T in 1..8192, R in 1..256 }
  mesh { tp = 2, pp = 1 }
  metadata { arch = "llama", "odd key" = [1, 2.5, -inf, nan, T + 1, -3, true, -0.0], e = [] }
  weight @l0.qkv : bf16[96, 576] = concat(ckpt "q\\n\\"", cast(const "") {dtype = "f32"}) {axis = 0}
  weight @"a b" : f32[] = ckpt "z"
  func @step(%ids: i32[T] role ids, %pos: i32[2*T + 1] role positions, %kv0: cache<group 0, \
planes {k: bf16[3, 64], v: bf16[3, 64]}> role cache) -> (f32[T, 49152] role logits, i32[T]) {
    %h, %res = nn.add_rms_norm(%ids, @l0.qkv, gain=@"a b") {eps = 1e-05} : f32[T, 49152], \
bf16[T, 576] loc "models/llama.py:88"
    x.nothing(%h)
    return %h, %ids
  } loc "models/llama.py:12"
}
"""


def test_canonical_text_comes_back_byte_for_byte() -> None:
    module = ir.parse_module(LLAMA)
    assert ir.print_module(module) == LLAMA
    assert module.dims == {"T": (1, 8192), "R": (1, 256)}
    assert module.metadata["odd key"][:3] == (1, 2.5, -math.inf)
    assert math.copysign(1, module.metadata["odd key"][7]) == -1
    add_norm, nothing = module.fn.ops
    assert add_norm.loc == "models/llama.py:88"
    assert add_norm.kwargs["gain"] is module.weights["a b"]
    assert add_norm.results[1].type == ir.TensorType("bf16", (ir.symbol("T"), 576))
    assert nothing.results == [] and nothing.args == [add_norm.results[0]]
    assert module.weights["l0.qkv"].expr.args[0] == ir.Ckpt('q\n"')
    assert module.fn.input("cache").type.plane("v").shape == (3, 64)


@RELAXED
@given(modules())
def test_any_module_round_trips(module: ir.Module) -> None:
    verify(module)
    text = ir.print_module(module)
    again = ir.parse_module(text)
    assert again == module
    assert ir.print_module(again) == text
    assert fingerprint(again) == fingerprint(module)
    assert text.encode().decode() == text


@RELAXED
@given(modules())
def test_a_clone_is_equal_and_apart(module: ir.Module) -> None:
    before = ir.print_module(module)
    copy = module.clone()
    assert copy == module
    verify(copy)
    for function in copy.functions.values():
        function.loc = "changed"
        for op in function.ops:
            op.attrs["changed"] = 1
            op.args.clear()
    copy.metadata["changed"] = True
    for weight in copy.weights.values():
        weight.name += "_"
    assert ir.print_module(module) == before
    assert copy != module


def test_equality_sees_kinds_of_numbers() -> None:
    def module(value: ir.Attr) -> ir.Module:
        return ir.Module("m", metadata={"x": value})

    assert module(math.nan) == module(math.nan)
    for left, right in ((1, 1.0), (True, 1), (0.0, -0.0), ("1", 1), ((1,), 1)):
        assert module(left) != module(right), (left, right)
        assert fingerprint(module(left)) != fingerprint(module(right))


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, len(LLAMA) - 1),
    st.integers(0, 12),
    st.text(st.sampled_from(string.printable + "é\u2028\0"), max_size=5),
)
def test_mutated_text_parses_or_is_a_syntax_error(at: int, drop: int, insert: str) -> None:
    text = LLAMA[:at] + insert + LLAMA[at + drop :]
    try:
        module = ir.parse_module(text)
    except IRSyntaxError as error:
        assert error.line >= 1 and error.column >= 1 and error.expected
        assert f":{error.line}:{error.column}:" in str(error)
    else:
        assert ir.parse_module(ir.print_module(module)) == module


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60))
def test_any_text_parses_or_is_a_syntax_error(text: str) -> None:
    with pytest.raises(IRSyntaxError):
        ir.parse_module(text)


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "expected"),
    [
        ("module @", "modul @", 1, 1, "'module'"),
        ("format 1", "format 2", 1, 24, "format 1"),
        ("T in 1..8192", "T in 1.8192", 2, 15, "an integer"),
        ("tp = 2", "tp 2", 3, 13, "'='"),
        ("tp = 2, pp", "tp = 2, tp", 3, 18, "a name that isn't taken"),
        ('ckpt "z"', "ckpt z", 6, 32, "'('"),
        ("role positions", "role", 7, 60, "a role"),
        ("nn.add_rms_norm(%ids", "nn.add_rms_norm(%idz", 8, 32, "a value defined above"),
        ("@l0.qkv, gain", "@l1.qkv, gain", 8, 38, "a weight of the module"),
        ("bf16[T, 576] loc", "bf15[T, 576] loc", 8, 91, "a type: one of"),
        ("return %h, %ids", "return %ids, %ids", 10, 12, "a value of the declared type f32"),
        ("return %h, %ids", "return %h", 11, 3, "','"),
        ("%h, %res =", "%ids, %res =", 8, 5, "a name that isn't taken"),
    ],
)
def test_errors_say_line_column_and_what_was_expected(
    old: str, new: str, line: int, column: int, expected: str
) -> None:
    assert LLAMA.count(old) == 1
    with pytest.raises(IRSyntaxError) as caught:
        ir.parse_module(LLAMA.replace(old, new), "step.ir")
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.expected.startswith(expected)
    assert str(caught.value).startswith(f"step.ir:{line}:{column}: expected ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "concat(" * 5000 + ")" * 5000,
        "concat(ckpt " + '"a"' * 3,
        "9" * 30,
        'transpose(const "a") {x = ' + "(" * 5000 + "1" + ")" * 5000 + "}",
        'transpose(const "a") {x = T**99999}',
        'transpose(const "a") {x = 99999999999*99999999999}',
        'transpose(const "a") {x = T // 0}',
        'ckpt "\\q"',
        'ckpt "\\u{110000}"',
        'ckpt "open',
    ],
)
def test_hostile_text_is_a_syntax_error(text: str) -> None:
    with pytest.raises(IRSyntaxError):
        ir.parse_module(f"module @m format 1 {{ weight @w : f32[1] = {text} }}")
