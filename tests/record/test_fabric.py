"""A loop of Lightning Fabric, watched: on a CPU and on a CUDA device, real or virtual."""

import pytest
import torch
from lightning.fabric import Fabric
from loop_parts import B, F, O, labels, loader, loss_of, network, off_bytes

import memcallback as mc

ON_CPU_AND_CUDA = pytest.mark.parametrize(
    "accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def train(accelerator="cpu", precision="32-true", *, is_watched=True, accumulate=1, clip=None):
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    own = network()
    model, optimizer = fabric.setup(own, torch.optim.Adam(own.parameters()))
    batches = fabric.setup_dataloaders(loader())
    prediction, recorder = None, mc.MemoryRecorder(sample_every_n_steps=1)
    if is_watched:
        recorder.watch(model, optimizer)
        step = mc.TrainingStep(
            own,
            next(iter(batches)),
            loss=loss_of,
            optimizer=optimizer,
            precision=precision,
            accumulate=accumulate,
            clip_grad_norm=clip,
        )
        prediction = mc.predict(step, device="cpu" if accelerator == "cpu" else None)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        fabric.backward(loss / accumulate if accumulate > 1 else loss)
        if (number + 1) % accumulate == 0:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
        del loss
    recorder.close()
    return recorder, prediction, [*own.parameters(), torch.get_rng_state()]


@ON_CPU_AND_CUDA
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_phases_are_marked_and_are_what_is_predicted(accelerator, precision):
    recorder, prediction, _ = train(accelerator, precision, clip=1.0)
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
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_leaves_the_same_bits_watched_and_not(accelerator, precision):
    _, _, with_it = train(accelerator, precision)
    _, _, without = train(accelerator, precision, is_watched=False)
    assert all(torch.equal(left, right) for left, right in zip(with_it, without, strict=True))
