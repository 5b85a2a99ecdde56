"""Which values may be overwritten where they lie.

An op may write over its operand when nothing else reads those bytes afterwards. The bytes are
followed up through views to the value that a kernel wrote, and down to every other reader.
"""

from ropeway.compiler.ir.graph import Function, Op, Operand, Value
from ropeway.compiler.ops.registry import attr

_VIEWS = frozenset({"tensor.reshape", "tensor.slice"})
_SPREAD = frozenset({"tensor.transpose", "tensor.expand"})  # may name bytes twice, or out of order


class Aliasing:
    """The readers of each value of a function."""

    def __init__(self, function: Function) -> None:
        self._kept = {value for value, _ in function.outputs}
        self._readers: dict[Value, list[Op]] = {}
        for op in function.ops:
            for _, operand in op.operands():
                if isinstance(operand, Value):
                    self._readers.setdefault(operand, []).append(op)

    def only_reader(self, op: Op, operand: Operand) -> bool:
        """Whether `op` alone reads the bytes of `operand`, so that it may write over them.

        True for a value that a kernel wrote, seen through reshapes and through slices whose
        siblings don't overlap them.
        """
        value, reader = operand, op
        while isinstance(value, Value) and value.producer is not None and value not in self._kept:
            if self._readers[value] != [reader] and not self._apart(value, reader):
                return False
            producer = value.producer
            if producer.name not in _VIEWS:
                return producer.name not in _SPREAD
            value, reader = producer.args[0], producer
        return False

    def _apart(self, value: Value, reader: Op) -> bool:
        """Whether every reader of `value` is a slice of one axis, and none overlaps `reader`."""
        readers = self._readers[value]
        if readers.count(reader) != 1 or any(other.name != "tensor.slice" for other in readers):
            return False
        if len({attr(other, "axis") for other in readers}) != 1:
            return False
        start, stop = _range(reader)
        return all(
            other is reader or _range(other)[1] <= start or _range(other)[0] >= stop
            for other in readers
        )


def _range(op: Op) -> tuple[int, int]:
    start, stop = attr(op, "start"), attr(op, "stop")
    if not isinstance(start, int) or not isinstance(stop, int) or start < 0 or stop < 0:
        return 0, 1 << 62  # not known here: overlaps everything
    return start, stop
