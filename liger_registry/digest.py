"""The digest in a document: whether its text is still what was written.

It finds damage and edits that nobody meant, and can be compared with one that the author published. It is no signature:
whoever can change a file can give it a digest that fits. A document without one is older, or written by hand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from liger_registry.errors import TableInvalidError

KEY = "digest"
_SEALED = re.compile(rb'\{\n"digest": "(sha256:[0-9a-f]{64})",\n')


def sealed(text: str) -> str:
    """A document with the SHA-256 of its text as a line of its own, the second.

    Args:
        text: the document in ASCII; its first line is ``{``.
    """
    return f'{{\n"{KEY}": "sha256:{hashlib.sha256(text.encode("ascii")).hexdigest()}",\n{text[2:]}'


def checked(data: bytes | str, document: Mapping[str, Any]) -> str:
    """The digest that a document carries; empty if it carries none.

    Line ends that a version control system turned into those of Windows are no change.

    Args:
        data: the document's text.
        document: the same, parsed.

    Raises:
        TableInvalidError: it carries one that does not fit its text.
    """
    if KEY not in document:
        return ""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    raw = raw.replace(b"\r\n", b"\n") if b"\r" in raw else raw
    found = _SEALED.match(raw)
    if found is not None:
        body = hashlib.sha256(b"{\n")
        body.update(memoryview(raw)[found.end() :])
        if found[1] == b"sha256:" + body.hexdigest().encode():
            return found[1].decode()
    raise TableInvalidError(
        "the digest does not fit the text",
        why="it was changed after it was written, or damaged on the way",
        fix="take it from its source again, or delete the line of the digest to use it as it is",
    )
