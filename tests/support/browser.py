"""A headless Chromium, driven by its DevTools protocol over a websocket."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 30.0  # seconds, for anything


def find_chromium() -> str | None:
    """The browser's path: what CHROMIUM names, or what is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `problems` collects what the console calls errors and warnings, and exceptions."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                found: dict[str, Any] = message["result"]
                return found
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.problems.append(str([part.get("value") for part in about["args"]]))
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(about["exceptionDetails"])[:600])
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(about["request"]["url"])

    def open(self, url: str) -> None:
        """Load a page whole."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON; promises are awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Until an expression is true; gives its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                text = self.value("document.body.innerText")
                raise AssertionError(f"not within {seconds} s: {expression}\n{text}")
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """A click in the middle of an element, as by a mouse."""
        box = self.value(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); "
            "found.scrollIntoView({block: 'nearest'}); const box = found.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2, box.width] })()"
        )
        assert box[2] > 0, f"{selector} can't be seen"
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as from a keyboard."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        about["modifiers"] = 8 if shift else 0
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        """The size of the window in CSS pixels; a phone has touch and no scroll bars."""
        about = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **about)

    def scheme(self, name: str) -> None:
        """What the reader prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser_page(chromium: str) -> Iterator[Page]:
    """A tab in a browser of its own, with a profile that is thrown away."""
    profile = tempfile.mkdtemp(prefix="ropeway-chromium-")
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
        *("--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0"),
        f"--user-data-dir={profile}",
    ]
    with (Path(profile) / "stderr").open("wb") as log:
        process = subprocess.Popen([chromium, *options, "about:blank"], stderr=log, stdout=log)
    try:
        with connect(_socket_url(process, Path(profile)), max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        shutil.rmtree(profile, ignore_errors=True)


def _socket_url(process: "subprocess.Popen[bytes]", profile: Path) -> str:
    """Where the first tab listens, once it does."""
    import urllib.request  # noqa: PLC0415

    told = profile / "DevToolsActivePort"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if told.exists() and (port := told.read_text().split("\n")[0]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError(f"Chromium didn't start: {(profile / 'stderr').read_text()[-2000:]}")
