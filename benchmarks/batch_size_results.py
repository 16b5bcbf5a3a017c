"""Suggested, true and found batch sizes as data and as a page: what `batch_size.py` comes to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batch_size_runs import NUM_SEARCHED, Found, Suggestion, Trial
from machine import not_reported

from memcallback.core.units import GiB

#: The least share of the truth that a suggestion is to be.
LEAST_SHARE = 0.97
OURS = "suggest_batch_size"
NOT_REPORTED = (
    "time: what a search takes of it, and what a retry costs",
    "several devices, sequences of different lengths, and steps that are not steady",
)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The largest batch sizes on a card, by trials.

    Attributes:
        trains: Without retries.
        gets_by: At all.
        num_trials: How many sizes were tried.
    """

    trains: int
    gets_by: int
    num_trials: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search came to, and what training at that size is.

    Attributes:
        tool: Who searched.
        found: What it gave; None if it failed.
        trial: Training at the size found; None if there is none.
        error: How it failed; empty if it did not.
    """

    tool: str
    found: Found | None = None
    trial: Trial | None = None
    error: str = ""

    @property
    def is_tested(self) -> bool:
        """Whether it has itself trained at that size to the end of a trial."""
        return self.found is not None and any(
            size == self.found.size and steps >= NUM_SEARCHED for size, steps in self.found.trials
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One configuration on one card.

    Attributes:
        config: The configuration.
        card: The card's name.
        capacity_bytes: Its capacity.
        suggestion: The suggestion and both limits.
        trial: Training at the suggestion on the whole card.
        less: The truth on a card of the capacity less the headroom.
        whole: The truth on the whole card.
        searches: What others found on the whole card.
    """

    config: str
    card: str
    capacity_bytes: int
    suggestion: Suggestion
    trial: Trial
    less: Truth
    whole: Truth
    searches: Sequence[Search]

    @property
    def share(self) -> float:
        """The suggestion in parts of what trains with the same headroom."""
        return self.suggestion.size / self.less.trains

    @property
    def is_met(self) -> bool:
        """Whether the suggestion trains without any lack of memory, and is as large as asked."""
        return self.trial.ran and not self.trial.num_ooms and self.share >= LEAST_SHARE


