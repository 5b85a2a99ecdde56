"""General ops (element-wise, reductions, shapes) lowered to cpu, against the interpreter."""

import numpy as np
import pytest
import torch
from support.cpu_programs import Compiled, Tensors, step_of
from support.decoder_text import Shape

from ropeway.compiler.config import Bucket
from ropeway.compiler.ops.interpreter import run
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.targets.base import activate
from ropeway.passes.lowering import lowering_pipeline
from ropeway.runtime.devices.cpu.device import CpuDevice

BUCKET = Bucket("mixed", 8, 8, 8)

# Each makes %y: dtype[T, 8] of %x: dtype[T, 8] and weights @v [8], @m [8, 8], @r [1, 8], @s [2, 4].
BODIES = {
    "unary": "%a = nn.sigmoid(%x) : D[T, 8]\n %b = math.exp(%a) : D[T, 8]\n"
    " %c = math.neg(%b) : D[T, 8]\n %y = nn.tanh(%c) : D[T, 8]",
    "more-unary": "%a = math.abs(%x) : D[T, 8]\n %b = math.add(%a) {scalar = 0.5} : D[T, 8]\n"
    " %c = math.rsqrt(%b) : D[T, 8]\n %d = math.sqrt(%c) : D[T, 8]\n"
    " %e = math.cos(%d) : D[T, 8]\n %f = math.sin(%e) : D[T, 8]\n %y = nn.relu(%f) : D[T, 8]",
    "gelus": '%a = nn.gelu(%x) : D[T, 8]\n %b = nn.gelu(%x) {approximate = "tanh"} : D[T, 8]\n'
    " %c = nn.silu(%x) : D[T, 8]\n %d = math.sub(%a, %b) : D[T, 8]\n"
    " %y = math.add(%d, %c) : D[T, 8]",
    "binary": "%a = math.sub(%x, @v) : D[T, 8]\n %b = math.mul(%a, %x) : D[T, 8]\n"
    " %c = math.max(%b, %a) : D[T, 8]\n %d = math.min(%c) {scalar = 0.75} : D[T, 8]\n"
    " %y = math.div(%d, @r) : D[T, 8]",
    "pow": "%a = math.abs(%x) : D[T, 8]\n %y = math.pow(%a) {scalar = 1.5} : D[T, 8]",
    "cast": '%a = tensor.cast(%x) {dtype = "f32"} : f32[T, 8]\n %b = math.mul(%a, %a) : f32[T, 8]\n'
    ' %y = tensor.cast(%b) {dtype = "D"} : D[T, 8]',
    "reduce": "%a = math.mean(%x) {axes = [1], keepdim = true} : D[T, 1]\n"
    " %b = math.sub(%x, %a) : D[T, 8]\n"
    " %c = math.sum(%b) {axes = [-1], keepdim = true} : D[T, 1]\n %y = math.add(%b, %c) : D[T, 8]",
    "reduce-heads": "%h = tensor.reshape(%x) {shape = [T, 2, 4]} : D[T, 2, 4]\n"
    " %m = math.mean(%h) {axes = [1], keepdim = false} : D[T, 4]\n"
    " %y = tensor.concat(%m, %m) {axis = 1} : D[T, 8]",
    "softmax": "%h = tensor.reshape(%x) {shape = [T, 2, 4]} : D[T, 2, 4]\n"
    " %s = nn.softmax(%h) {axis = 1} : D[T, 2, 4]\n %t = nn.softmax(%s) {axis = -1} : D[T, 2, 4]\n"
    " %y = tensor.reshape(%t) {shape = [T, 8]} : D[T, 8]",
    "rotate-half": "%a = tensor.slice(%x) {axis = 1, start = 0, stop = 4} : D[T, 4]\n"
    " %b = tensor.slice(%x) {axis = 1, start = 4, stop = 8} : D[T, 4]\n"
    " %c = math.neg(%b) : D[T, 4]\n"
    " %y = tensor.concat(%c, %a) {axis = -1} : D[T, 8]",
    "transpose": "%h = tensor.reshape(%x) {shape = [T, 2, 4]} : D[T, 2, 4]\n"
    " %t = tensor.transpose(%h) {perm = [0, 2, 1]} : D[T, 4, 2]\n %b = nn.silu(%t) : D[T, 4, 2]\n"
    " %y = tensor.reshape(%b) {shape = [T, 8]} : D[T, 8]",
    "transpose-copied": "%h = tensor.reshape(%x) {shape = [T, 2, 4]} : D[T, 2, 4]\n"
    " %t = tensor.transpose(%h) {perm = [0, 2, 1]} : D[T, 4, 2]\n"
    " %y = tensor.reshape(%t) {shape = [T, 8]} : D[T, 8]",
    "expand": "%h = tensor.reshape(%x) {shape = [T, 8, 1]} : D[T, 8, 1]\n"
    " %e = tensor.expand(%h) {shape = [T, 8, 3]} : D[T, 8, 3]\n"
    " %y = math.sum(%e) {axes = [2], keepdim = false} : D[T, 8]",
    "weights-2d": "%h = tensor.reshape(%x) {shape = [T, 2, 4]} : D[T, 2, 4]\n"
    " %a = math.mul(%h, @s) : D[T, 2, 4]\n %y = tensor.reshape(%a) {shape = [T, 8]} : D[T, 8]",
    "linear-of-slice": "%w = tensor.concat(%x, %x) {axis = 1} : D[T, 16]\n"
    " %a = tensor.slice(%w) {axis = 1, start = 4, stop = 12} : D[T, 8]\n"
    " %y = nn.linear(%a, @m, bias=@v) : D[T, 8]",
    "norms": "%n = nn.rms_norm(%x) {eps = 1e-06} : D[T, 8]\n"
    " %o = nn.rms_norm(%n, gain=@v) {eps = 1e-05, offset = 1.0} : D[T, 8]\n"
    " %l = nn.layer_norm(%o) {eps = 1e-05} : D[T, 8]\n"
    " %y = nn.layer_norm(%l, gain=@v, bias=@v) {eps = 1e-05} : D[T, 8]",
    "glu": "%a = nn.linear(%x, @m) : D[T, 8]\n %w = tensor.concat(%x, %a) {axis = 1} : D[T, 16]\n"
    ' %y = nn.glu(%w) {act = "gelu_tanh"} : D[T, 8]',
    "position-table": "%p = nn.embedding(@t, %positions) : D[T, 8]\n"
    " %y = math.add(%x, %p) : D[T, 8]",
}


