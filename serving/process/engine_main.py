"""The engine process: `python -m ropeway.serving.process.engine_main`, started by the supervisor.

Contract: reads an EngineSetup from its stdin, loads, says Opened and Ready, or Failed, and serves
until it is told to quit or its parent ends. Stdout isn't used; stderr is for faults only. Signals
that stop servers are its parent's affair, which may still have requests to finish.
"""

import gc
import logging
import os
import signal
import sys
import time
from typing import Protocol

import msgspec
import zmq

from ropeway.compiler.errors import InputError, RopewayError
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.loader import Engine, OnOpened, load_engine
from ropeway.runtime.text.assets import TokenizerAssets
from ropeway.serving.process.engine_loop import EngineLoop
from ropeway.serving.process.lifeline import die_with_parent
from ropeway.serving.process.protocol import (
    EngineInfo,
    EngineSetup,
    Failed,
    Opened,
    Ready,
    ToEngine,
)
from ropeway.serving.process.sockets import Inbox, Outbox

_log = logging.getLogger(__name__)


class Load(Protocol):
    """How an engine is loaded: as `load_engine` does."""

    def __call__(self, program: str, options: EngineOptions, opened: OnOpened, /) -> Engine:
        """See load_engine."""
        ...


def main(load: Load = load_engine) -> int:
    """Run the engine; the exit code."""
    began = time.monotonic()
    logging.basicConfig(format="ropeway engine: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer.readline()
    if not told:
        return 0  # the server ended before it knew what to serve
    setup = msgspec.json.decode(told, type=EngineSetup)
    die_with_parent(setup.parent, sys.stdin.fileno())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, setup.outbox)
    try:
        _serve(setup, load, context, outbox, began)
    except RopewayError as error:
        outbox.send(Failed(str(error), isinstance(error, InputError)))
        return error.exit_code
    except Exception as error:
        _log.exception("it ends")
        outbox.send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        outbox.close()
        context.term()
    return 0


def _serve(
    setup: EngineSetup,
    load: Load,
    context: "zmq.Context[zmq.Socket[bytes]]",
    outbox: Outbox,
    began: float,
) -> None:
    def opened(tokenizer: TokenizerAssets | None) -> None:
        outbox.send(Opened(tokenizer))

    inbox: Inbox[ToEngine] = Inbox(context, setup.inbox, ToEngine)
    engine: Engine | None = None
    try:
        engine = load(setup.artifact, setup.options, opened)
        # What was loaded stays: the collector needn't look at it again.
        gc.collect()
        gc.freeze()
        outbox.send(Ready(_info(engine, time.monotonic() - began)))
        EngineLoop(engine.core, inbox, outbox, setup.stream_interval).run()
    finally:
        inbox.close()
        if engine is not None:
            engine.close()


def _info(engine: Engine, load_seconds: float) -> EngineInfo:
    core, model = engine.core, engine.artifact.manifest.model
    memory, stats = engine.device.memory(), core.stats()
    isa = getattr(engine.device, "isa", "")  # where the device has such a thing
    threads = f"{engine.num_threads} thread" + "s" * (engine.num_threads != 1)
    return EngineInfo(
        model=model.name,
        target=f"{engine.device.name}: {engine.why}",
        device=f"{isa}, {threads}" if isa else threads,
        vocab_size=core.capacity.vocab_size,
        max_model_len=core.capacity.max_model_len,
        capacity_tokens=core.capacity.capacity_tokens,
        max_num_seqs=core.scheduler.limits.max_seqs,
        max_num_batched_tokens=core.scheduler.limits.max_tokens,
        block_size=stats.block_size,
        kv_blocks=stats.blocks_total,
        kv_bytes=memory.cache,
        buckets=tuple(bucket.name for bucket in engine.device.buckets),
        eos_ids=core.capacity.eos_ids,
        load_seconds=load_seconds,
        pid=os.getpid(),
    )


if __name__ == "__main__":
    sys.exit(main())
