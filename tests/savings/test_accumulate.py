"""`accumulate`: the gradients of the large batch, whatever the last window has; updates, clipping
and scaling once a window.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import memcallback as mc

NUM_FEATURES = 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        count, NUM_FEATURES, generator=generator, dtype=torch.float64
    ), torch.randint(0, 4, (count,), generator=generator)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Recording(torch.optim.SGD):
    """Keeps the gradients of each update."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(
            [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]
        )
        super().step(closure)


def large_batches(num_samples, samples_per_update, **clip):
    """The gradients of each update of a training with large batches."""
    model = network()
    optimizer = Recording(model.parameters())
    for batch in DataLoader(TensorDataset(*samples(num_samples)), samples_per_update):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["clip_grad_norm"])
        optimizer.step()
    return optimizer.seen


def accumulated(loader, num_batches, *, num_samples=None, **clip):
    model = network()
    optimizer = Recording(model.parameters())
    accumulation = mc.accumulate(num_batches, model, optimizer)
    updates = []
    for batch in accumulation.over(loader, num_samples=num_samples):
        accumulation.backward(loss_of(model, batch))
        updates.append(accumulation.step(**clip))
    return optimizer.seen, updates


def assert_close(found, expected):
    assert len(found) == len(expected)
    for gradients, others in zip(found, expected, strict=True):
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return zip(*samples(self.count), strict=True)


@pytest.mark.parametrize("clip", [{}, {"clip_grad_norm": 0.01}])
@pytest.mark.parametrize(
    ("num_samples", "micro_batch", "num_batches"),
    [
        (24, 4, 3),  # two whole windows
        (32, 4, 3),  # a last window of two
        (30, 4, 3),  # a last window of two, one of them smaller
        (25, 4, 3),  # a last window of one sample
        (10, 4, 5),  # no whole window
        (7, 1, 2),
        (12, 4, 1),
    ],
)
def test_the_gradients_are_those_of_the_large_batch(num_samples, micro_batch, num_batches, clip):
    expected = large_batches(num_samples, micro_batch * num_batches, **clip)
    for dataset in (TensorDataset(*samples(num_samples)), Stream(num_samples)):
        found, updates = accumulated(DataLoader(dataset, micro_batch), num_batches, **clip)
        assert_close(found, expected)
        num_micro_batches = -(-num_samples // micro_batch)
        assert [n for n, is_updated in enumerate(updates, 1) if is_updated] == sorted(
            {*range(num_batches, num_micro_batches + 1, num_batches), num_micro_batches}
        )


def test_batches_of_any_sizes_count_by_their_samples():
    features, classes = samples(20)
    sizes = [1, 7, 2, 3, 5, 2]
    ragged = list(zip(features.split(sizes), classes.split(sizes), strict=True))
    model = network()
    expected = []
    optimizer = Recording(model.parameters())
    for first, last in ((0, 10), (10, 20)):
        optimizer.zero_grad()
        loss_of(model, (features[first:last], classes[first:last])).backward()
        optimizer.step()
    expected = optimizer.seen
    assert_close(accumulated(ragged, 3)[0], expected)
    assert_close(accumulated((batch for batch in ragged), 3)[0], expected)


def test_a_loss_that_is_a_mean_over_tokens_counts_by_tokens():
    features, classes = samples(12)
    classes[[0, 1, 5]] = -100  # cross_entropy leaves these out of its mean
    micro_batches = list(zip(features.split(4), classes.split(4), strict=True))
    found, _ = accumulated(
        micro_batches, 3, num_samples=lambda batch: int((batch[1] != -100).sum())
    )
    model = network()
    loss_of(model, (features, classes)).backward()
    assert_close(found, [[parameter.grad for parameter in model.parameters()]])


def test_a_window_of_equal_batches_is_pytorchs_own_recipe_to_the_bit():
    model = network().float()
    micro_batches = [
        (features.float(), classes)
        for features, classes in DataLoader(TensorDataset(*samples(12)), 4)
    ]
    accumulation = mc.accumulate(3, model, torch.optim.SGD(model.parameters()))
    for batch in accumulation.over(micro_batches):
        accumulation.backward(loss_of(model, batch))
        if batch is micro_batches[-1]:
            break
    recipe = copy.deepcopy(model)
    recipe.zero_grad()
    for batch in micro_batches:
        (loss_of(recipe, batch) / 3).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), recipe.parameters(), strict=True)
    )


def test_several_losses_of_a_batch_count_as_their_sum():
    model = network()
    accumulation = mc.accumulate(2, model, torch.optim.SGD(model.parameters()))
    loader = DataLoader(TensorDataset(*samples(6)), 4)
    for batch in accumulation.over(loader):
        accumulation.backward(loss_of(model, batch))
        accumulation.backward(model(batch[0]).square().mean())
        accumulation.step()
    whole = network()
    (loss_of(whole, samples(6)) + whole(samples(6)[0]).square().mean()).backward()
    assert_close([[p.grad for p in model.parameters()]], [[p.grad for p in whole.parameters()]])


