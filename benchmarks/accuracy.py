"""The accuracy proof: what training takes on a device, measured and predicted, side by side.

    python benchmarks/accuracy.py all                           # on a device, real or virtual
    python benchmarks/accuracy.py measure --out accuracy.json.gz          # its first half
    python benchmarks/accuracy.py compare --measured accuracy.json.gz     # the second, anywhere
    python benchmarks/accuracy.py events --only NAME --out events.json    # origins of memory

`all` leaves accuracy.json.gz (measured), predicted.json.gz and accuracy.md (both side by side) in
`benchmarks/results/<device>-<date>/`. Every configuration of `accuracy_configs.py` trains in a
process of its own, so that the allocator begins empty. A virtual device (environment variable
VGPU=1) runs PyTorch's real CUDA build and its allocator, but no kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy_comparison import Figure, figures, summarise, to_markdown
from accuracy_configs import CONFIGS, OPTIMIZERS, Config, Parts
from accuracy_cudnn import cudnn_table
from machine import (
    command,
    driver,
    is_virtual,
    outside_pool_bytes,
    predict_as_virtual,
    results_folder,
    today,
)
from peak_errors import all_peak_errors, peaks_table
from training_loop import NUM_WINDOWS, train

from memcallback import __version__
from memcallback.core.step_memory import PhaseMemory, StepMemory
from memcallback.core.types import Phase
from memcallback.devices.catalogue import DeviceSpec, find_device
from memcallback.record.recorder import MemoryRecorder
from memcallback.step.training_step import TrainingStep

#: What is kept of each boundary.
STATS = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
NUM_PYTHON_FRAMES = 3


Answer = dict[str, Any]


def in_processes_of_their_own(
    works: Mapping[str, Callable[[], Any]], *, num_jobs: int = 1
) -> Iterator[tuple[str, Answer]]:
    """Fork for each piece of work; yield its name and `{"result": ...}` or `{"error": ...}`.

    The parent has imported everything but has not touched CUDA, nor run a backward pass. Results
    must go into JSON.
    """
    waiting, running = list(works.items()), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            if waiting and len(running) < num_jobs:
                name, work = waiting.pop(0)
                path = Path(folder, str(len(waiting)))
                child = os.fork()
                if child == 0:
                    try:
                        answer = {"result": work()}
                    except BaseException as error:
                        traceback.print_exc()
                        answer = {
                            "error": f"{type(error).__name__}: "
                            f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                        }
                    path.write_text(json.dumps(answer))
                    os._exit(0)  # nothing of the parent's is to be cleaned up here
                running[child] = f"{path}\n{name}"
                continue
            child, status = os.wait()
            found, name = running.pop(child).split("\n")
            yield (
                name,
                json.loads(Path(found).read_text())
                if Path(found).exists()
                else {"error": f"the process ended with status {status}"},
            )


def in_a_process_of_its_own(work: Callable[[], Any]) -> Any:
    """Fork, do the work in the child, and give back what it returned.

    Raises:
        RuntimeError: If the child failed.
    """
    ((_, answer),) = in_processes_of_their_own({"": work})
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def measure(config: Config) -> dict[str, Any]:
    """Train one configuration on the device, in this process.

    Returns:
        `windows`: for each update its micro-batches, for each of those its phases. The first is the
            warm-up, the last the steady one. `period`: after how many updates the figures are the
            same again: 1 where training is steady, None if they never were. `outside_pool_bytes`:
            what the process took of the device beside PyTorch's pool at the end.
    """
    device = torch.device("cuda", 0)
    recorder = MemoryRecorder(device=device)
    train(config, config.make(initialise=not is_virtual()), recorder, device)
    steps = [step_to_json(step) for step in recorder.steps]
    windows = [
        steps[first : first + config.accumulate]
        for first in range(0, len(steps), config.accumulate)
    ]
    period = next(
        (n for n in range(1, NUM_WINDOWS // 2 + 1) if windows[-1] == windows[-1 - n]), None
    )
    return {"windows": windows, "period": period, "outside_pool_bytes": outside_pool_bytes()}


def step_to_json(step: StepMemory) -> list[dict[str, Any]]:
    """The windows of a step."""
    return [_window_to_json(window) for window in step.windows]


def _window_to_json(window: PhaseMemory) -> dict[str, Any]:
    covers = [phase.value for phase in window.covers]
    return {
        "phase": window.phase.value,
        **({"covers": covers} if len(covers) > 1 else {}),
        "start": {name: getattr(window.start, name) for name in STATS},
        "end": {name: getattr(window.end, name) for name in STATS},
        "peak_allocated_bytes": window.peak_allocated_bytes,
        "peak_reserved_bytes": window.peak_reserved_bytes,
        "num_alloc_retries": window.num_alloc_retries,
    }


def environment() -> dict[str, Any]:
    """What the figures hold for; touches the device."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "is_virtual": is_virtual(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_multiprocessors": properties.multi_processor_count,
        "total_memory_bytes": properties.total_memory,
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": today(),
    }


