"""Meanings of the nn ops, in float32."""

from collections.abc import Sequence

import torch

from ropeway.compiler.ops.reference.attention import paged_attention, sdpa
from ropeway.compiler.ops.reference.call import Call, Reference, rounded

Results = Sequence[torch.Tensor]


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + gain) over the last axis; no gain: no factor."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if gain is None else normed * (offset + gain)


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + bias."""
    product = x @ w.T
    return product if bias is None else product + bias


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """The activation of this name: silu, gelu or gelu_tanh."""
    if act == "silu":
        return x * torch.sigmoid(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def rotate(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates the leading table-width part of x[T, H, D] by each token's table row."""
    rotary = table.shape[1]
    rows = table[positions.long()]
    cos, sin = rows[:, None, : rotary // 2], rows[:, None, rotary // 2 :]
    part = x[..., :rotary]
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : rotary // 2], part[..., rotary // 2 :]
    left, right = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = torch.stack((left, right), dim=-1).flatten(-2)
    else:
        turned = torch.cat((left, right), dim=-1)
    return torch.cat((turned, x[..., rotary:]), dim=-1)


def _embedding(call: Call) -> Results:
    return [call.raw("table")[call.raw("ids").long()].float()]


def _linear(call: Call) -> Results:
    return [linear(call.f32("x"), call.f32("w"), call.optional("bias"))]


def _norm_of(call: Call, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, call.optional("gain"), call.number("eps"), call.number("offset"))


def _rms_norm(call: Call) -> Results:
    return [_norm_of(call, call.f32("x"))]


def _layer_norm(call: Call) -> Results:
    x = call.f32("x")
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + call.number("eps"))
    gain, bias = call.optional("gain"), call.optional("bias")
    if gain is not None:
        normed = normed * gain
    return [normed if bias is None else normed + bias]


def _gelu(call: Call) -> Results:
    act = "gelu_tanh" if call.word("approximate") == "tanh" else "gelu"
    return [activate(call.f32("x"), act)]


def _rope(call: Call) -> Results:
    positions, table = call.raw("positions"), call.raw("table")
    return [rotate(call.f32("x"), positions, table, call.flag("interleaved"))]


def _rope_qk(call: Call) -> Results:
    positions, table = call.raw("positions"), call.raw("table")
    interleaved = call.flag("interleaved")
    return [rotate(call.f32(name), positions, table, interleaved) for name in ("q", "k")]


def _gated(call: Call, gate_up: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gated unit of f32 [.., 2N] whose values are those of `like`'s dtype."""
    # Contiguous, as an op of its own would see them: torch's strided loops round otherwise.
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
    return rounded(activate(gate, call.word("act")), like) * up


def _glu(call: Call) -> Results:
    raw = call.raw("gate_up")
    return [_gated(call, raw.float(), raw)]


def _of_linear(linear_op: Reference) -> Reference:
    """The gated unit of a linear's first result."""

    def reference(call: Call) -> Results:
        y, *others = linear_op(call)
        x = call.raw("x")
        return [_gated(call, rounded(y, x), x), *others]

    return reference


def _sum(call: Call) -> torch.Tensor:
    return rounded(call.f32("x") + call.f32("residual"), call.raw("x"))


def _add_rms_norm(call: Call) -> Results:
    total = _sum(call)
    return [_norm_of(call, total), total]


def _norm_linear(call: Call, x: torch.Tensor) -> torch.Tensor:
    normed = rounded(_norm_of(call, x), call.raw("x"))
    return linear(normed, call.f32("w"), call.optional("bias"))


def _rms_norm_linear(call: Call) -> Results:
    return [_norm_linear(call, call.f32("x"))]


def _add_rms_norm_linear(call: Call) -> Results:
    total = _sum(call)
    return [_norm_linear(call, total), total]


TABLE: dict[str, Reference] = {
    "nn.embedding": _embedding,
    "nn.linear": _linear,
    "nn.rms_norm": _rms_norm,
    "nn.layer_norm": _layer_norm,
    "nn.silu": lambda call: [activate(call.f32("x"), "silu")],
    "nn.relu": lambda call: [call.f32("x").clamp(min=0)],
    "nn.tanh": lambda call: [call.f32("x").tanh()],
    "nn.sigmoid": lambda call: [call.f32("x").sigmoid()],
    "nn.gelu": _gelu,
    "nn.softmax": lambda call: [call.f32("x").softmax(dim=call.integer("axis"))],
    "nn.sdpa": sdpa,
    "nn.rope": _rope,
    "nn.rope_qk": _rope_qk,
    "nn.glu": _glu,
    "nn.add_rms_norm": _add_rms_norm,
    "nn.rms_norm_linear": _rms_norm_linear,
    "nn.add_rms_norm_linear": _add_rms_norm_linear,
    "nn.linear_glu": _of_linear(_linear),
    "nn.rms_norm_linear_glu": _of_linear(_rms_norm_linear),
    "nn.add_rms_norm_linear_glu": _of_linear(_add_rms_norm_linear),
    "nn.paged_attention": paged_attention,
}
