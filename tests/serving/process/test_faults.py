"""Whatever dies: requests end, at once, and nothing is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import faulty_engine
from support.engine_clients import READY, stats_when, submit, with_client
from support.server import is_running, wait_until
from support.tiny_checkpoint import byte_prompt

from ropeway.compiler.errors import InputError, RunError
from ropeway.runtime.engine_options import EngineOptions
from ropeway.serving.errors import ApiError
from ropeway.serving.process.client import EngineClient
from ropeway.serving.process.generation import EngineGone, Generation
from ropeway.serving.process.sockets import SocketFolder
from ropeway.serving.settings import ServerSettings

PROMPT = byte_prompt(30)
AGAIN = ServerSettings(restart=True)
_PARENT = """
import asyncio, json, os, sys
from ropeway.serving.process.client import EngineClient
from ropeway.runtime.engine_options import EngineOptions
from ropeway.serving.settings import ServerSettings

async def main():
    client = EngineClient(sys.argv[1], EngineOptions(num_threads=1), ServerSettings())
    await client.start()
    if sys.argv[2] == "ready":
        await client.wait_ready(60)
    [folder] = [f for f in os.listdir(os.environ["XDG_RUNTIME_DIR"])]
    print(json.dumps([client._keeper.link.process.pid, folder]), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets' folders are made; pytest's own folders have too long names for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)


async def endless(client: EngineClient, *, streaming: bool = True) -> Generation:
    """A request that runs for long: 400 tokens."""
    generation = await submit(
        client, PROMPT, streaming=streaming, max_tokens=400, ignore_eos=True, n=2
    )
    await stats_when(client, lambda stats: stats.running == 2)
    return generation


@pytest.mark.parametrize("restart", [False, True])
def test_a_killed_engine_ends_every_request_at_once(tiny_artifact: Path, restart: bool) -> None:
    async def work(client: EngineClient) -> None:
        streamed = await submit(client, [*faulty_engine.SLOW, *PROMPT], max_tokens=400)
        whole = await submit(client, PROMPT, max_tokens=400, ignore_eos=True, streaming=False)
        assert await streamed.news()
        waiting = asyncio.gather(whole.output(), client.stats(), return_exceptions=True)
        first = client.info.pid
        os.kill(first, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(EngineGone, match="SIGKILL") as caught:
            while await streamed.news():
                pass
        assert caught.value.status == 503
        assert isinstance((await waiting)[0], EngineGone)
        assert time.monotonic() - died < 2
        assert client.open_requests == client.open_choices == 0
        assert client.trouble is not None
        if not restart:
            assert client.state == "dead"
            with pytest.raises(ApiError, match="SIGKILL") as refused:
                await submit(client, PROMPT)
            assert refused.value.status == 503
            return
        assert client.state == "restarting"
        with pytest.raises(ApiError, match="another engine is loading"):
            await submit(client, PROMPT)
        await client.wait_ready(READY)
        assert time.monotonic() - died < 10, "3 s on a quiet machine"
        assert client.trouble is None
        assert client.info.pid != first
        output = await (await submit(client, PROMPT, max_tokens=5, ignore_eos=True)).output()
        assert len(output.outputs[0].token_ids) == 5

    settings = ServerSettings(restart=restart)
    with_client(tiny_artifact, work, settings=settings, command=faulty_engine.command())


@pytest.mark.parametrize("moment", ["loading", "ready"])
def test_a_killed_parent_leaves_no_process_and_no_folder(
    tiny_artifact: Path, base: Path, moment: str
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tiny_artifact), moment],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    engine, folder = json.loads(parent.stdout.readline())
    assert is_running(engine)
    assert (base / folder).stat().st_mode & 0o777 == 0o700
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(engine), 5, "the engine's end")
    following = SocketFolder(base)
    assert os.listdir(base) == [following.path.name], "the dead server's folder stays"
    following.close()
    assert not os.listdir(base)


