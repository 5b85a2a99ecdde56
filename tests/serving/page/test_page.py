"""The page in headless Chromium, before a server whose answers are scripted."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Page, browser_page, find_chromium
from support.page_server import PageServer, delta, ending, page_server, refused, spoken

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install the package chromium, or set CHROMIUM"
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """One browser for all tests."""
    assert CHROMIUM is not None
    with browser_page(CHROMIUM) as page:
        yield page


@pytest.fixture
def server() -> Iterator[PageServer]:
    """A server of this test alone: its port makes an origin for which nothing is stored yet."""
    with page_server() as running:
        yield running


@pytest.fixture
def page(tab: Page, server: PageServer) -> Iterator[Page]:
    """The page, loaded at the size of a desktop; the console must stay silent."""
    tab.resize(1280, 800)
    tab.problems.clear()
    tab.requested.clear()
    tab.open(server.url)
    tab.wait("document.querySelector('#state-text').textContent === 'ready'")
    yield tab
    assert tab.problems == []
    assert {url for url in tab.requested if not url.startswith(server.url)} == set()


def say(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def answered(page: Page, count: int) -> None:
    """Until so many answers have ended."""
    page.wait(f"document.querySelectorAll('.foot').length === {count}")


def last(page: Page, selector: str) -> str:
    """Text of the last element that matches."""
    every = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return str(page.value(f"{every}.at(-1)?.textContent"))


def test_it_loads_and_needs_nothing_from_elsewhere(page: Page, server: PageServer) -> None:
    assert page.text("#model-name") == "tiny-model"
    assert page.value("document.title") == "Ropeway"
    policy = page.value("fetch('/').then(a => a.headers.get('content-security-policy'))")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.value("document.activeElement.id") == "prompt"
    # Every control has a name that a screen reader can say.
    unnamed = page.value(
        "[...document.querySelectorAll('button, input, textarea')].filter(one => "
        "!(one.labels?.[0]?.textContent.trim() || one.textContent.trim()))"
        ".map(one => one.outerHTML)"
    )
    assert unnamed == []


def test_an_answer_streams_and_says_how_fast_it_was(page: Page, server: PageServer) -> None:
    server.answers.append(spoken("Up ", "we ", "go", pause=0.15))
    say(page, "Where to?")
    page.wait("document.querySelector('.answer .text')?.textContent === 'Up '")
    assert page.value("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
    assert page.value("document.querySelector('#stop').hidden") is False
    answered(page, 1)
    assert last(page, ".answer .text") == "Up we go"
    tokens, speed, first = page.value(
        "[...document.querySelectorAll('.fact')].map(one => one.textContent)"
    )
    assert tokens == "3 tokens"
    assert 3 < float(speed.removesuffix(" tokens/s")) < 7  # one in 150 ms
    assert 150 <= int(first.removeprefix("first after ").removesuffix(" ms")) < 450
    assert page.value("document.querySelector('#send').hidden") is False
    assert page.value("document.querySelector('#welcome').hidden") is True


def test_a_conversation_goes_on_and_starts_over(page: Page, server: PageServer) -> None:
    server.answers += [spoken("one"), spoken("two"), spoken("three")]
    say(page, "first")
    answered(page, 1)
    page.click("#prompt")
    page.type("a line")
    page.press("Enter", shift=True)
    page.type("and another")
    page.press("Enter")
    answered(page, 2)
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "a line\nand another"},
    ]
    page.click("#new-chat")
    assert page.value("document.querySelector('#log').childElementCount") == 0
    assert page.value("document.activeElement.id") == "prompt"
    page.click(".idea")
    answered(page, 1)
    idea = page.text(".idea")
    assert server.asked[2]["messages"] == [{"role": "user", "content": idea}]


def test_settings_go_into_the_request_and_stay_in_the_tab(page: Page, server: PageServer) -> None:
    server.answers += [spoken("x"), spoken("x")]
    fill(page, system="Be brief.", temperature="0", top_p="0.9", max_tokens="7", seed="11")
    fill(page, key="secret", tools='[{"type": "function", "function": {"name": "f"}}]')
    say(page, "hi")
    answered(page, 1)
    assert server.asked[0] == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 11,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ],
    }
    assert server.keys == ["Bearer secret"]
    page.open(f"{server.url}/?again")
    assert page.value("document.querySelector('[name=key]').value") == "secret"
    assert page.value("Object.keys(localStorage).length") == 0
    fill(page, system="", temperature="", top_p="", max_tokens="", seed="", tools="", key="")
    say(page, "hi")
    answered(page, 1)
    only = {"stream", "stream_options", "messages"}
    assert server.asked[1].keys() == only
    assert server.keys[1] is None


def fill(page: Page, **values: str) -> None:
    """Set inputs as a reader would, by their names."""
    for name, value in values.items():
        page.value(
            f"(() => {{ const input = document.querySelector('[name={name}]'); "
            f"input.value = {json.dumps(value)}; "
            "input.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )


def test_stop_ends_the_answer_and_keeps_what_came(page: Page, server: PageServer) -> None:
    endless = [(0.0, delta(content="so far")), (60.0, delta(content=" never"))]
    server.answers += [endless, endless, spoken("ok")]
    for turn, stop in enumerate((lambda: page.press("Escape"), lambda: page.click("#stop")), 1):
        say(page, f"go {turn}")
        page.wait(f"document.querySelectorAll('.answer .text').length === {turn}")
        stop()
        answered(page, turn)
        assert last(page, ".fact") == "stopped"
        page.wait("document.querySelector('#stop').hidden")
    say(page, "go on")
    answered(page, 3)
    contents = [message["content"] for message in server.asked[2]["messages"]]
    assert contents == ["go 1", "so far", "go 2", "so far", "go on"]
    assert server.gone == 2  # the server saw both readers leave


def test_a_new_chat_forgets_the_answer_that_was_coming(page: Page, server: PageServer) -> None:
    server.answers += [[(0.0, delta(content="old")), (60.0, delta(content=" x"))], spoken("new")]
    say(page, "first")
    page.wait("document.querySelector('.answer .text') !== null")
    page.click("#new-chat")
    page.wait("document.querySelector('#stop').hidden")
    say(page, "second")
    answered(page, 1)
    assert server.asked[1]["messages"] == [{"role": "user", "content": "second"}]
    assert last(page, ".answer .text") == "new"


def test_markup_from_the_model_stays_text(page: Page, server: PageServer) -> None:
    nasty = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'><b>b</b>"
    call = {"index": 0, "id": "1", "function": {"name": nasty, "arguments": nasty}}
    server.answers += [
        [
            (0.0, delta(reasoning_content=nasty)),
            (0.0, delta(content=nasty[:20])),
            (0.0, delta(content=nasty[20:])),
            (0.0, delta(tool_calls=[call])),
            *ending("stop", 9),
        ],
        refused(400, nasty),
    ]
    say(page, nasty)
    answered(page, 1)
    assert last(page, ".answer > .text") == nasty
    assert last(page, ".reasoning .text") == nasty
    assert last(page, ".call-name") == nasty
    assert last(page, ".call-arguments") == nasty
    say(page, "again")
    answered(page, 2)
    assert last(page, ".error") == nasty
    assert page.value("window.broken === undefined")
    assert page.value("document.querySelectorAll('#log script, #log img, #log b').length") == 0
    page.problems = [one for one in page.problems if "status of 400" not in one]


def test_reasoning_is_folded_and_not_sent_back(page: Page, server: PageServer) -> None:
    answer = [
        (0.0, delta(role="assistant", content="")),
        (0.0, delta(reasoning_content="because ")),
        (0.1, delta(reasoning_content="so")),
        (0.0, delta(content="Yes.")),
        *ending("stop", 3),
    ]
    server.answers += [answer, spoken("ok")]
    say(page, "why?")
    answered(page, 1)
    assert page.value("document.querySelector('.reasoning').open") is False
    assert page.text(".reasoning summary").startswith("Thought for ")
    assert page.text(".reasoning .text") == "because so"
    say(page, "and?")
    answered(page, 2)
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_tool_calls_are_blocks_whose_results_are_asked_for(page: Page, server: PageServer) -> None:
    def piece(index: int, **values: object) -> dict[str, object]:
        return {"index": index, **values}

    server.answers += [
        [
            (0.0, delta(tool_calls=[piece(0, id="a", function={"name": "sun", "arguments": ""})])),
            (0.0, delta(tool_calls=[piece(0, function={"arguments": '{"at"'})])),
            (0.0, delta(tool_calls=[piece(0, function={"arguments": ": 3}"})])),
            (
                0.0,
                delta(tool_calls=[piece(1, id="b", function={"name": "wind", "arguments": "{}"})]),
            ),
            *ending("tool_calls", 9),
        ],
        spoken("Mild."),
    ]
    say(page, "weather?")
    answered(page, 1)
    names = page.value("[...document.querySelectorAll('.call-name')].map(one => one.textContent)")
    assert names == ["sun", "wind"]
    assert json.loads(page.text(".call-arguments")) == {"at": 3}
    assert last(page, ".fact") == "calls a tool"
    for name, result in (("sun", "high"), ("wind", "low")):
        assert page.value("document.querySelector('#prompt').placeholder") == f"Result of {name}"
        say(page, result)
    answered(page, 2)
    _, call, *results = server.asked[1]["messages"]
    assert [one["function"]["name"] for one in call["tool_calls"]] == ["sun", "wind"]
    assert [one["function"]["arguments"] for one in call["tool_calls"]] == ['{"at": 3}', "{}"]
    assert results == [
        {"role": "tool", "tool_call_id": "a", "content": "high"},
        {"role": "tool", "tool_call_id": "b", "content": "low"},
    ]


def test_errors_are_said_in_words_and_can_be_tried_again(page: Page, server: PageServer) -> None:
    server.answers += [
        refused(401, "no key"),
        refused(429, "queue is full.", **{"Retry-After": "3"}),
        [(0.0, delta(content="half")), (0.0, {"error": {"message": "the engine died"}})],
        [(0.0, delta(content="half"))],
        spoken("fine"),
    ]
    say(page, "hello")
    expected = ["wants an API key", "Try again in 3 s", "the engine died", "connection broke"]
    for what in expected:
        page.wait(f"document.querySelector('.error')?.textContent.includes({json.dumps(what)})")
        assert page.value("document.querySelector('.error').getAttribute('role')") == "alert"
        page.click(".foot .link")
    page.wait("document.querySelector('.answer .text')?.textContent === 'fine'")
    answered(page, 1)
    assert all(one["messages"] == server.asked[0]["messages"] for one in server.asked)
    fill(page, temperature="9")
    say(page, "more")
    page.wait("document.querySelector('.error')?.textContent.startsWith('Temperature: ')")
    fill(page, temperature="1", tools="{}")
    page.click(".answer:last-child .link")
    page.wait("document.querySelector('.error')?.textContent.startsWith('Tools: ')")
    assert len(server.asked) == 5
    page.problems = [one for one in page.problems if "Failed to load resource" not in one]


def test_live_numbers_follow_the_server(page: Page, server: PageServer) -> None:
    def shown(name: str) -> str:
        return page.text(f"[data-name='{name}'] .number").strip()

    assert shown("Running") == "0 requests"
    server.stats = {
        **{"running": 3, "waiting": 2, "blocks_used": 250, "output_tokens": 120},
        **{"prefix_queries": 200, "prefix_hits": 50},
    }
    server.first_token.count, server.first_token.total = 4, 0.36
    page.wait("document.querySelector('[data-name=Running] .value').textContent === '3'")
    assert shown("Waiting") == "2 requests"
    assert shown("KV cache") == "25 % used"
    assert shown("Prefix hits") == "25 % of tokens"
    assert shown("First token") == "90 ms"
    page.wait("parseFloat(document.querySelector('[data-name=Output] .value').textContent) === 0")
    peaks = page.value("document.querySelector('[data-name=Output] path').getAttribute('d')")
    assert peaks.count("L") == 1  # from 120 tokens in a second to none


def test_the_live_view_says_when_the_engine_is_down(page: Page, server: PageServer) -> None:
    server.client.state, server.client.trouble = "dead", "killed by signal 9"
    page.wait("document.querySelector('#status').dataset.state === 'down'")
    assert page.text("#state-text") == "engine down"
    assert page.text("#live-notice") == "killed by signal 9"
    assert page.text("[data-name=Running] .value") == "\N{EN DASH}"
    server.client.state, server.client.trouble = "ready", None
    page.wait("document.querySelector('#status').dataset.state === 'ready'")
    assert page.value("document.querySelector('#live-notice').hidden") is True


def test_a_hidden_page_asks_for_nothing(page: Page, server: PageServer) -> None:
    def become(state: str) -> None:
        page.value(
            f"Object.defineProperty(document, 'hidden', {{value: {state}, configurable: true}}), "
            "document.dispatchEvent(new Event('visibilitychange')), 1"
        )

    become("true")
    page.value("new Promise(done => setTimeout(done, 300))")
    before = server.live_asked
    page.value("new Promise(done => setTimeout(done, 2500))")
    assert server.live_asked == before
    become("false")
    page.wait("document.querySelector('#state-text').textContent === 'ready'")
    page.value("new Promise(done => setTimeout(done, 1500))")
    assert server.live_asked >= before + 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_one_view_at_a_time(page: Page, server: PageServer, scheme: str) -> None:
    page.scheme(scheme)
    page.resize(360, 640, phone=True)
    long = "W" * 200
    call = {"index": 0, "id": "a", "function": {"name": long, "arguments": f'{{"x": "{long}"}}'}}
    server.answers.append(
        [(0.0, delta(content=long)), (0.0, delta(tool_calls=[call])), *ending("stop", 2)]
    )
    say(page, long)
    answered(page, 1)
    for view in ("chat", "live", "settings"):
        page.click(f"[data-show={view}]")
        assert page.value(f"document.querySelector('.{view}').offsetParent !== null")
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        wide = page.value(
            "[...document.querySelectorAll('body *')].filter(one => "
            "one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML)"
        )
        assert wide == []
    page.click("[data-show=chat]")
    assert page.value("document.querySelector('.live').offsetParent === null")
    page.scheme("light")


def test_every_file_is_served_and_packaged() -> None:
    from ropeway.serving.page.files import _TYPES  # noqa: PLC0415

    folder = ROOT / "serving" / "page"
    kept = {path.name for path in folder.iterdir() if path.suffix not in ("", ".py")}
    assert kept == set(_TYPES)
    patterns = (ROOT / "pyproject.toml").read_text().split('"ropeway.serving.page" = [')[1]
    assert {path.split(".")[-1] for path in kept} == set(
        part.strip('" *.,]') for part in patterns.split("]")[0].split(",")
    )
