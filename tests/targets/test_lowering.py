"""Lowering: which kernel calls a decoder becomes, what is refused, how long it takes."""

import time
from dataclasses import replace

import pytest
from support.cpu_programs import FAST, compile_decoder
from support.decoder_text import decoder_text

from ropeway.compiler.config import default_buckets
from ropeway.compiler.errors import TargetError
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.base import PassContext
from ropeway.compiler.targets.base import Payload
from ropeway.compiler.targets.cpu.lower import lower, lower_template
from ropeway.compiler.targets.cpu.plan import TEMPLATE_FILE, Template, decode_template
from ropeway.passes import default_pipeline
from ropeway.passes.lowering import PackWeights

ONE = replace(FAST, layers=1)


def template_of(payload: Payload) -> Template:
    return decode_template(payload.files[TEMPLATE_FILE])


def lines(template: Template) -> list[str]:
    """Each step as `rows kernel name=buffer[shape]@offset ...`, the way goldens show it."""
    text = []
    for step in template.steps:
        parts = []
        for name, ref in step.operands.items():
            if ref.space == "arena":
                shape = "x".join(map(str, ref.shape))
                at = f"@{ref.offset}" if ref.offset else ""
                parts.append(f"{name}=b{ref.index}[{shape}]{at}")
            elif ref.space == "weights":
                parts.append(f"{name}={template.weights[ref.index].name}")
            elif ref.space == "input":
                parts.append(f"{name}={template.inputs[ref.index]}")
            else:
                parts.append(f"{name}={template.caches[ref.index].name}")
        text.append(" ".join([step.rows, step.kernel, *parts]))
    return text


GOLDEN = """\
tokens embedding ids=ids table=embed.weight y=b0[64]
tokens gemm gain=layers.0.input_norm.weight x=b0[64] weight=layers.0.attn.qkv.weight y=b1[128]
tokens rope q=b1[4x16] positions=positions table=rope q_out=b1[4x16] k=b1[2x16]@256 \
k_out=b1[2x16]@256
tokens kv_write k=b1[2x16]@256 v=b1[2x16]@384 cache=kv0 slots=slots.0
tokens attention q=b1[4x16] cache=kv0 block_table=block_table.0 query_start=query_start \
lengths=lengths y=b2[4x16]
rows gather_rows x=b2[4x16] index=rows y=b3[4x16]
rows gemm x=b3[64] weight=layers.0.attn.o_proj.weight y=b4[64]
rows gather_rows x=b0[64] index=rows y=b5[64]
rows gemm_glu residual=b5[64] gain=layers.0.mlp_norm.weight sum=b6[64] x=b4[64] \
weight=layers.0.mlp.gate_up.weight y=b7[96]
rows gemm x=b7[96] weight=layers.0.mlp.down_proj.weight y=b8[64]
rows gemm residual=b6[64] gain=norm.weight sum=b9[64] x=b8[64] weight=embed.weight y=b10[80]"""


def test_a_fused_layer_is_eleven_kernel_calls():
    """Slices of the merged matrix are views, rope turns q and k where they lie, the head reads the
    packed embedding, and what follows the last attention runs on the wanted rows only."""
    assert lines(template_of(compile_decoder(ONE).payload)) == GOLDEN.splitlines()


SLICED = """module @m format 1 {
  dims { T in 1..64, L in 1..8 }
  weight @e : f32[40, 24] = ckpt "e"
  weight @w : f32[40, 16] = pack(ckpt "w") {layout = "panel32"}
  weight @t : f32[64, 8] = ckpt "t"
  func @step(%ids: i32[T] role ids, %positions: i32[T] role positions, %rows: i32[L] role rows) \
-> f32[L, 40] role logits {
    %x = nn.embedding(@e, %ids) : f32[T, 24]
    %a = tensor.slice(%x) {axis = 1, start = A, stop = B} : f32[T, 16]
    %b = tensor.slice(%x) {axis = 1, start = C, stop = D} : f32[T, 16]
    %h = tensor.reshape(%a) {shape = [T, 2, 8]} : f32[T, 2, 8]
    %r = nn.rope(%h, %positions, @t) {rotary_dim = 8} : f32[T, 2, 8]
    %f = tensor.reshape(%r) {shape = [T, 16]} : f32[T, 16]
    %s = math.add(%f, READ) : f32[T, 16]
    %g = tensor.gather_rows(%s, %rows) : f32[L, 16]
    %z = nn.linear(%g, @w) : f32[L, 40]
    return %z
  }
}
"""


@pytest.mark.parametrize(
    ("a", "b", "read", "in_place"),
    [
        ((0, 16), (8, 24), "%f", False),  # %b overlaps, though nobody reads it after
        ((0, 16), (8, 24), "%b", False),
        ((0, 16), (0, 16), "%f", False),
        ((8, 24), (8, 24), "%a", False),  # %a itself is read again
    ],
)
def test_rope_copies_when_someone_else_reads_its_bytes(a, b, read, in_place):
    text = SLICED.replace("= A", f"= {a[0]}").replace("= B", f"= {a[1]}")
    text = text.replace("= C", f"= {b[0]}").replace("= D}", f"= {b[1]}}}").replace("READ", read)
    step = next(s for s in lower_template(read_module(text)).steps if s.kernel == "rope")
    assert (step.operands["q"] == step.operands["q_out"]) is in_place


