"""Shape ops of the trace: what only renames dims changes the view, the rest emits an op."""

from collections.abc import Sequence

from ropeway.compiler.frontend.importer.build import Builder
from ropeway.compiler.frontend.importer.elementwise import arrange
from ropeway.compiler.frontend.importer.view import View, reshape_groups
from ropeway.compiler.ir.dims import Dim


def reshape(build: Builder, x: View, shape: Sequence[Dim]) -> View:
    """The torch tensor reshaped; tokens must stay a dim of their own."""
    old = [x.size(dim) for dim in range(x.rank)]
    groups = reshape_groups(old, shape)
    if groups is None:
        raise build.fail(
            f"a reshape from {old} to {list(shape)} merges or splits tokens; "
            "keep the sequence a dim of its own"
        )
    if any(len(group.old) != 1 or len(group.new) != 1 for group in groups):
        x = build.in_torch_order(x)
    axes: list[int | None] = [None] * len(shape)
    sizes: list[tuple[int, Dim]] = []  # (sort key, size) of the new operand's axes
    kept = {dim: axis for dim, axis in enumerate(x.axes) if axis is not None}
    for group in groups:
        for place, dim in enumerate(group.new):
            sizes.append((kept[group.old[0]] * 1000 + place, shape[dim]))
    order = sorted(range(len(sizes)), key=lambda at: sizes[at][0])
    operand = build.reshaped(x.operand, tuple(sizes[at][1] for at in order))
    flat = [dim for group in groups for dim in group.new]
    for axis, at in enumerate(order):
        axes[flat[at]] = axis
    return View(operand, tuple(axes))


def unsqueeze(x: View, dim: int) -> View:
    """A dim of size 1 added; nothing in the IR."""
    at = dim % (x.rank + 1)
    return View(x.operand, (*x.axes[:at], None, *x.axes[at:]))


def squeeze(build: Builder, x: View, dims: Sequence[int]) -> View:
    """Dims of size 1 dropped; others named are kept, as torch does."""
    gone = {dim % x.rank for dim in dims if x.size(dim % x.rank) == 1}
    drop = sorted(axis for dim in gone if (axis := x.axes[dim]) is not None)
    operand = x.operand
    if drop:
        kept = tuple(size for axis, size in enumerate(x.type.shape) if axis not in drop)
        operand = build.reshaped(operand, kept)
    left = [axis for axis in range(len(x.type.shape)) if axis not in drop]
    axes = [
        None if axis is None else left.index(axis)
        for dim, axis in enumerate(x.axes)
        if dim not in gone
    ]
    return View(operand, tuple(axes))


def expand(build: Builder, x: View, shape: Sequence[Dim]) -> View:
    """Dims of size 1 repeated up to `shape`; emits only where a size changes."""
    x = x.padded(len(shape))
    grown = [dim for dim in range(x.rank) if x.size(dim) != shape[dim]]
    if not grown:
        return x
    for dim in grown:
        if not isinstance(shape[dim], int):
            raise build.fail("a value is repeated for every token where an op needs it whole")
        x = build.with_axis(x, dim)
    target = [x.type.shape[axis] for axis in range(len(x.type.shape))]
    for dim in grown:
        axis = x.axes[dim]
        if axis is not None:
            target[axis] = shape[dim]
    return View(build.emit("tensor.expand", [x.operand], {"shape": tuple(target)}), x.axes)


def slice_dim(build: Builder, x: View, dim: int, start: int | None, stop: int | None) -> View:
    """Elements start..stop-1 of a torch dim; over tokens only the whole."""
    dim %= x.rank
    size = x.size(dim)
    if not isinstance(size, int):
        if not _whole(start, stop, size):
            raise build.fail("a slice of the sequence isn't supported: the model must use it whole")
        return x
    low, high, _ = slice(start, stop).indices(size)
    if (low, high) == (0, size):
        return x
    if low >= high:
        raise build.fail(f"an empty slice {start}:{stop} of a dim of {size}")
    axis = x.axes[dim]
    attrs = {"axis": axis, "start": low, "stop": high}
    return View(build.emit("tensor.slice", [x.operand], attrs), x.axes)


def _whole(start: object, stop: object, size: Dim) -> bool:
    from_start = start is None or start == 0
    return from_start and (
        stop is None or stop == size or (isinstance(stop, int) and stop > 1 << 40)
    )


def select(build: Builder, x: View, dim: int, index: int) -> View:
    """One element of a torch dim, the dim dropped."""
    dim %= x.rank
    size = x.size(dim)
    if not isinstance(size, int):
        raise build.fail("one token is picked out of the sequence; the model must use it whole")
    at = index % size
    return squeeze(build, slice_dim(build, x, dim, at, at + 1), [dim])


def split(build: Builder, x: View, sizes: Sequence[int], dim: int) -> list[View]:
    """Consecutive pieces of a torch dim."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(slice_dim(build, x, dim, start, start + size))
        start += size
    return pieces


def pick(build: Builder, x: View, dim: int, indices: Sequence[int]) -> View:
    """The elements of a torch dim at fixed indices, in their order."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return slice_dim(build, x, dim, first, first + len(indices))
    return concat(build, [slice_dim(build, x, dim, at, at + 1) for at in indices], dim)


def concat(build: Builder, parts: Sequence[View], dim: int) -> View:
    """Parts joined along a torch dim that isn't the tokens."""
    rank = max(part.rank for part in parts)
    dim %= rank
    parts = [build.with_axis(part, dim) for part in parts]
    if any(part.tokens and part.dim_of(0) == dim for part in parts):
        raise build.fail("sequences are joined, which no cached decoder can do")
    lead = max(parts, key=lambda part: (part.tokens, len(part.type.shape)))
    order = [lead.dim_of(axis) for axis in range(len(lead.type.shape))]
    joined = []
    for part in parts:
        if lead.tokens and not part.tokens:
            raise build.fail("a value by token is joined with one that isn't; expand it first")
        joined.append(arrange(build, part, order).operand)
    axes: list[int | None] = [None] * rank
    for axis, own in enumerate(order):
        axes[own] = axis
    return View(build.emit("tensor.concat", joined, {"axis": axes[dim]}), tuple(axes))


def repeat(build: Builder, x: View, counts: Sequence[int]) -> View:
    """torch's repeat, by concatenation."""
    x = x.padded(len(counts))
    for dim, count in enumerate(counts):
        if count != 1:
            x = concat(build, [x] * count, dim)
    return x


def repeat_interleave(build: Builder, x: View, count: int, dim: int) -> View:
    """Every element of a torch dim `count` times in a row."""
    dim %= x.rank
    size = x.size(dim)
    if not isinstance(size, int):
        raise build.fail("tokens are repeated, which no cached decoder can do")
    shape = [x.size(at) for at in range(x.rank)]
    wide = expand(build, unsqueeze(x, dim + 1), [*shape[: dim + 1], count, *shape[dim + 1 :]])
    return reshape(build, wide, [*shape[:dim], size * count, *shape[dim + 1 :]])
