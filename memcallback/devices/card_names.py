"""Which words of a card's name distinguish it, and which names some words may mean."""

from __future__ import annotations

import re

#: Words that do not distinguish cards: makers' and series' names.
_MAKERS = frozenset(
    {"nvidia", "geforce", "tesla", "rtx", "generation", "amd", "instinct", "radeon", "rx"}
)
#: Words of names -> what people say instead. The driver's name of the H100 lacks the word SXM.
_ALIASES = {"sxm2": "sxm", "sxm4": "sxm", "hbm3": "sxm"}
#: Words that make another card of a name, which the name alone does not mean.
_OF_ANOTHER_CARD = frozenset({"ti"})


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name that distinguish cards: `4090` of `GeForce RTX4090`."""
    words = re.sub(r"\brtx(?=\d)", "rtx ", name.lower())
    return tuple(word for word in re.findall(r"[a-z0-9]+", words) if word not in _MAKERS)


def may_mean(words: set[str], name: str) -> bool:
    """Whether every word is in the card's name; `80` also means `80gb`, `sxm` also `sxm4`."""
    names = words_of(name)
    if _OF_ANOTHER_CARD & set(names) - words:
        return False
    return bool(words) and all(
        any(word in (name, name.removesuffix("gb"), _ALIASES.get(name)) for name in names)
        for word in words
    )
