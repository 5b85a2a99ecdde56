"""Attention: sdpa against torch's, and paged attention against dense attention per request."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.single_op import run_op

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Brute force in float64, one query, head and key at a time. q holds the last tokens."""
    tokens, heads, _ = q.shape
    offset = k.shape[0] - tokens
    out = torch.zeros(tokens, heads, v.shape[2], dtype=torch.float64)
    for i in range(tokens):
        for h in range(heads):
            source = h * k.shape[1] // heads
            position = offset + i
            seen = [j for j in range(position + 1) if not window or j > position - window]
            scores = [float(q[i, h].double() @ k[j, source].double()) * scale for j in seen]
            if softcap:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for j, weight in zip(seen, weights, strict=True):
                out[i, h] += weight / sum(weights) * v[j, source].double()
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_against_torch(causal: bool) -> None:
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 6)
    (got,) = run_op("nn.sdpa", [q, k, v], scale=0.3, causal=causal)
    by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *by_head, is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got, expected[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (3, 0.0), (0, 2.0), (4, 5.0)])
def test_sdpa_with_windows_and_softcap(window: int, softcap: float) -> None:
    q, k, v = torch.randn(7, 6, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 4)
    (got,) = run_op("nn.sdpa", [q, k, v], scale=0.7, window=window, softcap=softcap)
    expected = dense(q, k, v, scale=0.7, window=window, softcap=softcap)
    torch.testing.assert_close(got.double(), expected, **CLOSE)


class Requests:
    """Whole sequences, their blocks, and how many tokens of each are in the cache."""

    def __init__(self, lengths: list[int], block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.q = [torch.randn(n, 4, 8).to(dtype) for n in lengths]
        self.k = [torch.randn(n, 2, 8).to(dtype) for n in lengths]
        self.v = [torch.randn(n, 2, 6).to(dtype) for n in lengths]
        self.done = [0] * len(lengths)
        counts = [-(-n // block_size) for n in lengths]
        pool = iter((torch.randperm(sum(counts)) + 1).tolist())
        self.blocks = [[next(pool) for _ in range(count)] for count in counts]
        shape = (sum(counts) + 1, block_size, 2)
        nan = float("nan")
        self.cache = {
            "k": torch.full((*shape, 8), nan, dtype=dtype),
            "v": torch.full((*shape, 6), nan, dtype=dtype),
        }

    def step(self, takes: dict[int, int], padding: int = 0, **attrs: object) -> dict[int, object]:
        """Runs the next `takes[r]` tokens of each request in one call: outputs by request."""
        order = list(takes)
        starts, slots, lengths = [0], [], []
        for r in order:
            first, last = self.done[r], self.done[r] + takes[r]
            for p in range(first, last):
                slots.append(
                    self.blocks[r][p // self.block_size] * self.block_size + p % self.block_size
                )
            starts.append(starts[-1] + takes[r])
            lengths.append(last)
        span = {r: slice(self.done[r], self.done[r] + takes[r]) for r in order}
        nan = float("nan")
        rows = [
            torch.cat(
                [x[r][span[r]] for r in order]
                + [torch.full((padding, *x[0].shape[1:]), nan, dtype=x[0].dtype)]
            )
            for x in (self.q, self.k, self.v)
        ]
        width = max(len(blocks) for blocks in self.blocks)
        table = torch.zeros(len(order), width, dtype=torch.int32)
        for i, r in enumerate(order):
            table[i, : len(self.blocks[r])] = torch.tensor(self.blocks[r])
        ints = [
            torch.tensor(x, dtype=torch.int32) for x in (slots + [0] * padding, starts, lengths)
        ]
        (out,) = run_op(
            "nn.paged_attention",
            [*rows, self.cache, ints[0], table, ints[1], ints[2]],
            block_size=self.block_size,
            scale=0.4,
            **attrs,
        )
        self.padding_rows = out[starts[-1] :]
        for r in order:
            self.done[r] += takes[r]
        return {r: out[starts[i] : starts[i + 1]] for i, r in enumerate(order)}

    def check(
        self, outputs: dict[int, object], tolerance: dict[str, float], **attrs: object
    ) -> None:
        for r, got in outputs.items():
            end = self.done[r]
            expected = dense(
                self.q[r][end - len(got) : end],
                self.k[r][:end],
                self.v[r][:end],
                scale=0.4,
                **attrs,
            )
            torch.testing.assert_close(got.double(), expected, **tolerance)


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_attention_of_several_requests_in_chunks(block_size: int, window: int) -> None:
    requests = Requests([13, 1, 9, 6], block_size, torch.float32)
    for takes in ({0: 5, 2: 1}, {2: 7, 0: 1, 1: 1}, {3: 6, 0: 3}, {0: 4, 2: 1}):
        outputs = requests.step(takes, window=window)
        requests.check(outputs, CLOSE, window=window)
    assert requests.done == [13, 1, 9, 6]


def test_softcap_and_bf16_read_back_as_stored() -> None:
    requests = Requests([9, 5], 4, torch.bfloat16)
    for takes in ({0: 4}, {0: 1, 1: 5}, {0: 4}):
        outputs = requests.step(takes, softcap=3.0)
        requests.check(outputs, {"rtol": 1e-2, "atol": 4e-3}, softcap=3.0)
        assert all(out.dtype == torch.bfloat16 for out in outputs.values())


def test_chunks_of_any_size_give_the_same_bits() -> None:
    torch.manual_seed(1)
    whole = Requests([11], 4, torch.float32).step({0: 11})[0]
    torch.manual_seed(1)
    requests = Requests([11], 4, torch.float32)
    parts = [requests.step({0: n})[0] for n in (3, 1, 7)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-7)


def test_padding_rows_change_nothing_and_are_not_written() -> None:
    requests = Requests([5, 3], 4, torch.float32)
    outputs = requests.step({0: 5, 1: 3}, padding=3)
    requests.check(outputs, CLOSE)
    assert requests.padding_rows.isnan().all()
    assert requests.cache["k"][0].isnan().all()  # block 0 is null, and stays unwritten


def test_the_cache_holds_each_token_in_its_slot() -> None:
    requests = Requests([6], 4, torch.float32)
    requests.step({0: 6})
    first, second = requests.blocks[0]
    assert torch.equal(requests.cache["k"][first], requests.k[0][:4])
    assert torch.equal(requests.cache["v"][second, :2], requests.v[0][4:])
    assert requests.cache["v"][second, 2:].isnan().all()
