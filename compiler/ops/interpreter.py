"""Runs a function by the ops' references: the oracle, and the `reference` target.

Each op computes in float32 (integers stay integers) and its results are rounded to their declared
dtypes. With `poison`, memory that an op leaves unwritten reads as NaN.
"""

from collections.abc import Iterator, Mapping

import torch

from ropeway.compiler.errors import InputError, RunError
from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.dims import Dim, is_dim, is_symbol, print_dim, solve, substitute
from ropeway.compiler.ir.graph import Function, Module, Op, Operand, Value
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.reference.call import CachePlanes, Call
from ropeway.compiler.ops.reference.table import lookup
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.compiler.ops.weight_functions import TORCH_DTYPES, evaluate_logical

Caches = Mapping[str, CachePlanes]


def run(
    module: Module,
    function: Function | str,
    inputs: Mapping[str, torch.Tensor],
    tensors: TensorSource,
    caches: Caches | None = None,
    *,
    constants: TensorSource | None = None,
    poison: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """Runs once, evaluating the weights that are read; see `Interpreter.run`."""
    weights = _LazyWeights(module, tensors, constants)
    interpreter = Interpreter(module, weights, poison=poison)
    return interpreter.run(function, inputs, caches, sizes=sizes)


class _LazyWeights(Mapping[str, torch.Tensor]):
    """Logical weights, each evaluated when first read."""

    def __init__(
        self, module: Module, tensors: TensorSource, constants: TensorSource | None
    ) -> None:
        self._module, self._tensors, self._constants = module, tensors, constants
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            expr = self._module.weights[name].expr
            self._made[name] = evaluate_logical(expr, self._tensors, self._constants)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._module.weights)

    def __len__(self) -> int:
        return len(self._module.weights)


