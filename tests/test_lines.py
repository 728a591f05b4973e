from __future__ import annotations

import pytest

from liger_registry.lines import Lines


def test_each_entry_is_rendered_once_and_forgotten_with_it():
    rendered = []

    def render(entry):
        rendered.append(entry)
        return entry[0], f"<{entry[0]}>"

    lines, entries = Lines(), [(3,), (1,), (2,)]
    assert lines.of(entries, render) == ["<1>", "<2>", "<3>"]
    entries += [(0,), (2.5,)]
    assert lines.of(entries, render) == ["<0>", "<1>", "<2>", "<2.5>", "<3>"]
    assert len(rendered) == 5
    del entries[1]
    assert lines.of(entries, render) == ["<0>", "<2>", "<2.5>", "<3>"]
    entries[1] = tuple([2])  # equal, but another
    assert lines.of(entries, render) == ["<0>", "<2>", "<2.5>", "<3>"]
    assert len(rendered) == 6


def test_what_cannot_be_rendered_leaves_the_lines_as_they_were():
    lines = Lines()
    kept = (1,)
    lines.of([kept], lambda entry: (1, "first"))
    with pytest.raises(ZeroDivisionError):
        lines.of([kept, (0,)], lambda entry: 1 / entry[0])
    assert lines.of([kept], lambda entry: (1, "again")) == ["first"]
