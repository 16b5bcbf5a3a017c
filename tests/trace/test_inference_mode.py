"""Code under `torch.inference_mode` in a traced step."""

import torch
from torch import nn

import memcallback as mc

MiB = 2**20


def peak(step):
    return mc.predict(step, device="H200", isolate=False).peak_allocated_bytes


class TwoCalls(nn.Module):
    """4 MiB of weights, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_autocast_keeps_no_casts_in_inference_mode():
    def at(mode):
        step = mc.InferenceStep(
            TwoCalls(),
            torch.zeros(512, 1024),
            mode=mode,
            precision="bf16-mixed",
            keep_outputs="none",
        )
        return mc.predict(step, device="H200", isolate=False).step.windows[0]

    kept, dropped = at("no_grad"), at("inference_mode")
    # In either mode the first product has the input (2 MiB), its cast and its output (1 MiB each),
    # and the weights' cast (2 MiB); without gradients that cast is there for both products, so the
    # second is no higher. What is left is the output, which goes before the window ends.
    assert kept.peak_allocated_bytes == dropped.peak_allocated_bytes
    deep = nn.Sequential(TwoCalls(), TwoCalls(), TwoCalls())

    def of_three(mode):
        return peak(
            mc.InferenceStep(
                deep,
                torch.zeros(512, 1024),
                mode=mode,
                precision="bf16-mixed",
                keep_outputs="none",
            )
        )

    # Three weights are cast; autocast keeps all three, or one at a time.
    assert of_three("no_grad") - of_three("inference_mode") == 2 * 2 * MiB


def test_code_that_asks_sees_the_mode():
    seen = []

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            with torch.inference_mode(False):
                seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            return x * self.weight

    peak(mc.InferenceStep(Asks(), torch.zeros(2, 4)))
    assert set(seen[::2]) == {(False, True)}
    assert set(seen[1::2]) == {(True, False)}
    assert not torch.is_inference_mode_enabled()


def test_a_teacher_in_inference_mode_takes_what_it_does_without_gradients():
    def step(mode):
        teacher, student = TwoCalls(), TwoCalls()

        def loss(model, batch):
            with mode():
                target = teacher(batch)
            return (model(batch) - target.clone()).square().mean()

        return mc.TrainingStep(student, torch.zeros(64, 1024), loss=loss)

    assert peak(step(torch.inference_mode)) == peak(step(torch.no_grad))
