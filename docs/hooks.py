"""What mkdocs asks while it builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Written by other programs, and not there before they ran.
WRITTEN = ("models-*.md", "reliability.md")


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs' own mapping
    """Add to the reference and to the commands what is there."""
    docs = Path(config["docs_dir"])
    parts = {title: pages for entry in config["nav"] for title, pages in entry.items()}
    found = (path for pattern in WRITTEN for path in sorted(docs.glob(pattern)))
    parts["Reference"] += [{path.stem.capitalize().replace("-", ", "): path.name} for path in found]
    parts["Commands"] += [
        {f"liger-tune {path.stem}": f"commands/{path.name}"}
        for path in sorted((docs / "commands").glob("*.md"))
        if path.stem != "index"
    ]
    return config
