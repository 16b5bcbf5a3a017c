"""`predict` and `suggest_batch_size`: a step in, a prediction out, for a device that need not be
there.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from keeping_loss import AgainstTheLast
from small_cards import card_of
from torch import nn

import memcallback as mc
from memcallback import PredictionError, TrainingStep
from memcallback.batch_size.estimate import suggest
from memcallback.core.types import Kind
from memcallback.core.units import GiB, MiB
from memcallback.prediction.batch_trace import UnknownBatchSize


def make_step(model=None, batch=None, **options):
    model = model or nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 10))
    return TrainingStep(
        model,
        torch.ones(16, 50) if batch is None else batch,
        **({"optimizer": torch.optim.Adam} | options),
    )


def test_a_step_is_predicted_for_a_card_and_for_a_cpu():
    card, host = (
        mc.predict(make_step(), device="A100-SXM4-80GB"),
        mc.predict(make_step(), device="cpu"),
    )
    assert isinstance(card, mc.Prediction)
    assert card.device_name == "NVIDIA A100-SXM4-80GB"
    assert card.peak_reserved_bytes >= card.peak_allocated_bytes > 0
    assert host.peak_reserved_bytes is None
    assert 0 < host.peak_allocated_bytes < card.peak_allocated_bytes
    assert card.at(1000).peak_allocated_bytes > card.peak_allocated_bytes


def test_another_batch_size_than_the_batchs_own_may_be_asked_for():
    at_once = mc.predict(make_step(), device="24GiB", batch_size=40)
    assert at_once.batch_size == 40
    assert at_once.step == mc.predict(make_step(), device="24GiB").at(40).step


def test_what_a_loss_keeps_of_one_batch_size_is_not_there_at_another(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)

    def predicted(num_samples):
        model, batch = nn.Linear(64, 64), torch.zeros(num_samples, 64)
        step = TrainingStep(model, batch, loss=AgainstTheLast(), optimizer=torch.optim.SGD)
        found = mc.predict(step, device="24GiB")
        assert step.losses[0].last is None
        return found

    assert predicted(32).at(80).step.windows == predicted(80).step.windows


def test_who_waits_is_told_after_each_trace_but_the_last():
    told = []
    mc.predict(make_step(), device="L4", progress=lambda *numbers: told.append(numbers))
    assert told == [(1, 3), (2, 3)]


@pytest.mark.parametrize(("accumulate", "num_calls"), [(1, 6), (2, 12)])
def test_training_step_is_called_for_two_updates_at_three_batch_sizes(
    accumulate, num_calls, capsys
):
    from lightning.pytorch import LightningModule

    class Talking(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(50, 10)

        def training_step(self, batch, batch_idx):
            print(len(batch))
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    step = TrainingStep.from_lightning(Talking(), torch.ones(16, 50), accumulate=accumulate)
    mc.predict(step, device="L4")
    sizes = capsys.readouterr().out.split()
    assert len(sizes) == num_calls
    assert len(set(sizes)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_here_one_has_to_be_named():
    with pytest.raises(
        ValueError,
        match=r"device is missing.*Give the name of a card, .*'24GiB', or 'cpu'",
    ):
        mc.predict(make_step())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("given", ["cuda", "CUDA:1", torch.device("cuda"), torch.device("cuda", 1)])
def test_a_cuda_device_that_is_not_here_is_said_so(given):
    with pytest.raises(
        ValueError,
        match=r"^'cuda(:1)?' names a CUDA device of this machine, and this machine has none. "
        r"Give the name of a card, .*'24GiB'",
    ):
        mc.predict(make_step(), device=given)


def test_a_suggestion_before_training_stays_within_the_capacity():
    advice = mc.suggest_batch_size(make_step(), device=card_of(GiB), headroom=0.1)
    prediction = mc.predict(make_step(), device=card_of(GiB))
    assert not advice.is_measured
    for size, fits in ((advice.largest, True), (advice.largest + 1, False)):
        needed = max(step.peak_reserved_bytes for step in prediction.at(size).steps)
        assert (needed <= advice.budget_bytes) == fits


def convolutional_step():
    layers = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32 * 32, 10))
    return make_step(model, torch.zeros(8, 3, 64, 64), optimizer=torch.optim.SGD)


def test_a_suggestion_fits_although_fewer_samples_can_need_more():
    step, context_bytes = convolutional_step(), 512 * MiB
    prediction = mc.predict(step, device=card_of(24 * GiB))
    needed = {
        size: max(one.peak_reserved_bytes for one in prediction.at(size).steps)
        for size in range(1, 100)
    }
    # A multiple of 8 that needs more than some size a little above it: between the two lies a
    # capacity for which that is not enough.
    drops = [
        (size, more)
        for size, more in needed.items()
        if size > 8 and size % 8 and needed[size - size % 8] > more
    ]
    assert drops
    for size, more in drops:
        capacity_bytes = (more + needed[size - size % 8]) // 2 + context_bytes
        advice = suggest(
            measured=None, predicted=prediction, capacity_bytes=capacity_bytes, headroom=0.0
        )
        assert 0 < needed[advice.batch_size] <= capacity_bytes - context_bytes
        assert advice.batch_size % 8 == 0 or (
            advice.batch_size == advice.largest and advice.largest < 16
        )
        assert (
            needed[advice.accumulate_for(2 * (size - size % 8)).batch_size]
            <= capacity_bytes - context_bytes
        )
    traced = mc.suggest_batch_size(step, device=card_of(capacity_bytes), headroom=0.0)
    assert (traced.batch_size, traced.largest) == (advice.batch_size, advice.largest)


def test_several_ranks_have_buckets_besides():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    step = make_step(model, torch.ones(16, 1024))
    one, two = (
        mc.suggest_batch_size(step, device=card_of(4 * GiB), world_size=size, multiple_of=1)
        for size in (1, 2)
    )
    assert two.batch_size == two.largest
    at_largest = mc.predict(step, device=card_of(4 * GiB)).at(two.largest)
    bucket_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (
        dict(two.curve)[two.largest]
        == max(step.peak_reserved_bytes for step in at_largest.steps) + bucket_bytes
    )
    assert two.largest < one.largest
    assert two.limit < one.limit
    assert "with 16.02 MiB for the buckets of DistributedDataParallel" in two.sentence()


class Branches(nn.Module):
    """Does something else at every batch size but one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(50, 10)

    def forward(self, x):
        return self.linear(x) if len(x) == 16 else self.linear(x).relu().sigmoid()


