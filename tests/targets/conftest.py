"""Loaded CPU devices of tiny decoders, made once for each shape."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cpu_programs import WIDE, Compiled, compile_decoder
from support.decoder_text import Shape

from ropeway.compiler.artifact import Artifact
from ropeway.runtime.devices.cpu.device import CpuDevice

Loader = Callable[..., CpuDevice]


@pytest.fixture(scope="session")
def programs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Shape], tuple[Compiled, Artifact]]:
    """programs(shape): the compiled decoder and its artifact."""
    made: dict[Shape, tuple[Compiled, Artifact]] = {}
    folder: Path = tmp_path_factory.mktemp("programs")

    def build(shape: Shape) -> tuple[Compiled, Artifact]:
        if shape not in made:
            compiled = compile_decoder(shape, seed=len(made), buckets=WIDE)
            made[shape] = compiled, compiled.write(folder / f"{len(made)}.rope")
        return made[shape]

    return build


@pytest.fixture
def load(programs) -> Iterator[Loader]:
    """load(shape, threads=1, blocks=40, isa=None): a device with its KV blocks allocated."""
    opened: list[CpuDevice] = []

    def loader(
        shape: Shape, threads: int = 1, blocks: int = 40, isa: str | None = None
    ) -> CpuDevice:
        device = CpuDevice(isa)
        opened.append(device)
        device.load(programs(shape)[1], threads)
        device.allocate(blocks)
        return device

    yield loader
    for device in opened:
        device.close()
