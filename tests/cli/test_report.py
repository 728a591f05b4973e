"""The report: what it says of tables and misses, that it is one page, and safe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import HOSTILE, filled, hostile, problem, stored

from liger_registry.config import Config, Fields
from liger_registry.device import Device
from liger_registry.errors import ExtraMissingError
from liger_registry.problem import Problem
from liger_registry.report import charts, collect, traffic
from liger_registry.report.page import page
from liger_registry.runtime import Registry
from liger_registry.settings import Settings
from liger_registry.store import TableStore
from liger_registry.table import Choice

VOID = {"meta", "input", "br", "img", "link"}


class Parsed(HTMLParser):
    """Elements as (name, attributes), the text of the page, and the rows of the main table."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def rows(self) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == "tr" and "data-gain" in attributes]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    registry = filled(tmp_path_factory.mktemp("report") / "cache")
    return collect.collect(registry, devices=[Device.parse("cpu").fingerprint])


def test_what_is_collected(report: Any) -> None:
    fresh, second, old = report.entries
    assert (fresh.source, fresh.detail, fresh.store, fresh.stale) == ("exact", "user table", "user", "")
    assert (fresh.chosen, fresh.default, fresh.gain, fresh.tuned) == ("any:functional()", "any:eager()", 2.5, True)
    # x, weight, y and rstd in float32.
    assert fresh.bytes == 4 * (64 * 256 + 256 + 64 * 256 + 64)
    assert fresh.rate == pytest.approx(fresh.bytes / 10e-6)
    assert (fresh.share, fresh.date) == (None, "2026-01-02T03:04:05+00:00")
    assert [(x.implementation, x.status, x.time_us) for x in fresh.losers] == [
        ("any:eager", "slower", 25.0),
        ("cpu:row_chunks", "wrong", None),
    ]
    assert fresh.losers[1].config == "slab_rows=64"
    assert (second.gain, second.losers) == (pytest.approx(1.05), ())
    assert (old.source, old.stale, old.tuned) == ("stale", "its source has changed since", False)
    assert report.stale == (old,)
    assert [(m.source, m.solved) for m in report.misses] == [("exact", True), ("near", False)]
    assert [m.problem for m in report.missing] == [problem(4096).text]
    assert report.median_gain == pytest.approx((2.5 + 1.05) / 2)
    (place,) = report.places
    assert (place.decisions, place.samples, place.store, place.first) == (3, 3, "user", "2026-01-02T03:04:05+00:00")


def test_the_bound_of_a_device_whose_copy_rate_is_known(tmp_path: Path) -> None:
    sku = Device.parse("cpu").sku
    found = collect.collect(filled(tmp_path / "cache"), copy_rates={sku: 2e10})
    entry = next(e for e in found.entries if e.device == Device.parse("cpu").fingerprint)
    assert entry.bound_us == pytest.approx(entry.bytes / 2e10 * 1e6)
    assert entry.share == pytest.approx(entry.bound_us / 10.0)
    shipped = [e for e in found.entries if e.store == "shipped"]
    assert {(e.copy_rate, e.source, e.device) for e in shipped} == {(4.27e12, "shipped", "cuda/sm_90/h200-132")}


def test_the_bytes_of_backward_and_of_operations_without_a_bound(tmp_path: Path) -> None:
    catalog = Registry(Settings(cache_dir=tmp_path)).catalog
    op = catalog.op("rms_norm")
    back = replace(problem(64), phase="backward", flags=Fields(casting="llama", needs="x"))
    both = replace(back, flags=Fields(casting="llama", needs="x,weight"))
    assert traffic.least_bytes(catalog, op, back) == 4 * (3 * 64 * 256 + 256 + 64)
    assert traffic.least_bytes(catalog, op, both) == 4 * (3 * 64 * 256 + 2 * 256 + 64)
    linear = catalog.op("fused_linear_cross_entropy")
    sizes = Fields(tokens=64, hidden=32, vocab=64)
    product = Problem(linear.name, "recompute", "forward", sizes, Fields(), Fields())
    assert traffic.least_bytes(catalog, linear, product) is None


def test_entries_that_nothing_can_use(tmp_path: Path) -> None:
    registry = filled(tmp_path / "cache")
    odd = problem(64, mood="bad")
    TableStore(tmp_path / "cache").record(
        Device.parse("cpu"), "rms_norm", [stored(registry, 64, 1.0, 1.0, problem=odd)]
    )
    gone = replace(problem(64), op="gone_op")
    TableStore(tmp_path / "cache").record(
        Device.parse("cpu"), "gone_op", [stored(registry, 64, 1.0, 1.0, problem=gone)]
    )
    found = collect.collect(registry, devices=[Device.parse("cpu").fingerprint])
    assert {(e.op, e.source, e.detail) for e in found.unusable} == {
        ("rms_norm", "unusable", "no call of this version is such a problem"),
        ("gone_op", "unusable", "no operation gone_op is registered"),
    }
    assert all(e.bytes is None and e.time_us == 1.0 for e in found.unusable)
    Parsed(page(found))