def write_json(path: Path, value: object) -> None:
    """Write a JSON text, compressed if the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, separators=(",", ":")) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote."""
    return json.loads(
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text()
    )


def run_all(options: argparse.Namespace) -> int:
    """The command `all`."""
    folder = options.out or results_folder(in_a_process_of_its_own(torch.cuda.get_device_name))
    measured = folder / "accuracy.json.gz"
    files = {
        "out": measured,
        "measured": measured,
        "json": folder / "predicted.json.gz",
        "markdown": folder / "accuracy.md",
    }
    both = argparse.Namespace(**{**vars(options), **files})
    is_bad = run_measure(both)
    return run_compare(both) or is_bad


def run_measure(options: argparse.Namespace) -> int:
    """The command `measure`."""
    environment_ = {**in_a_process_of_its_own(environment), "command": command()}
    works = {config.name: partial(measure, config) for config in _chosen(options.only)}
    results: dict[str, Answer] = {}
    began = time.perf_counter()
    for name, answer in in_processes_of_their_own(works, num_jobs=options.jobs):
        results[name] = answer.get("result", answer)
        in_order = {name: results[name] for name in works if name in results}
        write_json(options.out, {"environment": environment_, "configs": in_order})
        print(
            f"{time.perf_counter() - began:7.1f} s  {name:60} {_in_words(results[name])}",
            file=sys.stderr,
        )
    return 1 if any("error" in result for result in results.values()) else 0


