"""The samplers under test: numpy's, and the native one (installed, else built here)."""

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ropeway.runtime.sampling.native import NativeSampler
from ropeway.runtime.sampling.numpy_sampler import NumpySampler

KERNELS = Path(__file__).parents[2] / "runtime" / "kernels"


def _installed() -> Path | None:
    spec = importlib.util.find_spec("ropeway.runtime._kernels")
    return Path(spec.origin) if spec is not None and spec.origin else None


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = _installed()
    if path is None:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("the kernels aren't built and there is no C++ compiler")
        path = tmp_path_factory.mktemp("sampler") / "sampler.so"
        flags = ["-shared", "-fPIC", "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"]
        sources = [KERNELS / "sampling.cpp", KERNELS / "sampling_loops.cpp"]
        subprocess.run([compiler, *flags, "-o", str(path), *map(str, sources)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(params=["native", "numpy"])
def make_sampler(request: pytest.FixtureRequest) -> Iterator[Callable[[int], object]]:
    made = []

    def make(vocab_size: int) -> object:
        if request.param == "numpy":
            sampler = NumpySampler(vocab_size)
        else:
            sampler = NativeSampler(request.getfixturevalue("library"), vocab_size)
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.close()


@pytest.fixture
def make_native(library: ctypes.CDLL) -> Callable[..., NativeSampler]:
    return lambda vocab_size, isa=-1: NativeSampler(library, vocab_size, isa)
