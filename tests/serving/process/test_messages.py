"""Requests cross the process boundary unchanged; news held back are neither lost nor reordered."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ropeway.runtime.engine.messages import GenerationRequest, TokenLogprobs, Update
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.process.news import HeldNews
from ropeway.serving.process.protocol import Add, EngineSetup, FromEngine, News, ToEngine
from ropeway.serving.process.supervisor import Restarts

IDS = st.integers(0, 2**31 - 1)
FINITE = st.floats(0, 1e300) | st.integers(0, 100)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 1024),
    temperature=FINITE,
    top_k=st.integers(-1, 2**63),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 1e300, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(IDS, st.floats(-100, 100)),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3) | st.just("end"),
    stop_token_ids=st.none() | st.lists(IDS) | st.lists(IDS).map(tuple),
    min_tokens=st.integers(0, 16),
    max_tokens=st.none() | st.integers(16, 2**63),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(-1, 10),
    prompt_logprobs=st.none() | st.integers(0, 1024),
    skip_special_tokens=st.booleans(),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    token=IDS,
    logprob=st.floats(max_value=0, allow_nan=False),  # -inf too: a token that can't be drawn
    rank=st.integers(1, 2**20),
    top_ids=st.lists(IDS, max_size=3),
    top_logprobs=st.lists(st.floats(allow_nan=False), max_size=3),
)
UPDATES = st.builds(
    Update,
    request_id=st.sampled_from("abc"),
    choice=st.integers(0, 2),
    token=st.none() | IDS,
    cached_tokens=st.integers(0, 100),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 9) | st.text(),
    logprobs=st.none() | LOGPROBS,
    prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=3),
)


@given(PARAMS, st.lists(IDS), st.integers(-(2**63), 2**63 - 1), st.text(), st.booleans())
def test_requests_survive(
    params: SamplingParams, prompt: list[int], priority: int, salt: str, confirm: bool
) -> None:
    request = GenerationRequest(
        request_id="7", prompt=tuple(prompt), params=params, priority=priority, salt=salt
    )
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(Add(request, confirm)), type=ToEngine)
    assert found == Add(request, confirm)
    assert type(found.request.params.stop) is type(params.stop) is tuple
    assert found.request.params.greedy == params.greedy
    assert hash(found.request.params.stop_ids) == hash(params.stop_ids)


@given(st.lists(UPDATES, max_size=5))
def test_updates_survive(updates: list[Update]) -> None:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(News(updates)), type=FromEngine)
    assert found == News(updates)


def test_setups_survive() -> None:
    setup = EngineSetup(
        artifact="/a b/é.rope",
        options=EngineOptions(num_threads=2, overlap=False, max_model_len=9),
        parent=1,
        inbox="ipc:///x",
        outbox="ipc:///y",
        stream_interval=math.pi,
    )
    assert msgspec.json.decode(msgspec.json.encode(setup), type=EngineSetup) == setup


STEPS = st.lists(
    st.tuples(
        st.floats(0, 0.02),  # seconds since the step before
        st.integers(0, 80),  # choices that run
        st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.booleans()), max_size=4),
    ),
    max_size=30,
)


@given(STEPS, st.none() | st.sampled_from([0.0, 0.004, 0.05]), st.data())
def test_news_are_neither_lost_nor_reordered_nor_held_for_long(
    steps: list[tuple[float, int, list[tuple[str, int, bool]]]],
    interval: float | None,
    data: st.DataObject,
) -> None:
    held = HeldNews(interval)
    given_, told = [], []
    heard, ended, came = set(), set(), {}
    now = 100.0
    for name in "abcd":
        held.expect(name)
    for pause, running, news in steps:
        now += pause
        updates = []
        for name, choice, ends in news:
            if (name, choice) in ended:
                continue
            updates.append(
                Update(name, choice, len(given_) + len(updates), 0, "stop" if ends else None)
            )
            if ends:
                ended.add((name, choice))
        given_ += updates
        came.update((update.token, now) for update in updates)
        due = held.add(updates, now, running)
        told += due
        for update in updates:
            if update.finish_reason is not None or update.request_id not in heard:
                assert update in due, "a first token or an end waits"
        heard.update(update.request_id for update in updates)
        most = min(0.002 * running, 0.1) if interval is None else interval
        for update in given_:
            if update not in told:
                assert now - came[update.token] < most
    told += held.drain()
    assert len(held) == 0
    assert sorted(u.token for u in told) == [u.token for u in given_]
    for name in "abcd":
        assert [u for u in told if u.request_id == name] == [
            u for u in given_ if u.request_id == name
        ]


def test_engines_that_die_often_are_started_later_and_then_not_at_all() -> None:
    restarts = Restarts(most=3, window=10, first_delay=0.5)
    assert [restarts.after_death(t) for t in (0, 1, 2)] == [0.0, 0.5, 1.0]
    assert restarts.after_death(11.5) == 0.5, "the first two are long ago"
    assert [restarts.after_death(t) for t in (11.6, 11.7)] == [1.0, None]
