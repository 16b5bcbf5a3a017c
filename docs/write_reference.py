"""Write the reference pages of `docs/`: the Python names, and the help of each command.

    python docs/write_reference.py

`docs/api*.md` are written whole, from docstrings. In `docs/command-line.md` the block under each
`<!-- help COMMAND -->` is replaced by what the command prints. A test says when a page is stale.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import griffe

import memcallback
from memcallback.cli import main as command_line
from memcallback.core.document import Printable

DOCS = Path(__file__).resolve().parent
WIDTH = 96


@dataclass(frozen=True)
class Page:
    """One page of names. Signatures of results are left out: nobody makes one."""

    file: str
    title: str
    introduction: str
    names: tuple[str, ...]
    has_signatures: bool = True


PAGES = (
    Page(
        "api-training.md",
        "Which names go into a training?",
        "Lightning's callback, that of a Hugging Face Trainer, and a recorder and a log for any "
        "other loop.",
        (
            "MemoryCallback",
            "MemoryTrainerCallback",
            "MemoryRecorder",
            "MemoryLog",
            "TensorDiff",
            "fit_batch_size",
        ),
    ),
    Page(
        "api-prediction.md",
        "Which names predict?",
        "What a step will take, and the largest batch. Nothing here needs a GPU.",
        (
            "TrainingStep",
            "InferenceStep",
            "Ranks",
            "predict",
            "suggest_batch_size",
            "what_if",
            "layers",
        ),
    ),
    Page(
        "api-savings.md",
        "Which names save memory?",
        "You turn each on; none is on by default.",
        ("accumulate", "amp", "checkpoint"),
    ),
    Page(
        "api-results.md",
        "What do the results hold?",
        "Results are data: reading, printing, comparing or pickling one runs nothing. The same "
        "types hold measured and predicted values. Sizes are in bytes. Results that print as "
        "tables have `to_text()`, `to_markdown()` and, for notebooks, `to_notebook_html()` too.",
        (
            "Prediction",
            "BatchSizeAdvice",
            "FittedBatchSize",
            "Plan",
            "PlanRow",
            "SavingGroup",
            "TextbookPrediction",
            "LayerTable",
            "Layer",
            "OutOfMemoryReport",
            "ModuleTable",
            "TensorChange",
            "StepMemory",
            "PhaseMemory",
            "MemoryStats",
            "DeviceMemory",
            "Phase",
            "Stage",
            "Category",
            "Kind",
        ),
        has_signatures=False,
    ),
    Page(
        "api-other.md",
        "Which names are left?",
        "Sizes as text, errors and warnings.",
        ("format_bytes", "parse_bytes", "PredictionError", "MemoryWarning"),
    ),
)
#: Hooks that a Trainer calls are not for people to call.
MEMBERS = {
    "MemoryCallback": ("prediction", "report", "out_of_memory"),
    "MemoryTrainerCallback": ("prediction", "report", "out_of_memory"),
}
HEADINGS = {
    "parameters": "Arguments",
    "attributes": "Attributes",
    "raises": "Raises",
    "returns": "Returns",
    "yields": "Yields",
}


def reference() -> dict[Path, str]:
    """The text of each page, by its path."""
    pages = {DOCS / page.file: _api_page(page) for page in PAGES}
    pages[DOCS / "api.md"] = _overview()
    pages[DOCS / "command-line.md"] = _command_line()
    return pages


def _overview() -> str:
    lines = [
        "# Which Python names are there?",
        "",
        "`import memcallback as mc` loads neither PyTorch nor Lightning: each name is imported on "
        "first use.",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    lines += [
        f"| [`{name}`]({page.file}#{name.lower()}) | {_first_line(getattr(memcallback, name))} |"
        for page in PAGES
        for name in page.names
    ]
    return "\n".join(lines) + "\n"


def _first_line(value: Any) -> str:
    return _plain(inspect.getdoc(value) or "")


def _api_page(page: Page) -> str:
    parts = [f"# {page.title}", page.introduction]
    for name in page.names:
        value = getattr(memcallback, name)
        parts.append(f"## `{name}`")
        if page.has_signatures:
            parts.append(_block(_signature(name, value)))
        parts += [*_docstring(value), *_enum_values(value)]
        members = dict(_members(name, value))
        long = [
            label
            for label, text in members.items()
            if page.has_signatures and f"**{HEADINGS['parameters']}**" in text
        ]
        short = [label for label in members if label not in long]
        if short:
            parts.append("**Members**")
            lines = (f"- `{_in_one_line(label)}`: {_plain(members[label][0])}" for label in short)
            parts.append("\n".join(lines))
        for label in long:
            parts.append(f"### `{name}.{label.partition('(')[0]}`")
            parts += [_block(label), *members[label]]
    return "\n\n".join(parts) + "\n"


def _in_one_line(label: str) -> str:
    return " ".join(label.split()).replace("( ", "(").replace(", )", ")")


def _plain(text: str) -> str:
    """The first paragraph in one line."""
    return " ".join(text.split("\n\n")[0].split())


def _members(name: str, value: Any) -> Iterator[tuple[str, list[str]]]:
    """Public methods, as they are called, and properties; last those of base classes of ours."""
    if not inspect.isclass(value):
        return
    own: dict[str, Any] = {}
    for base in value.__mro__:
        if base.__module__.startswith("memcallback") and base is not Printable:
            own = own | {name: part for name, part in vars(base).items() if name not in own}
    for member, definition in own.items():
        is_hidden = member.startswith("_") or member not in MEMBERS.get(name, own)
        function = getattr(definition, "__func__", definition)  # of a class method
        is_property = isinstance(function, property) or hasattr(function, "func")
        if is_hidden or not (inspect.isfunction(function) or is_property):
            continue
        label = _signature(member, function) if inspect.isfunction(function) else member
        yield label, _docstring(function)


def _enum_values(value: Any) -> Iterator[str]:
    """The members of an enum, unless its docstring names each."""
    if not (inspect.isclass(value) and issubclass(value, enum.Enum)):
        return
    names = [member.name for member in value]
    if not all(name in (value.__doc__ or "") for name in names):
        yield "**Values**"
        yield ", ".join(f"`{name}`" for name in names) + "."


def _signature(name: str, value: Any) -> str:
    """How it is called; on several lines if one is too short."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return name
    signature = inspect.signature(value)
    parameters: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(mark.startswith("*") for mark in parameters):
            parameters.append("*")
        if one.name not in ("self", "cls"):
            parameters.append(_parameter(one))
    returned = signature.return_annotation
    arrow = "" if returned in (signature.empty, "None", None) else f" -> {returned}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) > WIDTH:
        inside = "".join(f"    {mark},\n" for mark in parameters)
        line = f"{name}(\n{inside}){arrow}"
    return line


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    annotation = "" if one.annotation is one.empty else f": {one.annotation}"
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{stars}{one.name}{annotation}{default}"


