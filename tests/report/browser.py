"""Chromium, driven over its debugging pipe (https://chromedevtools.github.io/devtools-protocol)."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
PATIENCE = 30  # seconds


class Tab:
    """A page in the browser: what it complained of and saved is kept."""

    def __init__(self, commands, answers):
        self.commands, self.answers, self.number, self.heard_so_far = commands, answers, 0, b""
        self.complaints, self.saved = [], []
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def heard(self, said):
        """Keep what an event tells."""
        method, what = said.get("method"), said.get("params", {})
        if method in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.complaints.append(what.get("entry", what))
        elif method == "Browser.downloadProgress" and what["state"] != "inProgress":
            self.saved.append(what["state"])

    def next(self):
        """The next thing that the browser says."""
        while b"\0" not in self.heard_so_far:
            more = os.read(self.answers, 1 << 16)
            assert more, "the browser is gone"
            self.heard_so_far += more
        text, _, self.heard_so_far = self.heard_so_far.partition(b"\0")
        return json.loads(text)

    def send(self, method, **what):
        """The answer to a command."""
        self.number += 1
        asked = {"id": self.number, "method": method, "params": what}
        if self.session and not method.startswith(("Target.", "Browser.")):
            asked["sessionId"] = self.session
        os.write(self.commands, json.dumps(asked).encode() + b"\0")
        while (said := self.next()).get("id") != self.number:
            self.heard(said)
        assert "error" not in said, said
        return said["result"]

    def run(self, script):
        """The value of an expression in the page, awaited."""
        done = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def open(self, path, width=1280, theme="light"):
        """Open a file in a window of that width; the system's theme is `theme`."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.run("try { localStorage.clear(); } catch { /* none here */ }")  # a theme that was chosen before
        self.send("Page.navigate", url=path.as_uri())
        self.until(lambda: self.run("location.href !== 'about:blank' && document.readyState === 'complete'"))

    def press(self, key):
        """Press a key, as a keyboard does."""
        text, code = {"Enter": ("\r", 13), "Tab": ("", 9)}[key]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=code)

    def until(self, true):
        """Wait for something."""
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.05)

    def download(self, act, folder):
        """The file that an action saves."""
        before = set(folder.iterdir())
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)
        count = len(self.saved)
        act()
        self.until(lambda: self.run("1") and len(self.saved) > count)
        assert self.saved[-1] == "completed"
        (made,) = set(folder.iterdir()) - before
        return made


@contextmanager
def chromium(profile):
    """A tab of a new browser with a profile of its own."""
    down, up = os.pipe(), os.pipe()  # to the browser, which reads from 3; from it, which writes to 4
    ours = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (down[0], up[1])]

    def third_and_fourth():
        os.dup2(ours[0], 3)
        os.dup2(ours[1], 4)

    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    browser = subprocess.Popen(command, preexec_fn=third_and_fourth, pass_fds=(3, 4), **quiet)
    for end in (*ours, down[0], up[1]):
        os.close(end)
    with browser:
        tab = Tab(down[1], up[0])
        try:
            yield tab
        finally:
            tab.send("Browser.close")
            for end in (down[1], up[0]):
                os.close(end)
