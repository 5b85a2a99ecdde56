"""The verifier: one broken module a rule, with the code, the op and the place it must name."""

from collections.abc import Callable

import pytest
from support.random_modules import RECIPES

from ropeway.compiler import ir
from ropeway.compiler.errors import VerifyError
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.reference.table import lookup
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.ops.weight_functions import MappedTensors

TEXT = """module @tiny format 1 {
  dims { T in 1..64, R in 1..8, MB in 1..4 }
  weight @embed : f32[40, 8] = ckpt "embed"
  weight @qkv : f32[24, 8] = concat(ckpt "q", ckpt "kv") {axis = 0}
  weight @table : f32[64, 8] = const "rope"
  func @step(%ids: i32[T] role ids, %positions: i32[T] role positions, \
%slots: i32[T] role slots.0, %blocks: i32[R, MB] role block_table.0, \
%starts: i32[R + 1] role query_start, %lengths: i32[R] role lengths, \
%kv0: cache<group 0, planes {k: f32[1, 8], v: f32[1, 8]}> role cache) -> f32[T, 40] role logits {
    %x = nn.embedding(@embed, %ids) : f32[T, 8] loc "m.py:1"
    %n = nn.rms_norm(%x) {eps = 1e-05} : f32[T, 8] loc "m.py:2"
    %y = nn.linear(%n, @qkv) : f32[T, 24] loc "m.py:3"
    %h = tensor.reshape(%y) {shape = [T, 3, 8]} : f32[T, 3, 8]
    %q = tensor.slice(%h) {axis = 1, start = 0, stop = 1} : f32[T, 1, 8]
    %k = tensor.slice(%h) {axis = 1, start = 1, stop = 2} : f32[T, 1, 8]
    %v = tensor.slice(%h) {axis = 1, start = 2, stop = 3} : f32[T, 1, 8]
    %rq, %rk = nn.rope_qk(%q, %k, %positions, @table) {rotary_dim = 8} : f32[T, 1, 8], f32[T, 1, 8]
    %a = nn.paged_attention(%rq, %rk, %v, %kv0, %slots, %blocks, %starts, %lengths) \
{scale = 0.35, block_size = 4} : f32[T, 1, 8]
    %o = tensor.reshape(%a) {shape = [T, 8]} : f32[T, 8]
    %s = math.add(%o, %x) : f32[T, 8]
    %logits = nn.linear(%s, @embed) {out = "f32"} : f32[T, 40]
    return %logits
  } loc "m.py:9"
}
"""


def broken(code: str, change: Callable[[ir.Module], object]) -> VerifyError:
    module = read_module(TEXT)
    change(module)
    with pytest.raises(VerifyError) as caught:
        verify(module)
    assert caught.value.code == code, str(caught.value)
    assert str(caught.value).startswith(f"{code} {caught.value.rule}: ")
    assert "\n" not in str(caught.value)
    return caught.value


def op(module: ir.Module, result: str) -> ir.Op:
    return next(own for own in module.fn.ops if own.results[0].name == result)


def test_the_whole_module_is_right() -> None:
    module = read_module(TEXT)
    assert op(module, "a").attrs == {
        "scale": 0.35,
        "window": 0,
        "softcap": 0.0,
        "block_size": 4,
    }


def test_a_fault_shows_the_op_its_line_and_the_five_ops_around_it() -> None:
    def narrow(module: ir.Module) -> None:
        op(module, "y").results[0].type = ir.TensorType("f32", (ir.symbol("T"), 23))

    error = broken("T02", narrow)
    assert "%y is declared f32[T, 23], and nn.linear gives f32[T, 24]" in str(error)
    assert "@tiny @step op 2 %y (m.py:3)" in str(error)
    assert error.loc == "m.py:3"
    assert error.op.startswith("%y = nn.linear(%n, @qkv)")
    assert [line[:4] for line in error.around] == ["  %x", "  %n", "> %y", "  %h", "  %q"]


def test_five_ops_are_shown_at_the_ends_too() -> None:
    def widen(module: ir.Module) -> None:
        module.fn.ops[-1].attrs["out"] = "bf16"

    error = broken("T02", widen)
    assert [line[:3] for line in error.around] == ["  %", "  %", "  %", "  %", "> %"]
    assert error.loc == "m.py:9"  # the function's, for want of the op's


def _swap(module: ir.Module) -> None:
    ops = module.fn.ops
    ops[1], ops[2] = ops[2], ops[1]


def _same_name(module: ir.Module) -> None:
    op(module, "n").results[0].name = "x"


def _double(module: ir.Module) -> None:
    module.fn.ops.append(module.fn.ops[2])


def _steal_result(module: ir.Module) -> None:
    op(module, "n").results[0].producer = op(module, "y")


def _foreign_weight(module: ir.Module) -> None:
    old = module.weights["qkv"]
    op(module, "y").args[1] = ir.Weight("qkv", old.type, old.expr)


def _dropped_producer(module: ir.Module) -> None:
    module.fn.ops.remove(op(module, "o"))


