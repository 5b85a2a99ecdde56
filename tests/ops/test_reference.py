"""Each op's reference against torch.nn.functional or float64 arithmetic, not against itself."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.single_op import run_op

from ropeway.compiler.ops import registry

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    x, w, b = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    kwargs = {"bias": b} if bias else {}
    expected = F.linear(x.double(), w.double(), b.double() if bias else None)
    (got,) = run_op("nn.linear", [x, w], kwargs)
    torch.testing.assert_close(got.double(), expected, **CLOSE)


def test_linear_accumulates_bf16_in_float32_and_rounds_once() -> None:
    x, w = torch.randn(3, 600).bfloat16(), torch.randn(4, 600).bfloat16()
    exact = x.double() @ w.double().T
    (wide,) = run_op("nn.linear", [x, w], out="f32")
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-4)
    (narrow,) = run_op("nn.linear", [x, w])
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float) -> None:
    x, gain = torch.randn(5, 12), torch.randn(12)
    (got,) = run_op("nn.rms_norm", [x], {"gain": gain}, eps=1e-5, offset=offset)
    torch.testing.assert_close(got, F.rms_norm(x, (12,), gain + offset, 1e-5), **CLOSE)
    (plain,) = run_op("nn.rms_norm", [x], eps=1e-5, offset=offset)
    torch.testing.assert_close(plain, F.rms_norm(x, (12,), None, 1e-5), **CLOSE)


def test_rms_norm_of_heads_is_over_the_last_axis_only() -> None:
    x, gain = torch.randn(5, 3, 8), torch.randn(8)
    (got,) = run_op("nn.rms_norm", [x], {"gain": gain}, eps=1e-6)
    torch.testing.assert_close(got, F.rms_norm(x, (8,), gain, 1e-6), **CLOSE)


def test_norm_statistics_are_float32_for_bf16() -> None:
    x = (torch.randn(2, 512) + 30).bfloat16()
    (got,) = run_op("nn.rms_norm", [x], eps=1e-6)
    exact = F.rms_norm(x.double(), (512,), None, 1e-6)
    assert torch.equal(got, exact.float().bfloat16())


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine: bool) -> None:
    x, gain, bias = torch.randn(5, 12) * 3 + 1, torch.randn(12), torch.randn(12)
    kwargs = {"gain": gain, "bias": bias} if affine else {}
    (got,) = run_op("nn.layer_norm", [x], kwargs, eps=1e-5)
    expected = F.layer_norm(x, (12,), gain if affine else None, bias if affine else None, 1e-5)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "attrs", "oracle"),
    [
        ("nn.silu", {}, F.silu),
        ("nn.relu", {}, F.relu),
        ("nn.tanh", {}, torch.tanh),
        ("nn.sigmoid", {}, torch.sigmoid),
        ("nn.gelu", {}, F.gelu),
        ("nn.gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
        ("nn.softmax", {"axis": 1}, lambda x: F.softmax(x, 1)),
        ("nn.softmax", {"axis": 0}, lambda x: F.softmax(x, 0)),
        ("math.neg", {}, lambda x: -x),
        ("math.exp", {}, torch.exp),
        ("math.cos", {}, torch.cos),
        ("math.sin", {}, torch.sin),
        ("math.abs", {}, torch.abs),
        ("math.mean", {"axes": [1]}, lambda x: x.mean(1)),
        ("math.mean", {"axes": [-1], "keepdim": True}, lambda x: x.mean(1, keepdim=True)),
        ("math.sum", {"axes": [0, 1]}, torch.sum),
        ("math.add", {"scalar": 2}, lambda x: x + 2),
        ("math.sub", {"scalar": 2}, lambda x: x - 2),
        ("math.mul", {"scalar": 0.5}, lambda x: x * 0.5),
        ("math.div", {"scalar": 4.0}, lambda x: x / 4),
        ("math.pow", {"scalar": 3}, lambda x: x**3),
        ("math.max", {"scalar": 0.25}, lambda x: x.clamp(min=0.25)),
        ("math.min", {"scalar": 0.25}, lambda x: x.clamp(max=0.25)),
    ],
)
def test_one_operand(name: str, attrs: dict[str, object], oracle: object) -> None:
    x = torch.randn(4, 9) * 2
    (got,) = run_op(name, [x], **attrs)
    torch.testing.assert_close(got.double(), oracle(x.double()), **CLOSE)


@pytest.mark.parametrize(("name", "oracle"), [("rsqrt", torch.rsqrt), ("sqrt", torch.sqrt)])
def test_roots(name: str, oracle: object) -> None:
    x = torch.rand(4, 9) + 0.1
    torch.testing.assert_close(run_op(f"math.{name}", [x])[0].double(), oracle(x.double()), **CLOSE)


@pytest.mark.parametrize("shape", [(4, 9), (9,), (1, 9), (4, 1), (3, 4, 9)])
@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("add", torch.add),
        ("sub", torch.sub),
        ("mul", torch.mul),
        ("div", torch.div),
        ("max", torch.maximum),
        ("min", torch.minimum),
        ("pow", torch.pow),
    ],
)
def test_two_operands_broadcast(name: str, oracle: object, shape: tuple[int, ...]) -> None:
    x, y = torch.rand(4, 9) + 0.5, torch.rand(shape) + 0.5
    (got,) = run_op(f"math.{name}", [x, y])
    torch.testing.assert_close(got.double(), oracle(x.double(), y.double()), **CLOSE)


def test_integers_are_exact() -> None:
    x = indices(2**30, 2**24 + 1)
    assert run_op("math.add", [x], scalar=1)[0].tolist() == [2**30 + 1, 2**24 + 2]
    assert run_op("math.sub", [x, indices(1, 1)])[0].tolist() == [2**30 - 1, 2**24]


def test_movement() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(run_op("tensor.reshape", [x], shape=[6, 4])[0], x.view(6, 4))
    assert torch.equal(run_op("tensor.transpose", [x], perm=[2, 0, 1])[0], x.permute(2, 0, 1))
    assert torch.equal(run_op("tensor.slice", [x], axis=-1, start=1, stop=3)[0], x[..., 1:3])
    assert torch.equal(run_op("tensor.concat", [x, x], axis=1)[0], torch.cat([x, x], 1))
    assert torch.equal(run_op("tensor.expand", [x[:, :1]], shape=[5, 2, 3, 4])[0][4, :, 2], x[:, 0])
    assert torch.equal(run_op("tensor.gather_rows", [x, indices(1, 0, 1)])[0], x[[1, 0, 1]])
    table = torch.randn(7, 3).bfloat16()
    assert torch.equal(run_op("nn.embedding", [table, indices(6, 0)])[0], table[[6, 0]])
    assert run_op("tensor.cast", [torch.tensor([1.00390625])], dtype="bf16")[0].item() == 1.0


def rope_oracle(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Complex multiplication in float64: pairs turned by exp(i angle)."""
    rotary = 2 * angles.shape[1]
    part, rest = x[..., :rotary].double(), x[..., rotary:].double()
    if interleaved:
        pairs = torch.complex(part[..., 0::2].contiguous(), part[..., 1::2].contiguous())
    else:
        pairs = torch.complex(part[..., : rotary // 2].contiguous(), part[..., rotary // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    if interleaved:
        out = torch.stack([turned.real, turned.imag], -1).flatten(-2)
    else:
        out = torch.cat([turned.real, turned.imag], -1)
    return torch.cat([out, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4, 2])
def test_rope(rotary: int, interleaved: bool) -> None:
    q, k = torch.randn(4, 3, 8), torch.randn(4, 1, 8)
    positions = indices(0, 5, 2, 30)
    frequencies = 10000.0 ** (-torch.arange(rotary // 2).double() / (rotary // 2))
    angles = torch.arange(31).double()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    attrs = {"rotary_dim": rotary, "interleaved": interleaved}
    expected = [rope_oracle(x, angles[positions.long()], interleaved) for x in (q, k)]
    (single,) = run_op("nn.rope", [q, positions, table], **attrs)
    torch.testing.assert_close(single.double(), expected[0], **CLOSE)
    both = run_op("nn.rope_qk", [q, k, positions, table], **attrs)
    for got, wanted in zip(both, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, **CLOSE)


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("act", sorted(ACTS))
def test_glu(act: str) -> None:
    x = torch.randn(4, 10)
    (got,) = run_op("nn.glu", [x], act=act)
    gate, up = x.double()[:, :5], x.double()[:, 5:]
    torch.testing.assert_close(got.double(), ACTS[act](gate) * up, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_equal_their_chains_bit_for_bit(dtype: torch.dtype) -> None:
    x, residual = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype)
    gain, w, bias = (
        torch.randn(12).to(dtype),
        torch.randn(6, 12).to(dtype),
        torch.randn(6).to(dtype),
    )
    attrs = {"eps": 1e-5, "offset": 1.0}
    (total,) = run_op("math.add", [x, residual])
    (normed,) = run_op("nn.rms_norm", [total], {"gain": gain}, **attrs)
    (y,) = run_op("nn.linear", [normed, w], {"bias": bias}, out="f32")
    fused = run_op("nn.add_rms_norm", [x, residual], {"gain": gain}, **attrs)
    assert torch.equal(fused[0], normed) and torch.equal(fused[1], total)
    args = [x, residual, gain, w]
    fused = run_op("nn.add_rms_norm_linear", args, {"bias": bias}, out="f32", **attrs)
    assert torch.equal(fused[0], y) and torch.equal(fused[1], total)
    (fused_y,) = run_op("nn.rms_norm_linear", [total, gain, w], {"bias": bias}, out="f32", **attrs)
    assert torch.equal(fused_y, y)
    gate_up = torch.randn(5, 12).to(dtype)
    (act,) = run_op("nn.silu", [gate_up[:, :6].contiguous()])
    (product,) = run_op("math.mul", [act, gate_up[:, 6:].contiguous()])
    assert torch.equal(run_op("nn.glu", [gate_up])[0], product)


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linears_equal_their_chains_bit_for_bit(dtype: torch.dtype, act: str) -> None:
    x, residual = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype)
    gain, w, bias = (torch.randn(*shape).to(dtype) for shape in ((12,), (8, 12), (8,)))
    attrs = {"eps": 1e-5, "offset": 1.0}
    y, total = run_op("nn.add_rms_norm_linear", [x, residual, gain, w], {"bias": bias}, **attrs)
    (wanted,) = run_op("nn.glu", [y], act=act)
    args = [x, residual, gain, w]
    fused = run_op("nn.add_rms_norm_linear_glu", args, {"bias": bias}, **attrs, act=act)
    assert torch.equal(fused[0], wanted) and torch.equal(fused[1], total)
    args = [total, gain, w]
    (fused_y,) = run_op("nn.rms_norm_linear_glu", args, {"bias": bias}, **attrs, act=act)
    assert torch.equal(fused_y, wanted)
    (plain,) = run_op("nn.linear", [x, w])
    (wanted,) = run_op("nn.glu", [plain], act=act)
    assert torch.equal(run_op("nn.linear_glu", [x, w], act=act)[0], wanted)


def test_costs_of_the_ops_that_dominate() -> None:
    from ropeway.compiler import ir  # noqa: PLC0415

    t = ir.symbol("T")
    function = ir.Function("f")
    x = ir.Value("x", ir.TensorType("bf16", (t, 64)))
    w = ir.Weight("w", ir.TensorType("bf16", (32, 64)), ir.Ckpt("w"))
    cost = registry.cost(registry.build(function, "nn.linear", [x, w]))
    assert cost.flops == 2 * 64 * 32 * t
    assert ir.same(cost.bytes, 2 * (64 * t + 64 * 32 + 32 * t))
    move = registry.build(function, "tensor.reshape", [x], attrs={"shape": (t, 8, 8)})
    assert registry.cost(move).flops == 0
