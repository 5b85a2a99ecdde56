"""The CPU device on fused tiny decoders against the interpreter on the unfused module."""

import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from support.cpu_programs import FAST, WIDE, logits_of, run_sequence, step_of

from ropeway.compiler.config import Bucket, choose_bucket
from ropeway.compiler.errors import RunError, TargetError
from ropeway.compiler.ops.interpreter import run as interpret
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.targets.cpu.cache_layout import block_bytes
from ropeway.runtime.devices.cpu import library
from ropeway.runtime.devices.cpu.device import CpuDevice

IDS = np.random.default_rng(5).integers(0, FAST.vocab, 150).tolist()
BF16 = replace(FAST, dtype="bf16")
CHUNKS = ([64, 64], [1] * 40, [7, 1, 64, 33], [33])
SHAPES = {
    "llama": FAST,
    "biases": replace(FAST, bias="qkvogudh", tied=False),
    "qk-norm": replace(FAST, qk_norm=True),
    "windows": replace(FAST, windows=(0, 7)),
    "neox": replace(FAST, norm="layer", act="nn.gelu", parallel=True, bias="qkvo"),
    "phi3": replace(FAST, merged_qkv=True, merged_gate_up=True),
    "gemma": replace(FAST, post_norm=True, act="nn.gelu"),
    "no-rope": replace(FAST, rope=False),
    "odd": replace(FAST, hidden=36, head_dim=12, inter=50, vocab=77),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_float32_logits_are_the_interpreters(load, programs, name, chunks):
    ids = [token % SHAPES[name].vocab for token in IDS]
    expected = programs(SHAPES[name])[0].oracle(ids)[: sum(chunks)]
    found = run_sequence(load(SHAPES[name]), ids, chunks, WIDE)
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim(load, programs, head_dim):
    shape = replace(FAST, layers=1, head_dim=head_dim, heads=2, kv_heads=1)
    expected = programs(shape)[0].oracle(IDS[:70])
    found = run_sequence(load(shape), IDS[:70], [64, 1, 5], WIDE)
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


def test_bf16_is_as_near_to_float32_as_the_interpreters_bf16(load, programs):
    """Both round at other places; the error against float32 weights of bf16 values is alike."""
    compiled = programs(BF16)[0]
    as_f32 = read_module(_in_float32(compiled))
    inputs = {
        "ids": torch.tensor(IDS, dtype=torch.int32),
        "positions": torch.arange(len(IDS), dtype=torch.int32),
    }
    truth = interpret(as_f32, "step", inputs, _Upcast(compiled.tensors))["logits"].numpy()
    theirs = np.abs(compiled.oracle(IDS) - truth)
    ours = np.abs(run_sequence(load(BF16), IDS[:128], [64, 64], WIDE) - truth[:128])
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 2.0 * theirs.max()


class _Upcast:
    def __init__(self, tensors) -> None:
        self._tensors = tensors

    def get(self, name: str) -> torch.Tensor:
        return self._tensors.get(name).float()


def _in_float32(compiled) -> str:
    from support.decoder_text import decoder_text  # noqa: PLC0415

    return decoder_text(replace(compiled.shape, dtype="f32"))


# --- the numerics contract, bit for bit ---


def decode_inputs(count: int):
    return step_of([(IDS[: 20 + n], 1) for n in range(count)])


def prefilled(load, shape, count: int, threads: int = 1, isa: str | None = None) -> CpuDevice:
    """A device whose cache holds `count` sequences of 20, 21, .. tokens."""
    device = load(shape, threads, isa=isa)
    for number in range(count):
        whole = step_of([(IDS[: 20 + n], 20 + n if n == number else 1) for n in range(count)])
        first, last = whole.query_start[number], whole.query_start[number + 1]
        alone = msgspec.structs.replace(
            whole,
            ids=whole.ids[first:last],
            positions=whole.positions[first:last],
            slots=[slots[first:last] for slots in whole.slots],
            block_tables=[table[number : number + 1] for table in whole.block_tables],
            query_start=np.array([0, last - first], np.int32),
            lengths=whole.lengths[number : number + 1],
            rows=np.array([0], np.int32),
        )
        device.submit(choose_bucket(WIDE, "mixed", int(last - first), 1, 1), alone)
    return device


@pytest.mark.parametrize("shape", [FAST, BF16], ids=["f32", "bf16"])
def test_a_row_is_the_same_bits_in_every_bucket_and_batch(load, shape):
    device = prefilled(load, shape, 7)
    inputs = decode_inputs(7)
    together = logits_of(device, choose_bucket(WIDE, "decode", 7, 7, 7), inputs)
    assert np.array_equal(logits_of(device, WIDE[-1], inputs), together)
    assert np.array_equal(logits_of(device, WIDE[-2], inputs), together)
    for count in (1, 2, 3, 4):
        fewer = msgspec.structs.replace(
            inputs,
            ids=inputs.ids[:count],
            positions=inputs.positions[:count],
            slots=[slots[:count] for slots in inputs.slots],
            block_tables=[table[:count] for table in inputs.block_tables],
            query_start=inputs.query_start[: count + 1],
            lengths=inputs.lengths[:count],
            rows=inputs.rows[:count],
        )
        for bucket in (b for b in WIDE if b.kind == "decode" and b.tokens >= count):
            assert np.array_equal(logits_of(device, bucket, fewer), together[:count])


@pytest.mark.parametrize("shape", [FAST, BF16], ids=["f32", "bf16"])
def test_chunks_give_the_same_bits_as_one_prefill(load, shape):
    device = load(shape)
    whole = run_sequence(device, IDS[:120], [120], WIDE)
    for chunks in ([1] * 120, [7] * 17 + [1], [64, 56], [16] * 7 + [8]):
        assert np.array_equal(run_sequence(device, IDS[:120], chunks, WIDE), whole)


@pytest.mark.parametrize("isa", library.available_isas())
def test_threads_give_the_same_bits(load, isa):
    one = run_sequence(load(BF16, 1, isa=isa), IDS[:90], [64, 1, 25], WIDE)
    for threads in (2, 3):
        assert np.array_equal(
            run_sequence(load(BF16, threads, isa=isa), IDS[:90], [64, 1, 25], WIDE), one
        )


def test_padding_and_strangers_blocks_full_of_nan_change_nothing(load):
    device = prefilled(load, BF16, 3)
    inputs = decode_inputs(3)
    expected = logits_of(device, WIDE[2], inputs)
    program = device.loaded
    program.arena.bytes[:] = 0xFF
    caches = program.caches
    owned = set(inputs.block_tables[0].reshape(-1).tolist()) | {0}
    unused = [block for block in range(40) if block not in owned]
    for block in unused:
        caches.fill(b"\xff", [block])
    assert np.array_equal(logits_of(device, WIDE[2], inputs), expected)
    assert np.isfinite(expected).all()


def test_two_devices_side_by_side(load, programs):
    """Two programs in one process, each driven from a thread of its own."""
    other = replace(FAST, qk_norm=True)
    devices = [load(FAST, 2), load(other, 2)]
    expected = [run_sequence(d, IDS[:100], [60, 1, 39], WIDE) for d in devices]
    found: list[list[np.ndarray]] = [[], []]

    def work(number: int) -> None:
        for _ in range(5):
            found[number].append(run_sequence(devices[number], IDS[:100], [60, 1, 39], WIDE))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(2):
        assert len(found[number]) == 5
        assert all(np.array_equal(got, expected[number]) for got in found[number])


# --- blocks, inputs, life cycle ---


def test_copied_blocks_continue_a_sequence(load):
    device = load(BF16)
    run_sequence(device, IDS[:40], [40], WIDE)
    expected = logits_of(device, WIDE[0], step_of([(IDS[:41], 1)]))
    device.copy_blocks([(1, 30), (2, 31)])
    moved = step_of([(IDS[:41], 1)])
    moved.block_tables[0][0, :2] = (30, 31)
    moved.slots[0][0] += 29 * 32
    assert np.array_equal(logits_of(device, WIDE[0], moved), expected)
    with pytest.raises(RunError, match=r"blocks 0..39"):
        device.copy_blocks([(1, 40)])


def broken(name: str, index: int, value: int):
    inputs = step_of([(IDS[:5], 5), (IDS[:3], 3)])
    array = getattr(inputs, name)
    target = array[0] if isinstance(array, list) else array
    target.reshape(-1)[index] = value
    return inputs


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("ids", 2, FAST.vocab),
        ("ids", 0, -1),
        ("positions", 1, FAST.positions),
        ("slots", 3, 40 * 32),
        ("slots", 3, -2),
        ("block_tables", 0, 40),
        ("block_tables", 6, -1),
        ("query_start", 0, 1),
        ("query_start", 1, 9),
        ("query_start", 2, 7),
        ("lengths", 1, 2),
        ("lengths", 0, FAST.positions + 1),
        ("lengths", 0, 2**31 - 1),
        ("rows", 4, 8),
        ("rows", 0, -1),
    ],
)
def test_inputs_outside_their_tables_are_refused_by_name(load, name, index, value):
    device = load(FAST)
    named = {"block_tables": "block_table"}.get(name, name)
    with pytest.raises(RunError, match=named):
        device.submit(WIDE[-1], broken(name, index, value))


