"""Counters of the HTTP side."""


class Metrics:
    """Placeholder until the engine's client reports what ended."""