def _in_words(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error']}"
    windows = [window for step in result["windows"][-1] for window in step]
    allocated, reserved = (
        max(window[name] for window in windows) / 2**20
        for name in ("peak_allocated_bytes", "peak_reserved_bytes")
    )
    return f"allocated {allocated:9.2f} MiB, reserved {reserved:7.0f} MiB" + (
        "" if result["period"] == 1 else f", period {result['period']}"
    )


def _chosen(names: Sequence[str]) -> Iterable[Config]:
    unknown = set(names) - {config.name for config in CONFIGS}
    if unknown:
        raise SystemExit(f"no such configuration: {', '.join(sorted(unknown))}")
    return [config for config in CONFIGS if not names or config.name in names]


# Predicted against measured.


def training_step(config: Config, parts: Parts) -> TrainingStep:
    """A configuration as the package's users say it. The one place that knows both sides."""
    options: dict[str, Any] = {"precision": config.precision}
    if config.accumulate > 1:
        options["accumulate"] = config.accumulate
    if config.clip_grad_norm is not None:
        options["clip_grad_norm"] = config.clip_grad_norm
    if len(parts.losses) > 1:
        options |= {
            "loss": parts.losses,
            "optimizer": [make(parts.model) for make in parts.optimizers],
        }
    else:
        make_optimizer = OPTIMIZERS[config.optimizer]
        options |= {
            "loss": parts.losses[0],
            "optimizer": lambda parameters: make_optimizer(
                [p for p in parameters if p.requires_grad]
            ),
        }
    return TrainingStep(parts.model, parts.batch, **options)


def card_of(environment: dict[str, Any]) -> DeviceSpec:
    """The card of a measurement, with the workspaces of the PyTorch that ran there."""
    card = find_device(environment["device"])
    assert isinstance(card, DeviceSpec)
    major, minor = environment["torch"].split(".")[:2]
    return replace(card, torch_version=(int(major), int(minor)))


def predict(config: Config, device: DeviceSpec) -> Answer:
    """The steady step of one configuration on a device, in this process; and how long that took."""
    from memcallback.prediction.predict import predict as predict_step

    began = time.perf_counter()
    prediction = predict_step(training_step(config, config.make(initialise=False)), device=device)
    return {
        "steps": [step_to_json(prediction.step)],
        "caveats": list(prediction.caveats),
        "seconds": round(time.perf_counter() - began, 2),
    }


def run_compare(options: argparse.Namespace) -> int:
    """The command `compare`."""
    document = read_json(options.measured)
    about, measured = document["environment"], document["configs"]
    configs = {
        config.name: config
        for config in _chosen(options.only)
        if "windows" in measured.get(config.name, {})
    }
    card = card_of(about)
    if about["is_virtual"]:
        predict_as_virtual()
    works = {name: partial(predict, config, card) for name, config in configs.items()}
    left_out = (
        {name: config.left_out for name, config in configs.items() if config.left_out}
        if about["is_virtual"]
        else {}
    )
    answers = {}
    for name, answer in in_processes_of_their_own(works, num_jobs=options.jobs):
        answers[name] = answer
        if options.json:  # what there is stays if time runs out
            write_json(
                options.json, {"environment": about, "answers": answers, "left_out": left_out}
            )
        print(
            f"{name:60} {answer.get('error') or str(answer['result']['seconds']) + ' s'}",
            file=sys.stderr,
        )
    found: dict[str, list[Figure]] = {
        name: figures(name, measured[name]["windows"][-1], answers[name]["result"]["steps"])
        if "result" in answers[name]
        else []
        for name in configs
    }
    not_measured = {
        config.name: measured[config.name]["error"]
        for config in _chosen(options.only)
        if "error" in measured.get(config.name, {})
    }
    judged = {name: config for name, config in configs.items() if name not in left_out}
    summaries = [summarise("all", {name: found[name] for name in judged})]
    groups: dict[str, list[str]] = {}
    for name, config in judged.items():
        for group in (
            f"family {config.workload.family}",
            f"precision {config.precision}",
            f"optimizer {config.optimizer}",
        ):
            groups.setdefault(group, []).append(name)
    summaries += [
        summarise(group, {name: found[name] for name in names})
        for group, names in sorted(groups.items())
    ]
    failures = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    peaks = all_peak_errors({name: found[name] for name in judged}, groups)
    predicted_by = {
        "torch": torch.__version__,
        "memcallback": __version__,
        "date": today(),
        "command": command(),
    }
    about |= {"predicted by": ", ".join(f"{name} {value}" for name, value in predicted_by.items())}
    predicted = {name: answers[name]["result"] for name in judged if "result" in answers[name]}
    tables = [*cudnn_table(measured, predicted), *peaks_table(peaks)]
    text = to_markdown(about, summaries, found, failures, left_out | not_measured, tables)
    if options.json:
        rows = {
            "summaries": [asdict(s) for s in summaries],
            "peaks": [asdict(one) for one in peaks],
            "answers": {name: answers[name] for name in configs},
            "left_out": left_out | not_measured,
        }
        write_json(options.json, {"environment": about, **rows})
    if options.markdown:
        options.markdown.write_text(text)
    print(text)
    return 0 if summaries[0].is_met else 1


# Where the allocations come from: an aid for whoever writes the prediction.


class EventRecorder(MemoryRecorder):
    """A recorder that keeps the allocator's own history, cut at every boundary.

    Attributes:
        sections: In order: the step (-1 before the first), the phase (None outside of all), and its
            events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self.sections: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._num_blocks = 0
        self._step = -1
        self._restart()

    def begin_step(self, batch: object = None, **options: Any) -> None:
        """What came before is outside of all phases."""
        self.cut(None)
        self._step += 1
        super().begin_step(batch, **options)

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """What came before is outside of all phases."""
        self.cut(None)
        super().open_phase(phase, is_provisional=is_provisional)

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """What came before is of the open phase."""
        if self.current_phase is not None:
            self.cut(self.current_phase)
        super().close_phase(covers=covers)

    def cut(self, phase: Phase | None) -> None:
        """What happened since the last cut belongs to a phase."""
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        events = [row for entry in entries if (row := self._row(entry))]
        if events:
            self.sections.append(
                {"step": self._step, "phase": phase and phase.value, "events": events}
            )
        self._restart()

    def _restart(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="all", max_entries=10**7, clear_history=True
        )

    def _row(self, entry: dict[str, Any]) -> list[Any] | None:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            self._numbers[address] = self._num_blocks
            self._num_blocks += 1
            return [action, self._numbers[address], size, *origin(entry.get("frames", ()))]
        if action == "free_completed":
            return ["free", self._numbers.pop(address, None), size]
        return [action, address, size] if action.startswith("segment") else None


_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply\(")
_NATIVE = re.compile(r"at::(?:native|cuda)::(?:blas::|\(anonymous namespace\)::)?(\w+)(?:<.*>)?\(")


def origin(frames: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """The C++ and Python frames that asked for an allocation, innermost first.

    Functions of the standard library of the C++ side that only make tensors are left out, as are
    Python's own frames.
    """
    native: list[str] = []
    python: list[str] = []
    for frame in frames:
        name, file = frame["name"], frame["filename"]
        if file.endswith(".py"):
            if len(python) < NUM_PYTHON_FRAMES:
                python.append(f"{Path(file).name}:{frame['line']} {name}")
            continue
        for pattern in (_OPERATOR, _NODE, _NATIVE):
            found = pattern.search(name)
            if found and found[1] not in native and not found[1].startswith("empty"):
                native.append(found[1])
    return " < ".join(native), " < ".join(python)


def record_events(config: Config) -> dict[str, Any]:
    """Train one configuration and give all that its allocator did, in this process."""
    device = torch.device("cuda", 0)
    torch.cuda.init()
    recorder = EventRecorder(device)
    train(config, config.make(initialise=not is_virtual()), recorder, device)
    recorder.cut(None)
    return {"sections": recorder.sections, "steps": [step_to_json(step) for step in recorder.steps]}


def run_events(options: argparse.Namespace) -> int:
    """The command `events`."""
    os.environ.setdefault(
        "TORCH_SYMBOLIZE_MODE", "dladdr"
    )  # names of functions from the libraries' tables: fast
    document = {"environment": in_a_process_of_its_own(environment), "configs": {}}
    for config in _chosen(options.only):
        document["configs"][config.name] = in_a_process_of_its_own(partial(record_events, config))
        print(
            f"{config.name}: "
            f"{sum(len(s['events']) for s in document['configs'][config.name]['sections'])} events",
            file=sys.stderr,
        )
    write_json(options.out, document)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="What training takes on a device, measured and predicted."
    )
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("all", run_all, "measure and compare"),
        (
            "measure",
            run_measure,
            "train every configuration on the device and write what its memory was",
        ),
        ("compare", run_compare, "predict every configuration and judge it by what was measured"),
        (
            "events",
            run_events,
            "write every allocation of some configurations with what asked for it",
        ),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument(
            "--only",
            nargs="+",
            default=[],
            metavar="NAME",
            help="these configurations instead of all",
        )
        sub.add_argument("--jobs", type=int, default=1, help="processes at a time")
        if run is run_compare:
            sub.add_argument("--measured", type=Path, required=True, help="what `measure` wrote")
            sub.add_argument("--json", type=Path, help="write all figures here")
            sub.add_argument("--markdown", type=Path, help="write the tables here")
        elif run is run_all:
            sub.add_argument(
                "--out", type=Path, metavar="FOLDER", help="another folder for the results"
            )
        else:
            sub.add_argument(
                "--out", type=Path, required=True, help="a JSON file; compressed if it ends in .gz"
            )
        sub.set_defaults(run=run)
    return parser.parse_args()


def main() -> int:
    """Run a command."""
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
