"""The report in a browser: nothing overflows, sorting and filters work, in the light and in the dark."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from reports import hostile

from liger_registry.report.collect import collect
from liger_registry.report.page import page


@pytest.fixture(scope="module")
def browser() -> Any:
    """Chromium without a screen; where there is none this says so and tests nothing."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    api = pytest.importorskip("playwright.sync_api", reason="no browser test: playwright is not installed")
    if found is None:
        pytest.skip("no browser test: neither chromium nor google-chrome is installed")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the hostile tables, in a file."""
    directory = tmp_path_factory.mktemp("written")
    out = directory / "page.html"
    out.write_text(page(collect(hostile(directory))), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(360, "dark", marks=pytest.mark.ci),
        pytest.param(1360, "light", marks=pytest.mark.ci),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((360, "light"), (820, "dark"), (1360, "dark"))),
    ],
)
def test_a_browser_shows_it(width: int, scheme: str, browser: Any, written: Path, tmp_path: Path) -> None:
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    view.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    view.goto(written.as_uri())
    for details in view.locator("details").all():
        details.evaluate("d => d.open = true")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    back = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) is (scheme == "dark")
    narrow = width < 960
    assert view.locator("#sort").is_visible() is narrow

    def column(key: str) -> list[str]:
        return view.evaluate(f"[...document.querySelectorAll('#table tbody tr')].map(r => r.dataset['{key}'])")

    times = sorted(float(t) for t in column("time") if t)
    if narrow:
        view.select_option("#sort", "time")
    else:
        view.click("button[data-key=time]")
        assert view.get_attribute("th:has([data-key=time])", "aria-sort") == "ascending"
    assert [float(t) for t in column("time") if t] == times
    if narrow:
        view.select_option("#sort", "gain")
    else:
        view.click("button[data-key=time]")
        assert [float(t) for t in column("time") if t] == times[::-1]
        view.click("button[data-key=gain]")
    gains = [float(g) for g in column("gain") if g]
    assert gains == sorted(gains, reverse=True)
    assert column("gain")[len(gains) :] == [""] * (len(column("gain")) - len(gains))

    view.select_option("#filter-device", "cuda/sm_90/h200-132")
    shown = view.locator("#table tbody tr:visible")
    assert shown.count() == 26
    assert view.locator("#count").inner_text() == f"26 of {len(column('gain'))}"
    view.fill("#search", "hidden=4096 backward")
    assert 0 < shown.count() < 26
    view.fill("#search", "nothing is called so")
    assert shown.count() == 0
    assert view.locator("#none").is_visible()
    assert view.locator("figure:visible").count() == 2
    picture = view.screenshot(full_page=True, path=tmp_path / f"{width}-{scheme}.png")
    assert picture[:4] == b"\x89PNG"
    assert said == []
    view.close()
