"""The examples but `digits.py`, which tests/docs/test_dashboard.py runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_fsdp2, needs_ranks, needs_saved

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder, name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), "plain_loop.py", "--epochs", "6")


def test_the_plain_loop_predicts_before_the_first_step(output):
    # Before that it says how far the tracing is, if that is not over yet.
    assert re.search(
        r"\A((The step is being predicted|Tracing the step|Traced the step) .*\n)*"
        r"Before the first step: a peak of [\d.]+ MiB is predicted\.",
        output,
    )
    assert output.index("Before the first step") < output.index("memcallback │ Sequential")


def peaks_in(output, phase):
    """The predicted and the measured peak of a phase, in MiB; there is one report."""
    (sizes,) = re.findall(rf"^  {phase} +([\d.]+) MiB +([\d.]+) MiB", output, flags=re.MULTILINE)
    return tuple(map(float, sizes))


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step"])
def test_the_plain_loop_reports_each_phase_predicted_and_measured(output, phase):
    predicted, measured = peaks_in(output, phase)
    # What operators take for themselves on a CPU is not predicted.
    assert abs(predicted - measured) < 0.02 * measured


def test_the_plain_loop_ends_with_one_line(output):
    (line,) = re.findall(r"^memcallback: .*$", output, flags=re.MULTILINE)
    assert re.fullmatch(
        r"memcallback: 66 steps, peak [\d.]+ MiB allocated, \d of 66 steps read; "
        r"page: \S+memory\.html",
        line,
    )


def test_the_categories_of_the_plain_loop_add_up_to_its_peak(output):
    (total,) = re.findall(r"at the predicted peak \(\w+\) +([\d.]+) MiB", output)
    block = output[output.index("at the predicted peak") : output.index("largest")]
    rows = re.findall(r" ([\d.]+) ([KM])iB +[\d.]+ %", block)
    sizes = [float(size) / (1024 if unit == "K" else 1) for size, unit in rows]
    assert len(sizes) == 6
    assert sum(sizes) == pytest.approx(float(total), abs=0.2)


def test_the_plain_loop_learns_the_digits(output):
    (accuracy,) = re.findall(r"Validation accuracy: ([\d.]+)", output)
    assert float(accuracy) > 0.95


def test_two_cards_are_compared_without_either(tmp_path):
    output = run(tmp_path, "predict_without_gpu.py")
    assert output.startswith("GPT of 124 million parameters, batch size 16, 512 tokens, bf16-mixed")
    for card, capacity in (
        ("NVIDIA GeForce RTX 4090", "23.99 GiB"),
        ("NVIDIA A100-SXM4-80GB", "80.00 GiB"),
    ):
        (row,) = re.findall(rf"^{card} .*$", output, flags=re.MULTILINE)
        assert re.search(rf"[\d.]+ GiB +{capacity} +yes +\d+$", row), row
    for label in ("forward", "backward", "optimizer step", "activations", "parameters"):
        assert re.search(rf"^  {label} +[\d.]+ [GM]iB", output, flags=re.MULTILINE)


def test_a_batch_size_is_found_and_trained_with(tmp_path):
    output = run(tmp_path, "fit_batch_size.py")
    (size,) = re.findall(
        r"^Batch size ([\d,]+) \(it was 8\) is the largest found to fit CPU",
        output,
        flags=re.MULTILINE,
    )
    number = int(size.replace(",", ""))
    assert number > 100
    (row,) = re.findall(rf"^ ?{size} .*$", output, flags=re.MULTILINE)
    assert re.search(r"[\d.]+ MiB +[\d.]+ MiB +Fits", row), row
    assert "Weights are as before, optimizer updates made: 0." in output
    steps = 2 * -(-4096 // number)
    assert f"Trained {steps} steps of {number} images." in output
    assert list(tmp_path.iterdir()) == []


def test_savings_are_predicted_and_measured_to_the_same_peak(tmp_path):
    output = run(tmp_path, "savings.py", "--epochs", "6")
    without, peak = re.search(
        r"Predicted peak: ([\d.]+) MiB without savings, ([\d.]+) MiB with all three", output
    ).groups()
    assert float(peak) < float(without) / 2
    measured, predicted = re.search(
        r"Peak with all three: ([\d.]+) MiB measured, ([\d.]+) MiB predicted", output
    ).groups()
    assert predicted == peak
    assert abs(float(measured) - float(predicted)) <= 0.01
    assert float(re.search(r"Validation accuracy: ([\d.]+)", output)[1]) > 0.9


@needs_saved
def test_tensors_between_two_lines_are_told(tmp_path):
    output = run(tmp_path, "tensor_diff.py")
    forward, backward, step, leak = re.split(r"^(?=From )", output, flags=re.MULTILINE)[1:]
    # A convolution's input of 8 x 64 x 32 x 32 float32.
    assert re.search(
        r"\+ +1 x +\(8, 64, 32, 32\) +float32 +2\.00 MiB +activations +saved for "
        r"ConvolutionBackward0 of 2",
        forward,
    )
    assert re.search(r"\+ +1 x .* gradients +gradient of 5\.weight", backward)
    assert re.search(r"- +1 x .* activations +saved for ConvolutionBackward0 of 2", backward)
    assert re.search(
        r"\+ +2 x .* optimizer state +exp_avg of 5\.weight\n +exp_avg_sq of 5\.weight", step
    )
    assert re.search(
        r"\+ +3 x +\(8, 64, 32, 32\) +float32 +6\.00 MiB +activations .*\n"
        r" +made at .*tensor_diff\.py:\d+\n? +in \w+$",
        leak,
        flags=re.MULTILINE,
    )
    assert re.search(
        r"\+ +3 x +\(\) .* local variable 'losses' in\n +several_steps\(\) of tensor_diff\.py", leak
    )


PHASES = ("forward", "backward", "optimizer step")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("ddp.py", ["--epochs", "1"], marks=needs_ranks),
        pytest.param("fsdp2.py", ["--steps", "4"], marks=[needs_fsdp2, needs_ranks]),
    ],
)
def test_two_processes_record_each_its_own_and_rank_zero_tells_the_range(tmp_path, name, arguments):
    output = run(tmp_path, name, *arguments)
    assert output.count("memcallback │ ") == 1
    (line,) = re.findall(r"^  ranks +0-1: (.*)$", output, flags=re.MULTILINE)
    assert re.fullmatch(
        r"([\d.]+ MiB … )?[\d.]+ MiB allocated, worst rank [01] \([\d.]+ % of its capacity\)", line
    )
    predicted, measured = zip(*(peaks_in(output, phase) for phase in PHASES), strict=True)
    if name == "ddp.py":
        # One step, and a sentence for what it lacks.
        buckets = [ours - theirs for ours, theirs in zip(predicted, measured, strict=True)]
        assert buckets == pytest.approx([4.26] * 3, abs=0.1)
        sentence = " ".join(output[output.index("  prediction ") :].split())
        assert sentence.startswith("prediction peak of backward: predicted ")
        assert (
            "a CPU does not measure the buckets of DistributedDataParallel (4.26 MiB)" in sentence
        )
    else:
        assert predicted[:2] == pytest.approx(measured[:2], rel=0.02)
        # Gloo's threads release what was reduced, now and then after the step's own thread did. The
        # profile of that thread does not see it. They are gradients: 14 MiB before they are cut.
        assert predicted[2] * 0.98 < measured[2] < predicted[2] + 14
    (run_folder,) = tmp_path.rglob("version_0")
    assert list(run_folder.glob("events*"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fabric_loop.py", ["--epochs", "1"]),
        ("accelerate_loop.py", ["--epochs", "1"]),
        ("huggingface_trainer.py", ["--epochs", "1"]),
    ],
)
def test_the_loops_of_other_libraries_are_predicted_and_measured(tmp_path, name, arguments):
    output = run(tmp_path, name, *arguments)
    assert output.count("memcallback │ ") == 1
    assert output.count("memcallback: ") == 1
    for phase in PHASES:
        predicted, measured = peaks_in(output, phase)
        assert abs(predicted - measured) < 0.02 * measured
    (run_folder,) = tmp_path.rglob("version_0")
    assert re.search(r"^  more .*tensorboard.* --logdir ", output, flags=re.MULTILINE)
    assert list(run_folder.glob("events*"))