def test_a_live_servers_folder_is_left_alone(tmp_path: Path) -> None:
    first = SocketFolder(tmp_path)
    second = SocketFolder(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    first.close()
    first.close()
    assert os.listdir(tmp_path) == [second.path.name]
    second.close()


def test_closing_ends_process_requests_and_folder(tiny_artifact: Path, base: Path) -> None:
    async def work(client: EngineClient) -> int:
        generation = await endless(client)
        pid = client.info.pid
        await client.close()
        with pytest.raises(EngineGone, match="server stops"):
            await generation.output()
        await client.close()
        return pid

    assert not is_running(with_client(tiny_artifact, work))
    assert os.listdir(base) == []


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.rope.*doesn't exist"):
        with_client(tmp_path / "nothing.rope", lambda client: client.stats())


def test_options_that_do_not_fit_are_the_engines_own_words(tiny_artifact: Path) -> None:
    with pytest.raises(InputError, match="max_model_len=513: the program was compiled for 512"):
        with_client(tiny_artifact, lambda client: client.stats(), max_model_len=513)


def test_an_engine_that_cannot_be_started_says_why(tiny_artifact: Path) -> None:
    with pytest.raises(RunError, match="can't be started"):
        with_client(tiny_artifact, lambda c: c.stats(), command=("/no/such/python",))


def test_an_engine_that_ends_without_a_word(tiny_artifact: Path) -> None:
    with pytest.raises(RunError, match="exit code 7"):
        with_client(
            tiny_artifact,
            lambda client: client.stats(),
            settings=AGAIN,
            command=(sys.executable, "-c", "raise SystemExit(7)"),
        )


@pytest.mark.parametrize(
    ("fault", "words"),
    [(faulty_engine.FAIL, "the device broke"), (faulty_engine.BUG, "nobody thought of this")],
)
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    tiny_artifact: Path, fault: tuple[int, int], words: str
) -> None:
    async def work(client: EngineClient) -> None:
        pid = client.info.pid
        for _ in range(4):  # more than would be too many in a row
            neighbour = await endless(client)
            broken = await submit(client, [*fault, *PROMPT])
            for generation in (broken, neighbour):
                with pytest.raises(ApiError, match=words) as caught:
                    while await generation.news():
                        pass
                assert caught.value.status == 500
            good = await submit(client, PROMPT, max_tokens=5, ignore_eos=True)
            assert len((await good.output()).outputs[0].token_ids) == 5
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert client.info.pid == pid
        assert client.trouble is None

    with_client(tiny_artifact, work, command=faulty_engine.command())


def test_a_device_that_only_fails_is_given_up_and_replaced(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        pid = client.info.pid
        for _ in range(3):
            generation = await submit(client, [*faulty_engine.FAIL, *PROMPT])
            with pytest.raises(ApiError, match="the device broke"):
                await generation.output()
        async with asyncio.timeout(5):
            while client.state == "ready":
                await asyncio.sleep(0.01)
        assert client.state == "restarting"
        assert "3 steps in a row failed" in (client.trouble or "")
        await client.wait_ready(READY)
        assert client.info.pid != pid

    with_client(tiny_artifact, work, settings=AGAIN, command=faulty_engine.command())


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_is_given_up(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        deaths = 0
        while client.state != "dead":
            generation = await submit(client, [*faulty_engine.DIE])
            with pytest.raises(EngineGone):
                await generation.output()
            deaths += 1
            if client.state == "restarting":
                await client.wait_ready(READY)
        assert deaths == 6
        assert "died more than 5 times" in (client.trouble or "")

    with_client(tiny_artifact, work, settings=AGAIN, command=faulty_engine.command())


def test_an_engine_that_hangs_is_said_to(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        good = await submit(client, PROMPT, max_tokens=5)
        await good.output()
        await asyncio.sleep(0.6)
        assert client.trouble is None, "idle isn't hung"
        await submit(client, [*faulty_engine.HANG])
        assert client.trouble is None
        await asyncio.sleep(0.7)
        assert "no progress" in (client.trouble or "")

    command = faulty_engine.command()
    with_client(tiny_artifact, work, command=command, hang_seconds=0.5)


def test_the_engine_ignores_what_stops_servers(tiny_artifact: Path) -> None:
    """A service manager signals every process; the server still wants to finish its requests."""

    async def work(client: EngineClient) -> None:
        generation = await endless(client)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(client.info.pid, number)
        output = await generation.output()
        assert [len(choice.token_ids) for choice in output.outputs] == [400, 400]

    with_client(tiny_artifact, work)


def test_a_launch_that_fails_leaves_no_folder(tiny_artifact: Path, base: Path) -> None:
    client = EngineClient(
        tiny_artifact, EngineOptions(), ServerSettings(), command=("/no/such/python",)
    )
    with pytest.raises(RunError):
        client.launch()
    assert os.listdir(base) == []
