"""`checkpoint`: the gradients, buffers and random numbers of the model as it was, to the bit, and
the model as it was when it is undone.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import memcallback as mc


def convolutions(*, activation=nn.SiLU):
    """Batch norm, activations that work in place, dropout."""
    layers = [
        (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            activation(inplace=True),
            nn.Dropout(0.3),
        )
        for _ in range(4)
    ]
    return nn.Sequential(
        *(layer for four in layers for layer in four), nn.Flatten(), nn.Linear(3 * 64, 5)
    )


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.first, self.second, self.dropout = (
            nn.BatchNorm1d(width),
            nn.Linear(width, 32),
            nn.Linear(32, width),
            nn.Dropout(0.2),
        )

    def forward(self, x, scale, *, shift=0.0):
        return x + scale * self.dropout(self.second(F.gelu(self.first(self.norm(x))))) + shift


class Blocks(nn.Module):
    """A list of blocks that take several arguments, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, torch.tensor(0.5), shift=0.1)
        return self.head(x)


def images():
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vectors():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def left_behind(model, batch, *, autocast=None):
    """Everything that two training steps leave: losses, gradients, buffers, weights, the random
    number generator.
    """
    torch.manual_seed(1234)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(batch).square().mean()
        loss.backward()
        found |= {
            f"{step}.{name}.grad": parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
        found[f"{step}.loss"] = loss.detach()
        optimizer.step()
    return (
        found
        | {name: value.clone() for name, value in model.state_dict().items()}
        | {"generator": torch.get_rng_state()}
    )


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("segments", [None, 2, 3, 5, 18])
def test_a_sequential_model_leaves_the_same_bits_in_any_number_of_segments(segments):
    plain = convolutions()
    saved = copy.deepcopy(plain)
    mc.checkpoint(saved, segments=segments)
    assert_same(left_behind(saved, images()), left_behind(plain, images()))


def test_a_list_of_blocks_leaves_the_same_bits():
    plain = Blocks()
    saved = copy.deepcopy(plain)
    assert mc.checkpoint(saved).names == ("blocks",)
    assert_same(left_behind(saved, vectors()), left_behind(plain, vectors()))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_is_followed_in_the_recomputation(autocast):
    plain = Blocks()
    saved = copy.deepcopy(plain)
    mc.checkpoint(saved)
    assert_same(
        left_behind(saved, vectors(), autocast=autocast),
        left_behind(plain, vectors(), autocast=autocast),
    )


def test_the_gradients_are_those_of_checkpoint_sequential():
    model = convolutions(
        activation=lambda inplace: nn.SiLU()
    )  # torch's own cuts at layers that work in place, and fails
    with mc.checkpoint(model, segments=3):
        ours = left_behind(copy.deepcopy(model), images())
    as_in_torch = copy.deepcopy(model)
    as_in_torch.forward = lambda x: checkpoint_sequential(list(model), 3, x, use_reentrant=False)
    torch.manual_seed(1234)
    as_in_torch(images()).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[f"0.{name}.grad"], parameter.grad)


def test_running_statistics_are_updated_once():
    model = convolutions()
    mc.checkpoint(model, segments=4)
    model(images()).sum().backward()
    assert [
        norm.num_batches_tracked.item() for norm in model if isinstance(norm, nn.BatchNorm2d)
    ] == [1] * 4
    mean = F.conv2d(images(), model[0].weight, model[0].bias, padding=1).mean(dim=(0, 2, 3))
    assert torch.allclose(model[1].running_mean, 0.1 * mean, atol=1e-6)


class KeepsWhatItReads(nn.Module):
    """Reads a buffer and changes it, through an alias and by assignment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("codes", torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x * self.codes)
        self.codes.data.mul_(0.9).add_(y.detach().mean(0))
        self.calls = self.calls + 1
        return y.tanh() * self.calls


def test_buffers_that_a_forward_pass_reads_and_changes_are_those_of_then_in_the_recomputation():
    plain = nn.Sequential(*(KeepsWhatItReads() for _ in range(3)))
    saved = copy.deepcopy(plain)
    mc.checkpoint(saved)
    assert_same(left_behind(saved, vectors()), left_behind(plain, vectors()))


def test_a_backward_pass_may_be_repeated():
    model = Blocks()
    with mc.checkpoint(model):
        loss = model(vectors()).square().mean()
        first = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        second = torch.autograd.grad(loss, model.parameters())
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert model.blocks[0].norm.num_batches_tracked.item() == 1


def test_layers_are_computed_again_and_only_with_gradients():
    model, calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), []
    for position, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, position=position: calls.append(position))
    with mc.checkpoint(model, segments=2):
        with torch.no_grad():
            model(vectors())
        assert calls == [0, 1, 2, 3]
        loss = model(vectors()).sum()
        calls.clear()
        loss.backward()
        # The last segment is not checkpointed.
        assert calls == [0, 1]


def test_the_same_layer_may_stand_in_several_places():
    activation = nn.Tanh()
    plain = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), activation)
    saved = copy.deepcopy(plain)
    mc.checkpoint(saved, segments=2)
    assert_same(left_behind(saved, vectors()), left_behind(plain, vectors()))


# What is saved.


def saved_bytes_after_forward(model, batch):
    """Bytes of the distinct storages that autograd keeps for the backward pass, no parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch).sum()
    kept_bytes = sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in kept.items()
        if pointer not in parameters
    )
    return kept_bytes, loss


