"""`amp` against a loop written out with PyTorch's own autocast and GradScaler, step by step and bit
by bit.
"""

import copy

import pytest
import torch
from torch import nn

import memcallback as mc


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model, batch, position, overflow_at=()):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss * float("inf") if position in overflow_at else loss


def state(model, optimizer, scaler_state):
    states = {
        f"{index}.{name}": value
        for index, of in optimizer.state_dict()["state"].items()
        for name, value in of.items()
    }
    return {"scaler": dict(scaler_state)} | {
        name: value.clone() for name, value in (model.state_dict() | states).items()
    }


def reference(dtype, overflow_at, clip):
    """PyTorch's own recipe; the state after each step, and whether the scheduler was stepped."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**12, growth_interval=3, enabled=dtype is torch.float16
    )
    for position, batch in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, batch, position, overflow_at)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        is_finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if is_finite:
            scheduler.step()
        yield state(model, optimizer, scaler.state_dict()), scheduler.get_last_lr(), is_finite


def ours(precision, overflow_at, clip, *, say=lambda text: None):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {"init_scale": 2.0**12, "growth_interval": 3} if precision == "16-mixed" else {}
    amp = mc.amp(precision, device="cpu", say=say, **options)
    for position, batch in enumerate(batches()):
        optimizer.zero_grad()
        with amp.autocast():
            loss = loss_of(model, batch, position, overflow_at)
        amp.backward(loss)
        is_updated = amp.step(optimizer, clip_grad_norm=clip)
        if is_updated:
            scheduler.step()
        scaler_state = {
            name: value for name, value in amp.state_dict().items() if not name.startswith("num_")
        }
        yield state(model, optimizer, scaler_state), scheduler.get_last_lr(), is_updated


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (
            torch.equal(value, right[name])
            if isinstance(value, torch.Tensor)
            else value == right[name]
        ), name


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("precision", "dtype", "overflow_at"),
    [
        ("16-mixed", torch.float16, ()),
        ("16-mixed", torch.float16, (1, 2, 6)),
        ("bf16-mixed", torch.bfloat16, ()),
    ],
)
def test_every_step_is_that_of_pytorchs_own_recipe(precision, dtype, overflow_at, clip):
    updated = []
    # One after the other: both draw dropout's masks from the same generator.
    theirs, here = (
        list(reference(dtype, overflow_at, clip)),
        list(ours(precision, overflow_at, clip)),
    )
    for (expected, expected_rate, is_finite), (found, rate, is_updated) in zip(
        theirs, here, strict=True
    ):
        assert_same(found, expected)
        assert rate == expected_rate
        assert is_updated == is_finite
        updated.append(is_updated)
    assert [position for position, is_updated in enumerate(updated) if not is_updated] == list(
        overflow_at
    )


def test_a_skipped_step_changes_no_weight_and_halves_the_scale():
    states = list(ours("16-mixed", (2,), None))
    before, after = states[1][0], states[2][0]
    assert (before["scaler"]["scale"], after["scaler"]["scale"]) == (2.0**12, 2.0**11)
    assert_same(
        {k: v for k, v in after.items() if k != "scaler"},
        {k: v for k, v in before.items() if k != "scaler"},
    )


def test_skipped_steps_are_counted_and_told_of_at_the_first_second_fourth():
    told = []
    list(ours("16-mixed", (1, 3, 4, 5, 7), None, say=told.append))
    assert told == [
        "Step 2 was skipped: a gradient is inf or nan at loss scale 4096, which is lowered now. "
        "Skipped so far: 1 of 2 steps.",
        "Step 4 was skipped: a gradient is inf or nan at loss scale 2048, which is lowered now. "
        "Skipped so far: 2 of 4 steps.",
        "Step 6 was skipped: a gradient is inf or nan at loss scale 512, which is lowered now. "
        "Skipped so far: 4 of 6 steps.",
    ]


def overflowing_step(amp, model, optimizer, is_overflow):
    optimizer.zero_grad()
    with amp.autocast():
        loss = model(torch.ones(2, 16)).square().mean()
    amp.backward(loss * float("inf") if is_overflow else loss)
    return amp.step(optimizer)


def test_a_fused_optimizer_skips_in_its_kernel_and_is_counted_all_the_same():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp = mc.amp("16-mixed", device="cpu", init_scale=1024.0, say=lambda text: None)
    assert optimizer._step_supports_amp_scaling
    assert overflowing_step(amp, model, optimizer, False)
    weights = [parameter.clone() for parameter in model.parameters()]
    assert not overflowing_step(amp, model, optimizer, True)
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
    assert (amp.num_skipped_steps, amp.scaler.num_steps) == (1, 2)


def test_several_optimizers_have_one_scale_and_each_its_own_skipped_step():
    first, second = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    amp = mc.amp("16-mixed", device="cpu", init_scale=1024.0, say=lambda text: None)
    weights = first[0].weight.clone(), second[0].weight.clone()
    with amp.autocast():
        loss = (
            first(torch.ones(2, 16)).square().mean() * float("inf")
            + second(torch.ones(2, 16)).square().mean()
        )
    amp.backward(loss)
    assert not amp.step(*optimizers)
    assert torch.equal(first[0].weight, weights[0])
    assert not torch.equal(second[0].weight, weights[1])
    assert amp.num_skipped_steps == 1
    assert amp.state_dict()["scale"] == 512.0


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_restored_training_goes_on_to_the_bit(precision):
    def parts():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"growth_interval": 3} if precision == "16-mixed" else {}
        return {
            "model": model,
            "optimizer": optimizer,
            "amp": mc.amp(precision, device="cpu", say=lambda text: None, **options),
        }

    def train(model, optimizer, amp, first, last):
        torch.manual_seed(first)
        for position in range(first, last):
            optimizer.zero_grad()
            with amp.autocast():
                loss = loss_of(
                    model, batches()[position], position, (2, 5) if precision == "16-mixed" else ()
                )
            amp.backward(loss)
            amp.step(optimizer)

    whole = parts()
    train(**whole, first=0, last=4)
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in whole.items()}
    train(**whole, first=4, last=8)
    resumed = parts()
    for name, part in resumed.items():
        part.load_state_dict(saved[name])
    train(**resumed, first=4, last=8)
    assert_same(
        *(
            state(parts["model"], parts["optimizer"], parts["amp"].state_dict())
            for parts in (whole, resumed)
        )
    )
    assert (
        whole["amp"].num_skipped_steps
        == resumed["amp"].num_skipped_steps
        == (2 if precision == "16-mixed" else 0)
    )


def test_the_state_of_a_plain_grad_scaler_is_taken_and_given():
    theirs = torch.amp.GradScaler("cpu", init_scale=1234.0)
    amp = mc.amp("16-mixed", device="cpu")
    amp.load_state_dict(theirs.state_dict())
    assert amp.state_dict()["scale"] == 1234.0
    another = torch.amp.GradScaler("cpu")
    another.load_state_dict(amp.state_dict())
    assert another.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("precision", ["16-true", "fp16", "32-true", 16, None])
def test_a_precision_that_is_not_mixed_is_refused(precision):
    with pytest.raises(
        ValueError,
        match=rf"amp must be one of 16-mixed, bf16-mixed, got {precision!r}\. Leave it out",
    ):
        mc.amp(precision)


def test_bf16_has_no_scaler_to_set():
    assert mc.amp("bf16-mixed", device="cpu").scaler is None
    with pytest.raises(
        ValueError,
        match=r"bf16-mixed has no GradScaler, so init_scale cannot be set\. Leave it out, or use "
        r"16-mixed",
    ):
        mc.amp("bf16-mixed", init_scale=2.0)


def test_the_state_of_the_other_precision_is_refused():
    half, brain = mc.amp("16-mixed", device="cpu"), mc.amp("bf16-mixed", device="cpu")
    with pytest.raises(
        ValueError,
        match=r"the state was saved with a GradScaler, and the precision is bf16-mixed\. Use the "
        r"precision with which it was",
    ):
        brain.load_state_dict(half.state_dict())
    with pytest.raises(
        ValueError, match="the state was saved without a GradScaler, and the precision is 16-mixed"
    ):
        half.load_state_dict(brain.state_dict())
