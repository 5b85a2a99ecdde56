"""LLM over real artifacts of tiny decoders, against the module that no pass touched."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cpu_programs import FAST, Compiled, compile_decoder

from ropeway.compiler.errors import ArtifactError, InputError, RequestError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
TARGETS = ["cpu", "reference"]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def decoder(target: str) -> Compiled:
    return compile_decoder(FAST, target=target)


@pytest.fixture(scope="module")
def path(decoder: Compiled, target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("artifact") / f"{target}.rope"
    decoder.write(place, target)
    return place


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, FAST.vocab, length).tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_greedy_tokens_and_logprobs_equal_the_untouched_module(
    path: Path, decoder: Compiled
) -> None:
    prompts = [prompt(n) for n in (1, 31, 32, 33, 70)]
    with LLM(path, max_prefill_chunk=24, num_threads=2) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for ids, output in zip(prompts, outputs, strict=True):
        choice = output.outputs[0]
        rows = decoder.oracle([*ids, *choice.token_ids])
        assert choice.token_ids == rows[len(ids) - 1 : -1].argmax(axis=1).tolist()
        assert choice.logprobs is not None and output.prompt_logprobs is not None
        entries = [*output.prompt_logprobs[1:], *choice.logprobs]
        for at, (token, entry) in enumerate(
            zip([*ids, *choice.token_ids][1:], entries, strict=True)
        ):
            assert entry is not None
            want = log_softmax(rows[at])
            assert entry[token].logprob == pytest.approx(want[token], abs=2e-4)
            best = int(want.argmax())
            assert entry[best].rank == 1


@pytest.mark.parametrize("length", [31, 32, 33, 64])
def test_prefix_hits_change_no_bit(path: Path, target: str, length: int) -> None:
    if target == "reference":
        pytest.skip("torch's matmuls aren't batch invariant; the contract is the cpu target's")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, logprobs=1, n=2)
    with LLM(path) as llm:
        first = llm.generate(prompt(length), params)[0]
        for _ in range(9):
            again = llm.generate(prompt(length), params)[0]
            assert again.outputs == first.outputs
            assert again.num_cached_tokens == length // 32 * 32 - (length % 32 == 0)


def test_a_program_in_memory_runs_like_its_artifact(path: Path) -> None:
    class Unsaved:
        """A program that was never saved; `save` copies the artifact's files."""

        artifact = None

        def save(self, place: Path) -> None:
            subprocess.run(["cp", "-r", path, place], check=True)

    with LLM(Unsaved()) as llm:
        scratch = llm.artifact.path
        [one] = llm.generate(prompt(9), GREEDY)
        assert scratch.exists()
    assert not scratch.exists()
    with LLM(path) as llm:
        assert llm.generate(prompt(9), GREEDY) == [one]


def test_several_live_side_by_side(path: Path) -> None:
    with LLM(path) as one, LLM(path, max_num_seqs=2) as two:
        streams = [one.stream(prompt(9), GREEDY), two.stream(prompt(9), GREEDY)]
        pairs = zip(*streams, strict=True)
        assert all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_batched_tokens": 65}, "at most 64"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory: 1000 bytes hold 0 KV blocks"),
        ({"kv_cache_memory": -5}, "kv_cache_memory"),
        ({"verify": "no"}, "verify"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    path: Path, options: dict[str, int], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        LLM(path, **options)


def test_a_missing_artifact_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="doesn't exist"):
        LLM(tmp_path / "none.rope")


def test_a_cache_for_fewer_tokens_than_the_request_needs(path: Path) -> None:
    with LLM(path) as llm:
        block_bytes = llm._engine.device.cache_layout.block_bytes
        tokens = llm._engine.device.cache_layout.block_size
    with LLM(path, kv_cache_memory=2 * block_bytes) as llm:
        assert llm.stats().blocks_total == 1
        with pytest.raises(RequestError, match="raise kv_cache_memory"):
            llm.generate(prompt(tokens), SamplingParams(max_tokens=2))
        [output] = llm.generate(prompt(5), SamplingParams(max_tokens=None, temperature=0))
        assert len(output.outputs[0].token_ids) == tokens + 1 - 5


def test_serving_a_cpu_artifact_imports_no_compiler_library(path: Path, target: str) -> None:
    if target != "cpu":
        pytest.skip("the reference target runs on torch")
    code = (
        "import sys; from ropeway.runtime.llm import LLM\n"
        f"llm = LLM({str(path)!r}); llm.generate([1, 2]); llm.close()\n"
        "print([m for m in ('torch', 'sympy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