def _block(code: str) -> str:
    return f"```py\n{code}\n```"


def _docstring(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    parts = []
    sections = griffe.Docstring(text).parse(
        "google", warnings=False, returns_multiple_items=False, returns_named_value=False
    )
    for section in sections:
        kind = section.kind.value
        if kind == "text":
            parts.append(section.value)
        elif kind in HEADINGS:
            parts.append(f"**{HEADINGS[kind]}**")
            parts.append("\n".join(_items(kind, section.value)))
        elif kind == "examples":
            parts += [_block(example.strip()) for _, example in section.value]
        else:
            raise ValueError(f"The docstring of {value!r} has a section of a new kind: {kind}.")
    return parts


def _items(kind: str, items: Any) -> Iterator[str]:
    for item in items:
        name = getattr(item, "name", "") if kind != "raises" else str(item.annotation)
        label = f"`{name}`: " if name else ""
        yield f"- {label}{' '.join(item.description.split())}"


def _command_line() -> str:
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    return re.sub(
        r"^(<!-- help (\S+) -->\n\n)```text\n.*?^```$",
        lambda match: f"{match[1]}```text\n{_help(match[2])}```",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def _help(command: str) -> str:
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        command_line([command, "--help"])
    return out.getvalue()


if __name__ == "__main__":
    for path, text in reference().items():
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path.relative_to(DOCS.parent)}")
