"""/metrics: the engine's totals and the HTTP side's counts in Prometheus' text format."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ropeway.runtime.engine.messages import EngineStats
from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.http.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request, context: ServerContext) -> Response:
    """The totals; without the engine's own while there is no engine."""
    stats: EngineStats | None = None
    with contextlib.suppress(ApiError):
        stats = await context.client.stats()
    labels = {"model_name": context.model_name, "engine": "0"}
    text = await context.client.in_thread(_text, context.metrics, stats, labels)
    return Response(text, headers={"content-type": _TYPE})


def _text(counted: Metrics, stats: EngineStats | None, labels: dict[str, str]) -> bytes:
    # prometheus_client takes 50 ms to import, which only who watches needs.
    from prometheus_client import (  # noqa: PLC0415
        CollectorRegistry,
        ProcessCollector,
        generate_latest,
    )
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Counted(Collector):
        def collect(self) -> "Iterator[Metric]":
            yield from _families(counted, stats, labels)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Counted())
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _families(
    counted: Metrics, stats: EngineStats | None, labels: dict[str, str]
) -> "Iterator[Metric]":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    names, values = list(labels), list(labels.values())
    if stats is not None:
        gauges = {
            "vllm:num_requests_running": ("Requests in the running batch.", stats.running),
            "vllm:num_requests_waiting": ("Requests in the queue.", stats.waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV cache that requests hold, 0 to 1.",
                stats.blocks_used / stats.blocks_total,
            ),
        }
        for name, (about, value) in gauges.items():
            gauge = GaugeMetricFamily(name, about, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            "vllm:prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
            "vllm:num_preemptions": ("Requests sent back to the queue.", stats.preemptions),
            "vllm:prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "vllm:generation_tokens": ("Output tokens.", stats.output_tokens),
        }
        for name, (about, value) in counters.items():
            counter = CounterMetricFamily(name, about, labels=names)
            counter.add_metric(values, value)
            yield counter
    success = CounterMetricFamily(
        "vllm:request_success", "Choices that ended.", labels=[*names, "finished_reason"]
    )
    for reason, count in counted.finished.items():
        success.add_metric([*values, reason], count)
    yield success
    for histogram in counted.histograms:
        yield histogram.family(labels)


ENDPOINTS = [Endpoint("/metrics", "GET", metrics, "Prometheus metrics.", open=True)]
