"""Sampling worked out exactly and slowly: the oracle of the sampler's tests.

Written from the definitions, on Python floats and sets, without the code under test.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Row:
    """One row's parameters, with vLLM's meanings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def adjusted(logits: list[float], row: Row) -> list[float]:
    """The logits after bias, bans and penalties."""
    y = list(logits)
    for token, bias in row.bias.items():
        y[token] += bias
    for token in row.banned:
        y[token] = -math.inf
    for token in set(row.prompt) | set(row.output):
        if y[token] > 0:
            y[token] /= row.repetition
        else:
            y[token] *= row.repetition
        count = row.output.count(token)
        y[token] -= row.frequency * count + (row.presence if count else 0.0)
    return y


def ranking(logits: list[float]) -> list[int]:
    """Ids from most to least likely, ties by id."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def final_probabilities(logits: list[float], row: Row) -> list[float]:
    """The probability of every token, after the whole pipeline."""
    y = adjusted(logits, row)
    if row.temperature == 0:
        winner = ranking(y)[0]
        return [float(i == winner) for i in range(len(y))]
    y = [x / row.temperature for x in y]
    p = softmax(y)
    if row.min_p:
        limit = row.min_p * max(p)
        y = [x if q >= limit else -math.inf for x, q in zip(y, p, strict=True)]
    if row.top_k:
        kept = set(ranking(y)[: row.top_k])
        y = [x if i in kept else -math.inf for i, x in enumerate(y)]
    p = softmax(y)
    if row.top_p < 1:
        before = 0.0
        kept = set()
        for i in ranking(y):
            if kept and before >= row.top_p:
                break
            kept.add(i)
            before += p[i]
        y = [x if i in kept else -math.inf for i, x in enumerate(y)]
        p = softmax(y)
    return p


def logprobs(logits: list[float]) -> list[float]:
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [x - peak - log_total for x in logits]


def chi_square_limit(degrees: int) -> float:
    """About the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty's approximation)."""
    z = 4.753
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3