def test_between_the_passes_a_block_keeps_its_input_and_nothing_else():
    model = nn.ModuleList(Block() for _ in range(4))

    class Runs(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model

        def forward(self, x):
            for block in self.blocks:
                x = block(x, 1.0)
            return x

    plain, _ = saved_bytes_after_forward(Runs(), vectors())
    with mc.checkpoint(model):
        saved, _ = saved_bytes_after_forward(Runs(), vectors())
    input_bytes = 6 * 8 * 4
    assert plain > 4 * (3 * input_bytes + 2 * 6 * 32 * 4)
    assert saved <= 4 * input_bytes


# Where it is put, and that it can be taken away.


def test_undo_restores_the_modules_exactly():
    model = Blocks()
    marker = lambda *args, **kwargs: Block.forward(model.blocks[2], *args, **kwargs)  # noqa: E731
    model.blocks[2].forward = marker
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    checkpointing = mc.checkpoint(model)
    assert list(model.state_dict()) == keys
    checkpointing.undo()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert checkpointing.names == ()
    checkpointing.undo()


def test_the_end_of_a_with_block_undoes_it_after_an_error_too():
    model = convolutions()
    with pytest.raises(RuntimeError, match="input to conv2d"), mc.checkpoint(model, segments=2):
        model(torch.ones(3))
    assert "forward" not in vars(model)
    mc.checkpoint(model).undo()


def test_copies_and_saved_models_are_checkpointed_on_their_own():
    model = convolutions()
    with mc.checkpoint(model, segments=3):
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    plain = left_behind(copy.deepcopy(model), images())
    for other in (copied, loaded):
        assert vars(other)["forward"].module is other
        assert_same(left_behind(other, images()), plain)


class Encoder(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, x):
        return self.body(x)


class ResidualNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layer1 = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.layer2 = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (convolutions, ("",)),
        (Blocks, ("blocks",)),
        (ResidualNetwork, ("layer1", "layer2")),
        (lambda: Encoder(3), ("body.layers",)),
        # The list inside has nearly all layers, so cutting the three on the outside would save
        # nothing.
        (lambda: nn.Sequential(nn.Linear(8, 8), Encoder(4), nn.Linear(8, 5)), ("1.body.layers",)),
    ],
)
def test_the_outermost_containers_are_found(make, names):
    assert mc.checkpoint(make()).names == names


def test_modules_are_named_one_or_several_and_segments_by_a_mapping():
    model = ResidualNetwork()
    for name, names in (
        ("layer2", ("layer2",)),
        (["layer1", "head"], ("layer1", "head")),
        ({"layer1": 3, "layer2": 1}, ("layer1", "layer2")),
    ):
        with mc.checkpoint(model, name) as checkpointing:
            assert checkpointing.names == names
            model(vectors()).sum().backward()


def test_a_list_of_blocks_will_do_such_as_every_second_one():
    model, calls = Blocks(), []
    for position, block in enumerate(model.blocks):
        block.first.register_forward_hook(lambda *_, position=position: calls.append(position))
    mc.checkpoint(list(model.blocks)[::2])
    loss = model(vectors()).sum()
    calls.clear()
    loss.backward()
    assert calls == [2, 0]


def test_no_segment_begins_with_a_layer_that_works_in_place():
    model = convolutions()
    mc.checkpoint(model, segments=9)
    begins = [model[start] for start in vars(model)["forward"].starts]
    assert len(begins) > 4
    assert not any(isinstance(layer, nn.SiLU) for layer in begins)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [
            nn.LeakyReLU(inplace=True),
            nn.Linear(8, 8),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(8, 8),
        ],
        lambda: [nn.Sequential(nn.ELU(inplace=True), nn.Linear(8, 8)), nn.Tanh()],
        lambda: [nn.Dropout(0.2, inplace=True), nn.LeakyReLU(inplace=True)],
    ],
)
def test_a_container_that_begins_in_place_leaves_the_same_bits(layers):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*layers()), nn.Linear(8, 8))
    saved = copy.deepcopy(plain)
    mc.checkpoint(saved, "1")
    assert_same(left_behind(saved, vectors()), left_behind(plain, vectors()))