def test_where_a_trace_knows_one_batch_size_alone_the_largest_is_found_by_more_traces():
    step = make_step(Branches())
    advice = mc.suggest_batch_size(step, device="NVIDIA T4", multiple_of=1)
    peaks = [
        mc.predict(step, device="NVIDIA T4", batch_size=size).peak_reserved_bytes
        for size in (advice.batch_size, advice.batch_size * 65 // 64)
    ]
    assert peaks[0] <= advice.budget_bytes < peaks[1]


def test_for_a_cpu_of_unknown_memory_no_batch_size_is_suggested_and_the_way_out_said():
    with pytest.raises(
        PredictionError,
        match=r"^No batch size can be suggested: the CPU's capacity is unknown. Give it in Python: "
        r"device=memc",
    ):
        mc.suggest_batch_size(make_step(), device="cpu")
    advice = mc.suggest_batch_size(
        make_step(), device=mc.devices.catalogue.HostSpec(capacity_bytes=GiB)
    )
    assert advice.capacity_bytes == GiB
    assert advice.batch_size > 1000


def test_where_a_larger_batch_needs_no_more_no_batch_size_is_suggested_and_the_reason_said():
    loss = lambda model, batch: model.weight.sum() * batch.shape[0]  # noqa: E731
    step = make_step(nn.Linear(8, 4), torch.ones(16, 0), loss=loss, optimizer=torch.optim.SGD)
    text = (
        r"^No batch size can be suggested: every batch size fits.* Give .*: max_batch_size=\.\.\.$"
    )
    with pytest.raises(PredictionError, match=text):
        mc.suggest_batch_size(step, device="1GiB")
    assert mc.suggest_batch_size(step, device="1GiB", max_batch_size=64).batch_size == 64
    assert (
        mc.suggest_batch_size(step, device="4GiB", dataset_size=1000, world_size=2).batch_size
        == 496
    )


def test_a_measured_step_must_be_one_and_of_such_a_device():
    prediction = mc.predict(make_step(), device="L4")
    steady = replace(prediction.step, kind=Kind.MEASURED)
    assert (
        "the measured step agrees"
        in mc.suggest_batch_size(make_step(), device="L4", measured=steady).basis
    )
    on_host = replace(mc.predict(make_step(), device="cpu").step, kind=Kind.MEASURED)
    for step, text in (
        (prediction.step, "a predicted step"),
        (replace(steady, is_warm_up=True), "a warm-up step"),
        (on_host, "a step on CPU"),
    ):
        with pytest.raises(
            ValueError,
            match=f"measured=... got {text}.* it must be a steady step .* Give recorder.steady",
        ):
            mc.suggest_batch_size(make_step(), device="24GiB", measured=step)


def test_where_nothing_fits_the_way_out_is_said():
    advice = mc.suggest_batch_size(make_step(nn.Linear(50, 70_000)), device="600MiB")
    assert advice.batch_size == 0
    assert advice.sentence().endswith(
        "memcallback.what_if says what would make a training step fit."
    )


def test_a_step_without_batch_size_is_refused_with_the_way_out():
    with pytest.raises(
        PredictionError,
        match=r"batch size cannot be inferred.*batch_size=32 to TrainingStep or MemoryCallback",
    ):
        mc.predict(make_step(batch={"scale": torch.tensor(1.0)}), device="24GiB")


def test_a_sharded_model_is_refused_with_the_way_out():
    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(
        PredictionError, match=r"sharded over several devices already.*ranks=memcallback.Ranks"
    ):
        mc.predict(make_step(FullyShardedDataParallel(nn.Linear(50, 10))), device="24GiB")


def test_a_trace_leaves_nothing_in_a_users_profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mc.predict(make_step(), device="24GiB")
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profile.key_averages()}
    assert not any(
        "Optimizer" in event.key or "addmm" in event.key for event in profile.key_averages()
    )


