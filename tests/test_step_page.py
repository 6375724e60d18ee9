"""The page of one step, examples/course/step.html: its text, and how it behaves in a browser."""

import json
import os
import re
import shutil
from contextlib import contextmanager

import pytest
from mpirun import ROOT, run_world

COURSE = ROOT / "examples" / "course"
PAGE = COURSE / "step.html"
TRACE = re.compile(r"^const trace = (.*);$", re.M)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 400, "height": 850}


def trace_of(text):
    return json.loads(TRACE.search(text)[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page as the script makes it now, on four ranks."""
    path = tmp_path_factory.mktemp("page") / "step.html"
    world = run_world(4, [COURSE / "make_step.py", path], timeout=60)
    assert world.status == 0, world.output
    return path.read_text(encoding="utf-8")


def without_times(trace):
    for frame in trace["frames"]:
        for rank in frame["ranks"]:
            assert rank.pop("us") >= 0
    return trace


def test_the_page_that_is_kept_is_the_one_that_the_script_makes(made):
    """Times aside; where this fails, the engine has changed: run make_step.py again."""
    kept = PAGE.read_text(encoding="utf-8")
    assert TRACE.sub("", kept) == TRACE.sub("", made)
    assert without_times(trace_of(kept)) == without_times(trace_of(made))


def test_its_figures_are_the_papers(made):
    """3 Psi elements moved, and padded bytes: each rank sends its shard of what is gathered."""
    trace = trace_of(made)
    frames, units = trace["frames"], trace["units"]
    assert frames[-1]["moved"] == 3 * trace["parameters"]
    for rank in range(trace["ranks"]):
        vectors = [f for f in frames if f["unit"] and f["ranks"][rank]["sent"]]
        assert len(vectors) == 3 * len(units)
        for frame in vectors:
            assert frame["ranks"][rank]["sent"] == 3 * 4 * units[frame["unit"]]["shard"]


def test_at_most_two_full_vectors_are_held_and_none_after_the_step(made):
    for frame in trace_of(made)["frames"]:
        for rank in frame["ranks"]:
            full = [
                u for u, (weights, _, _) in rank["units"].items() if weights in ("full", "coming")
            ]
            assert len(full) <= 2 and bool(full) == ("full" in rank["held"])
    assert all(set(rank["held"]) == {"owned", "message"} for rank in frame["ranks"])
    assert all(
        of == ["shard", "summed", "new"] for r in frame["ranks"] for of in r["units"].values()
    )


def test_it_loads_nothing():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|\bsrc=|@import|\burl\(|\bfetch\(|XMLHttp|\bimport\b", text)
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    reason = "playwright is not installed (the extra `browser`)"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    with playwright.sync_playwright() as driver:
        sandbox = ["--no-sandbox"] * (os.geteuid() == 0)  # it needs another user than root
        yield driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)


@contextmanager
def opened(browser, **settings):
    """The page in a window of its own; afterwards nothing was said on its console, or loaded."""
    with browser.new_context(**settings) as context:
        page, said, loaded = context.new_page(), [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(PAGE.as_uri())
        yield page
        assert said == [] and [url for url in loaded if url[:5] != "data:"] == [PAGE.as_uri()]


def luminance(colour):
    """Of "rgb(r, g, b)", as WCAG 2 has it."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(page, selector):
    """The contrast of a text with the page's background: from 1 to 21."""
    script = "s => getComputedStyle(document.querySelector(s))"
    ink = page.evaluate(f"({script})('{selector}').color")
    paper = page.evaluate(f"({script})('body').backgroundColor")
    darker, lighter = sorted(map(luminance, (ink, paper)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["400", "1400"])
def test_it_can_be_read_at_both_widths_in_light_and_in_dark(browser, viewport):
    papers = []
    for scheme in ("light", "dark"):
        with opened(browser, viewport=viewport, color_scheme=scheme) as page:
            widths = "trace.frames.map((_, i) => (show(i), document.documentElement.scrollWidth))"
            assert set(page.evaluate(widths)) == {viewport["width"]}
            for selector in ("h1", "#event p", "#event code", ".lead", ".rank .did", ".unit"):
                assert contrast(page, selector) >= 4.5, selector  # WCAG 2, level AA
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            cells = page.locator(".bar i").first.bounding_box()
            assert cells["width"] >= 20 and cells["height"] >= 16
    assert luminance(papers[0]) > 0.9 and luminance(papers[1]) < 0.1


def test_arrow_keys_walk_the_step_forwards_and_backwards(browser):
    frames = trace_of(PAGE.read_text())["frames"]
    titles = [frame["title"] for frame in frames]
    with opened(browser, viewport=WIDE) as page:
        seen = []
        for frame in frames:
            seen.append(page.inner_text("#event h2"))
            of = [rank["units"] for rank in frame["ranks"]]
            dropped = sum(w == "freed" for units in of for w, _, _ in units.values())
            sent = sum(g == "sent" for units in of for _, g, _ in units.values())
            assert page.locator(".gone").count() == 3 * (dropped + sent)
            page.keyboard.press("ArrowRight")
        assert seen == titles
        assert page.inner_text("#event h2") == titles[-1], "there is nothing after the last event"
        back = []
        for _ in frames:
            back.append(page.inner_text("#event h2"))
            page.keyboard.press("ArrowLeft")
        assert back == titles[::-1]


def test_buttons_a_swipe_and_an_address_move_too(browser):
    with opened(browser, viewport=NARROW, has_touch=True) as page:

        def count():
            return page.inner_text("#count", timeout=3000).split()[0]

        assert count() == "1" and page.is_disabled("#back")
        page.tap("#next")
        assert count() == "2"
        swipe(page, 300, 200)
        swipe(page, 300, 100)
        assert count() == "4"
        swipe(page, 100, 300)
        assert count() == "3" and page.url.endswith("#3")
        swipe(page, 100, 110)  # a finger that trembled
        assert count() == "3"
        page.locator("#at").fill("9")
        assert count() == "10"
        page.locator("#course span").nth(20).click()
        assert count() == "21"
        page.evaluate("location.hash = '#7'")
        page.wait_for_function("document.querySelector('#count').textContent.startsWith('7 ')")


def swipe(page, start, end):
    """A finger's way over the ranks, as Chromium's own input gives it."""
    touch = page.context.new_cdp_session(page)
    for kind, points in (
        ("touchStart", [{"x": start, "y": 500}]),
        ("touchMove", [{"x": end, "y": 503}]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
