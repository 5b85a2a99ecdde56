"""The reference device: the same interface as the CPU device, by the interpreter."""

from dataclasses import replace

import numpy as np
import pytest
from support.cpu_programs import FAST, WIDE, compile_decoder, logits_of, run_sequence, step_of

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.reference.device import ReferenceDevice

IDS = np.random.default_rng(5).integers(0, FAST.vocab, 60).tolist()


@pytest.fixture
def device(tmp_path):
    compiled = compile_decoder(FAST, target="reference", buckets=WIDE)
    device = ReferenceDevice()
    device.load(compiled.write(tmp_path / "a.rope", "reference"), 1)
    device.allocate(40)
    yield device, compiled
    device.close()


@pytest.mark.parametrize("chunks", [[40], [1] * 12, [7, 1, 32]], ids=str)
def test_logits_are_those_of_the_unfused_module(device, chunks):
    expected = device[1].oracle(IDS)[: sum(chunks)]
    found = run_sequence(device[0], IDS, chunks, WIDE)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_windows_have_their_own_group(tmp_path):
    shape = replace(FAST, windows=(0, 7))
    compiled = compile_decoder(shape, target="reference", buckets=WIDE)
    found = ReferenceDevice()
    found.load(compiled.write(tmp_path / "a.rope", "reference"))
    found.allocate(20)
    # 2 layers, K and V, 2 heads of 16, f32: no padding
    assert found.cache_layout.groups == 2
    assert found.cache_layout.token_bytes == 2 * 2 * 2 * 16 * 4
    expected = compiled.oracle(IDS[:30])
    assert np.abs(run_sequence(found, IDS[:30], [30], WIDE) - expected).max() < 1e-4
    found.close()


def test_copied_blocks_continue_a_sequence(device):
    reference = device[0]
    run_sequence(reference, IDS[:20], [20], WIDE)
    again = step_of([(IDS[:21], 1)], block_size=16)
    expected = logits_of(reference, WIDE[0], again)
    reference.copy_blocks([(1, 30), (2, 31)])
    again.block_tables[0][0, :2] = (30, 31)
    again.slots[0][0] += 29 * 16
    assert np.array_equal(logits_of(reference, WIDE[0], again), expected)
    with pytest.raises(RunError, match=r"blocks 0..39"):
        reference.copy_blocks([(40, 1)])


def test_bad_steps_are_refused(device):
    reference = device[0]
    with pytest.raises(RunError, match="3 tokens in bucket decode-2, which takes 2"):
        reference.submit(WIDE[1], step_of([(IDS[:3], 3)]))
    with pytest.raises(RunError, match="no bucket decode-16"):
        reference.submit(Bucket("decode", 16, 16, 16), step_of([(IDS[:3], 3)]))
    far = step_of([(IDS[:3], 3)])
    far.slots[0][0] = 40 * 16
    with pytest.raises(RunError, match="slot"):
        reference.submit(WIDE[-1], far)
    reference.close()
    with pytest.raises(RunError, match="load"):
        reference.submit(WIDE[0], step_of([(IDS[:1], 1)]))