class Interpreter:
    """A module with its weights (logical, by name), ready to run."""

    def __init__(
        self, module: Module, weights: Mapping[str, torch.Tensor], *, poison: bool = False
    ) -> None:
        self._module = module
        self._weights = weights
        self._poison = poison

    def run(
        self,
        function: Function | str,
        inputs: Mapping[str, torch.Tensor],
        caches: Caches | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs by role, or by value name where there is no role.

        `inputs` are by role or by value name; `caches` by value name, planes
        [num_blocks, block_size, *plane.shape] in the plane's dtype, written in place. Dims are
        learnt from the inputs' shapes, or given in `sizes` where those don't say. Raises
        InputError for a missing or misfit input, RunError when an op gives a wrong shape.
        """
        if isinstance(function, str):
            function = self._module.functions[function]
        frame = _Frame(self._weights, self._poison, sizes or {})
        frame.bind(function, inputs, caches or {})
        last_use = _last_uses(function)
        for op in function.ops:
            frame.execute(op)
            for value in last_use.get(op, ()):
                frame.values.pop(value, None)
        return {role or value.name: frame.tensor(value) for value, role in function.outputs}


def _last_uses(function: Function) -> dict[Op, list[Value]]:
    """Which values no later op reads, so that memory stays one step's live set."""
    kept = {value for value, _ in function.outputs}
    last: dict[Value, Op] = {}
    for op in function.ops:
        for result in op.results:
            last[result] = op
        for _, operand in op.operands():
            if isinstance(operand, Value):
                last[operand] = op
    freed: dict[Op, list[Value]] = {}
    for value, op in last.items():
        if value not in kept:
            freed.setdefault(op, []).append(value)
    return freed


class _Frame:
    """One run: values and bound dims."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], poison: bool, sizes: Mapping[str, int]
    ) -> None:
        self.values: dict[Value, torch.Tensor | CachePlanes] = {}
        self._sizes: dict[str, Dim] = dict(sizes)
        self._weights = weights
        self._poison = poison

    def tensor(self, value: Value) -> torch.Tensor:
        """A value that must be a tensor."""
        held = self.values[value]
        if not isinstance(held, torch.Tensor):
            raise RunError(f"%{value.name} is a cache: only tensors can be returned")
        return held

    def bind(self, function: Function, inputs: Mapping[str, torch.Tensor], caches: Caches) -> None:
        """Takes the inputs, learns dims from their shapes, then checks all of them."""
        tensors: list[tuple[Value, TensorType, torch.Tensor]] = []
        for entry in function.inputs:
            value = entry.value
            if isinstance(value.type, CacheType):
                self.values[value] = _checked_cache(value, value.type, caches)
                continue
            tensor = _given(value, entry.role, inputs)
            _check_kind(value, value.type, tensor)
            tensors.append((value, value.type, tensor))
            self.values[value] = tensor
        self._learn(tensors)
        for value, kind, tensor in tensors:
            shape = tuple(self._bound(dim) for dim in kind.shape)
            if tuple(tensor.shape) != shape:
                raise InputError(
                    f"input %{value.name} should be {kind}, here {_sizes_text(shape)}, "
                    f"and is {_sizes_text(tuple(tensor.shape))}"
                )

    def _learn(self, tensors: list[tuple[Value, TensorType, torch.Tensor]]) -> None:
        """Plain symbols first, then what one linear equation gives (R from R + 1)."""
        pairs = [
            (dim, size)
            for _, kind, tensor in tensors
            for dim, size in zip(kind.shape, tensor.shape, strict=True)
            if is_dim(dim)
        ]
        pairs.sort(key=lambda pair: not is_symbol(pair[0]))
        for dim, size in pairs:
            solved = solve(self._bound(dim), size)
            if solved is not None:
                self._sizes.setdefault(*solved)

    def _bound(self, dim: Dim) -> Dim:
        return substitute(dim, self._sizes)

    def execute(self, op: Op) -> None:
        """Runs one op and stores its results."""
        definition = registry.get(op.name)
        attrs = registry.view(op).attrs
        call = Call(
            name=op.name,
            operand_names=definition.operands,
            args=[self._read(operand) for operand in op.args],
            kwargs={key: self._read_tensor(operand) for key, operand in op.kwargs.items()},
            attrs={key: self._bind_attr(attr) for key, attr in attrs.items()},
            poison=self._poison,
        )
        results = lookup(op.name)(call)
        for value, tensor in zip(op.results, results, strict=True):
            self._store(op, value, tensor)

    def _read(self, operand: Operand) -> torch.Tensor | CachePlanes:
        if isinstance(operand, Weight):
            return self._weights[operand.name]
        return self.values[operand]

    def _read_tensor(self, operand: Operand) -> torch.Tensor:
        held = self._read(operand)
        if not isinstance(held, torch.Tensor):
            raise RunError(f"%{operand.name} is a cache, not a tensor")
        return held

    def _bind_attr(self, attr: Attr) -> object:
        if isinstance(attr, tuple):
            return tuple(self._bound(item) if is_dim(item) else item for item in attr)
        return self._bound(attr) if is_dim(attr) else attr

    def _store(self, op: Op, value: Value, tensor: torch.Tensor) -> None:
        kind = value.type
        if not isinstance(kind, TensorType):
            raise RunError(f"{op.name}: %{value.name} is declared a cache, and is a tensor")
        shape = tuple(self._bound(dim) for dim in kind.shape)
        if tuple(tensor.shape) != shape:
            raise RunError(
                f"{op.name} gave %{value.name} the shape {list(tensor.shape)} instead of "
                f"{list(shape)} ({op.loc or 'no source line'}): its reference is wrong"
            )
        dtype = TORCH_DTYPES[kind.dtype]
        if not self._poison:
            self.values[value] = tensor.to(dtype)
            return
        fill = float("nan") if dtype.is_floating_point else 0
        held = torch.full(tensor.shape, fill, dtype=dtype)
        held.copy_(tensor)
        self.values[value] = held


def _sizes_text(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(print_dim(size) for size in shape)}]"


def _given(value: Value, role: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    key = role if role in inputs else value.name
    if key not in inputs:
        wanted = f"{role!r} or {value.name!r}" if role else repr(value.name)
        raise InputError(f"input %{value.name} isn't given: pass it as {wanted}")
    return inputs[key]


def _check_kind(value: Value, kind: TensorType, tensor: torch.Tensor) -> None:
    if tensor.dtype != TORCH_DTYPES[kind.dtype] or tensor.dim() != kind.rank:
        given = f"{tensor.dtype} {list(tensor.shape)}"
        raise InputError(f"input %{value.name} should be {kind}, and is {given}")


def _checked_cache(value: Value, kind: CacheType, caches: Caches) -> CachePlanes:
    if value.name not in caches:
        raise InputError(f"cache %{value.name} isn't given: pass its planes by that name")
    planes = caches[value.name]
    for plane in kind.planes:
        held = planes.get(plane.name)
        fits = (
            held is not None
            and held.dtype == TORCH_DTYPES[plane.dtype]
            and tuple(held.shape[2:]) == plane.shape
        )
        if not fits:
            raise InputError(
                f"cache %{value.name} needs a plane {plane} as [blocks, block size, ...], and has "
                f"{'none' if held is None else f'{held.dtype} {list(held.shape)}'}"
            )
    return planes