def test_a_choice_that_is_no_longer_legal(tmp_path: Path) -> None:
    registry = filled(tmp_path / "cache")
    chunks = Choice("cpu:row_chunks", Config(slab_rows=7))
    TableStore(tmp_path / "cache").record(
        Device.parse("cpu"), "rms_norm", [stored(registry, 512, 1.0, 2.0, choice=chunks)]
    )
    entry = collect.collect(registry, devices=[Device.parse("cpu").fingerprint]).entries[-1]
    assert entry.source == "near"
    assert entry.chosen == "any:functional()"
    assert entry.time_us is None
    assert "the table's choice is not used" in entry.detail


def test_the_page(report: Any) -> None:
    text = page(report)
    parsed = Parsed(text)
    assert [row["data-gain"] for row in parsed.rows] == ["2.5", "1.05", "1.0"]
    assert [row["data-source"] for row in parsed.rows] == ["exact", "exact", "stale"]
    heads = [a for tag, a in parsed.elements if tag == "button"]
    assert [a["data-key"] for a in heads] == [
        "problem", "device", "chosen", "time", "default", "gain", "share", "source", "date",
    ]  # fmt: skip
    assert all(f"data-{a['data-key']}" in parsed.rows[0] for a in heads)
    for said in (
        "any:functional", "2.50\N{MULTIPLICATION SIGN}", "2026-01-02", "off by one", "1 missing",
        "liger-tune warmup --from-misses",
        "its source has changed since", problem(4096).text, "Time of the default over the chosen one's",
    ):  # fmt: skip
        assert said in parsed.text
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 1
    # The chart takes the page's colours; none of matplotlib's own are left.
    assert "var(--accent)" in text
    assert not re.findall(r"(?:fill|stroke): #", text)


def test_the_page_loads_nothing(report: Any) -> None:
    text = page(report)
    parsed = Parsed(text)
    assert not {"link", "iframe", "object", "embed", "img", "base"} & {tag for tag, _ in parsed.elements}
    for _, attributes in parsed.elements:
        assert not {"src", "srcset", "action", "formaction"} & set(attributes)
        assert attributes.get("href", "#").startswith("#") or "xlink" in str(attributes)
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= set(re.findall(r"url\((#[^)]*)\)", text))
    assert sum(tag == "script" for tag, _ in parsed.elements) == 1
    policy = next(a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_ids_are_unique(report: Any) -> None:
    ids = re.findall(r'\sid="([^"]*)"', page(report))
    assert len(ids) == len(set(ids))


def test_hostile_tables_inject_nothing(tmp_path: Path) -> None:
    plain = Parsed(page(collect.collect(filled(tmp_path / "plain"))))
    found = collect.collect(hostile(tmp_path))
    assert any(e.implementation == HOSTILE for e in found.entries)
    assert any(e.versions[1][1] == HOSTILE for e in found.entries)
    assert any(m.op == HOSTILE for m in found.misses)
    assert any(p.name == HOSTILE for p in found.places)
    text = page(found)
    parsed = Parsed(text)
    assert HOSTILE in parsed.text  # as text
    kinds = {tag for tag, _ in plain.elements}
    names = {name for _, attributes in plain.elements for name in attributes}
    assert {tag for tag, _ in parsed.elements} <= kinds
    assert {name for _, attributes in parsed.elements for name in attributes} <= names | {"open"}
    assert "<script>alert" not in text
    assert text.count("</style>") == 1
    assert "49" not in re.findall(r"onerror=alert\(2\)&gt;(..)", text)


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_the_verb_writes_and_replaces_its_own_page(
    cache: Path, tmp_path: Path, tune: Callable[..., Any], tune_json: Callable[..., Any]
) -> None:
    filled(cache)
    out = tmp_path / "page.html"
    assert tune("report", "--out", out, "--device", "cpu").stdout.strip() == f"{out}: 3 problems, 1 stale, 1 missing"
    counts = {"problems": 3, "stale": 1, "missing": 1, "unusable": 0}
    assert tune_json("report", "--out", out, "--op", "rms_norm", "--device", "cpu") == {"file": str(out), **counts}
    assert len(Parsed(out.read_text(encoding="utf-8")).rows) == 3
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    out.write_text("my thesis")
    refused = tune("report", "--out", out, code=3)
    assert "is no report" in refused.output
    assert out.read_text() == "my thesis"
    tune("report", "--out", out, "--op", "swiglu", "--force")
    assert "No table holds a decision" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--copy-rate", "h100"), 2, "SKU=TB/S"),
        (("--copy-rate", "h100=fast"), 2, "SKU=TB/S"),
        (("--copy-rate", "h100=-1"), 2, "SKU=TB/S"),
        (("--op", "rms_nrm"), 2, "rms_nrm"),
        (("--device", "toaster"), 2, "toaster"),
        (("--out", "."), 3, "is a directory"),
        (("--out", "no/such/place.html"), 3, "cannot be written"),
    ],
)
def test_what_the_verb_refuses(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    tune: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in tune("report", *arguments, code=code).output
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra(package: str, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissingError, match=f"needs {package}") as caught:
        page(report)
    assert "pip install 'liger-registry[report]'" in caught.value.fix


def test_a_chart_where_nothing_is_told(report: Any) -> None:
    assert charts.charts([replace(e, default_us=e.time_us) for e in report.entries]) == []
