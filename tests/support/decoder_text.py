"""IR text of small decoders as the importer leaves them: written by hand here, by no pass.

One sequence, token-major, nn.sdpa, logits for each token. The options are the structures that
published decoders differ in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Shape:
    """A decoder; `bias` is any of the letters qkvogud and h for the projections that have one."""

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inter: int = 24
    vocab: int = 40
    positions: int = 64
    dtype: str = "f32"
    bias: str = ""
    act: str = "nn.silu"
    qk_norm: bool = False
    norm: str = "rms"  # rms | layer
    parallel: bool = False
    post_norm: bool = False
    merged_qkv: bool = False
    merged_gate_up: bool = False
    tied: bool = True
    rope: bool = True
    windows: tuple[int, ...] = field(default=())


class _Text:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.weights: list[str] = []
        self.ops: list[str] = []
        self.count = 0

    def weight(self, name: str, *dims: int, dtype: str | None = None) -> str:
        size = ", ".join(str(dim) for dim in dims)
        kind = dtype or self.shape.dtype
        self.weights.append(f'  weight @{name} : {kind}[{size}] = ckpt "{name}"')
        return f"@{name}"

    def op(self, text: str, kind: str, loc: str, name: str = "v") -> str:
        self.count += 1
        value = f"%{name}{self.count}"
        self.ops.append(f'    {value} = {text} : {kind} loc "{loc}"')
        return value

    def rows(self, *dims: int) -> str:
        return f"{self.shape.dtype}[{', '.join(['T', *(str(dim) for dim in dims)])}]"

    def linear(self, x: str, name: str, sizes: tuple[int, int], letter: str, loc: str) -> str:
        matrix = self.weight(f"{name}.weight", *sizes)
        bias = ""
        if letter in self.shape.bias:
            bias = f", bias={self.weight(f'{name}.bias', sizes[0])}"
        return self.op(f"nn.linear({x}, {matrix}{bias})", self.rows(sizes[0]), loc, letter)

    def norm(self, x: str, name: str, loc: str) -> str:
        gain = self.weight(f"{name}.weight", self.shape.hidden)
        if self.shape.norm == "layer":
            bias = self.weight(f"{name}.bias", self.shape.hidden)
            text = f"nn.layer_norm({x}, gain={gain}, bias={bias}) {{eps = 1e-05}}"
        else:
            text = f"nn.rms_norm({x}, gain={gain}) {{eps = 1e-05}}"
        return self.op(text, self.rows(self.shape.hidden), loc, "n")

    def head(self, x: str, name: str, heads: int, loc: str) -> str:
        """[T, heads * D] -> [T, heads, D], with a norm over D where the model has one."""
        s = self.shape
        x = self.op(
            f"tensor.reshape({x}) {{shape = [T, {heads}, {s.head_dim}]}}",
            self.rows(heads, s.head_dim),
            loc,
        )
        if not s.qk_norm or not name:
            return x
        gain = self.weight(f"{name}.weight", s.head_dim)
        return self.op(
            f"nn.rms_norm({x}, gain={gain}) {{eps = 1e-06}}", self.rows(heads, s.head_dim), loc
        )


def decoder_text(shape: Shape) -> str:
    """The module's text; weights are named as checkpoints name them."""
    text = _Text(shape)
    s = shape
    table = text.weight("embed.weight", s.vocab, s.hidden)
    rope = text.weight("rope", s.positions, s.head_dim, dtype="f32")
    x = text.op(f"nn.embedding({table}, %ids)", text.rows(s.hidden), "m.py:1", "x")
    for layer in range(s.layers):
        x = _layer(text, f"layers.{layer}", x, rope, s.windows[layer] if s.windows else 0)
    x = text.norm(x, "norm", "m.py:90")
    head = table if s.tied else text.weight("lm_head.weight", s.vocab, s.hidden)
    bias = f", bias={text.weight('lm_head.bias', s.vocab)}" if "h" in s.bias else ""
    x = text.op(f"nn.linear({x}, {head}{bias})", text.rows(s.vocab), "m.py:91", "logits")
    return "\n".join(
        [
            "module @decoder format 1 {",
            f"  dims {{ T in 1..{s.positions} }}",
            *text.weights,
            "  func @step(%ids: i32[T] role ids, %positions: i32[T] role positions)"
            f" -> {text.rows(s.vocab)} role logits {{",
            *text.ops,
            f"    return {x}",
            "  }",
            "}",
            "",
        ]
    )


