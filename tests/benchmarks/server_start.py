"""How long `ropeway serve ARTIFACT` takes from the creation of its process to /health 200.

.venv/bin/python tests/benchmarks/server_start.py smollm2.rope [RUNS]
"""

import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("ropeway")
_LIMIT = 30.0  # seconds


def _healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def start_seconds(artifact: str) -> float:
    """One start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [str(PROGRAM), "serve", artifact, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not _healthy(port):
            if process.poll() is not None or time.perf_counter() - began > _LIMIT:
                sys.exit(f"no server came up: {' '.join(command)}")
            time.sleep(0.004)
        return time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(_LIMIT)


if __name__ == "__main__":
    runs = [start_seconds(sys.argv[1]) for _ in range(int((*sys.argv, 5)[2]))]
    print(
        f"start to healthy: median {statistics.median(runs):.3f} s, of", *map("{:.3f}".format, runs)
    )