def test_tensors_that_a_lightning_step_makes_have_the_precisions_own_type():
    from lightning.pytorch import LightningModule

    class Makes(LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(50, 10, dtype=torch.float64)

        def training_step(self, batch):
            seen.append(torch.zeros(1).dtype)
            return self.linear(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    seen = []
    mc.predict(
        TrainingStep.from_lightning(
            Makes(), torch.ones(4, 50, dtype=torch.float64), precision="64-true"
        ),
        device="cpu",
    )
    assert set(seen) == {torch.float64}
    assert torch.get_default_dtype() is torch.float32


def test_a_loop_by_hand_is_predicted_at_any_batch_size():
    from training import ManualTwoOptimizers

    batch = (torch.ones(16, 64), torch.zeros(16, dtype=torch.long))
    predicted = mc.predict(TrainingStep.from_lightning(ManualTwoOptimizers(), batch), device="A100")
    assert [window.label for window in predicted.step.windows] == 2 * [
        "forward",
        "backward",
        "optimizer step",
    ]
    assert (
        predicted.at(40).step
        == mc.predict(
            TrainingStep.from_lightning(ManualTwoOptimizers(), batch), device="A100", batch_size=40
        ).step
    )


class AnotherPath(nn.Module):
    """Keeps more of each sample from some batch size on, or has an end there."""

    def __init__(self, begins_at, *, fails=False):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
        self.begins_at, self.fails = begins_at, fails

    def forward(self, x):
        y = self.linear(x)
        if len(x) < self.begins_at:
            return y
        if self.fails:
            raise IndexError("no such row")
        return y.exp().exp()


def test_a_suggestion_is_verified_by_a_trace_at_its_own_size():
    for begins_at in (1000, 10**9):
        step = make_step(AnotherPath(begins_at), torch.ones(4, 1024))
        advice = mc.suggest_batch_size(step, device=card_of(4 * GiB))
        assert advice.batch_size > 64 * 11
        peaks = [
            max(
                one.peak_reserved_bytes
                for one in mc.predict(step, device=card_of(4 * GiB), batch_size=size).steps
            )
            for size in (advice.batch_size, advice.batch_size + 1)
        ]
        assert peaks[0] <= advice.budget_bytes < peaks[1]
        assert not any("largest traced" in text for text in advice.leaves_out)


def test_a_suggestion_that_cannot_be_verified_says_so():
    step = make_step(AnotherPath(1000, fails=True), torch.ones(4, 1024))
    advice = mc.suggest_batch_size(step, device="4GiB")
    assert advice.leaves_out[-1] == (
        f"a check of batch size {advice.batch_size:,}, which cannot be traced (the largest traced "
        "is 11)"
    )


def test_far_beyond_what_was_traced_a_prediction_says_so():
    predicted = mc.predict(make_step(), device="NVIDIA L4")
    assert predicted.at(64 * 35).caveats == predicted.caveats
    assert predicted.at(64 * 35 + 1).caveats[-1] == (
        "Extrapolated: batch size 2,241 is far beyond the largest traced, 35. "
        "memcallback.predict(step, batch_size=2241) traces it there."
    )
    assert mc.predict(make_step(), device="NVIDIA L4", batch_size=2241).caveats == predicted.caveats


class Queue(nn.Module):
    """Keeps what it saw last: the larger the batch, the less of what it saw before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(100, 8))

    def forward(self, x):
        y = self.linear(x)
        self.kept = torch.cat([self.kept[len(x) :].clone(), y.detach()])
        return y


def test_a_step_with_less_of_something_in_a_larger_batch_has_a_limit_all_the_same():
    step = TrainingStep(Queue(), torch.randn(4, 8), optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="24GiB")
    assert predicted.limit == predicted.trace.largest_known == 100
    with pytest.raises(UnknownBatchSize, match="gives a negative size"):
        predicted.at(101)
    advice = mc.suggest_batch_size(step, device="24GiB")
    assert advice.largest == 100
    assert max(size for size, _ in advice.curve) <= 100


def test_a_batch_size_that_no_tensor_has_tells_of_no_other():
    step = TrainingStep(
        nn.Linear(8, 8), torch.randn(16, 8), batch_size=7, optimizer=torch.optim.SGD
    )
    predicted = mc.predict(step, device="24GiB")
    assert any(
        "no tensor of the batch has 7 as its first dimension" in caveat
        for caveat in predicted.caveats
    )
    with pytest.raises(UnknownBatchSize):
        predicted.at(1600)


class SequenceFirst(nn.Module):
    """32 sequences of length 128."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x):
        return self.linear(x.mean(0))


@pytest.mark.parametrize("batch_size", [64, 1_000_000])
def test_a_batch_size_is_refused_where_the_batch_cannot_be_made_so_large(batch_size):
    step = TrainingStep(SequenceFirst(), torch.zeros(128, 32, 16), batch_size=32)
    assert mc.predict(step, device="24GiB", batch_size=32).batch_size == 32
    with pytest.raises(
        mc.PredictionError, match=f"Batch size {batch_size} .* the step's own batch size, 32"
    ):
        mc.predict(step, device="24GiB", batch_size=batch_size)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(
        ValueError, match="the optimizer AdamW has 2 parameters, and none is the model's"
    ):
        TrainingStep(
            nn.Linear(8, 8),
            torch.randn(2, 8),
            optimizer=torch.optim.AdamW(nn.Linear(8, 8).parameters()),
        )


def test_accumulation_that_would_not_be_followed_is_refused():
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(2)]
    loss = lambda model, batch: model(batch).sum()  # noqa: E731
    with pytest.raises(ValueError, match="accumulate=2 with 2 losses"):
        TrainingStep(
            model, torch.randn(2, 8), loss=[loss, loss], optimizer=optimizers, accumulate=2
        )
    with pytest.raises(PredictionError, match="accumulate=2 with LBFGS"):
        mc.predict(
            TrainingStep(
                model, torch.randn(2, 8), loss=loss, optimizer=torch.optim.LBFGS, accumulate=2
            ),
            device="24GiB",
        )


def test_a_count_whose_length_only_values_tell_is_not_guessed():
    def loss(model, batch):
        output = model(batch)
        return output.sum() + torch.bincount(output.detach().flatten().long()).sum()

    with pytest.raises(PredictionError, match=r"bincount .* Give it minlength"):
        mc.predict(TrainingStep(nn.Linear(8, 8), torch.randn(2, 8), loss=loss), device="24GiB")


def test_an_optimizer_that_cannot_be_made_is_a_prediction_error():
    with pytest.raises(PredictionError, match="ZeroDivisionError"):
        mc.predict(
            TrainingStep(nn.Linear(8, 8), torch.randn(2, 8), optimizer=lambda parameters: 1 / 0),
            device="24GiB",
        )


def test_an_allocation_tells_the_tensor_and_the_line_that_made_it():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 10)

        def forward(self, x):
            hidden = self.first(x).exp()
            widened = torch.cat([hidden, hidden])
            return self.second(widened)

    step = TrainingStep(
        Net(),
        torch.ones(512, 32),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    prediction = mc.predict(step, device="NVIDIA A100-SXM4-80GB")
    for batch_size in (512, 513, 1000):
        found = {
            origin.line.text: (origin.shape, origin.dtype)
            for standing in prediction.at(batch_size).at_peak
            if standing.alloc.category is mc.Category.ACTIVATION
            and (origin := prediction.at(batch_size).origin_of(standing.alloc))
        }
        assert found["hidden = self.first(x).exp()"] == ((batch_size, 4096), "float32")
        assert found["widened = torch.cat([hidden, hidden])"] == ((2 * batch_size, 4096), "float32")


def test_nothing_of_a_trace_stays_alive():
    class Probe(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Probe(8, 8), torch.nn.ReLU(), Probe(8, 2))
    step = TrainingStep(
        model,
        torch.ones(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )
    mc.predict(step, device="24GiB")
    gc.collect()
    assert sum(type(one) is Probe for one in gc.get_objects()) == 2


def test_a_trace_keeps_no_error_alive_that_is_being_handled_meanwhile():
    step = TrainingStep(
        torch.nn.Linear(8, 2),
        torch.ones(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )

    class OutOfMemory(RuntimeError):
        pass

    try:
        raise OutOfMemory
    except OutOfMemory as error:
        prediction = mc.predict(step, device="24GiB")
        reference = weakref.ref(error)
    assert prediction.fits
    gc.collect()
    assert reference() is None
