"""One engine process and the sockets to it, as the HTTP process holds them."""

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ropeway.runtime.engine_options import EngineOptions
from ropeway.serving.process.prestart import ENGINE_COMMAND
from ropeway.serving.process.protocol import EngineSetup, FromEngine, Quit
from ropeway.serving.process.sockets import Inbox, Outbox, SocketFolder
from ropeway.serving.process.supervisor import EngineProcess

_log = logging.getLogger(__name__)

# A dead engine's last messages may still be on their way through the kernel.
_LAST_WORDS = 0.05  # seconds


class EngineLink:
    """Made with its process; `attach` begins to listen, `close` ends both."""

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        options: EngineOptions,
        *,
        context: "zmq.Context[Any]",
        folder: SocketFolder,
        stream_interval: float | None,
        command: Sequence[str] = ENGINE_COMMAND,
        child: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Starts the process at once, unless `child` was. Raises RunError."""
        self._context = context
        self._to_engine = folder.endpoint()
        from_engine = folder.endpoint()
        self._inbox: Inbox[FromEngine] = Inbox(context, from_engine, FromEngine)
        self._outbox: Outbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._later: asyncio.TimerHandle | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        setup = EngineSetup(
            artifact=str(Path(artifact).absolute()),
            options=options,
            parent=os.getpid(),
            inbox=self._to_engine,
            outbox=from_engine,
            stream_interval=stream_interval,
        )
        try:
            self.process = EngineProcess(setup, command, child)
        except BaseException:
            self._inbox.close()
            raise

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[], None],
    ) -> None:
        """Hand over each message in `loop`, and the process's end once, after its last message."""
        self._loop = loop
        self._on_message = on_message

        def ended() -> None:
            self._later = loop.call_later(_LAST_WORDS, finish)

        def finish() -> None:
            self._take()
            on_end()

        loop.add_reader(self._inbox.descriptor, self._take)
        loop.call_soon(self._take)  # the descriptor tells of changes only
        self.process.watch(loop, ended)

    def _take(self) -> None:
        if self._on_message is None:
            return
        for message in self._inbox.take():
            try:
                self._on_message(message)
            except Exception:  # one message that can't be handled mustn't keep back the others
                _log.exception("a message of the engine's")

    @property
    def outbox(self) -> Outbox:
        """Where to speak to the engine; for once it has said Ready, or it can't be connected to."""
        if self._outbox is None:
            self._outbox = Outbox(self._context, self._to_engine)
        return self._outbox

    async def quit(self, patience: float) -> None:
        """Ask it to end, wait for that up to `patience` seconds, then make sure."""
        if self._outbox is not None:
            self._outbox.send(Quit())
            deadline = asyncio.get_running_loop().time() + patience
            while self.process.alive and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
        self.close()

    def close(self) -> None:
        """End the process now and release the sockets; a second call does nothing."""
        self._on_message = None
        if self._later is not None:
            self._later.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.descriptor)
            self._loop = None
            self._inbox.close()
        self.process.kill()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
