"""An OpenAI server on a real socket that answers by a script: what is sent, and when."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
HANG_UP = None
"""In a script: close the connection."""

Script = list[tuple[float | Callable[[], bool], bytes | None]]
"""Seconds to wait, or what must have come true, and then bytes to send."""


def framed(text: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of /v1/completions."""
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage_chunk(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the counts."""
    details = {"cached_tokens": cached}
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }
    return {"id": "cmpl-1", "choices": [], "usage": usage}


def stream(
    first: float | Callable[[], bool], gaps: list[float], prompt: int = 7, cached: int = 0
) -> Script:
    """An answer whose first text comes after `first`, and the others after `gaps`, in seconds."""
    script: Script = [(0.0, HEAD)]
    script += [(wait, framed(event(text_chunk("word ")))) for wait in (first, *gaps)]
    last = event(text_chunk("", "length")) + event(usage_chunk(prompt, len(gaps) + 1, cached))
    script.append((0.0, framed(last + event("[DONE]")) + framed(b"")))
    return script


def refusal(status: int, message: str) -> Script:
    """An error object."""
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}})
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/json\r\n"
    return [(0.0, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())]


@dataclass
class Asked:
    """A request that came: its moment by time.perf_counter, path, headers, JSON body."""

    at: float
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeServer:
    """What came so far; `answer` decides what goes back."""

    answer: Callable[[int, Asked], Script]
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None:
                self.asked.append(asked)
                for wait, data in self._script(asked):
                    if callable(wait):
                        while not wait():
                            await asyncio.sleep(0.005)
                    elif wait:
                        await asyncio.sleep(wait)
                    if data is HANG_UP:
                        return
                    writer.write(data)
                    await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    def _script(self, asked: Asked) -> Script:
        if asked.path == "/v1/models":
            body = json.dumps({"data": [{"id": "fake", "max_model_len": 512}]})
        elif asked.path == "/tokenize":
            body = json.dumps({"tokens": [11, 12, 13, 14]})
        else:
            generated = [one for one in self.asked if one.path.startswith("/v1/c")]
            return self.answer(len(generated) - 1, asked)
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        return [(0.0, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())]


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        at = time.perf_counter()
        first, *lines = head.decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Asked(at, first.split()[1], headers, json.loads(body) if body else None)


@contextmanager
def fake_server(answer: Callable[[int, Asked], Script]) -> Iterator[FakeServer]:
    """A server in a thread of its own; `answer` gets the number of the request, from 0."""
    state = FakeServer(answer)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
        state.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(10)
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
