"""What is read, shown, compared, copied or pickled of a finished result runs nothing."""

import copy
import json
import pickle
from dataclasses import asdict, fields, replace

import pytest
import torch
from hand_made import law, prediction
from torch import nn

import memcallback as mc
from memcallback.batch_size.advice import RankBatchSize
from memcallback.batch_size.estimate import suggest
from memcallback.batch_size.fitted import FittedBatchSize, Trial
from memcallback.core.units import MiB
from memcallback.prediction import replay as replaying
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.host import HostAllocator
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.trace import tracer

SMALL_BYTES = 512 * MiB + 64 * MiB


def suggestion(predicted):
    return suggest(measured=None, predicted=predicted, capacity_bytes=predicted.capacity_bytes)


def fitted():
    trial = Trial(batch_size=8, peak_bytes=MiB, predicted_bytes=MiB, budget_bytes=2 * MiB)
    return FittedBatchSize(
        batch_size=8,
        previous_batch_size=4,
        predicted_batch_size=8,
        trials=(trial,),
        device_name="a card",
        capacity_bytes=4 * MiB,
        outside_bytes=MiB,
        headroom=0.05,
        counts="reserved",
        num_updates=3,
        has_validation=False,
    )


def predicted():
    """Of a real step: its trace has operators whose allocations follow rules."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = [torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)]
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.Adam)
    return mc.predict(step, device="T4")


RESULTS = {
    "prediction of a real step": predicted,
    "suggestion for a real step": lambda: suggestion(predicted()),
    "prediction": lambda: prediction(16, device=SMALL_BYTES),
    "prediction that does not fit": lambda: prediction(64, device=SMALL_BYTES),
    "prediction at another batch size": lambda: prediction(16).at(40),
    "prediction on another card": lambda: prediction(16).on("24GiB"),
    "suggestion": lambda: suggestion(prediction(16, device=SMALL_BYTES)),
    "suggestion from a formula": lambda: suggestion(law(capacity_bytes=SMALL_BYTES)),
    "fitted": fitted,
    "textbook": lambda: law(capacity_bytes=SMALL_BYTES),
    "ranks": lambda: RankBatchSize(ranks=(0,), device_name="a card", batch_size=8),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    def forbidden(*args, **options):
        raise AssertionError("something runs")

    def forbid():
        for owner, name in (
            (replaying, "replay"),
            (replaying._Replayer, "run"),
            (CachingAllocator, "allocate"),
            (HostAllocator, "allocate"),
            (BatchTrace, "at"),
            (tracer, "trace"),
        ):
            monkeypatch.setattr(owner, name, forbidden)

    return forbid


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_a_finished_result_is_data(make, nothing_runs):
    result, same = make(), copy.deepcopy(make())
    nothing_runs()
    for name in dir(result):
        if not name.startswith("__"):
            getattr(result, name)
    assert str(result)
    assert repr(result)
    assert result in (result, same)
    assert asdict(result).keys() == {field.name for field in fields(result)}
    assert copy.deepcopy(result)
    if hasattr(result, "to_dict"):
        assert json.loads(json.dumps(result.to_dict()))
        assert pickle.loads(pickle.dumps(result)).to_dict() == result.to_dict()
    if hasattr(result, "to_text"):
        assert result.to_text()
        assert pickle.loads(pickle.dumps(result)).to_text() == result.to_text()


def test_a_copy_of_a_prediction_is_equal_to_it():
    result = predicted()
    assert copy.deepcopy(result) == result
    assert pickle.loads(pickle.dumps(result)) == result
    assert result.at(8) != result


def test_a_suggestion_can_be_changed_with_replace():
    advice = suggestion(predicted())
    assert replace(advice, headroom=0.2).headroom == 0.2


def test_a_suggestion_holds_plain_values_alone():
    assert json.loads(json.dumps(asdict(suggestion(prediction(16, device=SMALL_BYTES)))))
