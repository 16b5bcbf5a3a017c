from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import (
    CalledTwice,
    DataDependent,
    FunctionalCalls,
    OwnParameterBesideChildren,
    TiedWeights,
    depthwise_separable_convolution,
    standard_convolution,
    vgg16,
)

import memcallback as mc
from memcallback.prediction.textbook.layer_table import Layer, LayerTable
from memcallback.prediction.textbook.shape_pass import layers, shape_pass
from memcallback.step.copies.objects import fake_copy


def row(table: LayerTable, name: str) -> Layer:
    found = [layer for layer in table.layers if layer.name == name]
    assert len(found) == 1, [layer.name for layer in table.layers]
    return found[0]


def names(table: LayerTable) -> list[str]:
    return [layer.name for layer in table.layers]


def meta(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


# --- the source articles' examples ---


def test_an_rgb_image_of_500_by_500_is_3_megabytes():
    table = layers(nn.Identity(), input_size=(500, 500, 3))
    assert table.layers[0].output_shape == (500, 500, 3)
    assert layers(nn.ReLU(), input_size=(500, 500, 3)).output_bytes == 3 * 10**6


def test_a_float32_tensor_of_256_3_100_100_is_30_72_megabytes():
    assert layers(nn.ReLU(), input_size=(256, 3, 100, 100)).output_bytes == 30_720_000


@pytest.mark.parametrize(
    ("layer", "given", "num_parameters"),
    [
        (nn.Conv2d(16, 32, 3, bias=False), meta(1, 16, 8, 8), 16 * 32 * 3 * 3),
        (nn.Linear(12, 34, bias=False), meta(1, 12), 12 * 34),
        (nn.BatchNorm2d(64), meta(2, 64, 4, 4), 2 * 64),
        (nn.Embedding(1000, 16), torch.zeros(2, 5, dtype=torch.int64), 1000 * 16),
        (nn.ReLU(), meta(1, 3), 0),
        (nn.MaxPool2d(2), meta(1, 3, 4, 4), 0),
        (nn.Dropout(), meta(1, 3), 0),
    ],
    ids=["Conv2d", "Linear", "BatchNorm2d", "Embedding", "ReLU", "MaxPool2d", "Dropout"],
)
def test_a_layer_has_the_parameters_of_the_articles_formula(layer, given, num_parameters):
    table = layers(layer, given)
    assert table.num_parameters == num_parameters
    assert table.parameter_bytes == 4 * num_parameters


@pytest.fixture(scope="module")
def vgg16_table() -> LayerTable:
    with torch.device("meta"):
        model = vgg16()
    return layers(model, input_size=(1, 3, 224, 224))


def test_vgg16_has_138_million_parameters_most_of_them_in_the_first_fully_connected_layer(
    vgg16_table,
):
    assert vgg16_table.num_parameters == 138_357_544
    assert (
        max(vgg16_table.layers, key=lambda layer: layer.num_parameters).num_parameters
        == 25088 * 4096 + 4096
    )


def test_vgg16_has_the_feature_maps_of_the_cs231n_table(vgg16_table):
    """The rows of cs231n's table at 224x224x3, in values, beginning after its `INPUT [224x224x3]
    memory: 150K`.

    Their honest sum, the input included, is 15.2 million values, 61 MB per image, and not 24
    million and 96 MB: cs231n's own total, which the articles repeat, is not the sum of its rows. If
    each ReLU's output were kept beside its convolution's, which in-place ReLU saves, the sum would
    be 28.8 million.
    """
    num_values = [
        layer.output_bytes // 4
        for layer in vgg16_table.layers
        if layer.kind in ("Conv2d", "MaxPool2d", "Linear")
    ]
    assert num_values == [
        *(224 * 224 * 64, 224 * 224 * 64, 112 * 112 * 64),
        *(112 * 112 * 128, 112 * 112 * 128, 56 * 56 * 128),
        *(56 * 56 * 256, 56 * 56 * 256, 56 * 56 * 256, 28 * 28 * 256),
        *(28 * 28 * 512, 28 * 28 * 512, 28 * 28 * 512, 14 * 14 * 512),
        *(14 * 14 * 512, 14 * 14 * 512, 14 * 14 * 512, 7 * 7 * 512),
        *(4096, 4096, 1000),
    ]
    assert vgg16_table.output_bytes == 4 * sum(num_values)
    num_input_values = 224 * 224 * 3
    assert sum(num_values) + num_input_values == 15_237_608


def test_in_place_relu_of_vgg16_has_no_output_of_its_own(vgg16_table):
    relus = [layer for layer in vgg16_table.layers if layer.kind == "ReLU"]
    assert len(relus) == 15
    assert {layer.output_bytes for layer in relus} == {0}
    assert relus[0].written_bytes == relus[0].read_bytes == 224 * 224 * 64 * 4


def test_most_of_vgg16s_activations_are_in_the_early_convolutions(vgg16_table):
    first_two = [layer for layer in vgg16_table.layers if layer.kind == "Conv2d"][:2]
    assert sum(vgg16_table.share(layer) for layer in first_two) > 0.4


def test_vgg16_takes_15_and_a_half_billion_multiply_adds(vgg16_table):
    assert vgg16_table.num_multiply_adds == 15_470_264_320
    assert vgg16_table.num_flops == 2 * vgg16_table.num_multiply_adds


@pytest.mark.parametrize(("num_in", "num_out", "kernel_size"), [(32, 64, 3), (16, 256, 5)])
def test_a_depthwise_separable_convolution_saves_computation_and_costs_feature_maps(
    num_in, num_out, kernel_size
):
    size = (2, num_in, 20, 20)
    standard = layers(standard_convolution(num_in, num_out, kernel_size), input_size=size)
    separable = layers(
        depthwise_separable_convolution(num_in, num_out, kernel_size), input_size=size
    )
    # computation * (1/Cout + 1/K^2), without fractions
    factor = num_out * kernel_size**2
    assert separable.num_multiply_adds * factor == standard.num_multiply_adds * (
        kernel_size**2 + num_out
    )
    assert separable.output_bytes == standard.output_bytes + 4 * 2 * num_in * 20 * 20


# --- rows ---


def test_functional_calls_have_rows_of_their_own():
    table = layers(FunctionalCalls(), input_size=(3, 2, 4))
    assert names(table) == ["first", "/relu", "/add", "/relu", "/cat", "/flatten", "second"]
    assert [layer.output_bytes for layer in table.layers] == [96, 96, 96, 96, 192, 0, 48]
    assert [layer.output_shape for layer in table.layers][-3:] == [(3, 4, 4), (3, 16), (3, 4)]
    assert row(table, "/add").read_bytes == 2 * 96


def test_a_functional_call_is_named_after_the_module_that_makes_it_and_every_call_has_a_row():
    table = layers(CalledTwice(), input_size=(2, 8))
    assert names(table) == ["block1.linear", "block1/relu", "block1.linear", "block1/relu"]
    assert [layer.num_parameters for layer in table.layers] == [72, 0, 0, 0]
    assert [layer.read_bytes for layer in table.layers] == [64 + 288, 64, 64 + 288, 64]


def test_a_model_that_is_one_layer_has_one_row():
    assert names(layers(nn.Linear(3, 4), input_size=(2, 3))) == [""]


def test_shared_parameters_count_once_at_their_first_use():
    table = layers(TiedWeights(), torch.zeros(2, 5, dtype=torch.int64))
    assert row(table, "embedding").num_parameters == 1600
    assert row(table, "head").num_parameters == 0
    assert table.num_parameters == sum(
        parameter.numel() for parameter in TiedWeights().parameters()
    )


def test_parameters_beside_children_and_parameters_never_used_are_counted():
    model = OwnParameterBesideChildren()
    table = layers(model, input_size=(2, 8))
    assert names(table) == ["linear", "/mul", "never_called"]
    assert [layer.num_parameters for layer in table.layers] == [72, 8, 9 * 123]
    assert row(table, "never_called").output_shape is None
    assert table.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (nn.MultiheadAttention(8, 2, batch_first=True), (meta(2, 5, 8),) * 3),
        (nn.TransformerEncoderLayer(8, 2, 16), (meta(5, 2, 8),)),
        (nn.LSTM(8, 4, num_layers=2), (meta(5, 2, 8),)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (meta(2, 8),)),
    ],
    ids=["MultiheadAttention", "TransformerEncoderLayer", "LSTM", "weight_norm"],
)
def test_every_parameter_is_in_a_row_however_it_is_used(model, given):
    table = layers(model, *given)
    assert table.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert table.num_flops > 0


