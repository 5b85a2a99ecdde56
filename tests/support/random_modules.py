"""Hypothesis strategies for valid modules: any op of the registry, any name, attribute and weight.

`modules()` gives modules that the verifier takes, built through the registry; `RECIPES` says for
each op which operands and attributes make a valid use of it.
"""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from ropeway.compiler import ir
from ropeway.compiler.ops import registry

T, R, L, MB = (ir.symbol(name) for name in ("T", "R", "L", "MB"))
DIMS = {"T": (1, 64), "R": (1, 8), "L": (1, 8), "MB": (1, 16)}
FLOATS = (ir.DType.F32, ir.DType.BF16, ir.DType.F16)

sizes = st.sampled_from([1, 2, 3, 8, 32, 40])
token_dims = st.sampled_from([T, T, T, 2 * T, T + 1, T * R - 1, (T + 1) * (R + 2), 7])
texts = st.text(st.characters(), max_size=12)
attr_scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    texts,
    st.sampled_from([T, -T, 2 * T + 1, T * R, T**2 - 3 * R]),
)
attr_values = st.one_of(attr_scalars, st.lists(attr_scalars, max_size=4).map(tuple))
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


class Builder:
    """A function under construction: operands are reused where a value of the type exists."""

    def __init__(self, draw: Callable, module: ir.Module, function: ir.Function) -> None:
        self.draw = draw
        self.module = module
        self.function = function

    def value(self, *shape: ir.Dim, dtype: ir.DType = ir.DType.F32) -> ir.Operand:
        """A value of this type, an existing one if the draw says so, else a new input."""
        kind = ir.TensorType(dtype, shape)
        existing = [value for value in self.function.values() if value.type == kind]
        if existing and self.draw(st.booleans()):
            return self.draw(st.sampled_from(existing))
        value = ir.Value(self.function.fresh(self.draw(texts) or "x"), kind)
        self.function.inputs.append(ir.Input(value))
        return value

    def indices(self, *shape: ir.Dim) -> ir.Operand:
        """An i32 value."""
        return self.value(*shape, dtype=ir.DType.I32)

    def weight(self, *shape: ir.Dim, dtype: ir.DType = ir.DType.F32) -> ir.Operand:
        """A new weight over a random expression."""
        kind = ir.TensorType(dtype, shape)
        name = self.draw(texts.filter(lambda text: text not in self.module.weights))
        return self.module.add_weight(ir.Weight(name, kind, self.draw(weight_exprs(dtype.value))))

    def cache(self, *planes: ir.Plane) -> ir.Operand:
        """A new cache input."""
        kind = ir.CacheType(self.draw(st.integers(0, 3)), planes)
        value = ir.Value(self.function.fresh("kv"), kind)
        self.function.inputs.append(ir.Input(value, "cache"))
        return value

    def maybe(self, make: Callable[[], ir.Operand]) -> ir.Operand | None:
        """An optional operand."""
        return make() if self.draw(st.booleans()) else None

    def apply(
        self,
        name: str,
        args: Sequence[ir.Operand],
        kwargs: dict[str, ir.Operand | None] | None = None,
        attrs: dict[str, object] | None = None,
    ) -> ir.Op:
        """Appends the op, with a random loc and result names."""
        result_names = [self.draw(texts) or "r" for _ in range(2)]
        loc = self.draw(st.one_of(st.just(""), texts))
        return registry.build(self.function, name, args, kwargs, attrs, loc=loc, names=result_names)


def weight_exprs(dtype: str) -> st.SearchStrategy[ir.WeightExpr]:
    """Expressions with valid functions and attributes; shapes are not made to fit."""
    leaves = st.one_of(texts.map(ir.Ckpt), texts.map(ir.Const))
    inner = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=3).map(
                lambda args: ir.Apply("concat", tuple(args), (("axis", 0),))
            ),
            children.map(lambda arg: ir.apply("transpose", arg)),
            children.map(lambda arg: ir.apply("reshape", arg, shape=(4, 6))),
            children.map(lambda arg: ir.apply("cast", arg, dtype=dtype)),
            children.map(lambda arg: ir.apply("mul_scalar", arg, scalar=-1e-30)),
        ),
        max_leaves=4,
    )
    return st.one_of(inner, inner.map(lambda e: ir.apply("pack", e, layout="panel32")))


def _activations(b: Builder) -> tuple[ir.DType, ir.Dim, int]:
    return b.draw(st.sampled_from(FLOATS)), b.draw(token_dims), b.draw(sizes)


def _eps(b: Builder) -> dict[str, object]:
    eps = b.draw(st.floats(1e-12, 1e-3))
    return {"eps": eps, "offset": b.draw(st.sampled_from([0.0, 1.0, None]))}


def _unary(name: str) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, width = _activations(b)
        return b.apply(name, [b.value(tokens, width, dtype=dtype)])

    return recipe


