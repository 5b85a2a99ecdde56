"""The interpreter and weight expressions against plain torch."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.random_modules import modules

from ropeway.compiler import ir
from ropeway.compiler.errors import CheckpointError, InputError, RunError
from ropeway.compiler.ops.definition import OpDef
from ropeway.compiler.ops.interpreter import Interpreter, run
from ropeway.compiler.ops.reference import table
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.ops.weight_functions import (
    TORCH_DTYPES,
    MappedTensors,
    evaluate,
    evaluate_logical,
    pack,
    stream_weights,
    unpack,
)
from ropeway.compiler.ops.weight_types import packed_shape

TEXT = """module @m format 1 {
  dims { T in 1..64 }
  weight @w : f32[4, 3] = concat(ckpt "a", ckpt "b") {axis = 0}
  weight @c : f32[4] = const "c"
  func @step(%x: f32[T, 3], %z: f32[2*T]) -> (f32[T, 4] role hidden, f32[T, 2, 2]) {
    %y = nn.linear(%x, @w, bias=@c) : f32[T, 4]
    %h = tensor.reshape(%y) {shape = [T, 2, 2]} : f32[T, 2, 2]
    return %y, %h
  }
}
"""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(1, 3), "b": torch.randn(3, 3), "c": torch.randn(4)}


def interpret(tensors: Mapping[str, torch.Tensor], **inputs: torch.Tensor) -> dict:
    source, constants = MappedTensors(tensors), MappedTensors({"c": tensors["c"]})
    return run(read_module(TEXT), "step", inputs, source, constants=constants)


def test_outputs_come_by_role_or_name(tensors: dict[str, torch.Tensor]) -> None:
    x = torch.randn(5, 3)
    outputs = interpret(tensors, x=x, z=torch.zeros(10))
    expected = x @ torch.cat([tensors["a"], tensors["b"]]).T + tensors["c"]
    assert list(outputs) == ["hidden", "h"]
    torch.testing.assert_close(outputs["hidden"], expected)
    assert torch.equal(outputs["h"], outputs["hidden"].view(5, 2, 2))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": torch.zeros(5, 3)}, "input %z isn't given"),
        ({"x": torch.zeros(5, 4), "z": torch.zeros(10)}, r"%x should be f32\[T, 3\]"),
        ({"x": torch.zeros(5, 3).double(), "z": torch.zeros(10)}, "torch.float64"),
        ({"x": torch.zeros(5, 3), "z": torch.zeros(9)}, r"f32\[2\*T\], here \[10\], and is \[9\]"),
        ({"x": torch.zeros(3), "z": torch.zeros(9)}, "%x should be"),
    ],
)
def test_misfit_inputs_are_refused(
    tensors: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        interpret(tensors, **inputs)


def test_a_missing_tensor_is_named(tensors: dict[str, torch.Tensor]) -> None:
    module = read_module(TEXT)
    inputs = {"x": torch.zeros(1, 3), "z": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="'c' isn't there"):
        run(module, module.fn, inputs, MappedTensors(tensors))


def test_a_wrong_reference_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT.replace(
        "tensor.reshape(%y) {shape = [T, 2, 2]} : f32[T, 2, 2]", "nn.silu(%y) : f32[T, 4]"
    )
    module = read_module(text.replace("f32[T, 2, 2]", "f32[T, 4]"))
    monkeypatch.setitem(table._TABLE, "nn.silu", lambda call: [call.f32("x")[:, :2]])
    weights = {"w": torch.zeros(4, 3), "c": torch.zeros(4)}
    inputs = {"x": torch.zeros(2, 3), "z": torch.zeros(4)}
    with pytest.raises(RunError, match=r"nn\.silu gave %h the shape \[2, 2\]"):
        Interpreter(module, weights).run("step", inputs)


def test_a_target_s_own_op_runs_with_its_reference() -> None:
    from ropeway.compiler.ops import registry  # noqa: PLC0415

    name = "testing.twice"
    registry.register(OpDef(name, ("x",), lambda view: [view.floating("x")], "x + x"))
    table.register_reference(name, lambda call: [call.f32("x") * 2])
    try:
        text = TEXT.replace("nn.linear(%x, @w, bias=@c)", "testing.twice(%x)")
        text = text.replace("f32[T, 3]", "f32[T, 4]")
        inputs = {"x": torch.ones(2, 4), "z": torch.zeros(4)}
        assert run(read_module(text), "step", inputs, MappedTensors({}))["hidden"].sum() == 16
    finally:
        registry._OPS.pop(name)
        table._TABLE.pop(name)


RANDOM = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SIZES = {"T": 5, "R": 2, "L": 3, "MB": 4}
"""2 requests of 2 and 3 tokens; T*R - 1 and the like follow."""


def random_inputs(
    module: ir.Module, function: ir.Function
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    torch.manual_seed(0)

    def tensor(kind: ir.TensorType) -> torch.Tensor:
        shape = [int(ir.substitute(dim, SIZES)) for dim in kind.shape]
        if kind.dtype == "i32":
            if kind.shape == (ir.symbol("R") + 1,):
                return torch.tensor([0, 2, 5], dtype=torch.int32)
            return torch.full(shape, 3, dtype=torch.int32)
        return torch.randn(shape).to(TORCH_DTYPES[kind.dtype])

    inputs, caches = {}, {}
    for entry in function.inputs:
        if isinstance(entry.value.type, ir.CacheType):
            planes = entry.value.type.planes
            caches[entry.value.name] = {
                p.name: torch.randn(4, 4, *p.shape).to(TORCH_DTYPES[p.dtype]) for p in planes
            }
        else:
            inputs[entry.value.name] = tensor(entry.value.type)
    return inputs, caches, {name: tensor(weight.type) for name, weight in module.weights.items()}


@RANDOM
@given(modules())
def test_random_modules_run_and_their_text_means_the_same(module: ir.Module) -> None:
    again = ir.parse_module(ir.print_module(module))
    for name, function in module.functions.items():
        inputs, caches, weights = random_inputs(module, function)
        copies = {key: {n: t.clone() for n, t in planes.items()} for key, planes in caches.items()}
        first = Interpreter(module, weights, poison=True).run(function, inputs, caches, sizes=SIZES)
        second = Interpreter(again, weights, poison=False).run(name, inputs, copies, sizes=SIZES)
        assert list(first) == list(second)
        for key, value in first.items():
            if not value.isnan().any():
                assert torch.equal(value, second[key])
        kinds = dict.fromkeys(value for value, _ in function.outputs)
        for value in kinds:
            shape = tuple(ir.substitute(dim, SIZES) for dim in value.type.shape)
            assert tuple(first[value.name].shape) == shape


def test_weight_functions() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 6), torch.randn(2, 6)
    source = MappedTensors({"a": a, "b": b, "h": a.bfloat16()})
    A, B, H = ir.Ckpt("a"), ir.Ckpt("b"), ir.Ckpt("h")  # noqa: N806

    def value(expr: ir.WeightExpr) -> torch.Tensor:
        return evaluate(expr, source)

    assert torch.equal(value(ir.apply("concat", A, B, axis=0)), torch.cat([a, b]))
    assert torch.equal(value(ir.apply("cast", A, dtype="bf16")), a.bfloat16())
    assert torch.equal(value(ir.apply("transpose", A)), a.T)
    assert torch.equal(value(ir.apply("transpose", A, perm=(0, 1))), a)
    assert torch.equal(value(ir.apply("reshape", A, shape=(3, 8))), a.view(3, 8))
    assert torch.equal(value(ir.apply("slice", A, axis=1, start=2, stop=5)), a[:, 2:5])
    assert torch.equal(
        value(ir.apply("expand", ir.apply("slice", B, axis=0, stop=1), shape=(4, 6))),
        b[:1].expand(4, 6),
    )
    assert torch.equal(value(ir.apply("add_scalar", A, scalar=1.0)), a + 1)
    assert torch.equal(value(ir.apply("mul", A, A)), a * a)
    assert torch.equal(
        value(ir.apply("mul_scalar", H, scalar=0.3)), (a.bfloat16().float() * 0.3).bfloat16()
    )
    assert value(ir.apply("transpose", A)).is_contiguous()
    with pytest.raises(InputError, match=r"concat doesn't fit the shapes \[4, 6\], \[2, 6\]"):
        value(ir.apply("concat", A, B, axis=1))
    with pytest.raises(CheckpointError, match="'nope' isn't among"):
        value(ir.Ckpt("nope"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 32), (1, 1), (33, 17), (70, 65)])
def test_panel32(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    w = torch.randn(shape).to(dtype)
    packed = pack(w, "panel32")
    kind = ir.TensorType({v: k for k, v in TORCH_DTYPES.items()}[dtype], shape)
    assert tuple(packed.shape) == packed_shape("panel32", kind)
    assert packed.is_contiguous()
    flat = packed.flatten().float()
    padded = math.ceil(shape[1] / 32) * 32
    held = 0.0
    for n in range(shape[0]):
        for k in range(shape[1]):
            panel, column = divmod(n, 32)
            if dtype == torch.float32:
                index = (panel * padded + k) * 32 + column
            else:
                index = ((panel * padded // 2 + k // 2) * 32 + column) * 2 + k % 2
            assert flat[index] == w[n, k].float()
            held += abs(float(w[n, k]))
    assert float(flat.abs().double().sum()) == pytest.approx(held)  # the rest is zeros
    assert torch.equal(unpack(packed, "panel32", shape), w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panel32_gated_has_sixteen_gates_beside_their_ups(dtype: torch.dtype) -> None:
    w = torch.randn(96, 20).to(dtype)
    packed = pack(w, "panel32_gated")
    assert torch.equal(unpack(packed, "panel32_gated", (96, 20)), w)
    panels = unpack(packed, "panel32", (96, 20)).reshape(3, 32, 20)
    for p in range(3):
        assert torch.equal(panels[p, :16], w[16 * p : 16 * p + 16])
        assert torch.equal(panels[p, 16:], w[48 + 16 * p : 64 + 16 * p])
    with pytest.raises(InputError, match="its rows aren't a multiple of 32"):
        pack(w[:80], "panel32_gated")


def test_packing_keeps_what_ops_see() -> None:
    w = torch.randn(5, 7)
    source = MappedTensors({"w": w})
    expr = ir.apply("pack", ir.Ckpt("w"), layout="panel32")
    weight = ir.Weight("w", ir.TensorType("f32", (5, 7)), expr)
    assert torch.equal(evaluate_logical(expr, source), w)
    ((own, stored),) = stream_weights(ir.Module("m", weights={"w": weight}), source)
    assert own is weight and tuple(stored.shape) == (1, 32, 32)
    weight.type = ir.TensorType("f32", (5, 40))
    with pytest.raises(InputError, match="weight @w should be"):
        list(stream_weights(ir.Module("m", weights={"w": weight}), source))
