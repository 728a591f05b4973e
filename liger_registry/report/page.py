"""From what a report says to one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from liger_registry.errors import ExtraMissingError
from liger_registry.report.charts import TIMES, Chart, charts
from liger_registry.report.data import Report
from liger_registry.table import duration

#: What a page begins with; a file that does may be replaced by a newer page.
MARK = "<!doctype html>\n<!-- written by liger-tune report -->"
DASH = "\N{EN DASH}"
# How each source is shown: as good as measured, measured under other circumstances, or not measured.
_KINDS = {
    "exact": "good",
    "shipped": "good",
    "plan": "good",
    "pinned": "good",
    "stale": "warn",
    "near": "warn",
    "shipped-near": "warn",
    "sibling": "warn",
    "heuristic": "bad",
    "reference": "bad",
    "unusable": "bad",
}


def page(report: Report) -> str:
    """The page.

    Every text of a table is escaped, and a policy in the page's head lets no script run but its own: a table comes
    from wherever it comes from.

    Raises:
        ExtraMissingError: jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ExtraMissingError(
            "a report needs jinja2, which is not installed",
            why=str(error),
            fix="pip install 'liger-registry[report]'",
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        time=lambda us: DASH if us is None else duration(us).replace(" us", " µs"),
        times=lambda x: DASH if x is None else f"{x:.2f}{TIMES}",
        percent=lambda x: DASH if x is None else f"{x:.0%}",
        noise=lambda x: f"{x:.1%}",
        rate=_rate,
        day=lambda date: date[:10],
        minute=lambda date: date[:16].replace("T", " "),
        spaced=lambda choice: choice.replace("(", " ").replace(",", " ").rstrip(")"),
        kind=lambda source: _KINDS.get(source, "bad"),
    )
    script, style = _file("page.js"), _file("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn: Sequence[Chart] = charts(report.entries)
    return environment.from_string(_file("page.html.j2")).render(
        report=report, charts=drawn, script=script, style=style, digest=digest, MARK=MARK
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _rate(rate: float | None) -> str:
    """Bytes a second for people."""
    if rate is None:
        return DASH
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"
