"""The sockets between the two processes: a private folder, random names, typed messages.

Contract: only the owner reaches an endpoint, for its folder is 0700. A folder whose server died
without removing it is removed by the next server that starts.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ropeway.compiler.errors import RunError

_PREFIX = "ropeway-serve-"
_LOCK = "lock"
_LONGEST = 107  # bytes of a Unix socket's path
_NAME_BYTES = 12
_OWN_LENGTH = len(f"/{_PREFIX}12345678/") + 2 * _NAME_BYTES
_LINGER = 1000  # milliseconds that what was said last may take to leave

T = TypeVar("T")


class SocketFolder:
    """A fresh folder that only this user can enter, removed by `close`."""

    def __init__(self, base: Path | None = None) -> None:
        """`base` None takes the user's runtime folder, else the one for temporary files.

        Raises RunError when no folder can be made there.
        """
        base = base or _base()
        _remove_stale(base)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            # Held as long as this process lives, so that others can tell a dead server's folder.
            self._lock = (self.path / _LOCK).open("x")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"{base}: no folder for the server's sockets can be made there "
                f"({error.strerror}): set XDG_RUNTIME_DIR or TMPDIR to one that is yours"
            ) from error

    def endpoint(self) -> str:
        """A new endpoint that nobody can guess."""
        return f"ipc://{self.path / secrets.token_hex(_NAME_BYTES)}"

    def close(self) -> None:
        """Remove it; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _base() -> Path:
    """The first of the usual folders that may be written and whose name is short enough."""
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    usable = [p for p in places if os.path.isdir(p) and os.access(p, os.W_OK | os.X_OK)]
    for place in usable:
        if len(os.fsencode(place)) + _OWN_LENGTH <= _LONGEST:
            return Path(place)
    raise RunError(
        f"no folder for the server's sockets: of {', '.join(filter(None, places))} none can be "
        f"written and has a name of at most {_LONGEST - _OWN_LENGTH} bytes: set XDG_RUNTIME_DIR "
        f"to one that is so"
    )


def _remove_stale(base: Path) -> None:
    """Folders of servers that are gone. One without a lock is being made just now: left alone."""
    for folder in base.glob(_PREFIX + "*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, or gone meanwhile


class Outbox:
    """Sends messages; never waits, however slow the other end is."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.linger = _LINGER
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct) -> bytes:
        """What `send_encoded` takes. Raises OverflowError or UnicodeEncodeError for values that
        no message can hold."""
        return self._encoder.encode(message)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Queue what `encode` returned."""
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, within a second, and close."""
        self._socket.close()


class Inbox(Generic[T]):
    """Receives messages of one union of structs."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    @property
    def descriptor(self) -> int:
        """Becomes readable when messages may have come; `take` until there are none then."""
        return int(self.socket.getsockopt(zmq.FD))

    def wait(self, other: int) -> None:
        """Return once there is a message, or the descriptor `other` is readable."""
        if other not in self._poller:
            self._poller.register(other, zmq.POLLIN)
        self._poller.poll()

    def take(self) -> Iterator[T]:
        """Every message that is there now."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            yield self._decoder.decode(self.socket.recv())

    def close(self) -> None:
        """Close; what wasn't taken is lost."""
        self.socket.close()
