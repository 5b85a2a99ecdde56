"""Finds the reference of an op."""

from ropeway.compiler.errors import InputError
from ropeway.compiler.ops.reference import arithmetic, movement, nn
from ropeway.compiler.ops.reference.call import Reference

_TABLE: dict[str, Reference] = {**nn.TABLE, **arithmetic.TABLE, **movement.TABLE}


def register_reference(name: str, reference: Reference) -> None:
    """Gives a registered op its meaning. Raises InputError when it has one."""
    if _TABLE.setdefault(name, reference) is not reference:
        raise InputError(f"op {name} has a reference already: register the op under another name")


def lookup(name: str) -> Reference:
    """The reference of an op. Raises InputError when it has none."""
    if name not in _TABLE:
        raise InputError(f"op {name} has no reference: call register_reference for it")
    return _TABLE[name]