# Bad input: the value, the rule, the way out.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"name": "layer3"},
            r"ResidualNetwork has no module named 'layer3'\. Closest are 'layer2.*', 'layer1'\.",
        ),
        (
            {"name": "qqqqqqqq"},
            r"no module named 'qqqqqqqq'\. It has 'stem', 'layer1', 'layer1\.0', .*\.\.\.",
        ),
        (
            {"name": "layer2", "segments": 5},
            r"segments=5 for 'layer2' must be at least 1 and at most 4, the number of "
            r"layers\. Leave it out",
        ),
        ({"name": "layer2", "segments": 0}, "segments=0 for 'layer2'"),
        (
            {"segments": 2},
            r"segments=2 is for one nn\.Sequential, and there are 2 modules: 'layer1', 'layer2'\. "
            r"Leave it out, or give a mapping",
        ),
        (
            {"name": "head", "segments": 2},
            r"segments=2 is for an nn\.Sequential, and 'head' is a Linear.*Leave segments out",
        ),
        (
            {"name": {"layer1": 2}, "segments": 2},
            r"segments=2 contradicts the numbers in name=\{'layer1': 2\}\. Leave segments out",
        ),
        ({"name": ["layer1", "layer1.0"]}, None),
    ],
)
def test_what_cannot_be_checkpointed_is_refused_with_the_way_out(arguments, text):
    model = ResidualNetwork()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    if text is None:  # a block inside a segment is checkpointed within it
        mc.checkpoint(model, **arguments).undo()
    else:
        with pytest.raises(ValueError, match=text):
            mc.checkpoint(model, **arguments)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_the_model_itself_needs_two_segments():
    with pytest.raises(
        ValueError,
        match=r"segments=1 for 'the model'.*at least 2 \(the last one is not checkpointed\)",
    ):
        mc.checkpoint(convolutions(), segments=1)


def test_a_list_of_blocks_has_no_segments():
    with pytest.raises(
        ValueError,
        match=r"segments=2 is for an nn\.Sequential, and 'blocks' is a ModuleList\. Leave "
        r"segments out",
    ):
        mc.checkpoint(Blocks(), "blocks", segments=2)


def test_a_model_with_nothing_to_find_asks_for_names():
    with pytest.raises(
        ValueError,
        match=r"Block has no nn\.Sequential of several layers.*Name the modules.*'norm', 'first'",
    ):
        mc.checkpoint(Block())


def test_a_module_cannot_be_checkpointed_twice():
    model = Blocks()
    mc.checkpoint(model)
    with pytest.raises(ValueError, match=r"'blocks\.0' is checkpointed already\. First call undo"):
        mc.checkpoint(model)
    with pytest.raises(
        ValueError, match=r"has a module twice, perhaps as a block of another one\. Name each once"
    ):
        mc.checkpoint(Blocks(), ["blocks", "blocks.0"])


def test_a_block_that_changes_its_input_in_place_is_refused_when_it_runs():
    class InPlace(nn.Module):
        def forward(self, x):
            return F.leaky_relu_(x) * 2

    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(InPlace(), nn.Linear(8, 8)), nn.Linear(8, 8)
    )
    mc.checkpoint(model, "1")
    with pytest.raises(
        RuntimeError, match=r"'1\[0:2\]' changed its own input in place.*inplace=False"
    ):
        model(vectors())


@pytest.mark.parametrize("name", [3, ["layer1", 3], {3: 2}, True])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(
        TypeError,
        match=r"name must be the name of a module, a list of names, or a mapping from names to "
        r"numbers of segments, got .*Leave it",
    ):
        mc.checkpoint(convolutions(), name)


@pytest.mark.parametrize("name", [[], {}, ()])
def test_no_name_at_all_is_refused(name):
    with pytest.raises(
        ValueError,
        match=r"name must have at least one name of a module, got .*Leave it out to find modules "
        r"auto",
    ):
        mc.checkpoint(convolutions(), name)


@pytest.mark.parametrize("options", [{"segments": "3"}, {"name": {"": 2.5}}, {"segments": True}])
def test_a_number_of_segments_that_is_none_is_refused(options):
    with pytest.raises(
        TypeError, match=r"segments=.* for 'the model' must be a whole number\. Leave it out"
    ):
        mc.checkpoint(convolutions(), **options)


def test_what_is_checkpointed_is_shown():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)), nn.Linear(4, 1)
    )
    checkpointing = mc.checkpoint(model, ["0", "1"])
    assert repr(checkpointing) == "<Checkpointing of '0', '1'>"
    checkpointing.undo()
    assert repr(checkpointing) == "<Checkpointing of no modules>"
