"""llama.cpp's server, asked over loopback HTTP: bf16 weights, a slot for every request.

This process is only the client; start-up time and memory are the server's. One client thread a
request, as a user of the server would have.
"""

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from .serving import Settings, die_with_parent, serve

_HOST = "127.0.0.1"
_POLL_S = 0.01
_SLOT_STEP = 256  # a slot's tokens are rounded up to this


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


class LlamaCpp:
    """A llama-server of our own."""

    def __init__(self, settings: Settings) -> None:
        self._port = _free_port()
        slot = -(-settings.longest // _SLOT_STEP) * _SLOT_STEP
        threads = str(settings.threads)
        command = [settings.options["program"], "--model", settings.model]
        command += ["--host", _HOST, "--port", str(self._port), "--no-webui"]
        command += ["--log-verbosity", "1"]  # errors
        command += ["--threads", threads, "--threads-batch", threads]
        command += ["--parallel", str(settings.requests)]
        command += ["--ctx-size", str(slot * settings.requests)]
        self.created: float | None = time.monotonic()
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (no other thread runs yet)
        )
        self.process = self._server.pid
        self._clients = ThreadPoolExecutor(settings.requests)
        while not self._healthy():
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self._server.returncode}")
            time.sleep(_POLL_S)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """See Engine."""
        return list(self._clients.map(lambda prompt: self._complete(prompt, new), prompts))

    def close(self) -> None:
        """Ends the server."""
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health", None)[0] == http.client.OK
        except OSError:
            return False

    def _complete(self, prompt: list[int], new: int) -> list[int]:
        body = {
            "prompt": prompt,
            "n_predict": new,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        status, answer = self._request("POST", "/completion", json.dumps(body))
        if status != http.client.OK:
            raise RuntimeError(f"llama-server answered {status}: {answer[:200]!r}")
        return json.loads(answer)["tokens"]

    def _request(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


if __name__ == "__main__":
    serve(LlamaCpp)
