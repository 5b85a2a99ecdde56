"""kv_write and paged attention against float64, and their contract on bits and on unread memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import kernel_calls as kc

BLOCK = 32


def padded(n: int) -> int:
    return -(-n // kc.PANEL) * kc.PANEL


@dataclass
class Model:
    """Shape of one layer's attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 0  # 0: the same
    dtype: int = kc.BF16
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.3

    def __post_init__(self) -> None:
        self.v_head_dim = self.v_head_dim or self.head_dim


@dataclass
class Request:
    """One sequence: every token's q, k and v, and its blocks."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    blocks: list[int]


@dataclass
class Cache:
    """Both planes of one layer, NaN until written, and the requests in it."""

    model: Model
    rng: np.random.Generator
    blocks: int = 64
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        m = self.model
        item = 2 if m.dtype == kc.BF16 else 4
        self.k = kc.aligned((self.blocks, m.kv_heads * padded(m.head_dim) * BLOCK), m.dtype)
        self.v = kc.aligned((self.blocks, m.kv_heads * padded(m.v_head_dim) * BLOCK), m.dtype)
        for plane in (self.k, self.v):
            plane.view(np.uint8).fill(0xFF)
        self.planes = [kc.CachePlane(p.ctypes.data, p.shape[1] * item) for p in (self.k, self.v)]
        self.free = list(self.rng.permutation(np.arange(1, self.blocks)))

    def add(self, length: int) -> Request:
        """A request of `length` tokens, nothing of it in the cache yet."""
        m = self.model
        shapes = [(m.heads, m.head_dim), (m.kv_heads, m.head_dim), (m.kv_heads, m.v_head_dim)]
        q, k, v = (kc.stored(self.rng.standard_normal((length, h * d)), m.dtype) for h, d in shapes)
        request = Request(q, k, v, [int(self.free.pop()) for _ in range(-(-length // BLOCK))])
        self.requests.append(request)
        return request

    def step(
        self, level: str, parts: list[tuple[Request, int, int]], threads: int = 1
    ) -> list[np.ndarray]:
        """Feeds tokens [start, stop) of each request in one step; returns each one's rows of y."""
        m = self.model
        # q, k and v lie in one matrix, as the fused projection leaves them
        step = [np.hstack([r.q[a:b], r.k[a:b], r.v[a:b]]) for r, a, b in parts]
        qkv = np.vstack([*step, kc.fresh((1, step[0].shape[1]), m.dtype)])
        tokens = len(qkv) - 1
        slots = np.array(
            [r.blocks[t // BLOCK] * BLOCK + t % BLOCK for r, a, b in parts for t in range(a, b)],
            dtype=np.int32,
        )
        q_end, k_end = m.heads * m.head_dim, (m.heads + m.kv_heads) * m.head_dim
        wide = qkv.shape[1]
        kc.run(
            level, "kv_write",
            kc.KvWriteArgs(
                tokens=tokens, kv_heads=m.kv_heads, head_dim=m.head_dim, v_head_dim=m.v_head_dim,
                dtype=m.dtype, k=kc.view(qkv[:, q_end:], wide), v=kc.view(qkv[:, k_end:], wide),
                k_cache=self.planes[0], v_cache=self.planes[1], slots=kc.pointer(slots),
            ),
            threads=threads,
        )  # fmt: skip
        table = np.full((len(parts), 40), -(1 << 30), dtype=np.int32)
        for i, (request, _, stop) in enumerate(parts):
            used = -(-stop // BLOCK)
            table[i, :used] = request.blocks[:used]
        starts = np.cumsum([0, *(b - a for _, a, b in parts)]).astype(np.int32)
        lengths = np.array([b for _, _, b in parts], dtype=np.int32)
        y = kc.fresh((tokens + 1, m.heads * m.v_head_dim), m.dtype)
        kc.run(
            level, "attention",
            kc.AttentionArgs(
                tokens=tokens, requests=len(parts), heads=m.heads, kv_heads=m.kv_heads,
                head_dim=m.head_dim, v_head_dim=m.v_head_dim, dtype=m.dtype, scale=m.scale,
                softcap=m.softcap, window=m.window, q=kc.view(qkv, wide), y=kc.view(y),
                k_cache=self.planes[0], v_cache=self.planes[1], block_table=kc.pointer(table),
                table_stride=table.shape[1], query_start=kc.pointer(starts),
                lengths=kc.pointer(lengths),
            ),
            threads=threads,
        )  # fmt: skip
        assert (y[-1].view(np.uint8) == 0xFF).all(), "wrote a row that isn't there"
        return [y[a:b] for a, b in itertools.pairwise(starts)]


def exact(m: Model, r: Request) -> np.ndarray:
    """float64 attention over the whole request, every row."""
    n = len(r.q)
    q = kc.value(r.q).reshape(n, m.heads, m.head_dim)
    k = kc.value(r.k).reshape(n, m.kv_heads, m.head_dim).repeat(m.heads // m.kv_heads, axis=1)
    v = kc.value(r.v).reshape(n, m.kv_heads, m.v_head_dim).repeat(m.heads // m.kv_heads, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * m.scale
    if m.softcap:
        scores = m.softcap * np.tanh(scores / m.softcap)
    i, j = np.mgrid[:n, :n]
    seen = (j <= i) & ((i - j < m.window) if m.window else True)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v).reshape(n, -1)


def check(m: Model, y: np.ndarray, expected: np.ndarray) -> None:
    tolerance = 2e-5 if m.dtype == kc.F32 else 2e-2
    np.testing.assert_allclose(kc.value(y), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
def test_head_dims(level: str, head_dim: int, dtype: int, rng: np.random.Generator) -> None:
    m = Model(head_dim=head_dim, dtype=dtype, scale=head_dim**-0.5)
    cache = Cache(m, rng)
    request = cache.add(300)
    (y,) = cache.step(level, [(request, 0, 300)], threads=2)
    check(m, y, exact(m, request))


@pytest.mark.parametrize(
    "m",
    [
        Model(window=1), Model(window=31), Model(window=32), Model(window=33), Model(window=257),
        Model(softcap=2.0), Model(heads=7, kv_heads=1), Model(heads=3, kv_heads=3),
        Model(head_dim=48, v_head_dim=80), Model(scale=-0.4), Model(dtype=kc.F32, window=100),
        Model(dtype=kc.F32, softcap=1.5, scale=3.0),
    ],
    ids=str,
)  # fmt: skip
def test_variants(level: str, m: Model, rng: np.random.Generator) -> None:
    cache = Cache(m, rng)
    request = cache.add(290)
    (y,) = cache.step(level, [(request, 0, 290)], threads=2)
    check(m, y, exact(m, request))


@pytest.mark.parametrize("m", [Model(), Model(window=40), Model(dtype=kc.F32, heads=6)], ids=str)
def test_bits_depend_on_the_row_alone(level: str, m: Model, rng: np.random.Generator) -> None:
    """One prefill, chunks, decode one by one, in company, on any number of threads."""
    length = 600
    cache = Cache(m, rng)
    request, other = cache.add(length), cache.add(length)
    (whole,) = cache.step(level, [(request, 0, length)])
    for chunk, threads in ((7, 2), (64, 3), (512, 2), (512, 5)):
        ends = [*range(chunk, length, chunk), length]
        starts = [0, *ends[:-1]]
        rows = [
            cache.step(level, [(request, a, b)], threads)[0]
            for a, b in zip(starts, ends, strict=True)
        ]
        assert (np.vstack(rows) == whole).all(), f"chunks of {chunk} on {threads} threads"
    cache.step(level, [(other, 0, 500)])
    for token in (0, 1, 31, 32, 255, 256, 257, 511, 512, 599):
        if token:  # a token at offset 0 zeroes its block, so what it sees is written anew
            cache.step(level, [(request, 0, token)])
        for threads in (1, 2, 3):
            (row,) = cache.step(level, [(request, token, token + 1)], threads)
            assert (row == whole[token]).all()
        parts = [(other, 300, 400), (request, token, token + 1), (other, 400, 403)]
        assert (cache.step(level, parts, 2)[1] == whole[token]).all()


def test_stale_and_unused_memory_never_shows(level: str, rng: np.random.Generator) -> None:
    """Blocks start as NaN; a block is zeroed when its first token comes, and not before."""
    m = Model()
    cache = Cache(m, rng)
    request = cache.add(40)
    rows = [cache.step(level, [(request, t, t + 1)])[0] for t in range(40)]
    check(m, np.vstack(rows), exact(m, request))
    unused = np.setdiff1d(np.arange(cache.blocks), request.blocks)
    assert (cache.k[unused].view(np.uint8) == 0xFF).all()
    assert (cache.v[unused].view(np.uint8) == 0xFF).all()
    assert not np.isnan(kc.value(cache.k[request.blocks])).any()
    assert not np.isnan(kc.value(cache.v[request.blocks])).any()


def test_blocks_before_the_window_may_be_gone(level: str, rng: np.random.Generator) -> None:
    """A group with a sliding window frees old blocks: the table then names block 0 there."""
    m = Model(window=50)
    cache = Cache(m, rng)
    request = cache.add(400)
    (whole,) = cache.step(level, [(request, 0, 400)])
    request.blocks[:9] = [0] * 9  # position 350 sees from 301 on: block 9
    for threads in (1, 2):
        (rows,) = cache.step(level, [(request, 350, 400)], threads)
        assert (rows == whole[350:]).all()


def test_layout_of_the_planes(level: str, rng: np.random.Generator) -> None:
    """The planes are panel32: tokens are the columns of k, the head dim those of v."""
    for dtype in (kc.BF16, kc.F32):
        m = Model(head_dim=48, dtype=dtype)
        cache = Cache(m, rng)
        request = cache.add(20)
        cache.step(level, [(request, 0, 20)])
        block = request.blocks[0]
        for head in range(m.kv_heads):
            k = np.zeros((BLOCK, 48))
            v = np.zeros((BLOCK, 48))
            k[:20] = kc.value(request.k)[:, head * 48 : head * 48 + 48]
            v[:20] = kc.value(request.v)[:, head * 48 : head * 48 + 48]
            for plane, matrix in ((cache.k, k), (cache.v, v.T)):
                got = plane[block].reshape(m.kv_heads, -1)[head]
                assert (got == kc.pack_panels(matrix, dtype).ravel()).all()


def test_skipped_slots_write_nothing(level: str, rng: np.random.Generator) -> None:
    m = Model()
    cache = Cache(m, rng)
    k = kc.stored(rng.standard_normal((3, m.kv_heads * m.head_dim)), m.dtype)
    slots = np.full(3, -1, dtype=np.int32)
    args = kc.KvWriteArgs(
        tokens=3, kv_heads=m.kv_heads, head_dim=m.head_dim, v_head_dim=m.head_dim, dtype=m.dtype,
        k=kc.view(k), v=kc.view(k), k_cache=cache.planes[0], v_cache=cache.planes[1],
        slots=kc.pointer(slots),
    )  # fmt: skip
    kc.run(level, "kv_write", args, threads=2)
    assert (cache.k.view(np.uint8) == 0xFF).all()
    assert (cache.v.view(np.uint8) == 0xFF).all()
