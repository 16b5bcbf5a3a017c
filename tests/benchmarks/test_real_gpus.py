"""The published measurements of real GPUs, and the command that compares predictions with them."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import memcallback as mc

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import real_gpus
from published import fine_tuning, image_fine_tuning, operators, operators_of_layers
from published.philox import normal_numbers
from published.reasons import REASONS, is_off, reason_of
from published.steps import cases, program, reason_left_out, step_of

CASES = cases()
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_case_names_its_source_what_was_measured_and_a_known_card():
    assert len(CASES) == 256
    assert len({case["id"] for case in CASES}) == len(CASES)
    for case in CASES:
        assert real_gpus.source_of(case)
        assert case["trust"] in ("A", "B", "C")
        assert "@" in case["source"] or "/" in case["source"]
        assert real_gpus.card_of(case).allocator_capacity_bytes > 2**30
        assert isinstance(case["value"], bool) == (case["measured"] in ("fits", "oom"))


def test_a_limit_that_a_case_sets_is_all_that_the_allocator_has():
    limited = [case for case in CASES if "cap_bytes" in case]
    assert limited
    for case in limited:
        assert real_gpus.card_of(case).allocator_capacity_bytes == case["cap_bytes"]


def test_a_case_is_left_out_for_a_reason_alone():
    reasons = [reason_left_out(case) for case in CASES]
    assert sum(reason is not None for reason in reasons) == 8
    assert all(reason is None or len(reason) > 20 for reason in reasons)


def test_cases_of_one_program_differ_in_batch_and_card_alone():
    for group in (
        [case for case in CASES if program(case) == key] for key in {*map(program, CASES)}
    ):
        assert len({(case["model"], case["optimizer"], case["precision"]) for case in group}) == 1


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["lib"] == "torch.nn"][:3],
    ids=lambda case: case["id"],
)
def test_a_perceptron_takes_what_nvidia_smi_showed_on_an_a100(case):
    prediction = mc.predict(
        step_of(case), device=real_gpus.card_of(case), progress=lambda done, num_all: None
    )
    # The reading has a step of one second and kernels that libraries load.
    assert abs(real_gpus.predicted(case, prediction)["error"]) < 0.05


OPERATORS = operators.operators()


def test_every_operator_names_its_card_and_one_that_is_left_out_its_reason():
    assert len(OPERATORS) == len({row["id"] for row in OPERATORS}) == 197
    for row in OPERATORS:
        assert real_gpus.source_of(row) == "Liger-Kernel"
        assert real_gpus.card_of(row).compute_capability in ((9, 0), (8, 6))
    built = [row for row in OPERATORS if operators.reason_left_out(row) is None]
    assert len(built) == 188


@pytest.mark.parametrize(
    "operator",
    [
        "fused_add_rms_norm",
        "fused_moe",
        "fused_neighborhood_attention",
        "jsd",
        "kl_div",
        "layer_norm",
        "llama4_rope",
        "megatron_rms_norm",
        "megatron_swiglu",
        "relu_squared",
        "softmax",
        "sparsemax",
        "tvd",
    ],
)
def test_an_operator_takes_what_was_measured_to_the_byte(operator):
    row = next(row for row in OPERATORS if row["operator"] == operator)
    prediction = mc.predict(
        operators.step_of(row),
        device=real_gpus.card_of(row),
        progress=lambda done, num_all: None,
    )
    assert prediction.peak_allocated_bytes == row["value"]


@pytest.mark.parametrize("operator", ["fused_linear_jsd", "sparse_multi_token_attention"])
def test_an_operator_takes_nearly_what_was_measured(operator):
    row = [row for row in OPERATORS if row["operator"] == operator][2]
    (prediction,) = real_gpus.traced([row]).values()
    assert abs(real_gpus.predicted(row, prediction)["error"]) < 1e-6


def test_the_seed_tells_how_many_tokens_choose_an_expert():
    row = next(row for row in OPERATORS if row["operator"] == "fused_moe" and row["x"] == 8)
    step, _ = operators_of_layers.fused_moe(row)
    assert step.operator.num_tokens == [8192] * 8  # each of 8 experts is chosen by all
    first, second = (normal_numbers(42, before, 2**20) for before in ([], [2**20]))
    assert abs(first.mean()) < 0.01
    assert abs(first.std() - 1) < 0.01
    assert abs((first * second).mean()) < 0.01


RUNS = fine_tuning.runs()


def test_every_run_names_its_card_and_one_that_is_left_out_its_reason():
    assert len(RUNS) == len({run["id"] for run in RUNS}) == 31
    for run in RUNS:
        assert real_gpus.source_of(run) == "PEFT"
        assert real_gpus.card_of(run).name == "NVIDIA L40S"
        assert run["trust"] in ("B", "C")
    left_out = {run["id"] for run in RUNS if fine_tuning.reason_left_out(run)}
    assert left_out == {"peft-lora-rank32", "peft-frod-sparse0.02-lr_0.001"}


def test_every_run_of_an_image_model_names_its_card_and_one_that_is_left_out_its_reason():
    runs = image_fine_tuning.runs()
    assert len(runs) == len({run["id"] for run in runs}) == 17
    for run in runs:
        assert real_gpus.source_of(run) == "PEFT, images"
        assert real_gpus.module_of(run) is image_fine_tuning
        assert real_gpus.card_of(run).name == "NVIDIA L40S"
    left_out = {run["id"] for run in runs if image_fine_tuning.reason_left_out(run)}
    assert left_out == {"peft-image-gen-frod-default"}


def test_many_updates_of_a_step_that_settles_reserve_what_one_does():
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 1000))
    step = mc.TrainingStep(model, torch.zeros(64, 1000), optimizer=torch.optim.Adam)
    prediction = mc.predict(step, device="L40S", progress=lambda done, num_all: None)
    reserved_bytes = image_fine_tuning.peak_reserved_bytes(prediction)
    assert reserved_bytes == prediction.run_peak_reserved_bytes


@pytest.mark.filterwarnings("ignore")  # of PEFT, at what transformers has renamed
def test_a_fine_tuning_run_takes_what_was_measured_within_half_a_percent():
    pytest.importorskip("peft")
    run = next(run for run in RUNS if run["id"] == "peft-lora-rank64")
    (prediction,) = real_gpus.traced([run]).values()
    # The true length of the longest batch is not known, nor that of the batch before it.
    error = real_gpus.predicted(run, prediction)["error"]
    assert abs(error) < 0.005


def committed_rows():
    (file,) = RESULTS.glob("real-gpus-*/real_gpus.json")
    return [row for row in json.loads(file.read_text())["rows"] if "left_out" not in row]


def test_the_page_counts_the_rows_that_are_off_by_reason():
    rows = committed_rows()
    reasons = Counter(reason_of(row) for row in rows if is_off(row))
    page = (RESULTS.parents[1] / "docs" / "real-gpus.md").read_text()
    for reason, count in reasons.items():
        assert f"| {count} | {reason.whose} | {reason.text} |" in page
    assert set(reasons) == set(REASONS)
    assert f"{reasons.total()} of the {len(rows)} compared rows are off" in page


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"measured": "peak_reserved", "error": 0.0051}, True),
        ({"measured": "peak_reserved", "error": -0.0049}, False),
        ({"measured": "nvidia_smi_used", "error": -0.025}, False),
        ({"measured": "nvidia_smi_used", "error": -0.027}, True),
        ({"measured": "peak_allocated", "error": 2e-6, "operator": "softmax"}, True),
        ({"measured": "fits", "is_right": False}, True),
        ({"measured": "oom", "is_right": True}, False),
    ],
)
def test_what_is_off(row, expected):
    assert is_off(row) is expected