def test_steps_that_do_not_fit_the_bucket_are_refused(load):
    device = load(FAST)
    with pytest.raises(RunError, match="3 tokens in bucket decode-2, which takes 2"):
        device.submit(WIDE[1], decode_inputs(3))
    with pytest.raises(RunError, match="no bucket decode-16"):
        device.submit(Bucket("decode", 16, 16, 16), decode_inputs(3))
    short = msgspec.structs.replace(decode_inputs(2), positions=np.zeros(1, np.int32))
    with pytest.raises(RunError, match="positions"):
        device.submit(WIDE[1], short)


def test_no_step_runs_before_blocks_are_allocated_or_after_close(programs):
    device = CpuDevice()
    device.load(programs(FAST)[1], 1)
    with pytest.raises(RunError, match="allocate"):
        device.submit(WIDE[0], decode_inputs(1))
    device.close()
    device.close()
    with pytest.raises(RunError, match="load"):
        device.submit(WIDE[0], decode_inputs(1))


def test_memory_and_layout_are_the_sums_of_their_parts(load, programs):
    device = load(BF16, blocks=10)
    template = device.loaded.template
    per_block = sum(block_bytes(slot) for slot in template.caches)
    # 2 layers, K and V, 2 heads of 16 (padded to 32) for 32 tokens in bf16
    assert device.cache_layout.block_bytes == per_block == 2 * 2 * 2 * 32 * 32 * 2
    assert device.memory().cache == 10 * per_block
    assert device.memory().weights == programs(BF16)[1].weights.data.nbytes


