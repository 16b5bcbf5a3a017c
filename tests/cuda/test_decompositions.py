"""CUDA's decompositions on fake tensors, against lists recorded from PyTorch's CUDA build on
(virtual) CUDA devices.
"""

import json
import threading
import warnings
from pathlib import Path

import composite_cases as cases
import pytest
import torch
from needs import needs_recorded_version
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcallback.cuda.decompositions import attention_backend as cuda_attention_choice
from memcallback.cuda.decompositions.attention_backend import AttentionCall, choose_backend
from memcallback.cuda.decompositions.registry import composite_kernels, registered
from memcallback.cuda.decompositions.rnn import dropout_state_bytes, flatten_rnn_weights
from memcallback.cuda.op_call import OpCall, tensors_of
from memcallback.cuda.rules import corrected_result
from memcallback.devices.catalogue import DeviceSpec

RECORDED = json.loads(
    (Path(__file__).parents[1] / "recorded" / "composites.json").read_text(encoding="utf-8")
)
#: They read values, which a fake tensor has not.
WITHOUT_VALUES = {"gaussian-nll", "ctc-mean", "ctc-sum", "ctc-none"}
HELD = [name for name in RECORDED["h200"]["held_bytes"] if name not in WITHOUT_VALUES]
ALL_CASES = cases.ATTENTION | cases.RECURRENT | cases.SURVEY


def spec(capability=(9, 0)):
    return DeviceSpec(
        name="a card",
        capacity_bytes=80 * 2**30,
        compute_capability=tuple(capability),
        num_multiprocessors=132,
        shared_memory_per_block_bytes=49152,
        shared_memory_per_block_optin_bytes=101376,
        max_threads_per_multiprocessor=2048,
        max_blocks_per_multiprocessor=32,
        l2_cache_bytes=2**20,
        clock_khz=1,
        memory_clock_khz=1,
        context_bytes=0,
    )


@pytest.fixture
def as_recorded(monkeypatch):
    monkeypatch.setattr(cuda_attention_choice, "torch_version", lambda: (2, 11))


def on_fakes(measure, case, device):
    with registered(device), FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def corrected_bytes(op, args, kwargs, outputs):
            result = corrected_result(OpCall(op, args, kwargs, device, outputs))
            return (
                None
                if result is None
                else [t.untyped_storage().nbytes() for t in tensors_of(result)]
            )

        return measure(case, cases.Maker(mode), corrected_bytes)


def in_place(lines):
    # A mode makes PyTorch add the mask out of place, and the recording of operators needs a mode;
    # the one of bytes had none.
    return [
        "add_.Tensor"
        if line.startswith("add.Tensor") and lines[i + 1].startswith("_safe_softmax")
        else line
        for i, line in enumerate(lines)
    ]


@needs_recorded_version
@pytest.mark.parametrize("name", cases.ATTENTION)
@pytest.mark.parametrize("card", RECORDED)
def test_attention_calls_and_allocates_what_cuda_does(card, name, as_recorded):
    recorded = in_place(RECORDED[card]["operators"][name].split("|"))
    assert (
        on_fakes(cases.logged, cases.ATTENTION[name], spec(RECORDED[card]["compute_capability"]))
        == recorded
    )


@needs_recorded_version
@pytest.mark.parametrize("name", HELD)
def test_as_much_is_held_after_forward_and_after_backward(name, as_recorded, as_the_virtual_device):
    after_forward, _, after_backward = on_fakes(cases.held, ALL_CASES[name], spec())
    recorded_forward, _, recorded_backward = RECORDED["h200"]["held_bytes"][name]
    # PyTorch keeps cuDNN's dropout state for the rest of the process, so the recording of a second
    # call is without it.
    state = dropout_state_bytes(spec()) if name.startswith("LSTM") and "dropout" in name else 0
    assert (after_forward - state, after_backward - state) == (recorded_forward, recorded_backward)


@pytest.mark.parametrize("name", cases.RECURRENT)
def test_recurrent_layers_take_as_much_at_most(name, as_the_virtual_device):
    state = dropout_state_bytes(spec()) if "dropout" in name else 0
    assert (
        on_fakes(cases.held, cases.RECURRENT[name], spec())[1] - state
        == RECORDED["h200"]["held_bytes"][name][1]
    )


def test_weights_of_a_recurrent_layer_share_one_buffer():
    with FakeTensorMode():
        model = nn.Sequential(nn.LSTM(8, 16, 2), nn.Linear(2, 2))
        before = list(model.parameters())
        flatten_rnn_weights(model)
        weights = list(model[0].parameters())
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert len({w.untyped_storage()._cdata for w in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)
        assert [w.storage_offset() for w in weights[:4]] == [0, 512, 3584, 3648]


def real_step():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 16, requires_grad=True)
    lstm = nn.LSTM(16, 8, 1)
    y = F.scaled_dot_product_attention(x, x, x, is_causal=True) + F.dropout(x, 0.3)
    y = F.rms_norm(y, (16,)).softmax(-1, dtype=torch.float64).float()
    z = lstm(y[0])[0].sum() + F.batch_norm(y, None, None, training=True).sum() + y.square().sum()
    z.backward()
    return [y.detach(), x.grad, lstm.weight_ih_l0.grad, F.one_hot(torch.arange(3))]


