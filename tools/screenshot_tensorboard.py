"""Take pictures of a run's TensorBoard, as the README shows them.

    python tools/screenshot_tensorboard.py runs/NAME            # writes ./tensorboard-scalars.png
    python tools/screenshot_tensorboard.py runs/NAME --page scalars images pr_curves hparams

TensorBoard runs inside this process, on a free port that only this machine can reach, and ends
with it. A Chromium without a window opens each page with a new, empty profile and draws it; what
has not ended after `--timeout` seconds is ended.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync
    --disable-dev-shm-usage --no-proxy-server --mute-audio""".split()
# A picture is taken after 30 seconds of the page's time, which wait for its requests but not for
# frames or threads: without the second flag some cards are still empty. Without WebGL, TensorBoard
# draws the curves in the page itself, not in a thread.
FLAGS += ["--virtual-time-budget=30000", "--run-all-compositor-stages-before-draw"]
FLAGS += ["--disable-3d-apis"]

# The name of a page in TensorBoard's address, and in the address of its data.
PAGES = {
    "scalars": ("timeseries", "scalars"),
    "images": ("images", "images"),
    "pr_curves": ("pr_curves", "pr_curves"),
    "hparams": ("hparams", "scalars"),
}
# The curves that fill one picture, and the settings a visitor would click for a better view of
# them, as TensorBoard keeps them in the browser.
CURVES = "^(train/(loss|lr|grad_norm)|val/(loss|accuracy|macro_f1))$"
SETTINGS = {
    "timeSeriesSettingsPaneOpened": False,
    "stepSelectorEnabled": False,
    "timeSeriesCardMinWidth": 270,
    "sideBarWidthInPercent": 0,  # the list of runs; shown where there are several
    "scalarSmoothing": 0.0,
    "ignoreOutliers": False,
}
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def start_tensorboard(folder: Path) -> str:
    """Serve the folder from threads of this process; returns the address."""
    try:
        from tensorboard import default, program
    except ImportError as error:
        raise SystemExit(f"{error}; install it with: pip install tensorboard") from None

    class Server(program.WerkzeugServer):
        def __init__(self, app: WsgiApp, flags: Any) -> None:
            super().__init__(with_settings(app), flags)

    for name in ("tensorboard", "werkzeug"):
        logging.getLogger(name).setLevel(logging.ERROR)
    board = program.TensorBoard(plugins=default.get_plugins(), server_class=Server)
    flags = ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    os.chdir(folder.resolve().parent)  # some pages show the --logdir
    board.configure(argv=["tensorboard", "--logdir", folder.resolve().name, *flags])
    return str(board.launch())


def with_settings(app: WsgiApp) -> WsgiApp:
    """The app with one more page, /start, that stores SETTINGS in the browser and then opens /."""
    script = f"localStorage.setItem('_tb_global_settings', {json.dumps(json.dumps(SETTINGS))});"
    script += "location.replace('/' + location.search + location.hash);"

    def wrapped(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/start":
            return app(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [f"<!doctype html><script>{script}</script>".encode()]

    return wrapped


def wait_for_data(address: str, plugin: str, seconds: float) -> bool:
    """Whether TensorBoard has read something for the plugin, in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{address}data/plugin/{plugin}/tags", timeout=30) as answer:
            if any(json.load(answer).values()):
                return True
        time.sleep(0.5)
    return False


def take(browser: str, url: str, picture: Path, size: str, seconds: float) -> None:
    """Let the browser write the picture of a page; raises RuntimeError with its output."""
    profile = tempfile.mkdtemp(prefix="screenshot-")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size}"]
    # A session of its own, so that every process the browser starts can be ended with it.
    process = subprocess.Popen(
        [*command, f"--screenshot={picture}", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = ""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        output = f"not ready after {seconds:g} seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)
    if not picture.is_file():
        raise RuntimeError(f"{browser} wrote no {picture}: {output.strip()[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Take pictures of a run's TensorBoard.")
    add = parser.add_argument
    add("run", type=Path, help="a run's folder, or a folder of several")
    add("--page", nargs="+", choices=PAGES, default=["scalars"], help="default: scalars")
    add("--out", type=Path, default=Path(), help="folder for tensorboard-PAGE.png (default: here)")
    add("--tags", default=CURVES, help="regular expression for the curves on the page scalars")
    add("--size", default="1400x840", help="of a picture, in pixels (default: %(default)s)")
    add(
        "--browser",
        nargs=1,
        help=f"the browser's command (default: the first of {', '.join(BROWSERS)})",
    )
    add("--timeout", type=float, default=90, help="seconds for a page (default: %(default)s)")
    arguments = parser.parse_args()

    browser = next(filter(None, map(shutil.which, arguments.browser or BROWSERS)), None)
    if browser is None:
        parser.error("no Chromium found; install one (Debian: apt-get install chromium), or name"
                     " yours with --browser")  # fmt: skip
    runs = {path.parent for path in arguments.run.rglob("events.out.tfevents.*")}
    SETTINGS["sideBarWidthInPercent"] = 0 if len(runs) == 1 else 18
    if not runs:
        parser.error(f"{arguments.run} has no TensorBoard events; give the folder of a run")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    address = start_tensorboard(arguments.run)
    for page in arguments.page:
        name, plugin = PAGES[page]
        if not wait_for_data(address, plugin, arguments.timeout):
            parser.error(f"{arguments.run} has nothing to show on the page {page}")
        picture = out / f"tensorboard-{page}.png"
        picture.unlink(missing_ok=True)
        url = f"{address}start?tagFilter={quote(arguments.tags)}#{name}"
        try:
            take(browser, url, picture, arguments.size.replace("x", ","), arguments.timeout)
        except RuntimeError as error:
            sys.exit(str(error))
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
