"""Licences of everything that this distribution needs at run time, and known vulnerabilities in it.

``python tests/supply/audit.py``. The licences are read from the installed metadata. The vulnerabilities are asked of
``pip-audit``, which needs a network. What it could not look up, as where there is none or a mirror of the index has no
such data, is listed as NOT AUDITED, which is no failure, because nothing was found. Exit code 1 if a licence is not
among those allowed, or if something is vulnerable.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN = "liger-registry"
# What may be used from an Apache-2.0 distribution that neither changes nor contains it.
ALLOWED = re.compile(
    r"apache|\bmit\b|\bbsd\b|bsd-|\bisc\b|\bpsf\b|python software foundation|\bmpl[- ]?2|mozilla public license 2"
    r"|unlicense|0bsd|\bcnri\b|historical permission|\bhpnd\b|zlib",
    re.IGNORECASE,
)
NEVER = re.compile(r"\b(a|l)?gpl|general public", re.IGNORECASE)
# torch's builds for CUDA need them; each user takes NVIDIA's licence by installing such a build.
OF_NVIDIA = re.compile(r"nvidia-.*|cuda-.*")


def needed(name: str = OWN) -> dict[str, metadata.Distribution]:
    """The installed distributions that one needs at run time, itself left out, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    queue = [(name, frozenset[str]())]
    seen = set(queue)
    for asked, extras in queue:
        try:
            distribution = metadata.distribution(asked)
        except metadata.PackageNotFoundError:
            continue  # for another platform, by a marker that cannot be told from here
        found[canonicalize_name(asked)] = distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                entry = (canonicalize_name(requirement.name), frozenset(requirement.extras))
                if entry not in seen:
                    seen.add(entry)
                    queue.append(entry)
    found.pop(canonicalize_name(name), None)
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """What a distribution says of its licence: an SPDX expression, its classifiers, or the first line of its text."""
    fields = distribution.metadata
    classifiers = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier") or () if c.startswith("License ::")]
    stated = (fields.get("License") or "").strip().partition("\n")[0][:100]
    return fields.get("License-Expression") or ", ".join(classifiers) or stated or "unknown"


def why_not(name: str, text: str) -> str:
    """Why a licence is not allowed; empty if it is."""
    if OF_NVIDIA.fullmatch(name):
        return ""
    if NEVER.search(text) and not re.search(r" or ", text, re.IGNORECASE):
        return "a licence that asks for the source of what uses it"
    return "" if ALLOWED.search(text) else "no licence that is known to be fine"


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        known: the names that were looked up.
        found: lines about vulnerabilities.
        why: why others were not looked up.
    """

    known: frozenset[str] = frozenset()
    found: tuple[str, ...] = ()
    why: str = ""


def vulnerable(distributions: dict[str, metadata.Distribution], command: tuple[str, ...] = ()) -> Audit:
    """Look up known vulnerabilities."""
    command = command or (sys.executable, "-m", "pip_audit")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "requirements.txt"
        # Local builds (2.11.0+cu128) are known under the version that they are built from.
        file.write_text("".join(f"{n}=={d.version.partition('+')[0]}\n" for n, d in distributions.items()))
        options = (
            "--requirement",
            str(file),
            "--no-deps",
            "--disable-pip",
            "--format",
            "json",
            "--progress-spinner",
            "off",
        )
        try:
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Audit(why=f"{type(error).__name__}: {error}")
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = (done.stderr or done.stdout).strip().splitlines()
        return Audit(why=(lines[-1:] or [f"exit code {done.returncode}"])[0])
    # What it could not look up has a reason in place of vulnerabilities; it calls that none found, and leaves with 0.
    skipped = [d["skip_reason"] for d in dependencies if "skip_reason" in d]
    return Audit(
        frozenset(canonicalize_name(d["name"]) for d in dependencies if "vulns" in d),
        tuple(
            f"{d['name']} {d['version']}: {v['id']}, mended in {', '.join(v.get('fix_versions') or ['no release'])}"
            for d in dependencies
            for v in d.get("vulns", ())
        ),
        skipped[0] if skipped else "pip-audit does not name them",
    )


def lines(
    distributions: dict[str, metadata.Distribution],
    audit: Callable[[dict[str, metadata.Distribution]], Audit] = vulnerable,
) -> Iterator[tuple[bool, str]]:
    """The report: for each line whether it is a failure, and the text."""
    for name, distribution in distributions.items():
        text = licence(distribution)
        reason = why_not(name, text)
        yield bool(reason), f"{name} {distribution.version}: {text}{f': {reason}' if reason else ''}"
    audited = audit(distributions)
    yield from ((True, line) for line in audited.found)
    known = [name for name in distributions if name in audited.known]
    left = [name for name in distributions if name not in audited.known]
    if known:
        yield False, f"audited {len(known)} distributions: {len(audited.found) or 'no'} known vulnerabilities"
    if left:
        names = ", ".join(left) if known else f"all {len(left)} distributions"
        yield False, f"NOT AUDITED for known vulnerabilities: {names}: {audited.why}"


def main() -> int:
    """Print the report; the exit code."""
    failed = False
    for failure, text in lines(needed()):
        failed |= failure
        print(f"{'FAILED ' if failure else ''}{text}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