def test_attention_and_batched_products_count_as_multiply_adds():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    class Product(nn.Module):
        def forward(self, x):
            return x @ x.mT

    size = (2, 3, 16, 8)
    assert layers(Attention(), input_size=size).num_multiply_adds == 2 * (2 * 3) * (16 * 16 * 8)
    assert layers(Product(), input_size=size).num_multiply_adds == (2 * 3) * (16 * 16 * 8)


def test_a_recurrent_layer_counts_the_products_of_its_gates():
    table = layers(nn.LSTM(8, 4), meta(5, 2, 8))
    assert table.num_multiply_adds == 5 * 2 * 4 * 4 * (8 + 4)


def test_in_place_operators_and_views_have_no_output_but_in_place_ones_write():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x):
            y = x.clone()
            y += 1
            y.relu_()
            return y.transpose(0, 1)

    table = layers(InPlace(), input_size=(2, 8))
    assert [
        (layer.kind, layer.output_bytes, layer.written_bytes, layer.read_bytes)
        for layer in table.layers
    ] == [
        ("clone", 64, 64, 64),
        ("add_", 0, 64, 64),
        ("relu_", 0, 64, 64),
        ("transpose", 0, 0, 0),
    ]


def test_temporaries_inside_a_call_are_not_its_output():
    table = layers(nn.CrossEntropyLoss(), meta(4, 10), torch.zeros(4, dtype=torch.int64))
    assert table.output_bytes == 4
    assert table.layers[0].output_shape == ()