def pair_from(found: dict[str, Any]) -> Pair:
    """A pair from what JSON has of it."""
    searches = [
        Search(
            tool=one["tool"],
            found=Found(**one["found"]) if one["found"] else None,
            trial=Trial(**one["trial"]) if one["trial"] else None,
            error=one["error"],
        )
        for one in found["searches"]
    ]
    return Pair(
        **{name: found[name] for name in ("config", "card", "capacity_bytes")},
        suggestion=Suggestion(**found["suggestion"]),
        trial=Trial(**found["trial"]),
        less=Truth(**found["less"]),
        whole=Truth(**found["whole"]),
        searches=searches,
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One way to a batch size, over all pairs.

    Attributes:
        tool: Who.
        num_failed: Pairs for which it gave none.
        median_share: Of what trains on the whole card.
        least_share: The same.
        largest_share: The same; above 1 there are retries.
        num_out_of_memory: Sizes at which training runs out of memory.
        num_short: Sizes at which the allocator runs short in the last update too, the above
            included.
        num_untested: Sizes that it has not run itself.
        num_trials: Of a search, in the median.
        num_ooms: Trials that ran out of memory, in the median.
        changed: What it left changed.
    """

    tool: str
    num_failed: int
    median_share: float
    least_share: float
    largest_share: float
    num_out_of_memory: int
    num_short: int
    num_untested: int
    num_trials: float
    num_ooms: float
    changed: list[str]


def summarise(pairs: Sequence[Pair], left_behind: dict[str, list[str]]) -> list[Summary]:
    """The suggestion and all searches."""
    own = [
        (pair, Search(tool=OURS, found=_nothing_tried(pair.suggestion.size), trial=pair.trial))
        for pair in pairs
    ]
    by_tool = {
        tool: [(pair, one) for pair in pairs for one in pair.searches if one.tool == tool]
        for tool in _tools(pairs)
    }
    return [_summary(tool, rows, left_behind) for tool, rows in {OURS: own, **by_tool}.items()]


def _tools(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(search.tool for pair in pairs for search in pair.searches))


def _nothing_tried(size: int) -> Found:
    return Found(size=size, trials=[], num_ooms=0, changed=[])


def _summary(
    tool: str, of_pairs: Sequence[tuple[Pair, Search]], left_behind: dict[str, list[str]]
) -> Summary:
    found = [
        (pair, one, one.found, one.trial)
        for pair, one in of_pairs
        if one.found is not None and one.trial is not None
    ]
    shares = [of.size / pair.whole.trains for pair, _, of, _ in found]
    on_cpu = next(changed for name, changed in left_behind.items() if tool.startswith(name))
    return Summary(
        tool=tool,
        num_failed=len(of_pairs) - len(found),
        median_share=statistics.median(shares or [0]),
        least_share=min(shares, default=0),
        largest_share=max(shares, default=0),
        num_out_of_memory=sum(not trial.ran for *_, trial in found),
        num_short=sum(not trial.ran or trial.num_last_retries > 0 for *_, trial in found),
        num_untested=sum(not search.is_tested for _, search, *_ in found),
        num_trials=statistics.median([len(of.trials) for _, _, of, _ in found] or [0]),
        num_ooms=statistics.median([of.num_ooms for _, _, of, _ in found] or [0]),
        changed=list(
            dict.fromkeys([*on_cpu, *(text for _, _, of, _ in found for text in of.changed)])
        ),
    )


def to_markdown(about: dict[str, str], pairs: Sequence[Pair], summaries: Sequence[Summary]) -> str:
    """The page beside the JSON file."""
    shares = [pair.share for pair in pairs]
    at_all = [pair.suggestion.size / pair.less.gets_by for pair in pairs]
    without_retry = [
        (pair.suggestion.limit_without_retry or 0) / pair.whole.trains for pair in pairs
    ]
    limits = [(pair.suggestion.limit or 0) / pair.whole.gets_by for pair in pairs]
    num_met = sum(pair.is_met for pair in pairs)
    num_cards = len({(pair.card, pair.capacity_bytes) for pair in pairs})
    lines = [
        "# The largest batch size",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += [
        f"{len(pairs)} pairs of {len({pair.config for pair in pairs})} configurations and "
        f"{num_cards} card{'' if num_cards == 1 else 's'}. Asked: training at the "
        "suggestion never runs out of memory, and the suggestion is at least "
        f"{LEAST_SHARE:.0%} of the largest size that *trains* on a card that is smaller by the "
        f"headroom. **{'Met' if num_met == len(pairs) else f'Met by {num_met}'}.** The suggestion "
        f"is {_range(shares)} of that size.",
        "",
        "The largest size that *gets by* on that smaller card needs retries or smaller workspaces. "
        f"The suggestion is {_range(at_all)} of it, and at least {LEAST_SHARE:.0%} in "
        f"{sum(share >= LEAST_SHARE for share in at_all)} pairs. Sizes between the two are not "
        "suggested on purpose: there the allocator runs short.",
        "",
        "On the whole card, with nothing kept free, the limit without a retry is "
        f"{_range(without_retry)} of the largest size that *trains*, and the limit with retries is "
        f"{_range(limits)} of the largest that *gets by*. The second is below 100% where PyTorch "
        "runs a convolution with its next algorithm, because the workspace of the first does not "
        "fit.",
        "",
        "`benchmarks/batch_size.py` says what *trains* and *gets by* mean. Share: the suggestion "
        "divided by the largest size that trains with the same headroom.",
        "",
        "| configuration | card | GiB | suggestion | trains, less headroom | share | gets by, "
        "less headroom | limit without a retry | trains | limit | gets by |",
        "|:---|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(_pair_row, pairs),
        "",
        "†: not as asked.",
        "",
        "## Side by side, on the whole card",
        "",
        "Share: the size divided by the largest that trains on the whole card; above 1 the "
        "allocator runs short. Trials and OOMs are those of one search, in the median. Untested: "
        "sizes that a search returned without running them. Left changed: what a search leaves "
        "changed, seen on a CPU, where values are real; with Accelerate, in a model made outside "
        "of the function that it calls, when the attempt that fits begins.",
        "",
        "| | failed | share, median | least | largest | out of memory | short in the last update | "
        "untested | trials | OOMs | left changed |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|:---|",
        *map(_summary_row, summaries),
        "",
        "| configuration | GiB | trains | suggestion | " + " | ".join(_tools(pairs)) + " |",
        "|:---|---:|---:|---:|" + "---:|" * len(_tools(pairs)),
        *map(_search_row, pairs),
        "",
        "After a size: ✗ it ran out of memory; ~ the allocator ran short up to the last update; ? "
        "the search did not run it. In parentheses: trials and OOMs of the search.",
        *not_reported(NOT_REPORTED),
    ]
    return "\n".join(lines) + "\n"


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.1%} to {max(shares):.1%} ({statistics.median(shares):.1%} in the median)"


def _pair_row(pair: Pair) -> str:
    one = pair.suggestion
    cells = [
        pair.config,
        pair.card,
        pair.capacity_bytes // GiB,
        f"{one.size}{'' if pair.is_met else ' †'}",
        pair.less.trains,
    ]
    cells += [
        f"{pair.share:.3f}",
        pair.less.gets_by,
        one.limit_without_retry,
        pair.whole.trains,
        one.limit,
        pair.whole.gets_by,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _summary_row(row: Summary) -> str:
    cells = [
        row.tool,
        row.num_failed,
        f"{row.median_share:.3f}",
        f"{row.least_share:.3f}",
        f"{row.largest_share:.3f}",
    ]
    cells += [row.num_out_of_memory, row.num_short, "" if row.tool == OURS else row.num_untested]
    cells += [f"{row.num_trials:g}", f"{row.num_ooms:g}", ", ".join(row.changed) or "nothing"]
    return f"| {' | '.join(map(str, cells))} |"


def _search_row(pair: Pair) -> str:
    cells = [
        pair.config,
        str(pair.capacity_bytes // GiB),
        str(pair.whole.trains),
        str(pair.suggestion.size),
    ]
    for search in pair.searches:
        if search.found is None or search.trial is None:
            cells.append("failed")
            continue
        mark = "✗" if not search.trial.ran else "~" if search.trial.num_last_retries else ""
        mark += "" if search.is_tested else "?"
        cells.append(
            f"{search.found.size}{mark} ({len(search.found.trials)}, {search.found.num_ooms})"
        )
    return f"| {' | '.join(cells)} |"
