"""The largest batch size: suggested, truly trainable, and as found by other searches.

    python benchmarks/batch_size.py                                     # on virtual devices
    python benchmarks/batch_size.py --here 16 --jobs 4 --out FOLDER     # on this device

Virtual devices (environment variable VGPU=1) are of several cards and capacities (VGPU_ARCH,
VGPU_TOTAL_BYTES); memory is that of the card, and kernels do nothing. A Lightning Trainer trains,
each trial in a process of its own, the warm-up and five more updates. With `--here 16` each process
may have 16 GiB of this machine's device, fewer configurations train, and nobody searches.

*Suggestion*: `memcallback.suggest_batch_size(step, device="cuda", multiple_of=1)` with its default
headroom of 5 %.

*Truth*: found by trials alone, by bisection from the suggestion, with two more sizes beyond what is
found, since memory need not grow with every sample. It is said of a card, and there are two:

- *trains*: the largest size at which PyTorch's allocator never runs short: it never has to give
  back its cache and try again (a retry, which waits for the device) and raises no OutOfMemoryError.
  That is what a suggestion means by fitting.
- *gets by*: the largest at which training goes on at all: by retries, in every update if need be,
  and with other algorithms where a workspace of cuDNN cannot be had (PyTorch catches that
  OutOfMemoryError).

To compare like with like, the suggestion is set beside the truth of a card of the capacity less the
headroom; and the limits that come with it, which have no headroom, beside that of the whole card.

*Searches*, on the whole card: Lightning's `Tuner.scale_batch_size` (`BatchSizeFinder`) in both
modes, Accelerate's `find_executable_batch_size` from its default of 128 and from Lightning's
maximum, 8192, and `memcallback.fit_batch_size`, all else by their defaults. Of these the last keeps
5 % of the memory free and Lightning's mode `binsearch` takes off 5 % of the samples. What each
gives is trained like the suggestion. What a search leaves behind is looked at on a CPU, where
values are real (`batch_size_state.py`).

The result goes to `benchmarks/results/virtual-cards-<date>/`, with `--here` to that device's
folder, as batch_size.json and batch_size.md; with `--only` the other pairs there stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import batch_size_state
import torch
from accuracy import in_a_process_of_its_own, in_processes_of_their_own
from accuracy_configs import CONFIGS, Config
from batch_size_results import OURS, Pair, Search, Truth, pair_from, summarise, to_markdown
from batch_size_runs import (
    Found,
    Suggestion,
    Trial,
    by_accelerate,
    by_fit,
    by_lightning,
    suggested,
    try_out,
)
from machine import RESULTS, command, driver, is_virtual, processor, results_folder, today

from memcallback import __version__
from memcallback.core.units import GiB
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.prediction.search import largest_number

#: Capacity in GiB -> the card of that virtual device.
CARDS = {8: "rtx3090", 16: "t4", 24: "rtx4090", 40: "a100", 80: "h100"}
#: Configurations of the accuracy proof -> the capacities at which each is tried.
PAIRS = {
    "resnet50-momentum-32-true": (8, 40),
    "resnet18-sgd-32-true": (16, 80),
    "vgg16-momentum-32-true": (8, 24),
    "unet-adamw-bf16-mixed": (24, 80),
    "convnext-adamw-32-true": (16, 40),
    "autoencoder-adam-32-true": (8, 80),
    "vit-s16-adamw-32-true": (24, 80),
    "mlp-mixer-adamw-32-true": (8, 40),
    "gpt2-adamw-bf16-mixed": (40, 80),
    "bert-adamw-fused-16-mixed": (16, 40),
    "llama-adamw-bf16-true": (16, 40),
    "t5-adafactor-32-true": (40, 80),
    "vae-adam-32-true": (16, 40),
    "wavenet-adam-32-true": (16, 40),
}
#: Those for `--here`.
PAIRS_HERE = (
    *(
        "resnet50-momentum-32-true",
        "resnet18-sgd-32-true",
        "unet-adamw-bf16-mixed",
        "vit-s16-adamw-32-true",
    ),
    *(
        "gpt2-adamw-bf16-mixed",
        "bert-adamw-fused-16-mixed",
        "llama-adamw-bf16-true",
        "wavenet-adam-32-true",
    ),
)
SEARCHES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "fit_batch_size": by_fit,
    "BatchSizeFinder, power": partial(by_lightning, mode="power"),
    "BatchSizeFinder, binsearch": partial(by_lightning, mode="binsearch"),
    "find_executable_batch_size, 128": partial(by_accelerate, starting_batch_size=128),
    "find_executable_batch_size, 8192": partial(by_accelerate, starting_batch_size=8192),
}
LEFT_BEHIND: dict[str, Callable[[], list[str]]] = {
    OURS: batch_size_state.by_suggestion,
    "fit_batch_size": batch_size_state.by_fit,
    "BatchSizeFinder, power": partial(batch_size_state.by_lightning, "power"),
    "BatchSizeFinder, binsearch": partial(batch_size_state.by_lightning, "binsearch"),
    "find_executable_batch_size": batch_size_state.by_accelerate,
}
HERE = "here"
#: How far beyond the size found others are tried.
_BEYOND = (0.02, 0.05)
_ENDLESS = 1 << 24


def on_card(capacity_bytes: int, arch: str, work: Callable[[], Any]) -> Any:
    """Do work in a process that sees a virtual device; or with arch `HERE`, a share of this one."""

    def there() -> Any:
        if arch == HERE:
            torch.cuda.set_per_process_memory_fraction(
                capacity_bytes / torch.cuda.get_device_properties(0).total_memory
            )
        else:
            os.environ.update(VGPU_ARCH=arch, VGPU_TOTAL_BYTES=str(capacity_bytes))
        return work()

    return in_a_process_of_its_own(there)


class Trials:
    """Tries sizes of a configuration on a card, each once.

    Args:
        config: The configuration.
        capacity_bytes: The card's capacity.
        arch: Its kind.
    """

    def __init__(self, config: Config, capacity_bytes: int, arch: str) -> None:
        self._config, self._capacity_bytes, self._arch = config, capacity_bytes, arch
        self._done: dict[int, Trial] = {}

    def at(self, batch_size: int) -> Trial:
        """What came of a size."""
        if batch_size not in self._done:
            self._done[batch_size] = Trial(
                **on_card(
                    self._capacity_bytes, self._arch, partial(try_out, self._config, batch_size)
                )
            )
        return self._done[batch_size]

    def truth(self, *, near: int, near_at_all: int) -> Truth:
        """Bisect.

        Args:
            near: Where to begin for what trains.
            near_at_all: Where to begin for what gets by.
        """
        trains = self._largest(lambda trial: trial.ran and not trial.num_retries, near)
        gets_by = self._largest(lambda trial: trial.ran, max(trains, near_at_all))
        return Truth(trains=trains, gets_by=gets_by, num_trials=len(self._done))

    def _largest(self, is_good: Callable[[Trial], bool], near: int) -> int:
        def holds(batch_size: int) -> bool:
            return is_good(self.at(batch_size))

        while True:
            found = largest_number(holds, near=max(1, near), end=_ENDLESS)
            assert found is not None
            beyond = (max(found + 2, round(found * (1 + share))) for share in _BEYOND)
            further = next((size for size in beyond if holds(size)), None)
            if further is None:
                return found
            near = further


def measured(
    config: Config, capacity_gib: int, arch: str, tools: Sequence[str], suggestion: Suggestion
) -> Pair:
    """All else of one configuration on one card."""
    capacity_bytes = capacity_gib * GiB
    whole, less = (
        Trials(config, capacity_bytes, arch),
        Trials(config, int(capacity_bytes * (1 - DEFAULT_HEADROOM)), arch),
    )
    limit = suggestion.limit or suggestion.size
    return Pair(
        config=config.name,
        card=on_card(capacity_bytes, arch, torch.cuda.get_device_name),
        capacity_bytes=capacity_bytes,
        suggestion=suggestion,
        trial=whole.at(max(1, suggestion.size)),
        less=less.truth(near=suggestion.size, near_at_all=int(limit * (1 - DEFAULT_HEADROOM))),
        whole=whole.truth(
            near=suggestion.limit_without_retry or suggestion.size, near_at_all=limit
        ),
        searches=[
            _searched(tool, config, whole, partial(on_card, capacity_bytes, arch)) for tool in tools
        ],
    )


def _searched(
    tool: str, config: Config, whole: Trials, there: Callable[[Callable[[], Any]], Any]
) -> Search:
    try:
        found = Found(**there(partial(SEARCHES[tool], config)))
    except RuntimeError as error:
        return Search(tool=tool, error=str(error))
    return Search(tool=tool, found=found, trial=whole.at(found.size))


def environment(gib_here: int | None) -> dict[str, str]:
    """What the figures hold for."""
    cards = ", ".join(f"{arch} of {gib} GiB" for gib, arch in CARDS.items()) + " (virtual)"
    if gib_here is not None:
        cards = (
            f"{torch.cuda.get_device_name()}{' (virtual)' if is_virtual() else ''}, {gib_here} GiB "
            "of it for each process"
        )
    return {
        "devices": cards,
        "driver": driver(),
        "processor": processor(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
        f"{torch.backends.cudnn.version()}",
        "lightning": version("lightning"),
        **({} if gib_here else {"accelerate": version("accelerate")}),
        "python": platform.python_version(),
        "memcallback": __version__,
        "date": today(),
        "command": command(),
    }


def num_places(gib: int) -> int:
    """How many processes fit the device, each with `gib` and a context; at least one."""
    return max(1, torch.cuda.get_device_properties(0).total_memory // ((gib + 1) * GiB))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check suggested batch sizes on virtual devices.")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CONFIG", help=f"of {', '.join(PAIRS)}"
    )
    parser.add_argument(
        "--here",
        type=int,
        metavar="GIB",
        help="on the device that is here, of which each process may have so much",
    )
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time")
    parser.add_argument("--out", type=Path, help="another folder for the results")
    return parser.parse_args()


def main() -> int:
    """Suggest, try, search, compare; 1 if a suggestion is not as asked."""
    options = arguments()
    if options.here is None and not is_virtual():
        raise SystemExit(
            "The capacities are those of virtual devices (VGPU=1), and this is none. Try --here 16."
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    configs = {config.name: config for config in CONFIGS}
    cards = [(name, gib, CARDS[gib]) for name, gibs in PAIRS.items() for gib in gibs]
    if options.here is not None:
        cards = [(name, options.here, HERE) for name in PAIRS_HERE]
    tools = list(SEARCHES) if options.here is None else []
    chosen = {
        f"{name}, {gib} GiB": (configs[name], gib, arch)
        for name, gib, arch in cards
        if not options.only or name in options.only
    }
    left_behind = {
        tool: in_a_process_of_its_own(look)
        for tool, look in LEFT_BEHIND.items()
        if options.here is None or tool == OURS
    }
    # PyTorch's question for cuDNN's version opens the device, after which no process can be forked
    # that uses it.
    about = in_a_process_of_its_own(partial(environment, options.here))
    out = options.out or RESULTS / f"virtual-cards-{today()}"
    if options.here and not options.out:
        out = results_folder(in_a_process_of_its_own(torch.cuda.get_device_name))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "batch_size.json"
    kept = json.loads(path.read_text())["pairs"] if options.only and path.exists() else []
    pairs = [pair_from(pair) for pair in kept if pair["config"] not in options.only]
    began = time.perf_counter()
    # One at a time, since what others use of the device counts for a suggestion; a trial has its
    # share of the device, whatever others do.
    asked = {
        name: partial(on_card, gib * GiB, arch, partial(suggested, config))
        for name, (config, gib, arch) in chosen.items()
    }
    suggestions = dict(in_processes_of_their_own(asked))
    print(f"{time.perf_counter() - began:6.0f} s  {len(suggestions)} suggestions", file=sys.stderr)
    failed = {name: answer["error"] for name, answer in suggestions.items() if "error" in answer}
    works = {
        name: partial(_measured, *chosen[name], tools, Suggestion(**answer["result"]))
        for name, answer in suggestions.items()
        if name not in failed
    }
    num_jobs = (
        options.jobs
        if options.here is None
        else min(options.jobs, in_a_process_of_its_own(partial(num_places, options.here)))
    )
    for name, answer in in_processes_of_their_own(works, num_jobs=num_jobs):
        print(
            f"{time.perf_counter() - began:6.0f} s  {name} {answer.get('error', '')}",
            file=sys.stderr,
        )
        if "error" in answer:
            failed[name] = answer["error"]
            continue
        pairs = sorted(
            [*pairs, pair_from(answer["result"])],
            key=lambda pair: (list(PAIRS).index(pair.config), pair.capacity_bytes),
        )
        summaries = summarise(pairs, left_behind)
        results = {
            "environment": about,
            "pairs": [asdict(pair) for pair in pairs],
            "summaries": [asdict(row) for row in summaries],
        }
        path.write_text(json.dumps({**results, "left_behind": left_behind}, indent=1) + "\n")
        path.with_suffix(".md").write_text(to_markdown(about, pairs, summaries))
        print(path.with_suffix(".md").read_text())
    for name, error in failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    return 0 if pairs and all(pair.is_met for pair in pairs) and not failed else 1


def _measured(
    config: Config, gib: int, arch: str, tools: Sequence[str], suggestion: Suggestion
) -> dict[str, Any]:
    return asdict(measured(config, gib, arch, tools, suggestion))


if __name__ == "__main__":
    sys.exit(main())