def _layer(text: _Text, name: str, x: str, rope: str, window: int) -> str:
    normed = text.norm(x, f"{name}.input_norm", "m.py:10")
    mixed = _attention(text, f"{name}.attn", normed, rope, window)
    if text.shape.post_norm:
        mixed = text.norm(mixed, f"{name}.post_attn_norm", "m.py:19")
    hidden = text.rows(text.shape.hidden)
    if text.shape.parallel:
        mlp = _mlp(text, f"{name}.mlp", text.norm(x, f"{name}.mlp_norm", "m.py:20"))
        both = text.op(f"math.add({mixed}, {mlp})", hidden, "m.py:21")
        return text.op(f"math.add({both}, {x})", hidden, "m.py:22", "x")
    x = text.op(f"math.add({x}, {mixed})", hidden, "m.py:20", "x")
    mlp = _mlp(text, f"{name}.mlp", text.norm(x, f"{name}.mlp_norm", "m.py:21"))
    if text.shape.post_norm:
        mlp = text.norm(mlp, f"{name}.post_mlp_norm", "m.py:29")
    return text.op(f"math.add({x}, {mlp})", hidden, "m.py:30", "x")


def _attention(text: _Text, name: str, x: str, rope: str, window: int) -> str:
    s = text.shape
    q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.merged_qkv:
        whole = text.linear(x, f"{name}.qkv", (q_size + 2 * kv_size, s.hidden), "q", "m.py:11")
        stops = [0, q_size, q_size + kv_size, q_size + 2 * kv_size]
        q, k, v = (
            text.op(
                f"tensor.slice({whole}) {{axis = 1, start = {start}, stop = {stop}}}",
                text.rows(stop - start),
                "m.py:11",
            )
            for start, stop in pairwise(stops)
        )
    else:
        q = text.linear(x, f"{name}.q_proj", (q_size, s.hidden), "q", "m.py:11")
        k = text.linear(x, f"{name}.k_proj", (kv_size, s.hidden), "k", "m.py:12")
        v = text.linear(x, f"{name}.v_proj", (kv_size, s.hidden), "v", "m.py:13")
    q = text.head(q, f"{name}.q_norm", s.heads, "m.py:14")
    k = text.head(k, f"{name}.k_norm", s.kv_heads, "m.py:15")
    v = text.head(v, "", s.kv_heads, "m.py:16")
    if s.rope:
        rotary = f"%positions, {rope}) {{rotary_dim = {s.head_dim}}}"
        q = text.op(f"nn.rope({q}, {rotary}", text.rows(s.heads, s.head_dim), "m.py:17")
        k = text.op(f"nn.rope({k}, {rotary}", text.rows(s.kv_heads, s.head_dim), "m.py:17")
    attrs = f"scale = {s.head_dim**-0.5!r}" + (f", window = {window}" if window else "")
    a = text.op(
        f"nn.sdpa({q}, {k}, {v}) {{{attrs}}}", text.rows(s.heads, s.head_dim), "m.py:18", "a"
    )
    a = text.op(f"tensor.reshape({a}) {{shape = [T, {q_size}]}}", text.rows(q_size), "m.py:18")
    return text.linear(a, f"{name}.o_proj", (s.hidden, q_size), "o", "m.py:19")


def _mlp(text: _Text, name: str, x: str) -> str:
    s = text.shape
    kind = text.rows(s.inter)
    if s.merged_gate_up:
        whole = text.linear(x, f"{name}.gate_up", (2 * s.inter, s.hidden), "g", "m.py:22")
        gate, up = (
            text.op(
                f"tensor.slice({whole}) {{axis = 1, start = {at}, stop = {at + s.inter}}}",
                kind,
                "m.py:22",
            )
            for at in (0, s.inter)
        )
    else:
        gate = text.linear(x, f"{name}.gate_proj", (s.inter, s.hidden), "g", "m.py:22")
        up = text.linear(x, f"{name}.up_proj", (s.inter, s.hidden), "u", "m.py:23")
    gate = text.op(f"{s.act}({gate})", kind, "m.py:24")
    both = text.op(f"math.mul({gate}, {up})", kind, "m.py:25")
    return text.linear(both, f"{name}.down_proj", (s.hidden, s.inter), "d", "m.py:26")
