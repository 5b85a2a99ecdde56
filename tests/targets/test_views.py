"""Views against numpy: slice, transpose, expand and reshape of a row without moving a byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ropeway.compiler.targets.cpu.views import View, contiguous_strides

ROW = np.arange(24, dtype=np.float32)


def read(view: View) -> np.ndarray:
    """The elements that a view of ROW names, by numpy's own stride machinery."""
    base = ROW[view.offset // 4 :]
    return as_strided(base, view.shape, tuple(4 * stride for stride in view.strides))


def dense(*shape: int) -> View:
    return View(0, "f32", shape, contiguous_strides(shape))


def test_slice_moves_the_offset_in_bytes():
    view = dense(4, 6).slice(1, 2, 5)
    assert (view.shape, view.strides, view.offset) == ((4, 3), (6, 1), 8)
    assert np.array_equal(read(view), ROW.reshape(4, 6)[:, 2:5])


def test_transpose_and_expand_only_touch_strides():
    assert np.array_equal(read(dense(4, 6).transpose([1, 0])), ROW.reshape(4, 6).T)
    spread = dense(4, 1).expand((2, 4, 3))
    assert np.array_equal(read(spread), np.broadcast_to(ROW[:4].reshape(4, 1), (2, 4, 3)))


def test_a_transposed_row_cannot_be_flattened():
    assert dense(4, 6).transpose([1, 0]).reshape((24,)) is None


def test_a_slice_splits_into_heads_but_does_not_merge_over_the_gap():
    part = dense(2, 12).slice(1, 4, 12)
    heads = part.reshape((2, 4, 2))
    assert heads is not None
    assert np.array_equal(read(heads), ROW.reshape(2, 12)[:, 4:].reshape(2, 4, 2))
    assert part.reshape((16,)) is None


SHAPES = st.sampled_from([(24,), (2, 12), (4, 6), (2, 3, 4), (1, 24, 1), (3, 8), (2, 2, 6)])


@given(SHAPES, SHAPES, st.integers(0, 2), st.data())
def test_reshape_is_numpys_or_refused(before, after, axis, data):
    view = dense(*before)
    axis = min(axis, len(before) - 1)
    if data.draw(st.booleans()):
        view = view.transpose(data.draw(st.permutations(range(len(before)))))
    reshaped = view.reshape(after)
    if reshaped is not None:
        assert np.array_equal(read(reshaped), read(view).reshape(after))
    elif view.ref.adjacent:
        raise AssertionError(f"{view} is dense and was refused")
