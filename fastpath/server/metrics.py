"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastpath.talk.events import Finish
from fastpath.talk.exchange import Exchange

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self, exchange: Exchange):
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(exchange))
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self.queue = histogram("twinpath_queue_seconds", "Until a request was begun.")
        self.first = histogram("twinpath_first_token_seconds", "Until its first token.")
        self.between = histogram("twinpath_between_tokens_seconds", "From one piece of text to the next.")
        self.requests = Counter(
            "twinpath_requests", "Answers by how they ended.", ["reason"], registry=self._registry
        )
        self.prompt = Counter("twinpath_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self.cached = Counter(
            "twinpath_cached_tokens", "Of these, found in the prefix cache.", registry=self._registry
        )
        self.generated = Counter("twinpath_generated_tokens", "Tokens of answers.", registry=self._registry)

    def finished(self, end: Finish) -> None:
        usage = end.usage
        self.requests.labels(end.reason).inc()
        self.prompt.inc(usage.prompt)
        self.cached.inc(usage.cached)
        self.generated.inc(usage.generated)
        self.queue.observe(usage.queue_s)
        self.first.observe(usage.first_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine:
    """What is asked when somebody wants to know."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def collect(self) -> Iterator[Metric]:
        engine = self._exchange.worker.engine
        yield GaugeMetricFamily("twinpath_running", "Requests that are computed.", engine.n_running)
        yield GaugeMetricFamily("twinpath_waiting", "Requests that wait.", engine.n_waiting)
        pages = GaugeMetricFamily("twinpath_pages", "Pages of keys and values.", labels=["layers", "state"])
        for kind, pool in engine.lanes.cache.pools.items():
            pages.add_metric([kind, "free"], pool.n_free)
            pages.add_metric([kind, "all"], pool.n)
        yield pages
        counters = engine.prefix_counters
        if counters is not None:
            for name in ("lookups", "hits"):
                if hasattr(counters, name):
                    value = getattr(counters, name)
                    yield CounterMetricFamily(f"twinpath_prefix_{name}", "Of the prefix cache.", value)