def test_an_operator_outside_of_any_function_is_named_after_itself():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    assert layers(Model(), input_size=(2, 8)).output_bytes == 64


# --- saved for backward ---


def test_saved_bytes_are_the_storages_that_autograd_keeps():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    # The first Linear saves the model's input, ReLU its output, the second Linear that output
    # again.
    assert layers(model, input_size=(2, 8)).saved_bytes == 2 * 16 * 4


def test_in_place_relu_shares_what_it_saves():
    def saved(inplace: bool) -> int:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(inplace),
        )
        return layers(model, input_size=(2, 3, 4, 4)).saved_bytes

    map_bytes = 2 * 8 * 16 * 4
    statistics_bytes = 2 * 8 * 4
    assert saved(inplace=False) == saved(inplace=True) == 3 * map_bytes + statistics_bytes


def test_a_pass_without_gradients_saves_nothing():
    class Inference(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                return self.linear(x).relu()

    assert layers(Inference(), input_size=(2, 8)).saved_bytes == 0


def test_checkpointed_parts_keep_nothing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    assert layers(Checkpointed().body, input_size=(2, 8)).saved_bytes == 2 * 64
    assert layers(Checkpointed(), input_size=(2, 8)).saved_bytes == 0


# --- precision, sizes and the pass ---


def test_autocast_halves_the_outputs_of_linear_layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    full = layers(model, input_size=(2, 8))
    half = layers(model, input_size=(2, 8), autocast_dtype=torch.bfloat16)
    assert [layer.output_bytes * 2 for layer in half.layers] == [
        layer.output_bytes for layer in full.layers
    ]
    assert half.parameter_bytes == full.parameter_bytes
    assert half.num_flops == full.num_flops


def test_inputs_made_from_a_size_have_the_dtype_of_the_model():
    assert layers(nn.Linear(8, 4).bfloat16(), input_size=(2, 8)).output_bytes == 2 * 4 * 2


def test_several_sizes_are_several_inputs():
    assert layers(nn.Bilinear(3, 4, 5), input_size=[(2, 3), (2, 4)]).layers[0].output_shape == (
        2,
        5,
    )


def test_a_loss_in_the_pass_gives_rows_and_a_backward_in_it_is_left_out():
    mode = FakeTensorMode()
    model = fake_copy(nn.Sequential(nn.Linear(8, 4)), mode)
    with mode:
        x = torch.zeros(2, 8)
        table = shape_pass(
            model, lambda: nn.functional.mse_loss(model(x), torch.zeros(2, 4)).backward()
        )
        assert names(table) == ["0", "/zeros", "/mse_loss"]
        assert model[0].weight.grad is None


def test_the_model_is_not_touched_and_no_hook_stays():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    onednn = torch._C._get_mkldnn_enabled()
    rng = torch.get_rng_state()
    layers(model, input_size=(2, 8))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._C._get_mkldnn_enabled() == onednn
    assert torch.equal(torch.get_rng_state(), rng)
    mode = FakeTensorMode()
    copy = fake_copy(model, mode)

    def stop():
        copy(torch.zeros(2, 8))
        raise RuntimeError("stop")

    with mode, pytest.raises(RuntimeError, match="stop"):
        shape_pass(copy, stop)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in copy.modules())