def _lost_output(module: ir.Module) -> None:
    module.fn.outputs = [(ir.Value("z", ir.TensorType("f32", (1, 2))), "logits")]


def _undeclared_dim(module: ir.Module) -> None:
    del module.dims["MB"]


def _undeclared_in_attr(module: ir.Module) -> None:
    op(module, "o").attrs["shape"] = (ir.symbol("Z"), 8)


def _negative(module: ir.Module) -> None:
    module.weights["qkv"].type = ir.TensorType("f32", (24, -8))


def _role(role: str, index: int = 0) -> Callable[[ir.Module], None]:
    def change(module: ir.Module) -> None:
        module.fn.inputs[index].role = role

    return change


def _output_role(module: ir.Module) -> None:
    module.fn.outputs = [(module.fn.outputs[0][0], "logit")]


def _filed_wrong(module: ir.Module) -> None:
    module.weights["other"] = module.weights.pop("qkv")


def _range(module: ir.Module) -> None:
    module.dims["T"] = (5, 4)


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        ("S01", _same_name, "two values are called %x"),
        ("S02", _swap, "reads %n, which is defined only below"),
        ("S02", _dropped_producer, "reads %o, which is defined nowhere"),
        ("S02", _lost_output, "the output %z is defined nowhere"),
        ("S03", _double, "%y is defined a second time"),
        ("S03", _steal_result, "%n names another op as its producer"),
        ("S04", _foreign_weight, "reads @qkv, which isn't a weight of the module"),
        ("S05", _undeclared_dim, "%blocks: i32[R, MB] uses the dim MB"),
        ("S05", _undeclared_in_attr, "attribute shape uses the dim Z"),
        ("S06", _negative, "has the negative size -8"),
        ("S07", _role("idz"), "unknown input role idz: did you mean ids?"),
        ("S07", _role("slots", 2), "unknown input role slots: did you mean slots.0?"),
        ("S07", _role("ids.0"), "unknown input role ids.0"),
        ("S07", _output_role, "unknown output role logit: did you mean logits?"),
        ("S08", _role("cache"), "of role cache should be a cache, and is i32[T]"),
        ("S08", _role("block_table.1"), "should be i32 with 2 axes, and is i32[T]"),
        ("S09", _role("ids", 1), "two inputs have the role ids"),
        ("S10", _filed_wrong, "weight qkv is filed under other"),
        ("S11", _range, "dim T in 5..4"),
    ],
)
def test_structure(code: str, change: Callable[[ir.Module], None], says: str) -> None:
    assert says in str(broken(code, change))


def edit(result: str, **changes: object) -> Callable[[ir.Module], None]:
    """Changes op fields: name, drop (operand index), attr / no_attr, kwarg."""

    def change(module: ir.Module) -> None:
        own = op(module, result)
        own.name = changes.get("name", own.name)
        own.attrs.update(changes.get("attrs", {}))
        for key in changes.get("without", ()):
            del own.attrs[key]
        for key, value in changes.get("kwargs", {}).items():
            own.kwargs[key] = module.weights[value]
        if "args" in changes:
            values = {value.name: value for value in module.fn.values()}
            own.args = [
                module.weights[name[1:]] if name[0] == "@" else values[name]
                for name in changes["args"]
            ]

    return change


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        ("O01", edit("n", name="nn.rmsnorm"), "unknown op nn.rmsnorm: did you mean nn.rms_norm?"),
        ("O02", edit("y", args=["n"]), "takes the operands (x, w), and got 1"),
        ("O02", edit("y", args=["n", "@qkv", "n"]), "takes the operands (x, w), and got 3"),
        ("O02", edit("y", kwargs={"bais": "qkv"}), "no optional operand bais: it takes bias"),
        ("O03", edit("n", without=["eps"]), "needs the attribute eps"),
        ("O03", edit("n", attrs={"epsilon": 1.0}), "no attribute epsilon: it takes eps, offset"),
        ("O03", edit("n", attrs={"eps": 1}), "attribute eps should be of kind float, and is 1"),
        ("O03", edit("q", attrs={"axis": True}), "attribute axis should be of kind int"),
        ("O03", edit("logits", attrs={"out": "f8"}), "should be of kind dtype"),
        ("O03", edit("o", attrs={"shape": 8}), "should be of kind dims"),
        ("T01", edit("logits", args=["y", "@embed"]), "K of x f32[T, 24] and w f32[40, 8]"),
        ("T01", edit("y", args=["ids", "@qkv"]), "x should be of a floating-point type"),
        ("T01", edit("y", kwargs={"bias": "qkv"}), "bias should have 1 axes"),
        ("T01", edit("o", attrs={"shape": (8, 9)}), "elements of the new shape"),
        ("T01", edit("q", attrs={"stop": 4}), "0..4 isn't inside axis 1"),
        ("T01", edit("q", attrs={"axis": 3}), "axis 3 is out of range"),
        ("T01", edit("q", attrs={"start": 1}), "1..1 is empty"),
        ("T01", edit("rq", attrs={"rotary_dim": 6}), "rotary_dim and the table's width"),
        ("T01", edit("a", attrs={"block_size": 0}), "block_size should be positive"),
        ("T01", edit("a", attrs={"window": -1}), "window and softcap"),
        ("T01", edit("s", args=["o", "y"]), "sizes 8 and 24 don't broadcast"),
        ("T01", edit("s", args=["o"]), "two tensors, or one tensor and a scalar"),
        ("T01", edit("s", args=["o", "x", "x"]), "two tensors, or one tensor and a scalar"),
        ("T01", edit("s", args=["o", "ids"]), "insert a tensor.cast"),
        ("T01", edit("s", args=["o", "kv0"]), "should be a tensor, and is cache<"),
    ],
)
def test_ops(code: str, change: Callable[[ir.Module], None], says: str) -> None:
    assert says in str(broken(code, change))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("rq rk v slots slots blocks starts lengths", "cache should be a cache"),
        ("rq rk v kv0 ids blocks lengths lengths", "query_start and requests + 1"),
        ("rq rk v kv0 ids blocks starts positions", "requests of block_table and lengths"),
        ("h rk v kv0 slots blocks starts lengths", ""),
    ],
)
def test_attention_operands(args: str, says: str) -> None:
    def change(module: ir.Module) -> None:
        edit("a", args=args.split())(module)

    if says:
        assert says in str(broken("T01", change))
    else:  # three query heads over one key head are fine, but no longer give the declared type
        broken("T02", change)


