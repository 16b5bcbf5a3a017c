"""A page in a real browser: nothing fails or is fetched, pointer and keys tell what is there."""

import json
import shutil
import subprocess
from html import unescape

import pytest
import torch
from torch import nn

import memcallback as mc

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

#: Runs before the page's own script, and writes down what goes wrong.
WATCH = """
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
new PerformanceObserver((list) => wrong.push(...list.getEntries().map((one) => one.name)))
  .observe({type: "resource", buffered: true});
const old = console.error;
console.error = (...texts) => { wrong.push(texts.join(" ")); old(...texts); };
"""

#: Runs after it: what a reader does, and what the page says then.
READ = """
const tip = document.getElementById("tip");
const at = (element, x, y) => {
  const box = element.getBoundingClientRect();
  const place = {clientX: box.left + box.width * x, clientY: box.top + box.height * y};
  const target = document.elementFromPoint(place.clientX, place.clientY) ?? element;
  target.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, ...place}));
  return tip.hidden ? "" : tip.textContent;
};
const key = (element, name) => {
  element.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
  return tip.hidden ? "" : tip.textContent;
};
const told = {};
const figure = document.querySelector(".timeline");
const plot = figure.querySelector(".plot");
told.timeline = at(plot, 0.5, 0.9);
told.end = key(figure, "End");
told.before = key(figure, "ArrowLeft");
key(document.body, "Escape");
told.escaped = tip.hidden;
const box = document.querySelector(".box");
box.scrollIntoView();
told.box = at(box, 0.5, 0.5);
told.colours = [...document.querySelectorAll("path.fill")].map((one) => getComputedStyle(one).fill);
told.back = getComputedStyle(document.body).backgroundColor;
told.wide = document.documentElement.scrollWidth > innerWidth;
const titles = [...document.querySelectorAll("h2, summary")];
told.sections = titles.map((one) => one.firstChild.data.trim());
told.wrong = wrong;
document.body.textContent = "told " + JSON.stringify(told);
"""


@pytest.fixture(scope="module")
def page():
    layer = nn.TransformerEncoderLayer(64, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    step = mc.TrainingStep(
        model,
        torch.zeros(8, 32, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.Adam,
    )
    return mc.predict(step, device="1GiB").page().html()


def read(page, tmp_path, *, width=1100, options=()):
    page = page.replace("<script>\n", f"<script>{WATCH}</script><script>\n", 1)
    page = page.replace("</body>", f"<script>{READ}</script></body>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        # Chromium refuses its sandbox to root, as in a container; it sees our own page alone.
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        *options,
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.JSONDecoder().raw_decode(unescape(done.stdout.partition("told ")[2]))[0]


def test_pointer_and_keys_tell_what_is_there(page, tmp_path):
    told = read(page, tmp_path)
    assert told["wrong"] == []
    assert " allocated, " in told["timeline"]
    assert "parameters " in told["timeline"]
    assert " allocated, " in told["end"]
    assert told["before"] != ""
    assert told["escaped"]
    assert "% of the peak" in told["box"]
    assert not told["wide"]
    assert told["sections"] == [
        "One training step",
        "In memory at the peak",
        "Batch size",
        "What was assumed",
    ]
    assert len(set(told["colours"])) == len(told["colours"]) >= 5


def test_a_narrow_window_and_a_dark_one_show_it_too(page, tmp_path):
    narrow = read(page, tmp_path, width=500)
    assert not narrow["wide"]
    assert narrow["wrong"] == []
    dark = read(page, tmp_path, options=["--blink-settings=preferredColorScheme=0"])
    light = read(page, tmp_path, options=["--blink-settings=preferredColorScheme=1"])
    assert dark["wrong"] == []
    assert dark["back"] != light["back"]


def test_a_page_is_one_file_that_names_no_address(page):
    assert "http" not in page
    assert " src=" not in page
    assert "url(" not in page
    assert "@import" not in page
