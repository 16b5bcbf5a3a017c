"""What a person reads of a comparison of tensors fits a console of 100 columns."""

from memcallback.core.code_lines import CodeLine
from memcallback.core.types import Category
from memcallback.core.units import MiB
from memcallback.diagnose.tensors.change import TensorChange, TensorGroup, TensorMark


def line(number):
    path = "/home/me/examples/tensor_diff.py"
    return CodeLine("examples/tensor_diff.py", number, "several_steps_of_a_training", path)


def mark(number, known_bytes, label=""):
    return TensorMark(
        label=label,
        at=line(number),
        known_bytes=known_bytes,
        num_storages=1,
        resident_bytes=309 * MiB + known_bytes,
    )


def change(*owners):
    group = TensorGroup(
        count=3,
        shape=(8, 64, 32, 32),
        dtype="float32",
        size_bytes=6 * MiB,
        category=Category.OPTIMIZER_STATE,
        owners=owners,
        modules=("",),
        made_at=line(48),
    )
    return TensorChange(
        before=mark(46, 2 * MiB),
        after=mark(50, 8 * MiB, "end of the block"),
        appeared=(group,),
        vanished=(),
        device_name="CPU",
    )


def test_no_line_is_wider_than_a_console():
    text = str(
        change(
            "local variable 'images' in several_steps_of_a_training() of tensor_diff.py",
            "saved for ConvolutionBackward0 of 0",
            "another",
        )
    )
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "known storages 2.00 MiB -> 8.00 MiB (+6.00 MiB)" in words
    for part in ("saved for ConvolutionBackward0 of 0", "and 1 more", "made at"):
        assert part in words


def test_each_owner_has_a_line_of_its_own():
    lines = [line.strip() for line in str(change("first of 0", "second of 0")).splitlines()]
    position = next(number for number, line in enumerate(lines) if line.endswith("first of 0"))
    assert lines[position + 1] == "second of 0"
    assert lines[position + 2].startswith("made at")