def test_the_number_of_results() -> None:
    def change(module: ir.Module) -> None:
        own = op(module, "n")
        own.results.append(ir.Value("extra", own.results[0].type, own))

    assert "has 1 results, and 2 are named" in str(broken("O04", change))


@pytest.mark.parametrize(
    ("code", "expr", "says"),
    [
        ("W01", ir.apply("concta", ir.Ckpt("q"), axis=0), "did you mean concat?"),
        ("W02", ir.apply("concat", ir.Ckpt("q")), "concat needs the attribute axis"),
        ("W02", ir.apply("cast", ir.Ckpt("q"), dtype="f8"), "attribute dtype"),
        ("W02", ir.apply("transpose", ir.Ckpt("q"), ir.Ckpt("q")), "takes 1 arguments, and got 2"),
        ("W02", ir.apply("transpose", ir.Ckpt("q"), perms=(1, 0)), "has no attribute perms"),
        (
            "W02",
            ir.apply("transpose", ir.apply("pack", ir.Ckpt("q"), layout="panel32")),
            "pack may stand only at the root",
        ),
    ],
)
def test_weight_expressions(code: str, expr: ir.WeightExpr, says: str) -> None:
    def change(module: ir.Module) -> None:
        module.weights["qkv"].expr = expr

    error = broken(code, change)
    assert says in str(error) and "@qkv" in str(error)


@pytest.mark.parametrize(
    ("expr", "kind", "ok"),
    [
        (ir.apply("concat", ir.Ckpt("a"), ir.Ckpt("a"), axis=0), "f32[8, 6]", True),
        (ir.apply("concat", ir.Ckpt("a"), ir.Ckpt("a"), axis=1), "f32[8, 6]", False),
        (ir.apply("transpose", ir.Ckpt("a")), "f32[6, 4]", True),
        (ir.apply("cast", ir.Ckpt("a"), dtype="bf16"), "bf16[4, 6]", True),
        (ir.apply("cast", ir.Ckpt("a"), dtype="bf16"), "f32[4, 6]", False),
        (ir.apply("reshape", ir.Ckpt("a"), shape=(2, 12)), "f32[2, 12]", True),
        (ir.apply("slice", ir.Ckpt("a"), axis=1, start=2, stop=5), "f32[4, 3]", True),
        (ir.apply("pack", ir.Ckpt("a"), layout="panel32"), "f32[4, 6]", True),
        (ir.Const("a"), "f32[99]", True),  # constants weren't given: nothing to compare
    ],
)
def test_weight_types_against_a_checkpoint(expr: ir.WeightExpr, kind: str, ok: bool) -> None:
    import torch  # noqa: PLC0415  # the other tests here need none

    module = ir.Module("m", weights={"w": ir.Weight("w", ir.parse_type(kind), expr)})
    tensors = MappedTensors({"a": torch.zeros(4, 6)})
    if ok:
        verify(module, tensors)
        return
    with pytest.raises(VerifyError) as caught:
        verify(module, tensors)
    assert caught.value.code == "W03"


def test_every_op_has_a_recipe_and_a_reference() -> None:
    built_in = {n for n in registry.names() if n.split(".")[0] in ("nn", "math", "tensor")}
    assert built_in == set(RECIPES)
    for name in built_in:
        assert callable(lookup(name)), name
        assert registry.get(name).doc


def test_registering_a_name_twice_is_refused() -> None:
    taken = registry.get("nn.linear")
    assert registry.register(taken) is taken
    other = registry.OpDef("nn.linear", (), lambda view: [], "another")
    with pytest.raises(Exception, match=r"nn\.linear is registered already"):
        registry.register(other)