@pytest.mark.parametrize("num_samples", [24, 30])
def test_with_a_grad_scaler_gradients_are_unscaled_clipped_and_skipped_by_the_window(num_samples):
    def run(overflow_at):
        model = network().float()
        optimizer = Recording(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        amp = mc.amp("16-mixed", device="cpu", init_scale=1024.0, say=lambda text: None)
        accumulation = mc.accumulate(3, model, optimizer, amp=amp)
        updates = []
        for position, batch in enumerate(
            accumulation.over(DataLoader(TensorDataset(*samples(num_samples)), 4))
        ):
            with torch.autocast(
                "cpu", enabled=False
            ):  # in float32, to compare with the large batch
                loss = loss_of(model, (batch[0].float(), batch[1]))
            accumulation.backward(loss * float("inf") if position == overflow_at else loss)
            updates.append(accumulation.step(clip_grad_norm=0.5))
            if updates[-1]:
                scheduler.step()
        return optimizer.seen, updates, scheduler.get_last_lr()[0], amp

    seen, updates, rate, amp = run(overflow_at=None)
    expected = large_batches(num_samples, 12, clip_grad_norm=0.5)
    assert len(seen) == len(expected)
    for gradient, other in zip(seen[0], expected[0], strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-7)
    assert rate == 0.1 * 0.5 ** len(seen)
    assert amp.state_dict()["scale"] == 1024.0

    after, updates, rate, amp = run(overflow_at=1)
    assert updates[:3] == [False] * 3
    assert len(after) == len(seen) - 1
    assert rate == 0.1 * 0.5 ** len(after)
    assert (amp.num_skipped_steps, amp.state_dict()["scale"]) == (1, 512.0)


def test_several_optimizers_are_updated_together_and_clipped_each_by_its_own_norm():
    model = network()
    optimizers = [Recording(model[0].parameters()), Recording(model[2].parameters())]
    accumulation = mc.accumulate(2, model, optimizers)
    for batch in accumulation.over(DataLoader(TensorDataset(*samples(8)), 2)):
        accumulation.backward(loss_of(model, batch))
        accumulation.step(clip_grad_norm=1e-3, clip_grad_value=5e-4)
    for optimizer in optimizers:
        assert len(optimizer.seen) == 2
        for gradients in optimizer.seen:
            assert nn.utils.get_total_norm(gradients) <= 1e-3
            assert max(gradient.abs().max() for gradient in gradients) <= 5e-4


def test_a_loop_that_was_broken_off_leaves_nothing_to_the_next_window():
    model = network()
    optimizer = Recording(model.parameters())
    accumulation = mc.accumulate(3, model, optimizer)
    loader = DataLoader(TensorDataset(*samples(12)), 4)
    for batch in accumulation.over(loader):
        accumulation.backward(loss_of(model, batch))
        break
    for batch in accumulation.over(loader):
        accumulation.backward(loss_of(model, batch))
        accumulation.step()
    assert_close(optimizer.seen, large_batches(12, 12))


def test_a_loader_with_a_length_is_not_asked_ahead():
    asked = []

    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            for position in range(3):
                asked.append(position)
                yield torch.ones(2, NUM_FEATURES, dtype=torch.float64)

    model = network()
    accumulation = mc.accumulate(2, model, torch.optim.SGD(model.parameters()))
    for position, batch in enumerate(accumulation.over(Loader())):
        assert asked == list(range(position + 1))
        accumulation.backward(model(batch).mean())
        accumulation.step()


@pytest.mark.parametrize("num_batches", [0, -1, 2.0, True, "4"])
def test_a_number_of_batches_that_is_none_is_refused(num_batches):
    with pytest.raises(
        ValueError,
        match=rf"accumulate must be a whole number of at least 1, got {num_batches!r}\. It is the "
        r"number",
    ):
        mc.accumulate(num_batches, network(), [])


def train(loader, *, calls_step, num_samples=None):
    model = network()
    accumulation = mc.accumulate(2, model, torch.optim.SGD(model.parameters()))
    for batch in accumulation.over(loader, num_samples=num_samples):
        accumulation.backward(loss_of(model, batch))
        if calls_step:
            accumulation.step()


def test_a_forgotten_step_is_an_error():
    loader = DataLoader(TensorDataset(*samples(8)), 2)
    with pytest.raises(
        RuntimeError,
        match=r"After batch 1 an update was due and step\(\) was not called\. Call it for each "
        r"batch",
    ):
        train(loader, calls_step=False)


@pytest.mark.parametrize(("length", "given"), [(5, "3"), (2, "more")])
def test_a_length_that_is_wrong_is_an_error(length, given):
    class Liar(list):
        def __len__(self):
            return length

    loader = Liar(DataLoader(TensorDataset(*samples(6)), 2))
    with pytest.raises(
        RuntimeError,
        match=rf"a length of {length} and gave {given} batches.*over\(batch for batch in loader\)",
    ):
        train(loader, calls_step=True)


def test_a_batch_that_counts_nothing_is_an_error():
    loader = DataLoader(TensorDataset(*samples(6)), 2)
    with pytest.raises(
        ValueError,
        match=r"num_samples returned 0 for batch 0: it must be at least 1\. Leave such batches out",
    ):
        train(loader, calls_step=True, num_samples=lambda batch: 0)
