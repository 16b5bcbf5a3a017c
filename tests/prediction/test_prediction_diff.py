import pytest

from memcallback.core.units import GiB, MiB
from memcallback.prediction.prediction_diff import PredictionDiff


def line(number, text, size, *, file="loss.py", function="loss_of"):
    return {"file": file, "line": number, "function": function, "text": text, "num_bytes": size}


def saved(*lines, allocated=10 * GiB, reserved=12 * GiB, parameters=4 * GiB, **changes):
    """A prediction as `predict --json` writes it."""
    window = {"phase": "backward", "peak_allocated_bytes": allocated}
    return {
        "torch_version": "2.13.0",
        "memcallback_version": "0.2.0",
        "device_name": "NVIDIA L4",
        "batch_size": 32,
        "sequence_length": None,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "largest_batch_size": 48,
        "fits": True,
        "steps": [{"windows": [{"phase": "forward", "peak_allocated_bytes": GiB}, window]}],
        "at_peak_by_category_bytes": {
            "parameter": parameters,
            "activation": allocated - parameters,
        },
        "at_peak_by_module_bytes": {"head": parameters, "": allocated - parameters},
        "at_peak_by_line": list(lines),
    } | changes


def test_the_verdict_names_the_peak_the_line_and_the_batch():
    old = saved(line(41, "loss = f(scores)", GiB))
    new = saved(
        line(41, "loss = f(scores)", 3 * GiB),
        allocated=12 * GiB,
        reserved=14 * GiB,
        largest_batch_size=40,
    )
    assert PredictionDiff(old, new).verdict() == (
        "This change adds 2.00 GiB to the peak: 12.00 GiB -> 14.00 GiB reserved. "
        "The largest part of the change in allocated memory is at loss.py:41: +2.00 GiB. "
        "Largest batch: 48 -> 40."
    )
    assert PredictionDiff(new, old).verdict() == (
        "This change takes 2.00 GiB off the peak: 14.00 GiB -> 12.00 GiB reserved. "
        "The largest part of the change in allocated memory is at loss.py:41: -2.00 GiB. "
        "Largest batch: 40 -> 48."
    )


def test_with_a_cpu_on_one_side_the_allocated_peaks_are_compared():
    on_cpu = saved(allocated=8 * GiB, reserved=None, device_name="CPU", largest_batch_size=None)
    for diff, said in (
        (PredictionDiff(on_cpu, saved()), "adds 2.00 GiB to the peak: 8.00 GiB -> 10.00 GiB"),
        (PredictionDiff(saved(), on_cpu), "takes 2.00 GiB off the peak: 10.00 GiB -> 8.00 GiB"),
    ):
        assert diff.verdict().startswith(f"This change {said} allocated.")
        assert diff.peak.name == "peak allocated"
        assert {diff.peak.old_bytes, diff.peak.new_bytes} == {8 * GiB, 10 * GiB}


def test_memory_that_no_line_made_is_named_by_its_category():
    new = saved(parameters=6 * GiB, allocated=12 * GiB, reserved=14 * GiB, fits=False)
    assert PredictionDiff(saved(), new).verdict() == (
        "This change adds 2.00 GiB to the peak: 12.00 GiB -> 14.00 GiB reserved. "
        "The largest part of the change in allocated memory is in parameters: +2.00 GiB. "
        "It does not fit any more."
    )


def test_a_prediction_is_the_same_as_itself():
    same = saved(line(41, "loss = f(scores)", GiB))
    diff = PredictionDiff(same, same)
    assert diff.verdict() == "The peak is the same: 12.00 GiB reserved."
    assert not (*diff.by_line, *diff.by_module, *diff.by_category, *diff.notes)


def test_a_line_that_only_moved_has_not_changed():
    old = saved(line(41, "loss = f(scores)", GiB), line(50, "x = g(y)", MiB))
    new = saved(line(44, "loss = f(scores)", GiB), line(53, "x = g(y)", 2 * MiB))
    assert [(one.name, one.change_bytes) for one in PredictionDiff(old, new).by_line] == [
        ("loss.py:53", MiB)
    ]


def test_a_line_that_was_written_anew_in_its_place_is_one_line():
    old, new = saved(line(41, "loss = f(scores)", GiB)), saved(line(41, "loss = g(scores)", MiB))
    (change,) = PredictionDiff(old, new).by_line
    assert (change.old_bytes, change.new_bytes) == (GiB, MiB)
    assert change.text == "loss = g(scores)"


def test_a_line_that_came_or_went_has_no_size_before_or_after():
    old, new = saved(line(41, "a = f(x)", GiB)), saved(line(57, "b = g(x)", MiB))
    assert [
        (one.name, one.old_bytes, one.new_bytes) for one in PredictionDiff(old, new).by_line
    ] == [
        ("loss.py:41", GiB, None),
        ("loss.py:57", None, MiB),
    ]


def test_lines_of_like_source_in_one_function_count_together():
    old = saved(line(3, "x = block(x)", MiB), line(4, "x = block(x)", MiB))
    new = saved(line(3, "x = block(x)", MiB), line(4, "x = block(x)", 4 * MiB))
    (change,) = PredictionDiff(old, new).by_line
    assert (change.old_bytes, change.new_bytes) == (2 * MiB, 5 * MiB)


def test_phases_modules_and_categories_are_compared():
    new = saved(allocated=11 * GiB, largest_batch_size=44)
    diff = PredictionDiff(saved(), new)
    assert [(one.name, one.change_bytes) for one in diff.by_phase] == [
        ("forward", 0),
        ("backward", GiB),
    ]
    assert [(one.name, one.change_bytes) for one in diff.by_module] == [("(root module)", GiB)]
    assert [(one.name, one.change_bytes) for one in diff.by_category] == [("activations", GiB)]


def test_what_else_differs_is_said_after_the_verdict():
    diff = PredictionDiff(saved(), saved(device_name="NVIDIA A10", torch_version="2.14.0"))
    assert diff.notes == (
        "Another device: NVIDIA L4 -> NVIDIA A10.",
        "Another PyTorch: 2.13.0 -> 2.14.0.",
    )
    assert diff.to_text().splitlines()[1] == diff.notes[0]


def test_on_a_cpu_the_allocated_peak_is_compared():
    old = saved(reserved=None, fits=None, largest_batch_size=None)
    diff = PredictionDiff(old, old | {"peak_allocated_bytes": 11 * GiB})
    assert diff.verdict() == (
        "This change adds 1024.00 MiB to the peak: 10.00 GiB -> 11.00 GiB allocated."
    )
    assert "reserved" not in diff.to_text()


@pytest.mark.parametrize("num_lines", [12, 15])
def test_a_long_table_ends_with_the_sum_of_the_rest(num_lines):
    new = saved(*(line(n, f"x{n} = f(x)", (100 - n) * MiB) for n in range(1, num_lines + 1)))
    text = PredictionDiff(saved(), new).to_text()
    last = text.rstrip().splitlines()[-1].split()
    assert last == (
        ["3", "more", "+258.00", "MiB"]
        if num_lines == 15
        else ["loss.py:12", "x12", "=", "f(x)", "none", "88.00", "MiB", "+88.00", "MiB"]
    )