def _binary(name: str) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, width = _activations(b)
        x = b.value(tokens, width, dtype=dtype)
        kind = b.draw(st.sampled_from(["scalar", "same", "row", "column"]))
        if kind == "scalar":
            return b.apply(name, [x], attrs={"scalar": b.draw(st.sampled_from([2, 0.5, -1.5]))})
        shape = {"same": (tokens, width), "row": (width,), "column": (tokens, 1)}[kind]
        return b.apply(name, [x, b.value(*shape, dtype=dtype)])

    return recipe


def _reduction(name: str) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, width = _activations(b)
        x = b.value(tokens, 3, width, dtype=dtype)
        axes = b.draw(st.sampled_from([(2,), (-1,), (1, 2), (0,)]))
        return b.apply(name, [x], attrs={"axes": axes, "keepdim": b.draw(st.booleans())})

    return recipe


def _embedding(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    return b.apply("nn.embedding", [b.weight(50, width, dtype=dtype), b.indices(tokens)])


def _linear(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    bias = b.maybe(lambda: b.weight(24, dtype=dtype))
    out = b.draw(st.sampled_from([None, "f32"]))
    args = [b.value(tokens, width, dtype=dtype), b.weight(24, width, dtype=dtype)]
    return b.apply("nn.linear", args, {"bias": bias}, {"out": out})


def _rms_norm(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    x = b.value(tokens, width, dtype=dtype)
    return b.apply("nn.rms_norm", [x], {"gain": b.maybe(lambda: b.weight(width))}, _eps(b))


def _layer_norm(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    x = b.value(tokens, width, dtype=dtype)
    kwargs = {name: b.maybe(lambda: b.weight(width, dtype=dtype)) for name in ("gain", "bias")}
    return b.apply("nn.layer_norm", [x], kwargs, {"eps": 1e-5})


def _add_rms_norm(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    args = [b.value(tokens, width, dtype=dtype) for _ in range(2)]
    return b.apply("nn.add_rms_norm", args, {"gain": b.maybe(lambda: b.weight(width))}, _eps(b))


def _norm_linear(name: str, inputs: int) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, width = _activations(b)
        args = [b.value(tokens, width, dtype=dtype) for _ in range(inputs)]
        args += [b.weight(width), b.weight(24, width, dtype=dtype)]
        bias = b.maybe(lambda: b.weight(24))
        return b.apply(name, args, {"bias": bias}, _eps(b) | {"out": "f32"})

    return recipe


def _linear_glu(name: str, inputs: int, normed: bool) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, width = _activations(b)
        args = [b.value(tokens, width, dtype=dtype) for _ in range(inputs)]
        args += [b.weight(width)] if normed else []
        args.append(b.weight(24, width, dtype=dtype))
        attrs = {"act": b.draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))}
        bias = b.maybe(lambda: b.weight(24))
        return b.apply(name, args, {"bias": bias}, attrs | (_eps(b) if normed else {}))

    return recipe


def _softmax(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    axis = b.draw(st.sampled_from([0, 1, -1]))
    return b.apply("nn.softmax", [b.value(tokens, width, dtype=dtype)], attrs={"axis": axis})


def _gelu(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    kind = b.draw(st.sampled_from(["none", "tanh"]))
    return b.apply("nn.gelu", [b.value(tokens, width, dtype=dtype)], attrs={"approximate": kind})


def _glu(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    act = b.draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))
    return b.apply("nn.glu", [b.value(tokens, 2 * width, dtype=dtype)], attrs={"act": act})


def _attention(b: Builder) -> dict[str, object]:
    return {
        "scale": b.draw(st.floats(0.01, 1.0)),
        "window": b.draw(st.sampled_from([0, 1, 5])),
        "softcap": b.draw(st.sampled_from([0.0, 20.0])),
    }


def _heads(b: Builder, dtype: ir.DType, tokens: ir.Dim) -> list[ir.Operand]:
    shapes = ((6, 8), (2, 8), (2, 4))
    return [b.value(tokens, heads, size, dtype=dtype) for heads, size in shapes]


def _sdpa(b: Builder) -> ir.Op:
    dtype, tokens, _ = _activations(b)
    attrs = _attention(b) | {"causal": b.draw(st.booleans())}
    return b.apply("nn.sdpa", _heads(b, dtype, tokens), attrs=attrs)


def _paged_attention(b: Builder) -> ir.Op:
    dtype, tokens, _ = _activations(b)
    planes = (ir.Plane("k", dtype, (2, 8)), ir.Plane("v", dtype, (2, 4)))
    tables = [b.indices(tokens), b.indices(R, MB), b.indices(R + 1), b.indices(R)]
    args = [*_heads(b, dtype, tokens), b.cache(*planes), *tables]
    return b.apply("nn.paged_attention", args, attrs=_attention(b) | {"block_size": 4})


def _rope(name: str, shapes: Sequence[int]) -> Callable[[Builder], ir.Op]:
    def recipe(b: Builder) -> ir.Op:
        dtype, tokens, _ = _activations(b)
        rotary = b.draw(st.sampled_from([2, 4, 8]))
        args = [b.value(tokens, heads, 8, dtype=dtype) for heads in shapes]
        args += [b.indices(tokens), b.weight(64, rotary)]
        attrs = {"rotary_dim": rotary, "interleaved": b.draw(st.booleans())}
        return b.apply(name, args, attrs=attrs)

    return recipe


def _reshape(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    x = b.value(tokens, 2 * width, dtype=dtype)
    shape = b.draw(st.sampled_from([(tokens, 2, width), (2, tokens, width), (tokens * width, 2)]))
    return b.apply("tensor.reshape", [x], attrs={"shape": shape})


def _expand(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    x = b.value(tokens, 1, width, dtype=dtype)
    return b.apply("tensor.expand", [x], attrs={"shape": (2, tokens, 4, width)})


def _transpose(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    perm = b.draw(st.permutations([0, 1, 2]))
    return b.apply(
        "tensor.transpose", [b.value(tokens, 3, width, dtype=dtype)], attrs={"perm": perm}
    )


def _slice(b: Builder) -> ir.Op:
    dtype, tokens, _ = _activations(b)
    start = b.draw(st.integers(0, 7))
    attrs = {"axis": b.draw(st.sampled_from([1, -1])), "start": start, "stop": start + 3}
    return b.apply("tensor.slice", [b.value(tokens, 10, dtype=dtype)], attrs=attrs)


def _concat(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    parts = [b.value(tokens, width + i, dtype=dtype) for i in range(b.draw(st.integers(1, 3)))]
    return b.apply("tensor.concat", parts, attrs={"axis": 1})


def _cast(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    to = b.draw(st.sampled_from(FLOATS))
    return b.apply("tensor.cast", [b.value(tokens, width, dtype=dtype)], attrs={"dtype": to})


def _gather_rows(b: Builder) -> ir.Op:
    dtype, tokens, width = _activations(b)
    return b.apply("tensor.gather_rows", [b.value(tokens, width, dtype=dtype), b.indices(L)])


RECIPES: dict[str, Callable[[Builder], ir.Op]] = {
    "nn.embedding": _embedding,
    "nn.linear": _linear,
    "nn.rms_norm": _rms_norm,
    "nn.layer_norm": _layer_norm,
    "nn.softmax": _softmax,
    "nn.gelu": _gelu,
    "nn.glu": _glu,
    "nn.sdpa": _sdpa,
    "nn.paged_attention": _paged_attention,
    "nn.rope": _rope("nn.rope", [3]),
    "nn.rope_qk": _rope("nn.rope_qk", [6, 2]),
    "nn.add_rms_norm": _add_rms_norm,
    "nn.rms_norm_linear": _norm_linear("nn.rms_norm_linear", 1),
    "nn.add_rms_norm_linear": _norm_linear("nn.add_rms_norm_linear", 2),
    "nn.linear_glu": _linear_glu("nn.linear_glu", 1, normed=False),
    "nn.rms_norm_linear_glu": _linear_glu("nn.rms_norm_linear_glu", 1, normed=True),
    "nn.add_rms_norm_linear_glu": _linear_glu("nn.add_rms_norm_linear_glu", 2, normed=True),
    "tensor.reshape": _reshape,
    "tensor.expand": _expand,
    "tensor.transpose": _transpose,
    "tensor.slice": _slice,
    "tensor.concat": _concat,
    "tensor.cast": _cast,
    "tensor.gather_rows": _gather_rows,
    **{f"nn.{name}": _unary(f"nn.{name}") for name in ("silu", "relu", "tanh", "sigmoid")},
    **{
        f"math.{name}": _unary(f"math.{name}")
        for name in ("exp", "rsqrt", "sqrt", "cos", "sin", "neg", "abs")
    },
    **{
        f"math.{name}": _binary(f"math.{name}")
        for name in ("add", "sub", "mul", "div", "pow", "max", "min")
    },
    **{f"math.{name}": _reduction(f"math.{name}") for name in ("mean", "sum")},
}


@st.composite
def modules(draw: Callable, max_ops: int = 6) -> ir.Module:
    """A valid module of one or two functions, whatever it means."""
    module = ir.Module(draw(texts), dims=dict(DIMS))
    module.mesh = draw(st.dictionaries(texts, st.integers(1, 8), max_size=2))
    module.metadata = draw(st.dictionaries(texts, attr_values, max_size=3))
    for name in draw(st.lists(texts, min_size=1, max_size=2, unique=True)):
        function = ir.Function(name, loc=draw(texts))
        builder = Builder(draw, module, function)
        for recipe in draw(st.lists(st.sampled_from(sorted(RECIPES)), max_size=max_ops)):
            RECIPES[recipe](builder)
        values = [v for v in function.values() if isinstance(v.type, ir.TensorType)]
        if values:
            chosen = draw(st.lists(st.sampled_from(values), max_size=3))
            function.outputs = [(value, "") for value in chosen]
        module.functions[name] = function
    return module
