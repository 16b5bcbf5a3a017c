"""Make the README's pictures from a trained example in the real TensorBoard.

    python docs/render_dashboard.py

Trains `examples/plain_loop.py` in a terminal of 100 columns and `examples/digits.py` for the logs
that it serves with TensorBoard, renders the terminal and the tabs with headless Chromium and
fetches the figures; all go to `docs/images/`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
#: Tab of TensorBoard -> file, width and height of the window in pixels.
TABS = {
    "timeseries": ("tensorboard.png", 1500, 1010),
    "images": ("tensorboard-images.png", 1500, 900),
    "text&tagFilter=memory/report": ("tensorboard-text.png", 1500, 780),
}
#: The landing tab shows this package's curves alone. They are drawn on the page itself: no worker
#: does it, for which no virtual time passes.
OPTIONS = "darkMode=false&tagFilter=memory_gib&forceSVG=true"
#: Image tag -> file.
FIGURES = {
    "memory_pictures/1_timeline": "timeline.png",
    "memory_pictures/2_at_the_peak": "at-the-peak.png",
    "memory_pictures/3_batch_size": "batch-size.png",
    "memory_pictures/4_what_if": "what-if.png",
    "memory_pictures/5_modules": "modules.png",
}
#: The first step waits for its prediction, however busy the machine is.
WAITING = os.environ | {"MEMCALLBACK_ISOLATE": "0"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_OPTIONS = (
    "--headless",
    # Chromium refuses its sandbox to root, as in a container; it only sees our own pages.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    # Time that passes only while nothing is fetched: the page has loaded and drawn whatever the
    # machine's speed.
    "--virtual-time-budget=120000",
)
DEADLINE_S = 60.0


@contextmanager
def serve(log_dir: Path) -> Iterator[str]:
    """The real TensorBoard on a folder, at a port of its own choice.

    Args:
        log_dir: The folder.

    Yields:
        Its address, ending in a slash, once it has said it.

    Raises:
        RuntimeError: If it does not start within a minute.
    """
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        log_dir.name,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        # From the folder above, since the page shows the path as it was given.
        server = subprocess.Popen(
            command, cwd=log_dir.parent, stdout=log.file.fileno(), stderr=subprocess.STDOUT
        )
        try:
            found = wait_for(
                lambda: re.search(r"http://127\.0\.0\.1:\d+/", Path(log.name).read_text()),
                "TensorBoard's address",
            )
            yield str(found[0])
        finally:
            server.terminate()
            server.wait(timeout=DEADLINE_S)


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """Look until there is something to see.

    Raises:
        RuntimeError: If there is nothing after a minute.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if seen := look():
            return seen
        time.sleep(0.1)
    raise RuntimeError(f"{what} did not appear within {DEADLINE_S:.0f} s.")


def ask(url: str, path: str, **query: object) -> Any:
    """An answer of TensorBoard's HTTP API; None while it has none."""
    try:
        with urllib.request.urlopen(
            f"{url}data/{path}?{urllib.parse.urlencode(query)}", timeout=DEADLINE_S
        ) as answer:
            return json.load(answer)
    except (urllib.error.URLError, json.JSONDecodeError):
        return None


def wait_until_loaded(url: str) -> None:
    """Until the server has read the run: the report and the figures are the last things in it."""
    wait_for(
        lambda: any(run.endswith("/predicted") for run in ask(url, "plugin/scalars/tags") or {}),
        "The predictions",
    )
    wait_for(lambda: ask(url, "plugin/text/tags"), "The report")
    wait_for(
        lambda: (
            FIGURES.keys()
            <= {tag for tags in (ask(url, "plugin/images/tags") or {}).values() for tag in tags}
        ),
        "The figures",
    )


def fetch_figure(url: str, run: str, tag: str) -> bytes:
    """The last figure of a tag, as PNG."""
    last = ask(url, "plugin/images/images", run=run, tag=tag, sample=0)[-1]
    with urllib.request.urlopen(
        f"{url}data/plugin/images/individualImage?{last['query']}", timeout=DEADLINE_S
    ) as answer:
        return bytes(answer.read())


def render(
    browser: str, address: str, width: int, height: int, to: Path, options: Sequence[str] = ()
) -> None:
    """A picture of a page.

    Raises:
        RuntimeError: If the browser makes none.
    """
    to.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            *BROWSER_OPTIONS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--screenshot={to}",
            *options,
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    if not to.exists():
        raise RuntimeError(f"{browser} made no picture of {address}: {done.stderr.strip()[-500:]}")


def train(folder: Path) -> Path:
    """Train the example; the folder of its run."""
    example = str(ROOT / "examples" / "digits.py")
    subprocess.run(
        [sys.executable, example, "--what-if", "--per-module", "--log-dir", str(folder)],
        check=True,
        env=WAITING,
    )
    return folder / "lightning_logs"


def terminal_page(folder: Path) -> Path:
    """What a terminal shows of the plain loop, from the report on, as a page in its colours.

    Raises:
        RuntimeError: If the training fails.
    """
    command = [sys.executable, str(ROOT / "examples" / "plain_loop.py")]
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=WAITING
        | {
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            # The report names the tools that are on the path.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
    )
    os.close(terminal)
    shown = b""
    # Linux ends the output of a terminal that is closed with an error.
    with os.fdopen(controller, "rb", buffering=0) as output, suppress(OSError):
        while part := output.read(65536):
            shown += part
    if process.wait():
        raise RuntimeError(f"{command[-1]} ended with status {process.returncode}")
    lines = shown.decode().replace("\r", "").split("\n")
    start = next(number for number, line in enumerate(lines) if "│ " in line)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(lines[start:])))
    page = folder / "console.html"
    page.write_text(console.export_html(theme=MONOKAI), encoding="utf-8")
    return page


def find_browser() -> str:
    """The first Chromium or Chrome on the path.

    Raises:
        SystemExit: If there is none.
    """
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise SystemExit(
        f"None of {', '.join(BROWSERS)} is on the path. Install Chromium, or give --browser."
    )


def main() -> None:
    """Train, serve, render."""
    parser = argparse.ArgumentParser(description="Render the README's pictures.")
    parser.add_argument("--browser", help="a Chromium or Chrome; by default the first on the path")
    browser = parser.parse_args().browser or find_browser()
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = terminal_page(folder).as_uri()
        render(browser, page, 960, 400, IMAGES / "console.png")
        render_tabs(browser, train(folder))
    print(
        f"Pictures: {', '.join(sorted(path.name for path in IMAGES.glob('*.png')))} in "
        f"{IMAGES.relative_to(ROOT)}"
    )


def render_tabs(browser: str, logs: Path) -> None:
    """The pictures of TensorBoard's tabs, and its figures."""
    with serve(logs) as url:
        wait_until_loaded(url)
        for tab, (name, width, height) in TABS.items():
            render(browser, f"{url}?{OPTIONS}#{tab}", width, height, IMAGES / name)
        run = next(run for run, tags in ask(url, "plugin/images/tags").items() if tags)
        for tag, name in FIGURES.items():
            (IMAGES / name).write_bytes(fetch_figure(url, run, tag))


if __name__ == "__main__":
    main()