def test_profile_times_every_step_of_the_plan(load):
    device = load(FAST)
    timings = device.profile(WIDE[1], decode_inputs(2), 3)
    assert [timing.kernel for timing in timings] == [
        step.kernel for step in device.loaded.template.steps
    ]
    assert all(timing.nanoseconds >= 0 for timing in timings)
    assert sum(timing.nanoseconds for timing in timings) > 0
    assert timings[0].op == "nn.embedding at m.py:1"


def test_without_the_native_library_the_error_says_what_is_missing(monkeypatch, programs):
    monkeypatch.setattr(library, "library_path", lambda: None)
    library.load_library.cache_clear()
    try:
        with pytest.raises(TargetError, match=r"weren't built: install a C\+\+17 compiler"):
            CpuDevice().load(programs(FAST)[1], 1)
    finally:
        library.load_library.cache_clear()


def test_a_forced_instruction_set_that_is_not_there_is_refused(programs):
    with pytest.raises(TargetError, match="'sparc' isn't available here: use one of"):
        CpuDevice("sparc").load(programs(FAST)[1], 1)


def test_loading_a_program_imports_no_compiler_library(programs):
    artifact = programs(FAST)[1]
    code = (
        "import sys\n"
        "from ropeway.compiler.artifact import open_artifact\n"
        "from ropeway.compiler.targets.base import activate, device_class\n"
        f"artifact = open_artifact({str(artifact.path)!r})\n"
        "device = device_class(activate('cpu').target)()\n"
        "device.load(artifact, 1)\n"
        "device.allocate(2)\n"
        "print(sorted({'torch', 'sympy', 'transformers', 'ropeway.passes'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
