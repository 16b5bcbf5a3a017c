"""Steps in which PyTorch itself reads values, or whose sizes shrink with the batch: they are
predicted.
"""

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

import memcallback as mc

DEVICES = ["NVIDIA H200", "cpu"]


def normal(model, batch):
    output = model(batch)
    return (
        D.kl_divergence(D.Normal(output, output.exp()), D.Normal(0.0, 1.0)).mean()
        + D.Normal(output, output.exp()).rsample().mean()
    )


def categorical(model, batch):
    choice = D.Categorical(logits=model(batch))
    return choice.log_prob(choice.sample()).mean()


def spectrum(model, batch):
    output = model(batch)
    window = torch.hann_window(64, device=output.device)
    return torch.stft(output, 64, 16, window=window, return_complex=True).abs().mean()


def back_from_spectrum(model, batch):
    output = model(batch)
    window = torch.hann_window(64, device=output.device)
    there = torch.stft(output, 64, 16, window=window, return_complex=True)
    return torch.istft(there, 64, 16, window=window, length=output.shape[-1]).square().mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", [normal, categorical, spectrum, back_from_spectrum])
def test_a_check_of_pytorch_on_values_passes(loss, device):
    prediction = mc.predict(
        mc.TrainingStep(nn.Linear(32, 256), torch.zeros(8, 32), loss=loss), device=device
    )
    assert not [caveat for caveat in prediction.caveats if caveat.startswith("Only batch size")]
    assert prediction.at(batch_size=32).peak_allocated_bytes > prediction.peak_allocated_bytes


@pytest.mark.parametrize("device", DEVICES)
def test_a_last_part_that_shrinks_from_one_batch_size_to_the_next_leaves_only_the_traced_one_known(
    device,
):
    def in_parts(model, batch):
        return sum(F.cross_entropy(part, part.softmax(-1)) for part in model(batch).chunk(4))

    prediction = mc.predict(
        mc.TrainingStep(nn.Linear(32, 1000), torch.zeros(512, 32), loss=in_parts), device=device
    )
    assert prediction.peak_allocated_bytes > 512 * 1000 * 4
    assert [
        caveat
        for caveat in prediction.caveats
        if caveat.startswith("Only batch size 512 is predicted")
    ]


def skipping(model, batch):
    output = model(batch)
    if (output > 1).any():
        return (output @ output.t()).square().mean()
    return output.mean()


def reading(number):
    """A function that reads as many values, each at a line of its own."""
    lines = "\n".join("    float(output.sum())" for _ in range(number))
    code = f"def loss(model, batch):\n    output = model(batch)\n{lines}\n    return output.mean()"
    names = {}
    exec(compile(code, "<stdin>", "exec"), names)
    return names["loss"]


def reads(loss, device):
    step = mc.TrainingStep(nn.Linear(32, 256), torch.zeros(8, 32), loss=loss)
    caveats = mc.predict(step, device=device, isolate=False).caveats
    return [caveat for caveat in caveats if "If a branch depends on it" in caveat]


@pytest.mark.parametrize("device", DEVICES)
def test_the_line_that_reads_an_unknown_value_is_named(device):
    (told,) = reads(skipping, device)
    line = skipping.__code__.co_firstlineno + 2
    assert f"test_placeholders.py:{line} in skipping, which is unknown here: False was" in told
    assert told.endswith("the one that was not taken may need more.")


def test_a_few_of_many_lines_that_read_values_are_named():
    assert len(reads(reading(3), "cpu")) == 3
    *_, last = told = reads(reading(8), "cpu")
    assert len(told) == 4
    assert last.startswith("Other lines of the step's code read such values, too.")


def fixed_point(model, batch):
    """Ends at once where the difference is taken for 0."""
    found = torch.zeros(8, 32, device=batch.device)
    for _ in range(10):
        following = model(batch + found)
        if (following - found).norm() < 1e-3:
            break
        found = following
    return found.mean()


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_without_gradients_tells_which_values_were_assumed_before(device):
    step = mc.TrainingStep(nn.Linear(32, 32), torch.zeros(8, 32), loss=fixed_point)
    with pytest.raises(mc.PredictionError) as error:
        mc.predict(step, device=device, isolate=False)
    line = fixed_point.__code__.co_firstlineno + 5
    assert "returned a tensor that does not require grad" in str(error.value)
    assert f"test_placeholders.py:{line} in fixed_point, which is unknown here" in str(error.value)


@pytest.mark.cuda  # where torchvision is
def test_all_boxes_are_kept_where_their_overlap_is_not_known():
    ops = pytest.importorskip("torchvision.ops")

    def loss(model, boxes):
        scores = model(boxes).squeeze(-1)
        kept = ops.nms(boxes, scores.detach(), 0.5)
        return scores[kept].sum()

    step = mc.TrainingStep(torch.nn.Linear(4, 1), torch.zeros(32, 4), loss=loss)
    prediction = mc.predict(step, device="H200")
    assert any("torchvision::nms has a shape" in caveat for caveat in prediction.caveats)
    assert prediction.at(64).peak_allocated_bytes >= prediction.peak_allocated_bytes
