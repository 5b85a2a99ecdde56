"""The server under load: where it is, what it says of itself, and the bytes of its requests."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ropeway.compiler.errors import InputError, RunError
from ropeway.serving.load.workload import WORDS, Ask

PATIENCE = 30.0  # seconds for an answer that needs no model


@dataclass(frozen=True)
class Target:
    """An OpenAI server and how to ask it. `path` is a prefix such as "/v1"."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str = ""

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> "Target":
        """From a base URL, with or without /v1; raises InputError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url}: {error}: give a URL such as http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url}: is no http URL: give one such as http://127.0.0.1:8000")
        if not api_key.isprintable() or not api_key.isascii():
            raise InputError("--api-key: holds characters that a header can't: give it as one word")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), path, tls, api_key)

    def first_model(self) -> tuple[str, int | None]:
        """The first model that the server names, and its longest context where that is said."""
        answer = self._ask("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise RunError(f"{self.address}/v1/models names no model: give --model")
        length = models[0].get("max_model_len")
        return str(models[0]["id"]), length if isinstance(length, int) else None

    def word_ids(self, model: str) -> list[int]:
        """Token ids of common words, by the server's /tokenize; raises RunError without one."""
        body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
        answer = self._ask("POST", "/tokenize", body)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not ids or not all(isinstance(token, int) for token in ids):
            raise RunError(f"{self.address}/tokenize gave no token ids: leave out --token-ids")
        return sorted(set(ids))

    @property
    def address(self) -> str:
        """The base URL."""
        return f"{'https' if self.tls else 'http'}://{self._host_header}{self.path}"

    def request(self, ask: Ask, model: str, *, chat: bool, fields: dict[str, Any]) -> bytes:
        """The bytes of a streamed request; `fields` go into its body."""
        endpoint = "/v1/chat/completions" if chat else "/v1/completions"
        body = {
            "model": model,
            "messages" if chat else "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **ask.extra,
        }
        payload = msgspec.json.encode(body)
        head = [
            f"POST {self.path}{endpoint} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self._headers.items()),
            f"Content-Length: {len(payload)}",
        ]
        return "\r\n".join([*head, "", ""]).encode("ascii") + payload

    @property
    def _host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Host": self._host_header, "Content-Type": "application/json", **key}

    def _ask(self, method: str, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=PATIENCE)
        where = f"{self.address}{endpoint}"
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, self.path + endpoint, payload, self._headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise RunError(
                f"{where} can't be reached: {error or type(error).__name__}: is the server running?"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            said = text[:200].decode(errors="replace")
            raise RunError(f"{where} answered {answer.status}: {said}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise RunError(f"{where} didn't answer with JSON: is it an OpenAI server?") from error
