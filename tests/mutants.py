"""Small changes to the package, one at a time: how many of them do the tests notice?

`python tests/mutants.py` changes a comparison, a number, a condition, a returned value or a
statement in a copy of the package, runs the test files nearest to the module, and prints how many
changes failed a test, and those that failed none. PyTorch is imported once: each run is a fork.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Of core, allocator, replay and batch_size: module -> the test files nearest to it, the most
#: specific first.
NEAREST = {
    "core/allocation_trace": "core/test_allocation_trace prediction/test_batch_trace",
    "core/by_class": "core/test_by_class",
    "core/code_lines": "core/test_code_lines",
    "core/control_groups": "core/test_control_groups devices/test_cpu_meter",
    "core/document": "core/test_document core/test_shown",
    "core/errors": "core/test_errors",
    "core/files": "core/test_files",
    "core/interruptions": "core/test_interruptions",
    "core/kernel": "core/test_kernel",
    "core/module_table": "core/test_module_table",
    "core/phase_spans": "core/test_phase_spans",
    "core/step_memory": "core/test_step_memory core/test_document report/test_report",
    "core/tensors": "core/test_tensors diagnose/test_live_tensors",
    "core/torch_private": "core/test_tensors core/test_torch_parts",
    "core/types": "core/test_types",
    "core/units": "core/test_units",
    "core/validation": "core/test_validation batch_size/test_advice",
    "core/visible": "core/test_visible",
    "core/weak_list": "core/test_weak_list",
    "prediction/allocator/addresses": "prediction/test_segment_addresses",
    "prediction/allocator/at_start": "prediction/test_at_start",
    "prediction/allocator/blocks": "prediction/test_allocator prediction/test_allocator_recorded",
    "prediction/allocator/caching": "prediction/test_allocator prediction/test_allocator_recorded",
    "prediction/allocator/expandable": "prediction/test_allocator "
    "prediction/test_allocator_recorded",
    "prediction/allocator/host": "prediction/test_host_allocator",
    "prediction/allocator/settings": "prediction/test_allocator_settings prediction/test_allocator",
    "prediction/replay": "prediction/test_replay prediction/test_steady_state",
    "prediction/steady_state": "prediction/test_steady_state",
    "batch_size/accumulation_plan": "batch_size/test_advice batch_size/test_accumulation_plan",
    "batch_size/advice": "batch_size/test_advice batch_size/test_estimate",
    "batch_size/bounds": "batch_size/test_estimate batch_size/test_advice",
    "batch_size/estimate": "batch_size/test_estimate batch_size/test_advice "
    "batch_size/test_measured_and_predicted",
    "batch_size/fitted": "integrations/test_fitted",
    "batch_size/measured_shift": "batch_size/test_measured_and_predicted "
    "batch_size/test_suggest_measured",
    "batch_size/peaks": "batch_size/test_estimate batch_size/test_measured_and_predicted",
}

#: Their tests start processes or trace for half a minute, for each change.
LEFT_OUT = (
    "core/answers",
    "batch_size/one_rank",
    "batch_size/rank_kinds",
    "batch_size/retraced",
    "batch_size/sequence_lengths",
    "batch_size/suggest",
)
#: What takes longest to import, and no test wants to see imported.
IMPORTED_ONCE = (
    "pytest",
    "hypothesis.strategies",
    "numpy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch.nn.attention.flex_attention",
)
#: Pytest would rewrite the assertions of hypothesis, which is there already.
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")

COMPARED_AS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALCULATED_AS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one span of a source."""

    line: int
    start: int
    stop: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.line}: {old[:90]}  ->  {new[:90]}"


