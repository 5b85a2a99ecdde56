"""The rewriter's record of uses, against uses counted afresh."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_modules import modules

from ropeway.compiler import ir
from ropeway.compiler.errors import InputError
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.verifier import verify

X = ir.TensorType("f32", (ir.symbol("T"), 4))


def chain() -> tuple[ir.Module, ir.Function]:
    """x -> a = silu(x) -> b = add(a, a) -> c = mul(b, a), returning c."""
    module = ir.Module("m", dims={"T": (1, 8)})
    function = ir.Function("f")
    module.functions["f"] = function
    x = ir.Value("x", X)
    function.inputs.append(ir.Input(x))
    a = registry.build(function, "nn.silu", [x], names=["a"]).result
    b = registry.build(function, "math.add", [a, a], names=["b"]).result
    c = registry.build(function, "math.mul", [b, a], names=["c"]).result
    function.outputs.append((c, "hidden"))
    return module, function


def counted(function: ir.Function) -> dict[ir.Operand, set[tuple[ir.Op, int | str]]]:
    uses: dict[ir.Operand, set[tuple[ir.Op, int | str]]] = {}
    for op in function.ops:
        for key, operand in op.operands():
            uses.setdefault(operand, set()).add((op, key))
    return uses


def check(rewriter: ir.Rewriter) -> None:
    uses = counted(rewriter.function)
    for value in rewriter.function.values():
        assert set(rewriter.uses(value)) == uses.get(value, set())
    verify(rewriter.module)


def test_uses_and_users() -> None:
    module, function = chain()
    rewriter = ir.Rewriter(function, module)
    a_op, b_op, c_op = function.ops
    assert rewriter.uses(a_op.result) == [(b_op, 0), (b_op, 1), (c_op, 1)]
    assert rewriter.users(a_op.result) == [b_op, c_op]
    assert rewriter.single_user(a_op.result) is None
    assert rewriter.single_user(b_op.result) is c_op
    assert rewriter.single_user(c_op.result) is None  # an output isn't an op's use
    assert rewriter.is_output(c_op.result) and not rewriter.is_dead(c_op.result)


def test_replace_insert_and_erase() -> None:
    module, function = chain()
    rewriter = ir.Rewriter(function, module)
    a_op, b_op, c_op = function.ops
    double = registry.build(rewriter, "math.mul", [a_op.result], attrs={"scalar": 2.0}, names=["b"])
    assert double.result.name == "b_1"
    assert double not in function.ops
    rewriter.insert_before(b_op, double)
    with pytest.raises(InputError, match="%b is still in use"):
        rewriter.erase(b_op)
    rewriter.replace_op(b_op, [double.result])
    assert [op.results[0].name for op in function.ops] == ["a", "b_1", "c"]
    assert c_op.args[0] is double.result
    check(rewriter)
    tail = registry.build(rewriter, "nn.relu", [c_op.result])
    rewriter.append(tail)
    rewriter.replace(c_op.result, tail.result)
    assert function.outputs == [(tail.result, "hidden")]
    rewriter.set_operand(tail, 0, c_op.result)  # replace took the tail's own use along
    check(rewriter)
    weight = module.add_weight(ir.Weight(rewriter.fresh_weight("w"), X, ir.Const("w")))
    with pytest.raises(InputError, match="is an output"):
        rewriter.replace(tail.result, weight)
    assert rewriter.fresh_weight("w") == "w_1"
    with pytest.raises(InputError, match="isn't in @f"):
        rewriter.insert_after(b_op)


@settings(deadline=None, max_examples=25)
@given(modules(), st.data())
def test_uses_stay_right_over_random_replacements(module: ir.Module, data: st.DataObject) -> None:
    function = next(iter(module.functions.values()))
    rewriter = ir.Rewriter(function, module)
    values = list(function.values())
    for index, old in enumerate(values):
        earlier = [value for value in values[:index] if value.type == old.type]
        if earlier and data.draw(st.booleans()):
            rewriter.replace(old, data.draw(st.sampled_from(earlier)))
            assert rewriter.is_dead(old)
    for op in reversed(list(function.ops)):
        if all(rewriter.is_dead(result) for result in op.results):
            rewriter.erase(op)
    check(rewriter)


def test_fresh_names_are_unique_however_ops_were_added() -> None:
    _, function = chain()
    function.ops.append(ir.Op("nn.relu", results=[ir.Value("relu_1", X)]))
    names = [function.fresh("relu") for _ in range(3)]
    assert names == ["relu", "relu_2", "relu_3"]
    function.ops.append(ir.Op("nn.relu", results=[ir.Value("z", X)]))
    assert function.fresh("z") == "z_1"


def test_the_ir_and_the_registry_import_no_torch() -> None:
    code = (
        "import sys, ropeway.compiler.ops.text, ropeway.compiler.ir as ir; ir.Module; "
        "assert 'torch' not in sys.modules; print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    code = "import sys, ropeway.compiler.ir; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
