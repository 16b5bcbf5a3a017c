"""What several charts share: colours by category, legends, data inside a page."""

from __future__ import annotations

from collections.abc import Iterable

from memcallback.core.types import Category

#: The class of a category's colour.
SLUGS = {category: category.value.replace("_", "-") for category in Category}


def legend(categories: Iterable[Category]) -> str:
    """The colours of some categories."""
    items = "".join(
        f'<span><i class="{SLUGS[category]}"></i>{category.label}</span>' for category in categories
    )
    return f'<div class="legend">{items}</div>'


def script_json(text: str) -> str:
    """JSON that no text inside can end: a browser looks for `</` and `<!--` first."""
    return text.replace("<", "\\u003c")
