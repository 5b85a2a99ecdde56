"""What each aten op of a trace becomes. One entry an op; an op that isn't here is refused by name.

A handler gets the builder, the node and its arguments, in which token-dependent values are Views,
known ones stay fx nodes (so that a mask or an index can be told from a tensor), and numbers are
numbers. It returns a View, or a list of them for ops with several results.
"""
# ruff: noqa: PLR0917 -- handlers take their arguments as aten's schemas order them

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ropeway.compiler.frontend.importer import elementwise, neural, shapes
from ropeway.compiler.frontend.importer.build import Builder
from ropeway.compiler.frontend.importer.elementwise import BINARY, UNARY, binary, unary
from ropeway.compiler.frontend.importer.view import View
from ropeway.compiler.ir.types import DType

Result = View | list[View]
Handler = Callable[..., Result]
HANDLERS: dict[str, Handler] = {}
EMPTY: list[View] = []
"""A tensor without elements: only joining ops may take one."""
IGNORED = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for ops of the aten namespace."""

    def record(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return record


def view_of(build: Builder, value: Any) -> View:
    """A tensor argument as a View: known tensors become constants or tables."""
    if isinstance(value, View):
        return value
    if isinstance(value, fx.Node):
        return build.materialize(value)
    raise build.fail(f"{value!r} stands where a tensor is needed")


def optional_view(build: Builder, value: Any) -> View | None:
    """`view_of`, None staying None."""
    return None if value is None else view_of(build, value)


def _shape(build: Builder, node: fx.Node) -> tuple[Any, ...]:
    return build.dims(node.meta["val"])


def _dtype(build: Builder, node: fx.Node) -> DType:
    return build.dtype(node.meta["val"])


def _argument(build: Builder, value: Any) -> elementwise.Argument:
    if isinstance(value, fx.Node):
        number = elementwise.scalar_of(build, value)
        return build.materialize(value) if number is None else number
    return value


@handles(*UNARY)
def _unary(build: Builder, node: fx.Node, x: Any, *, name: str) -> Result:
    view = build.cast(view_of(build, x), _dtype(build, node))
    return unary(build, UNARY[name], view)


@handles(*BINARY, "rsub", "true_divide", "multiply", "subtract", "divide")
def _binary(
    build: Builder, node: fx.Node, x: Any, y: Any, *, name: str, alpha: Any = 1, **rest: Any
) -> Result:
    if rest.get("rounding_mode"):
        raise build.fail("a rounded division isn't supported on token values")
    op = BINARY.get(name, {"true_divide": "math.div", "multiply": "math.mul"}.get(name))
    op = op or {"subtract": "math.sub", "divide": "math.div", "rsub": "math.sub"}[name]
    left, right = _argument(build, x), _argument(build, y)
    if name == "rsub":
        left, right = right, left
    dtype = _dtype(build, node)
    if alpha != 1:
        right = binary(build, "math.mul", right, alpha, dtype)
    return binary(build, op, left, right, dtype)


@handles("gelu")
def _gelu(
    build: Builder, node: fx.Node, x: View, *, name: str, approximate: str = "none"
) -> Result:
    return unary(build, "nn.gelu", x, {"approximate": approximate})


@handles("square")
def _square(build: Builder, node: fx.Node, x: View, *, name: str) -> Result:
    return binary(build, "math.mul", x, x, x.type.dtype)


@handles("reciprocal")
def _reciprocal(build: Builder, node: fx.Node, x: View, *, name: str) -> Result:
    return binary(build, "math.pow", x, -1.0, x.type.dtype)


@handles("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(
    build: Builder,
    node: fx.Node,
    x: View,
    low: Any = None,
    high: Any = None,
    *,
    name: str,
    **rest: Any,
) -> Result:
    low, high = rest.get("min", low), rest.get("max", high)
    if name == "clamp_max":
        low, high = None, low if high is None else high
    if any(isinstance(bound, View | fx.Node) for bound in (low, high)):
        raise build.fail("a clamp by tensors isn't supported: use numbers")
    return elementwise.clamp(build, x, low, high)


@handles("mean", "sum")
def _reduce(
    build: Builder,
    node: fx.Node,
    x: View,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    name: str,
    **rest: Any,
) -> Result:
    dims = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    wide = build.cast(x, _dtype(build, node))
    return elementwise.reduce(build, f"math.{name}", wide, list(dims), keepdim)


@handles("softmax", "_softmax")
def _softmax(
    build: Builder, node: fx.Node, x: View, dim: int, *_: Any, name: str, **rest: Any
) -> Result:
    axis = x.axes[dim % x.rank]
    if axis is None or (x.tokens and axis == 0):
        raise build.fail("a softmax over tokens mixes positions: attention must be SDPA")
    wide = build.cast(x, _dtype(build, node))
    return unary(build, "nn.softmax", wide, {"axis": axis})


@handles(
    "contiguous", "clone", "alias", "detach", "dropout", "lift_fresh_copy", "expand_as", "view_as"
)
def _same(build: Builder, node: fx.Node, x: View, *_: Any, name: str, **rest: Any) -> Result:
    if name in ("expand_as", "view_as"):
        return _reshaped(build, node, x, name=name)
    return x


@handles("to", "_to_copy", "type_as", "float")
def _cast(build: Builder, node: fx.Node, x: View, *_: Any, name: str, **rest: Any) -> Result:
    return build.cast(x, _dtype(build, node))


@handles("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _reshaped(build: Builder, node: fx.Node, x: View, *_: Any, name: str, **rest: Any) -> Result:
    return shapes.reshape(build, x, _shape(build, node))


@handles("expand")
def _expand(build: Builder, node: fx.Node, x: View, *_: Any, name: str, **rest: Any) -> Result:
    return shapes.expand(build, x, _shape(build, node))


@handles("unsqueeze")
def _unsqueeze(build: Builder, node: fx.Node, x: View, dim: int, *, name: str) -> Result:
    return shapes.unsqueeze(x, dim)


@handles("squeeze")
def _squeeze(
    build: Builder, node: fx.Node, x: View, dim: int | Sequence[int] | None = None, *, name: str
) -> Result:
    dims = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    return shapes.squeeze(build, x, list(dims))


@handles("transpose", "swapaxes")
def _transpose(build: Builder, node: fx.Node, x: View, a: int, b: int, *, name: str) -> Result:
    perm = list(range(x.rank))
    perm[a], perm[b] = perm[b], perm[a]
    return x.permuted(perm)


@handles("permute")
def _permute(build: Builder, node: fx.Node, x: View, dims: Sequence[int], *, name: str) -> Result:
    return x.permuted([dim % x.rank for dim in dims])


@handles("t", "numpy_T", "mT")
def _reverse(build: Builder, node: fx.Node, x: View, *, name: str) -> Result:
    if x.rank > 2 and name == "mT":
        return x.permuted([*range(x.rank - 2), x.rank - 1, x.rank - 2])
    return x.permuted(range(x.rank)[::-1])


@handles("slice")
def _slice(
    build: Builder,
    node: fx.Node,
    x: View,
    dim: int = 0,
    start: Any = None,
    stop: Any = None,
    step: int = 1,
    *,
    name: str,
) -> Result:
    dim %= x.rank
    size = x.size(dim)
    if not isinstance(size, int):
        stop = None if build.dims(node.meta["val"])[dim] == size else stop
        start = 0 if build.dims(node.meta["val"])[dim] == size else start
    if step == 1:
        return shapes.slice_dim(build, x, dim, start, stop)
    return _strided(build, x, dim, start=start or 0, stop=stop, step=step)


def _strided(build: Builder, x: View, dim: int, *, start: int, stop: Any, step: int) -> View:
    """x[start::step] along a dim that step divides: a reshape and a slice."""
    size = x.size(dim)
    whole = stop is None or (isinstance(stop, int) and isinstance(size, int) and stop >= size)
    if not isinstance(size, int) or size % step or start >= step or not whole:
        raise build.fail(f"a slice {start}:{stop}:{step} of a dim of {size} isn't supported")
    shape = [x.size(at) for at in range(x.rank)]
    pairs = shapes.reshape(build, x, [*shape[:dim], size // step, step, *shape[dim + 1 :]])
    return shapes.select(build, pairs, dim + 1, start)


@handles("select")
def _select(build: Builder, node: fx.Node, x: View, dim: int, index: int, *, name: str) -> Result:
    return shapes.select(build, x, dim, index)


@handles("index", "index_select")
def _index(build: Builder, node: fx.Node, x: View, *args: Any, name: str) -> Result:
    if name == "index_select":
        dim, where = int(args[0]) % x.rank, args[1]
    else:
        given = [(at, index) for at, index in enumerate(args[0]) if index is not None]
        if len(given) != 1:
            raise build.fail("an index over several dims at once isn't supported on token values")
        dim, where = given[0]
    size = x.size(dim)
    if not isinstance(where, fx.Node) or where.meta["val"].dim() != 1 or not isinstance(size, int):
        raise build.fail("only one fixed list of indices over one dim is supported, not of tokens")
    indices = [int(at) % size for at in build.known.evaluate(where, build.length)]
    return shapes.pick(build, x, dim, indices)


@handles("split", "split_with_sizes", "chunk", "tensor_split")
def _split(build: Builder, node: fx.Node, x: View, _: Any, dim: int = 0, *, name: str) -> Result:
    sizes = [build.dims(piece)[dim % x.rank] for piece in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise build.fail("the sequence is split; the model must use it whole")
    return shapes.split(build, x, sizes, dim)


@handles("unbind")
def _unbind(build: Builder, node: fx.Node, x: View, dim: int = 0, *, name: str) -> Result:
    count = x.size(dim % x.rank)
    if not isinstance(count, int):
        raise build.fail("the sequence is taken apart; the model must use it whole")
    return [shapes.select(build, x, dim, at) for at in range(count)]


@handles("cat", "concat", "stack")
def _concat(
    build: Builder, node: fx.Node, parts: Sequence[Any], dim: int = 0, *, name: str
) -> Result:
    dtype = _dtype(build, node)
    views = [build.cast(view_of(build, part), dtype) for part in parts if part is not EMPTY]
    if name == "stack":
        views = [shapes.unsqueeze(view, dim) for view in views]
    return shapes.concat(build, views, dim)


@handles("repeat")
def _repeat(build: Builder, node: fx.Node, x: View, counts: Sequence[int], *, name: str) -> Result:
    return shapes.repeat(build, x, counts)


@handles("repeat_interleave")
def _repeat_interleave(
    build: Builder, node: fx.Node, x: View, count: int, dim: int, *, name: str, **rest: Any
) -> Result:
    return shapes.repeat_interleave(build, x, count, dim)


@handles("embedding")
def _embedding(
    build: Builder, node: fx.Node, table: Any, ids: Any, *_: Any, name: str, **rest: Any
) -> Result:
    weight = view_of(build, table)
    if isinstance(ids, fx.Node):
        return neural.position_embedding(build, weight, ids)
    return neural.embedding(build, weight, ids)


@handles("linear")
def _linear(
    build: Builder, node: fx.Node, x: Any, w: Any, bias: Any = None, *, name: str
) -> Result:
    return neural.linear(build, view_of(build, x), view_of(build, w), optional_view(build, bias))


@handles("matmul", "mm", "bmm")
def _matmul(build: Builder, node: fx.Node, x: Any, w: Any, *, name: str) -> Result:
    return neural.matmul(build, view_of(build, x), view_of(build, w))


@handles("addmm")
def _addmm(
    build: Builder, node: fx.Node, bias: Any, x: Any, w: Any, *, name: str, **rest: Any
) -> Result:
    if any(value != 1 for value in rest.values()):
        raise build.fail("addmm with factors isn't supported")
    weight = view_of(build, w)
    if weight.rank != 2:
        raise build.fail("addmm needs a 2-d parameter")
    turned = weight.permuted((1, 0))
    return neural.linear(build, view_of(build, x), turned, optional_view(build, bias))


@handles("rms_norm")
def _rms_norm(
    build: Builder,
    node: fx.Node,
    x: View,
    shape: Sequence[int],
    gain: Any = None,
    eps: float | None = None,
    *,
    name: str,
) -> Result:
    if eps is None:
        eps = torch.finfo(node.meta["val"].dtype).eps
    return neural.norm(build, "nn.rms_norm", x, shape, eps, gain=optional_view(build, gain))


@handles("layer_norm")
def _layer_norm(
    build: Builder,
    node: fx.Node,
    x: View,
    shape: Sequence[int],
    gain: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
    name: str,
) -> Result:
    learned = {"gain": optional_view(build, gain), "bias": optional_view(build, bias)}
    return neural.norm(build, "nn.layer_norm", x, shape, eps, **learned)


@handles("scaled_dot_product_attention")
def _attention(
    build: Builder,
    node: fx.Node,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    name: str,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    if isinstance(attn_mask, View):
        raise build.fail("the attention mask depends on the tokens, which isn't supported")
    qkv = (view_of(build, q), view_of(build, k), view_of(build, v))
    return neural.attention(build, qkv, attn_mask, is_causal, scale)
