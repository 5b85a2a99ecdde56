"""The verifier: structure first, then every weight expression and every op, types re-inferred.

Codes: S.. structure (see `ropeway.compiler.ir.structure`); O01 unknown op, O02 operands, O03
attributes, O04 number of results; T01 an op's type rule, T02 declared against inferred type; W01
unknown weight function, W02 weight expression, W03 weight's type.
"""

from ropeway.compiler.errors import VerifyError
from ropeway.compiler.ir.graph import Function, Module, Op
from ropeway.compiler.ir.structure import check_structure, fault
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Ckpt, Const, Weight, WeightExpr
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.compiler.ops.weight_types import check_expr, infer_type


def verify(
    module: Module, tensors: TensorSource | None = None, constants: TensorSource | None = None
) -> None:
    """Raises VerifyError for the first broken rule.

    With the sources of checkpoint tensors and constants, weights' types are checked against
    their expressions too.
    """
    check_structure(module)
    for weight in module.weights.values():
        _verify_weight(module, weight, tensors, constants)
    for function in module.functions.values():
        for op in function.ops:
            _verify_op(module, function, op)


def _verify_op(module: Module, function: Function, op: Op) -> None:
    try:
        types = registry.infer(op)
    except VerifyError as error:
        raise fault(
            error.code, error.rule, str(error), module=module, function=function, op=op
        ) from error
    if len(types) != len(op.results):
        message = f"{op.name} has {len(types)} results, and {len(op.results)} are named"
        raise fault("O04", "results", message, module=module, function=function, op=op)
    for result, kind in zip(op.results, types, strict=True):
        if result.type != kind:
            message = f"%{result.name} is declared {result.type}, and {op.name} gives {kind}"
            raise fault("T02", "result type", message, module=module, function=function, op=op)


def _verify_weight(
    module: Module,
    weight: Weight,
    tensors: TensorSource | None,
    constants: TensorSource | None,
) -> None:
    def leaf(expr: WeightExpr) -> TensorType | None:
        source = tensors if isinstance(expr, Ckpt) else constants
        if source is None or not isinstance(expr, Ckpt | Const):
            return None
        dtype, shape = source.info(expr.name)
        return TensorType(DType(dtype), shape) if dtype in tuple(DType) else None

    try:
        check_expr(weight.expr)
        kind = infer_type(weight.expr, leaf)
    except VerifyError as error:
        message = f"weight @{weight.name}: {error}"
        raise fault(error.code, error.rule, message, module=module) from error
    if kind is not None and kind != weight.type:
        message = f"@{weight.name} is declared {weight.type}, and its expression gives {kind}"
        raise fault("W03", "weight type", message, module=module)