@pytest.mark.parametrize(
    ("read", "operator"),
    [
        ("item", "aten._local_scalar_dense.default"),
        ("mask", "aten.nonzero.default"),
        ("nonzero", "aten.nonzero.default"),
        ("numpy", "Tensor.numpy"),
    ],
)
def test_an_operator_that_reads_values_is_named_with_its_module_and_the_way_out(read, operator):
    with pytest.raises(
        ValueError,
        match=rf"The operator {operator} in module '0.1' reads the values .* Let the model skip "
        r"this operator, for instance",
    ):
        layers(nn.Sequential(nn.Sequential(nn.Identity(), DataDependent(read))), input_size=(2, 8))


def test_an_exception_that_a_module_catches_leaves_the_later_rows_in_order():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(8, 8)

        def forward(self, x):
            self.child(x)
            raise LookupError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            with contextlib.suppress(LookupError):
                x = self.fails(x)
            return self.last(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.catches = Catches()

        def forward(self, x):
            return self.catches(x) + 1

    assert names(layers(Outer(), input_size=(2, 8))) == [
        "catches.fails.child",
        "catches.last",
        "/add",
    ]


def test_both_or_neither_of_inputs_and_size_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"got neither\. Write layers"):
        layers(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"got both\. Write layers"):
        layers(nn.Linear(3, 3), torch.zeros(1, 3), input_size=(1, 3))


@pytest.mark.parametrize("size", [(1, -3), [(1, 3), (2.5,)], [[]]])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="input_size must be a size such as"):
        layers(nn.Linear(3, 3), input_size=size)


# --- the table ---


def test_the_sums_are_the_sums_of_the_rows(vgg16_table):
    for name in (
        "num_parameters",
        "parameter_bytes",
        "output_bytes",
        "num_flops",
        "num_multiply_adds",
        "read_bytes",
        "written_bytes",
    ):
        assert getattr(vgg16_table, name) == sum(
            getattr(layer, name) for layer in vgg16_table.layers
        )
    assert sum(vgg16_table.share(layer) for layer in vgg16_table.layers) == pytest.approx(1)


def test_the_table_shows_the_rows_and_the_sums():
    text = (
        layers(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
            input_size=(2, 8),
        )
        .to_table()
        .to_markdown()
    )
    assert text == (
        "**Layers (saved for backward: 128 bytes)**\n\n| name | kind | output shape | parameters | "
        "parameter size | output size | share of outputs | MAdd | FLOPs | read | written |\n| :--- "
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n| 0 | Linear | "
        "2x16 | 144 | 576 bytes | 128 bytes | 80.0 % | 256 | 512 | 640 bytes | 128 bytes |\n| 1 | "
        "ReLU | 2x16 | 0 | 0 bytes | 0 bytes | 0.0 % | 0 | 0 | 128 bytes | 128 bytes |\n| 2 | "
        "Linear | 2x4 | 68 | 272 bytes | 32 bytes | 20.0 % | 128 | 256 | 400 bytes | 32 bytes |\n| "
        "**total** |  |  | **212** | **848 bytes** | **160 bytes** | **100.0 %** | **384** | "
        "**768** | **1.14 KiB** | **288 bytes** |"
    )


def test_the_dictionary_is_json_with_units_in_its_keys():
    table = layers(nn.Sequential(nn.Linear(8, 4), nn.Identity()), input_size=(2, 8))
    data = json.loads(json.dumps(table.to_dict()))
    assert data["layers"][0] == {
        "name": "0",
        "kind": "Linear",
        "output_shape": [2, 4],
        "num_parameters": 36,
        "parameter_bytes": 144,
        "output_bytes": 32,
        "num_flops": 128,
        "num_multiply_adds": 64,
        "read_bytes": 208,
        "written_bytes": 32,
        "output_share_pct": 100.0,
    }
    assert data["total"]["output_bytes"] == 32
    assert data["saved_bytes"] == 0


def test_a_table_without_outputs_has_shares_of_zero():
    table = layers(nn.Identity(), input_size=(2, 8))
    assert table.share(table.layers[0]) == 0.0


def test_a_users_module_without_children_has_a_row_for_each_function_it_calls():
    class Functions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return torch.relu(x @ self.weight) + 1

    table = mc.layers(Functions(), input_size=(2, 4))
    assert [layer.output_bytes for layer in table.layers] == [32, 32, 32]
    assert table.num_parameters == 16
