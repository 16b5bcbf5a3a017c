"""A loop of accelerate, watched: on a CPU and on a CUDA device, real or virtual."""

import pytest
import torch
from loop_parts import B, F, O, labels, loader, loss_of, network, off_bytes

import memcallback as mc

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

ON_CPU_AND_CUDA = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def train(device="cpu", mixed_precision="no", *, is_watched=True, accumulate=1, clip=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate
    )
    own = network()
    model, optimizer, batches = accelerator.prepare(
        own, torch.optim.Adam(own.parameters()), loader()
    )
    prediction, recorder = None, mc.MemoryRecorder(sample_every_n_steps=1)
    if is_watched:
        recorder.watch(model, optimizer)
        # accelerate's model enters autocast itself.
        step = mc.TrainingStep(
            model,
            next(iter(batches)),
            loss=loss_of,
            optimizer=optimizer,
            accumulate=accumulate,
            clip_grad_norm=clip,
        )
        prediction = mc.predict(step, device="cpu" if device == "cpu" else None)
    torch.manual_seed(1)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            del loss
    recorder.close()
    return recorder, prediction, [*own.parameters(), torch.get_rng_state()]


@ON_CPU_AND_CUDA
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_the_phases_are_marked_and_are_what_is_predicted(device, mixed_precision):
    recorder, prediction, _ = train(device, mixed_precision, clip=1.0)
    assert labels(recorder) == [[F, B, O]] * 6
    assert [step.batch_size for step in recorder.steps] == [8] * 6
    assert [step.num_optimizer_updates for step in recorder.steps] == [1] * 6
    assert off_bytes(recorder, prediction) <= 8 * 512


def test_under_gradient_accumulation_each_batch_is_a_step():
    recorder, prediction, _ = train(accumulate=3)
    assert labels(recorder) == [[F, B], [F, B], [F, B, O]] * 2
    assert recorder.num_updates == 2
    assert off_bytes(recorder, prediction) <= 8 * 512


@ON_CPU_AND_CUDA
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_training_leaves_the_same_bits_watched_and_not(device, mixed_precision):
    _, _, with_it = train(device, mixed_precision)
    _, _, without = train(device, mixed_precision, is_watched=False)
    assert all(torch.equal(left, right) for left, right in zip(with_it, without, strict=True))


def test_the_report_names_the_users_optimizer(tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    own = network()
    model, optimizer = accelerator.prepare(own, torch.optim.Adam(own.parameters()))
    recorder = mc.MemoryRecorder(model, optimizer)
    with recorder.watch(), mc.MemoryLog(recorder, log_dir=tmp_path):
        for batch in list(loader())[:4]:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    (header,) = (
        line for line in capsys.readouterr().out.splitlines() if "batch" in line and "│" in line
    )
    assert " · Adam · " in header