_INPUTS = "%ids: i32[T] role ids, %positions: i32[T] role positions, %rows: i32[L] role rows"


def text_of(body: str, dtype: str) -> str:
    return f"""module @m format 1 {{
  dims {{ T in 1..16, L in 1..8 }}
  weight @e : D[40, 8] = ckpt "e"
  weight @v : D[8] = ckpt "v"
  weight @m : D[8, 8] = ckpt "m"
  weight @r : D[1, 8] = ckpt "r"
  weight @s : D[2, 4] = ckpt "s"
  weight @t : D[16, 8] = ckpt "t"
  weight @w : D[40, 8] = ckpt "w"
  func @step({_INPUTS}) -> f32[L, 40] role logits {{
    %x = nn.embedding(@e, %ids) : D[T, 8]
    {body}
    %g = tensor.gather_rows(%y, %rows) : D[L, 8]
    %z = nn.linear(%g, @w) {{out = "f32"}} : f32[L, 40]
    return %z
  }}
}}
""".replace("D[", f"{dtype}[").replace('"D"', f'"{dtype}"')


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", BODIES)
def test_an_op_gives_what_the_interpreter_gives(name, dtype, tmp_path):
    module = read_module(text_of(BODIES[name], dtype))
    generator = torch.Generator().manual_seed(len(name))
    tensors = Tensors(
        {
            weight.name: torch.randn([int(n) for n in weight.type.shape], generator=generator).to(
                torch.float32 if dtype == "f32" else torch.bfloat16
            )
            for weight in module.weights.values()
        }
    )
    target = activate("cpu").target
    lowered, _ = lowering_pipeline(target).run(module)
    payload = target.lower(lowered, [BUCKET])
    shape = Shape(vocab=40, positions=16, dtype=dtype)
    compiled = Compiled(module, lowered, payload, tensors, shape, (BUCKET,))
    device = CpuDevice()
    device.load(compiled.write(tmp_path / "a.rope"), 2)
    inputs = step_of([([5, 39, 0, 17, 5], 5)], groups=0, rows=[4, 0, 2])
    found = device.submit(BUCKET, inputs).logits.copy()
    device.close()
    expected = run(
        module,
        "step",
        {role: torch.from_numpy(getattr(inputs, role)) for role in ("ids", "positions", "rows")},
        tensors,
    )["logits"].numpy()
    tolerance = 1e-5 if dtype == "f32" else 2e-2
    assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())