def test_rope_turns_a_slice_in_place_when_its_siblings_lie_apart():
    text = SLICED.replace("f32[40, 24]", "f32[40, 32]").replace("f32[T, 24]", "f32[T, 32]")
    text = text.replace("= A", "= 0").replace("= B", "= 16").replace("= C", "= 16")
    text = text.replace("= D}", "= 32}").replace("READ", "%b")
    step = next(s for s in lower_template(read_module(text)).steps if s.kernel == "rope")
    assert step.operands["q"] == step.operands["q_out"]


def test_weights_are_stored_once_and_only_matrices_are_packed():
    template = template_of(compile_decoder(ONE).payload)
    names = [slot.name for slot in template.weights]
    assert len(names) == len(set(names))
    layouts = {slot.name: slot.layout for slot in template.weights}
    assert layouts["embed.weight"] == "panel32" and layouts["rope"] == "rows"
    assert {slot.layout for slot in template.weights if len(slot.shape) == 1} == {"rows"}


def test_an_untied_embedding_stays_row_major():
    template = template_of(compile_decoder(replace(ONE, tied=False)).payload)
    layouts = {slot.name: slot.layout for slot in template.weights}
    assert layouts["embed.weight"] == "rows" and layouts["lm_head.weight"] == "panel32"


def test_windows_make_two_cache_groups():
    payload = compile_decoder(replace(FAST, layers=3, windows=(0, 7, 0))).payload
    # K and V, 2 heads, 32 tokens, head dim 16 padded to 32, f32; blocks of 32 tokens
    layer = 2 * 2 * 32 * 32 * 4
    assert [(g.group, g.layers, g.block_size, g.bytes_per_block) for g in payload.cache_groups] == [
        (0, 2, 32, 2 * layer),
        (1, 1, 32, layer),
    ]
    template = template_of(payload)
    windows = [step.params["window"] for step in template.steps if step.kernel == "attention"]
    assert windows == [0, 7, 0]


def test_all_default_buckets_of_a_deep_model_lower_within_two_seconds():
    compiled = compile_decoder(replace(FAST, layers=30))
    buckets = default_buckets()
    start = time.perf_counter()
    payload = lower(compiled.module, buckets)
    assert time.perf_counter() - start < 2.0
    assert len(payload.graphs) == len(buckets) == 15
    assert sum(len(data) for _, data in payload.graphs.values()) < 100_000
    by_bucket = {entry.bucket: entry for entry in payload.memory}
    for bucket in buckets:
        assert by_bucket[bucket].arena_bytes * 3 < by_bucket[bucket].without_reuse_bytes


HEAD = """module @m format 1 {
  dims { T in 1..64, L in 1..8, R in 1..8 }
  weight @e : f32[40, 8] = ckpt "e"
  weight @w : f32[40, 8] = ckpt "w"
  func @step(%ids: i32[T] role ids, %rows: i32[L] role rows) -> f32[L, 40] role logits {
    %x = nn.embedding(@e, %ids) : f32[T, 8] loc "m.py:1"
"""
TAIL = """
    %g = tensor.gather_rows(%y, %rows) : f32[L, 8]
    %z = nn.linear(%g, @w) : f32[L, 40] loc "m.py:9"
    return %z
  }
}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            '%t = tensor.transpose(%x) {perm = [1, 0]} : f32[8, T] loc "m.py:2"\n'
            "    %y = tensor.transpose(%t) {perm = [1, 0]} : f32[T, 8]",
            "tensor.transpose at m.py:2: it moves the rows",
        ),
        (
            '%s = math.sum(%x) {axes = [0], keepdim = true} : f32[1, 8] loc "m.py:3"\n'
            "    %y = math.add(%x, %s) : f32[T, 8]",
            "math.sum at m.py:3: it mixes the rows",
        ),
        (
            '%c = tensor.concat(%x, %x) {axis = 0} : f32[2*T, 8] loc "m.py:4"\n'
            "    %y = tensor.slice(%c) {axis = 0, start = 0, stop = T} : f32[T, 8]",
            "tensor.concat at m.py:4",
        ),
    ],
)
def test_an_op_that_mixes_rows_is_refused_by_name_and_line(body, says):
    module = read_module(f"{HEAD}    {body}{TAIL}")
    with pytest.raises(TargetError) as caught:
        lower_template(module)
    assert says in str(caught.value) and "target cpu can't lower" in str(caught.value)


def test_unpacked_matrices_are_refused_with_the_pass_to_run():
    module = read_module(f"{HEAD}    %y = math.mul(%x) {{scalar = 2.0}} : f32[T, 8]{TAIL}")
    with pytest.raises(TargetError, match=r"nn.linear at m.py:9.*run the pass pack-weights"):
        lower_template(module)


def test_an_unfused_module_is_refused_by_its_attention():
    pipeline = default_pipeline().without("lower-lm-head").without("fuse-attention")
    module, _ = pipeline.run(read_module(decoder_text(ONE)))
    module = PackWeights().run(module, PassContext()).module
    with pytest.raises(TargetError, match=r"nn.sdpa at m.py:18: it has no kernel"):
        lower_template(module)


def test_an_unknown_input_role_is_refused():
    text = HEAD.replace(
        "%rows: i32[L] role rows", "%rows: i32[L] role rows, %a: i32[R] role adapter_ids"
    )
    module = read_module(f"{text}    %y = math.mul(%x) {{scalar = 2.0}} : f32[T, 8]{TAIL}")
    with pytest.raises(TargetError, match="role 'adapter_ids'"):
        lower_template(module)
