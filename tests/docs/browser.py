"""A real browser without a window, driven through its debugging pipe."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserPage:
    """One page of a browser.

    Attributes:
        errors: the exceptions that its scripts raised.
    """

    def __init__(self) -> None:
        browser = find_browser()
        assert browser is not None
        (mine, theirs), (results, answers) = os.pipe(), os.pipe()
        # The browser reads 3 and writes 4: the other ends must not have these numbers.
        theirs, answers, mine, results = (fcntl.fcntl(x, fcntl.F_DUPFD, 10) for x in (theirs, answers, mine, results))
        self._commands, self._results = os.fdopen(theirs, "wb", 0), os.fdopen(results, "rb")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "remote-debugging-pipe")
        self._process = subprocess.Popen(
            [browser, *(f"--{x}" for x in flags), f"--user-data-dir={self._profile.name}", "about:blank"],
            close_fds=False,
            preexec_fn=lambda: (os.dup2(mine, 3), os.dup2(answers, 4)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(mine)
        os.close(answers)
        self.errors: list[str] = []
        self._numbers, self._session, self._buffer = itertools.count(1), None, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")
        self.ask("Runtime.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the DevTools protocol."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            some = os.read(self._results.fileno(), 1 << 16)
            assert some, "the browser has ended"
            self._buffer += some
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            detail = message["params"]["exceptionDetails"]
            self.errors.append(detail.get("exception", {}).get("description", detail["text"]))
        return message

    def open(self, address: str) -> None:
        """Load a page, and wait until it is there."""
        self.ask("Page.navigate", url="about:blank")  # the same page with another hash would not be loaded
        self.ask("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass
        while self.run("document.readyState + location.protocol") in ("completeabout:", "loading" + "file:"):
            pass

    def run(self, code: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the screen, and whether dark colours are preferred."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = "dark" if dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.ask("Browser.close")
        self._commands.close()
        self._process.wait(timeout=30)
        self._results.close()
        self._profile.cleanup()
