"""The page of a real `ropeway serve`, in headless Chromium."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.browser import Page, browser_page, find_chromium
from support.server import RunningServer, running_server, wait_until
from support.tiny_checkpoint import make_checkpoint

import ropeway

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install the package chromium, or set CHROMIUM"
)
KEY = "open-sesame"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model whose answers are long enough to be stopped, behind an API key."""
    folder = tmp_path_factory.mktemp("page")
    checkpoint = make_checkpoint(folder / "tiny", max_position_embeddings=8192)
    artifact = folder / "tiny.rope"
    ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64).save(artifact)
    with running_server(artifact, "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """One browser."""
    assert CHROMIUM is not None
    with browser_page(CHROMIUM) as page:
        yield page


@pytest.fixture
def page(tab: Page, served: RunningServer) -> Page:
    """The page, with the key and greedy sampling."""
    tab.resize(1280, 800)
    tab.open(served.url)
    tab.value("sessionStorage.clear()")
    tab.open(f"{served.url}/?new")
    for name, value in (("temperature", "0"), ("max_tokens", "24"), ("key", KEY)):
        tab.value(
            f"(() => {{ const input = document.querySelector('[name={name}]'); "
            f"input.value = {json.dumps(value)}; "
            "for (const kind of ['input', 'change']) "
            "input.dispatchEvent(new Event(kind, {bubbles: true})) })()"
        )
    tab.wait("document.querySelector('#state-text').textContent === 'ready'")
    tab.problems.clear()  # /live was refused until the key was there
    return tab


def say(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def live(served: RunningServer) -> dict[str, object]:
    """What /live says."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{served.url}/live", headers=headers, timeout=10)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def test_an_answer_is_the_servers(page: Page, served: RunningServer) -> None:
    say(page, "hello")
    page.wait("document.querySelectorAll('.foot').length === 1")
    assert page.value("document.querySelectorAll('.error').length") == 0
    body = {
        "model": page.text("#model-name"),
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    assert page.text(".answer .text") == answer["choices"][0]["message"]["content"]
    assert page.text(".fact") == f"{answer['usage']['completion_tokens']} tokens"
    assert page.problems == []


def test_stop_reaches_the_engine(page: Page, served: RunningServer) -> None:
    page.value("document.querySelector('[name=max_tokens]').value = ''")
    say(page, "hello")
    page.wait("document.querySelector('.answer .text')?.textContent.length > 50")
    page.press("Escape")
    page.wait("document.querySelectorAll('.foot').length === 1")
    assert page.value("[...document.querySelectorAll('.fact')].at(-1).textContent") == "stopped"
    wait_until(lambda: live(served)["engine"]["running"] == 0, 5, "nothing runs")  # type: ignore[index]
    assert len(page.text(".answer .text")) < 8000
    assert page.problems == []


def test_live_numbers_are_the_servers(page: Page, served: RunningServer) -> None:
    before = live(served)["engine"]
    say(page, "hello again, and again")
    page.wait("document.querySelectorAll('.foot').length === 1")
    peak = "Math.max(...document.querySelector('[data-name=Output] path').getAttribute('d')"
    page.wait(
        "/[1-9]/.test(document.querySelector('[data-name=\"First token\"] .value').textContent)"
    )
    page.wait(f"{peak}.split(/[ML ]/).filter(Boolean).map(Number)) > 0")
    after = live(served)["engine"]
    assert after["output_tokens"] > before["output_tokens"]  # type: ignore[index]
    assert page.text("[data-name=Running] .value") == "0"


def test_without_the_key_it_says_what_to_do(tab: Page, served: RunningServer) -> None:
    tab.open(served.url)
    tab.value("sessionStorage.clear()")
    tab.open(f"{served.url}/?locked")
    tab.wait("document.querySelector('#state-text').textContent === 'wants an API key'")
    say(tab, "hello")
    tab.wait("document.querySelector('.error')?.textContent.includes('wants an API key')")
    assert httpx.get(f"{served.url}/live", timeout=10).status_code == 401


def test_a_server_that_ends_is_missed(tab: Page, tmp_path: Path, tiny_artifact: Path) -> None:
    with running_server(tiny_artifact) as server:
        tab.open(server.url)
        tab.wait("document.querySelector('#state-text').textContent === 'ready'")
    tab.wait("document.querySelector('#state-text').textContent === 'no answer'")
    assert tab.text("#live-notice") == "The server can't be reached."
    say(tab, "hello")
    tab.wait("document.querySelector('.error')?.textContent.includes(\"can't be reached\")")
