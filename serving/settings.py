"""How a server is set up: one value, made by the command line, read everywhere."""

from typing import Literal

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about the HTTP side. Sizes in bytes, times in seconds; 0 means no limit where it
    says so."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_name: tuple[str, ...] = ()  # empty: the model's own name
    api_keys: tuple[str, ...] = ()  # empty: open to everybody who reaches the port
    cors_origins: tuple[str, ...] = ()  # empty: CORS is off
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    request_timeout: float = 0.0  # 0: no deadline
    drain_timeout: float = 30.0
    max_queued_requests: int = 512  # requests beyond the running ones; more get a 429
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allow_special_tokens: bool = False
    chat_template: str | None = None  # text of a template that replaces the model's
    restart: bool = False  # start another engine when it dies
    log_requests: bool = False
    log_json: bool = False
    stream_interval: float | None = None  # least seconds between a stream's chunks; None: by load
