"""The audit of what is needed at run time: licences offline, vulnerabilities where there is a network."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import audit
import pytest


def test_every_licence_is_fine():
    distributions = audit.needed()
    assert {"torch", "transformers", "platformdirs", "filelock", "packaging", "typer", "rich"} <= distributions.keys()
    assert {"pytest", "mypy", "hypothesis", "liger-registry"}.isdisjoint(distributions)
    assert [text for failure, text in audit.lines(distributions, lambda d: audit.Audit(frozenset(d))) if failure] == []


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("MIT", True), ("Apache-2.0 OR BSD-2-Clause", True), ("BSD License", True), ("PSF-2.0", True),
        ("MPL-2.0 AND MIT", True), ("GPL-3.0-only", False), ("AGPL-3.0", False), ("LGPLv2+", False),
        ("GNU General Public License v3 (GPLv3)", False), ("GPL-2.0 OR MIT", True), ("unknown", False),
        ("Proprietary", False), ("Commercial", False), ("", False), ("limits", False),
    ],
)  # fmt: skip
def test_licences(text, fine):
    assert (audit.why_not("some-package", text) == "") is fine
    assert audit.why_not("nvidia-cublas-cu12", text) == ""


def pretending(tmp_path, output, code=0, errors=""):
    """A command that says what ``pip-audit`` would, after a look at what it was given."""
    script = tmp_path / "pretended.py"
    script.write_text(
        "import sys\n"
        "named = open(sys.argv[sys.argv.index('--requirement') + 1]).read()\n"
        "assert 'filelock==' in named and '+' not in named, named\n"
        f"print({output!r}); print({errors!r}, file=sys.stderr); sys.exit({code})\n"
    )
    return sys.executable, str(script)


def report(command):
    distributions = {name: metadata.distribution(name) for name in ("filelock", "torch")}
    return list(audit.lines(distributions, lambda found: audit.vulnerable(found, command)))


def test_a_vulnerability_fails(tmp_path):
    vulns = [{"id": "PYSEC-2099-1", "fix_versions": ["9.9"]}]
    found = {"dependencies": [{"name": "filelock", "version": "1", "vulns": vulns}, {"name": "torch", "vulns": []}]}
    assert (True, "filelock 1: PYSEC-2099-1, mended in 9.9") in report(pretending(tmp_path, json.dumps(found), 1))
    clean = {"dependencies": [{"name": name, "version": "1", "vulns": []} for name in ("filelock", "torch")]}
    *_, last = report(pretending(tmp_path, json.dumps(clean)))
    assert last == (False, "audited 2 distributions: no known vulnerabilities")


def test_what_was_not_looked_up_is_not_audited(tmp_path):
    """pip-audit finds nothing and leaves with 0 where an index knows none of them."""
    reason = "Dependency not found on PyPI and could not be audited"
    skipped = [{"name": name, "skip_reason": f"{reason}: {name}"} for name in ("filelock", "torch")]
    *_, last = report(pretending(tmp_path, json.dumps({"dependencies": skipped})))
    why = f"{reason}: filelock"
    assert last == (False, f"NOT AUDITED for known vulnerabilities: all 2 distributions: {why}")
    half = [skipped[0], {"name": "torch", "version": "1", "vulns": []}]
    *_, one, other = report(pretending(tmp_path, json.dumps({"dependencies": half})))
    assert one == (False, "audited 1 distributions: no known vulnerabilities")
    assert other == (False, f"NOT AUDITED for known vulnerabilities: filelock: {why}")
    *_, other = report(pretending(tmp_path, json.dumps({"dependencies": half[1:]})))
    assert other == (False, "NOT AUDITED for known vulnerabilities: filelock: pip-audit does not name them")


@pytest.mark.parametrize("errors", ["ConnectionError: no route to host", ""])
def test_without_a_network_it_says_so_and_does_not_fail(tmp_path, errors):
    *_, (failure, text) = report(pretending(tmp_path, "", 1, errors))
    assert not failure
    assert text.startswith("NOT AUDITED for known vulnerabilities: ")
    assert (errors or "exit code 1") in text
    *_, (failure, text) = report(("/no/such/command",))
    assert not failure
    assert "NOT AUDITED" in text


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(audit, "lines", lambda found: iter([(False, "one"), (True, "two")]))
    assert audit.main() == 1
    assert capsys.readouterr().out == "one\nFAILED two\n"
    monkeypatch.setattr(audit, "lines", lambda found: iter([(False, "one")]))
    assert audit.main() == 0