def mutants(source: bytes) -> list[Mutant]:
    """All changes of a source, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            text = f"({text})"
        found.append(Mutant(node.lineno, start, stop, source[start:stop].decode(), text))
    return sorted(set(found), key=lambda one: (one.start, one.stop, one.new))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each node that can be changed, with what it becomes."""
    for node in _nodes(tree):
        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                new = copy.copy(node)
                new.ops = [*node.ops[:i], COMPARED_AS[type(op)](), *node.ops[i + 1 :]]
                yield node, new
        elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED_AS:
            yield node, ast.BinOp(node.left, CALCULATED_AS[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            yield (
                node,
                ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values),
            )
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield node, ast.Constant(not node.value)
            elif isinstance(node.value, (int, float)):
                yield node, ast.Constant(node.value + 1)
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            test = node.test
            if not isinstance(test, (ast.UnaryOp, ast.Compare)):
                yield test, ast.UnaryOp(ast.Not(), test)
        elif isinstance(node, ast.Return):
            value = node.value
            if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                yield node, ast.Return(ast.Constant(None))
        elif _is_removable(node):
            yield node, ast.Pass()


def _is_removable(node: ast.AST) -> bool:
    """Whether it is a statement without which the rest is still a program."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, decorators and docstrings, which say nothing of behavior; and
    not the parts of f-strings, whose positions Python 3.11 does not know.
    """
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield from _nodes(child)


def _run_tests(folder: Path, files: list[str], limit_s: float, shown: Path) -> int | None:
    """Pytest's exit code for some test files, in a fork; None if it took longer than the limit."""
    pid = os.fork()
    if not pid:
        os.setsid()
        with shown.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        os.chdir(folder)
        sys.path[0] = str(folder / "tests")
        sys.path.insert(0, str(folder))
        code = 70
        try:
            import pytest

            code = int(pytest.main([*OPTIONS, *files]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _end_group(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _end_group(pid)
    os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> None:
    """End what the tests have started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _mutate(folder: Path, module: str, chosen: list[Mutant], lines: Path) -> None:
    """Run a module's tests with each mutant, and write what became of it."""
    path = folder / "memcallback" / f"{module}.py"
    files = [f"tests/{name}.py" for name in NEAREST[module].split()]
    if missing := [name for name in files if not (folder / name).exists()]:
        raise SystemExit(f"{module} names test files that are not there: {missing}")
    source = path.read_bytes()
    shown = folder / "output.txt"
    began = time.monotonic()
    code = _run_tests(folder, files, 600, shown)
    if code:
        print(shown.read_text()[-3000:])
        raise SystemExit(f"the tests of {module} fail without any change (exit code {code})")
    limit_s = 20 + 4 * (time.monotonic() - began)
    for one in chosen:
        path.write_bytes(one.applied(source))
        code = _run_tests(folder, files, limit_s, shown)
        path.write_bytes(source)
        outcome = "too slow" if code is None else "killed" if code else "survived"
        with lines.open("a") as out:
            out.write(f"{outcome}\t{module}\t{one}\n")
        if outcome == "survived":
            print(f"SURVIVED {module}.py:{one}", flush=True)


def _workers(work: list[tuple[str, list[Mutant]]], num_jobs: int, base: Path) -> None:
    """Fork the workers, each with a copy of the tree of its own, and give them the modules."""
    pids = []
    queue, fill = os.pipe()
    os.write(fill, bytes(range(len(work))))
    os.close(fill)
    for number in range(num_jobs):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                folder = base / f"tree{number}"
                for name in ("memcallback", "tests", "examples", "benchmarks"):
                    ignored = shutil.ignore_patterns("__pycache__", "results")
                    shutil.copytree(ROOT / name, folder / name, ignore=ignored)
                shutil.copy(ROOT / "pyproject.toml", folder)
                while taken := os.read(queue, 1):
                    _mutate(folder, *work[taken[0]], base / "lines.txt")
                code = 0
            except SystemExit as error:
                print(error)
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit("A worker failed; the score would leave its modules out.")


def _score(lines: list[list[str]]) -> str:
    """How many of each part were noticed: by a failed test, or by one that did not end."""
    groups: dict[str, list[str]] = {}
    for outcome, module, _ in lines:
        group = "replay" if module.startswith("prediction/") else module.split("/")[0]
        group = "allocator" if "allocator/" in module else group
        groups.setdefault(group, []).append(outcome)
    rows = []
    for group, outcomes in [*sorted(groups.items()), ("all", [line[0] for line in lines])]:
        num_noticed = len(outcomes) - outcomes.count("survived")
        rows.append(
            f"{group}: {num_noticed} of {len(outcomes)} noticed ({num_noticed / len(outcomes):.1%}"
            f", {outcomes.count('too slow')} of them by a time limit)"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=15, help="changes to a module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--jobs", type=int, default=2, help="changes tried at once")
    parser.add_argument("modules", nargs="*", help="those whose path begins so; else all listed")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    sys.dont_write_bytecode = True
    for name in IMPORTED_ONCE:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    work = []
    for module in NEAREST:
        if arguments.modules and not module.startswith(tuple(arguments.modules)):
            continue
        found = mutants((ROOT / "memcallback" / f"{module}.py").read_bytes())
        if arguments.sample and len(found) > arguments.sample:
            found = random.Random(f"{arguments.seed} {module}").sample(found, arguments.sample)
        work.append((module, found))
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        _workers(work, arguments.jobs, base)
        lines = [line.split("\t") for line in (base / "lines.txt").read_text().splitlines()]
    print(_score(lines))


if __name__ == "__main__":
    main()
