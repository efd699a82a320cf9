"""A headless Chromium that a test drives over a pipe, by Chromium's own protocol (--remote-debugging-pipe)."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-sync",
    # No name of another machine has an address.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip
SECONDS = 60
KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, ""), "a": (65, "a"),
}  # fmt: skip
CONTROL, SHIFT = 2, 8  # bits of `modifiers`


class Chromium:
    """A browser with one page."""

    def __init__(self, folder):
        """Start it, with its profile in `folder`."""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Its protocol reads from descriptor 3 and writes to 4; high numbers first, lest one is overwritten.
        command = f'exec 8<&{theirs_in} 9>&{theirs_out}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._calls, self._session = b"", 0, None
        self.events = []
        (target,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self):
        with contextlib.suppress(OSError):
            self.call("Page.close")
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method, **parameters):
        """Call a method of the protocol; what happens meanwhile is kept in `events`."""
        self._calls += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._calls, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], SECONDS)[0], "Chromium does not answer"
            piece = os.read(self._in, 2**16)
            assert piece, "Chromium has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url, width=1280, height=900):
        """Load a page in a window of so many pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script):
        """Until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)

    def press(self, *keys, modifiers=0):
        """Press keys one after the other, as a keyboard does."""
        for key in keys:
            code, text = KEYS[key]
            described = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            written = {} if modifiers or not text else {"text": text}
            self.call("Input.dispatchKeyEvent", type="keyDown" if written else "rawKeyDown", **described, **written)
            self.call("Input.dispatchKeyEvent", type="keyUp", **described)

    def write(self, text):
        """Replace the text of the field that has the focus."""
        self.press("a", modifiers=CONTROL)
        self.run("document.activeElement.select()")
        self.call("Input.insertText", text=text)