def test_real_tensors_keep_their_decomposition_before_during_and_after(capfd):
    before = real_step()
    tables = {name: torch._C._dispatch_dump(f"aten::{name}") for name in composite_kernels(spec())}
    with registered(spec()):
        during = real_step()
        of_a_thread = []
        thread = threading.Thread(target=lambda: of_a_thread.extend(real_step()))
        thread.start()
        thread.join()
    after = real_step()
    for other in (during, of_a_thread, after):
        assert all(torch.equal(a, b) for a, b in zip(before, other, strict=True))
    assert {name: torch._C._dispatch_dump(f"aten::{name}") for name in tables} == tables
    assert capfd.readouterr().err == ""


def test_a_call_in_the_python_dispatcher_is_not_remembered_beyond_the_block():
    """Compilers run in it. What it remembers of the block has no derivative outside."""

    def gradient():
        weight = torch.ones(4, 4, requires_grad=True)
        with enable_python_dispatcher():
            F.linear(torch.ones(2, 4), weight).sum().backward()
        return weight.grad

    with registered(spec()):
        assert torch.equal(gradient(), torch.full((4, 4), 2.0))
    assert torch.equal(gradient(), torch.full((4, 4), 2.0))


def test_nothing_stays_behind_after_an_error_and_it_can_be_had_again():
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"), registered(spec()):
            raise RuntimeError("stop")


@needs_recorded_version
def test_the_users_flags_decide():
    query = torch.empty(2, 4, 64, 64, dtype=torch.float16)
    call, a100 = AttentionCall(query, query, query), spec((8, 0))
    assert choose_backend(call, a100) == SDPBackend.FLASH_ATTENTION
    assert choose_backend(call, spec((9, 0))) == SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_backend(call, a100) == SDPBackend.MATH
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        assert choose_backend(call, spec((9, 0))) == SDPBackend.MATH
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        choose_backend(AttentionCall(query.float(), query.float(), query.float()), a100)


@needs_recorded_version
@pytest.mark.parametrize(
    ("capability", "size", "needs_grad", "dropout_p", "backend"),
    [
        ((12, 0), 64, True, 0.0, SDPBackend.FLASH_ATTENTION),
        ((12, 1), 64, True, 0.0, SDPBackend.FLASH_ATTENTION),
        ((12, 2), 64, True, 0.0, SDPBackend.MATH),
        ((12, 0), 192, True, 0.0, SDPBackend.FLASH_ATTENTION),
        # Shared memory of 99 KiB holds no backward pass of these heads.
        ((12, 0), 200, True, 0.0, SDPBackend.EFFICIENT_ATTENTION),
        ((12, 0), 224, True, 0.0, SDPBackend.EFFICIENT_ATTENTION),
        ((12, 0), 200, False, 0.0, SDPBackend.FLASH_ATTENTION),
        ((12, 0), 256, True, 0.0, SDPBackend.FLASH_ATTENTION),
        ((12, 0), 256, True, 0.25, SDPBackend.EFFICIENT_ATTENTION),
        ((8, 9), 200, True, 0.0, SDPBackend.EFFICIENT_ATTENTION),
        ((8, 0), 200, True, 0.0, SDPBackend.FLASH_ATTENTION),
        ((10, 0), 200, True, 0.0, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_consumer_blackwell_chooses_as_ada_does(capability, size, needs_grad, dropout_p, backend):
    query = torch.empty(2, 4, 64, size, dtype=torch.float16, requires_grad=needs_grad)
    call = AttentionCall(query, query, query, dropout_p=dropout_p)
    assert choose_backend(call, spec(capability)) == backend


@needs_recorded_version
@pytest.mark.parametrize(
    ("version", "backend"),
    [((2, 11), SDPBackend.CUDNN_ATTENTION), ((2, 13), SDPBackend.FLASH_ATTENTION)],
)
def test_cudnn_takes_any_dropout_until_211(version, backend, monkeypatch):
    monkeypatch.setattr(cuda_attention_choice, "torch_version", lambda: version)
    query = torch.empty(2, 4, 64, 64, dtype=torch.float16)
    assert choose_backend(AttentionCall(query, query, query, dropout_p=0.1), spec()) == backend


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name",
    [
        "sdpa-float16-64",
        "sdpa-float32-bool-60x70",
        "sdpa-float16-33",
        "sdpa-float32-gqa",
        "sdpa-bfloat16-dropout",
    ],
)
def test_attention_on_this_device(name):
    live = cases.logged(cases.ATTENTION[name], cases.Maker())
    with FakeTensorMode() as mode, registered(spec(torch.cuda.get_device_capability())):
        kinds = {line.split()[0] for line in live if "attention" in line}
        fakes = cases.logged(cases.ATTENTION[name], cases.Maker(mode))
    assert {line.split()[0] for line in fakes if "attention" in line} == kinds


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256, 33])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_the_choice_is_this_devices(dtype, size, options):
    query = torch.empty(2, 4, 64, size, dtype=dtype, device="cuda")
    ours = choose_backend(
        AttentionCall(query, query, query, None, **options),
        spec(torch.cuda.get_device_capability()),
    )
    assert int(ours.value) == torch._fused_sdp_choice(query, query, query, None, **options)
