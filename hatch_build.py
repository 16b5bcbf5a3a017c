"""The README as a package index shows it: an index has none of the repository's files.

With a `Repository` in `[project.urls]` of pyproject.toml relative links and pictures become
absolute; without one a link is its text, and a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` when a distribution is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme_for_index(text, repository),
        }


def readme_for_index(text: str, repository: str | None) -> str:
    """The README without relative links and without comments, which an index would show."""
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    if repository is None:
        text = re.sub(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n", "", text, flags=re.MULTILINE)

    def absolute(match: re.Match[str]) -> str:
        if repository is None:
            return match["text"]
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{kind}/main/{match['path']})"

    return _LINK.sub(absolute, text)
