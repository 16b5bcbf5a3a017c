"""Who holds memory at a predicted peak, in names that a program's author knows."""

import torch
from hand_made import prediction as by_hand
from torch import nn

import memcallback as mc

SIZE = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(SIZE, 8), nn.ReLU())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, batch):
    outputs = model(batch)
    return (outputs.repeat(1, 5000).softmax(-1) - 1).square().mean()


def predicted(loss=loss_of, model=None, optimizer=torch.optim.Adam):
    step = mc.TrainingStep(
        Net() if model is None else model, torch.ones(64, SIZE), loss=loss, optimizer=optimizer
    )
    # An H100's workspaces would be the largest of so small a step.
    return mc.predict(step, device="RTX 4090")


def names_of(prediction):
    return [consumer.name for consumer in prediction.consumers]


def test_all_that_is_live_at_the_peak_is_somebodys():
    for prediction in (predicted(), by_hand(16), by_hand(16, device="cpu")):
        found = prediction.consumers
        assert sum(consumer.num_bytes for consumer in found) == prediction.peak_allocated_bytes
        sizes = [consumer.num_bytes for consumer in found]
        assert sizes == sorted(sizes, reverse=True)


def test_layers_that_repeat_are_one_and_others_have_their_class():
    names = names_of(predicted())
    assert "layers.*.mlp (3)" in names
    assert "layers.*.norm (3)" in names
    assert "head.0 Linear" in names
    assert not any(name.startswith("layers.0") for name in names)


def test_a_layer_that_stands_alone_keeps_its_name():
    model = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, 8))
    names = names_of(predicted(model=model))
    assert {"0 Linear", "2 Linear"} <= set(names)
    assert not any("*" in name for name in names)


def test_memory_outside_of_modules_has_the_function_and_the_line_also_of_its_backward_pass():
    prediction = predicted()
    largest = prediction.consumers[0]
    number = loss_of.__code__.co_firstlineno + 2
    assert largest.name.startswith("loss_of, ")
    assert largest.name.endswith(f"test_consumers.py:{number}")
    names = names_of(prediction)
    assert not any("root" in name for name in names)
    assert not any("<module>" in name for name in names)
    assert "" not in names


def test_the_line_that_asks_for_a_prediction_is_no_consumer():
    names = names_of(predicted())
    lines = [name for name in names if "test_consumers.py" in name]
    assert all(name.startswith(("loss_of, ", "forward, ")) for name in lines), lines


def test_what_an_update_takes_for_itself_is_the_optimizers():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    step = mc.TrainingStep(
        model,
        torch.ones(1, 512),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=torch.optim.Adam,
    )
    prediction = mc.predict(step, device="24GiB")
    assert prediction.peak_phase is mc.Phase.OPTIMIZER_STEP
    assert "optimizer step" in names_of(prediction)


def test_the_backward_pass_of_a_layer_has_its_line_even_if_nothing_of_its_forward_pass_is_kept():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def squared(model, batch):
        output = model(batch)
        return output.square().mean()

    def doubled(model, batch):
        output = model(batch)
        return (output * 2).square().mean()  # which keeps nothing of the last layer

    def bytes_of_model(loss):
        step = mc.TrainingStep(model, torch.ones(2048, 256), loss=loss, optimizer=torch.optim.SGD)
        lines = mc.predict(step, device="L4").to_dict()["at_peak_by_line"]
        return {line["text"]: line["num_bytes"] for line in lines}["output = model(batch)"]

    assert bytes_of_model(doubled) == bytes_of_model(squared)


def test_so_has_that_of_an_operator_of_the_root_module():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 1024)

        def forward(self, x):
            x = nn.functional.gelu(self.layer(x))
            return x * 2

    step = mc.TrainingStep(
        Functional(),
        torch.ones(2048, 256),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=torch.optim.SGD,
    )
    names = names_of(mc.predict(step, device="L4"))
    number = Functional.forward.__code__.co_firstlineno + 1
    assert any(name.endswith(f"test_consumers.py:{number}") for name in names)
    assert "backward of gelu" not in names
