"""What the CUDA kernels of operators ask of the allocator, against recordings from the CUDA build
of PyTorch.
"""

import json
from pathlib import Path

import kernel_zoo
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp, OpenBlasHandles
from memcallback.cuda.kernels.matrix import (
    uses_cublas,
    uses_cublaslt,
)
from memcallback.cuda.op_call import OpCall
from memcallback.cuda.rules import corrected_result, kernel_of, kernel_rule
from memcallback.devices.blas import CUBLASLT_WORKSPACE_BYTES
from memcallback.devices.catalogue import DeviceSpec

RECORDED = Path(__file__).parents[1] / "recorded" / "kernels"
#: Whose outputs depend on values: the recording tells their shapes.
DEPENDS_ON_VALUES = (
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "bincount",
    "repeat_interleave",
)
#: What is not said exactly, and why it is not.
NOT_SAID = {
    "scratch of CUB and thrust": (
        "_unique2 bincount masked_select multinomial nonzero randperm repeat_interleave unique_dim "
        "unique_consecutive"
    ),
    "masks are counted first, which fakes cannot do": "index",
    "no fake kernel": "_ctc_loss multi_margin_loss_backward multilabel_margin_loss_backward",
    "a value is read": "equal",
    "compositions that a training step seldom has": (
        "count_nonzero isin soft_margin_loss_backward normal unfold_backward _foreach_max "
        "multi_margin_loss multilabel_margin_loss_forward"
    ),
    "cuFFT, cuSOLVER": (
        "_linalg_det _linalg_eigh _linalg_solve_ex _linalg_svd linalg_cholesky_ex "
        "linalg_inv_ex linalg_solve_triangular triangular_solve"
    ),
}
LEFT_OUT = {op for ops in NOT_SAID.values() for op in ops.split()}
#: Single calls that are not said exactly: the embedding of very few rows, masks as indices, parts
#: of more than 2 GiB, numbers to half types, norms of nothing.
SINGLE = (
    "embedding_dense_backward(%[5000,16]",
    "[b8[",
    "[262144,3072]",
    "_foreach_norm.Scalar([2x",
    "_foreach_norm.Scalar(%f32[0]",
)
#: The scratch of CUB for 2-byte keys and cuDNN's workspaces below compute capability 9.0 are not
#: known.
BELOW_9 = (
    "sort",
    "argsort",
    "median",
    "nanmedian",
    "_embedding_bag_dense_backward",
    "_scaled_dot_product_cudnn",
)


def load(name):
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def said(name, head):
    """Whether a recorded call is one that the rules claim to know to the byte."""
    op = name.partition("(")[0].partition(".")[0]
    if op in LEFT_OUT or name not in kernel_zoo.cases():
        return False
    is_sorted_after = op == "topk" and name.endswith(("], 5000)", "], 100000)"))
    if head["compute_capability"][0] < 9 and (
        op.startswith(BELOW_9) or (is_sorted_after and "f16" in name)
    ):
        return False
    return not any(all(piece in name for piece in single.split("%")) for single in SINGLE)


def spec_of(head):
    return DeviceSpec(
        name=head["device"],
        capacity_bytes=0,
        compute_capability=tuple(head["compute_capability"]),
        torch_version=(2, 11),
        num_multiprocessors=head["num_multiprocessors"],
        shared_memory_per_block_bytes=48 * 1024,
        shared_memory_per_block_optin_bytes=0,
        max_threads_per_multiprocessor=head["max_threads_per_multiprocessor"],
        max_blocks_per_multiprocessor=32,
        l2_cache_bytes=head["l2_cache_bytes"],
        clock_khz=0,
        memory_clock_khz=0,
        context_bytes=0,
    )


def described(text):
    """A recorded output: dtype, shape, strides or None, number of its allocation or None."""
    text, _, place = text.partition("@")
    head, _, strides = text.partition(":")
    dtype, _, shape = head.rstrip("]").partition("[")
    dtypes = {v: k for k, v in kernel_zoo.SHORT.items()}
    whole = tuple(int(s) for s in shape.split(",") if s)
    return (
        dtypes.get(dtype, dtype),
        whole,
        tuple(map(int, strides.split(","))) if strides else None,
        int(place) if place else None,
    )


def events_of(plan, sizes):
    """A kernel and the sizes of the outputs to make, as a recording has them; and which allocation
    each output is.
    """
    events, takes, places, count = [], {}, {}, 0
    plan = [step for step in plan or () if not isinstance(step, OpenBlasHandles)]
    made = {step.index for step in plan if isinstance(step, AllocOutput)}
    given = {step.index for step in plan if isinstance(step, FreeTemp)}
    plan += [AllocOutput(i) for i in range(len(sizes)) if i not in made]
    plan += [
        FreeTemp(i) for i in range(sum(isinstance(s, AllocTemp) for s in plan)) if i not in given
    ]
    num_takes = 0
    for step in plan:
        if isinstance(step, FreeTemp):
            if takes[step.index] is not None:
                events.append(f"-{takes[step.index]}")
            continue
        size = step.size_bytes if isinstance(step, AllocTemp) else sizes[step.index]
        if isinstance(step, AllocTemp):
            takes[num_takes] = count if size else None
            num_takes += 1
        elif size:
            places[step.index] = count
        if size:
            events.append(f"+{size}")
            count += 1
    return " ".join(events), places


def fake_result(case, line, args, kwargs):
    if case.op.split(".")[0] not in DEPENDS_ON_VALUES:
        return case.overload(*args, **kwargs)
    return tuple(
        torch.empty(shape, dtype=dtype) for dtype, shape, _, _ in map(described, line[1].split())
    )


def compare(case, line, spec):
    """None, or what differs between a call on fakes and the recording: what, ours, real."""
    with FakeTensorMode():
        args, kwargs = case.build("cpu")
        result = fake_result(case, line, args, kwargs)
        better = corrected_result(OpCall(case.overload, args, kwargs, spec, result))
        outputs = kernel_zoo.tensors(result if better is None else better)
        inputs = {t.untyped_storage()._cdata for t in kernel_zoo.tensors((args, kwargs))}
        plan = kernel_of(OpCall(case.overload, args, kwargs, spec, outputs))
        sizes, seen = [], set(inputs)
        for t in outputs:
            storage = t.untyped_storage()
            sizes.append(0 if storage._cdata in seen else storage.nbytes())
            seen.add(storage._cdata)
    events, places = events_of(plan, sizes)
    ours = " ".join(
        f"{kernel_zoo.SHORT[t.dtype]}[{','.join(map(str, t.shape))}]"
        + ("" if t.is_contiguous() else f":{','.join(map(str, t.stride()))}")
        + (f"@{places[i]}" if i in places else "")
        for i, t in enumerate(outputs)
    )
    if _plain(ours) != _plain(line[1].replace("cpui64[]", "i64[0]")):
        return "outputs", ours, line[1]
    if events != line[0]:
        return "events", events, line[0]
    return None


def _plain(text):
    return [t.partition("@")[0] for t in text.split()]


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm"),
    reason="recorded with PyTorch 2.11, which has operators that this one has not",
)
@pytest.mark.parametrize("device", ["h200", "a100", "t4"])
def test_every_kernel_asks_for_what_was_recorded(device):
    head = load(device)
    spec = spec_of(head)
    known = {name: line for name, line in head["cases"].items() if said(name, head)}
    assert len(known) > 0.8 * len(head["cases"])
    differ = {
        name: found
        for name, line in known.items()
        if (found := compare(kernel_zoo.cases()[name], line, spec))
    }
    assert differ == {}


@pytest.mark.parametrize("device", ["h200", "a100", "t4"])
def test_the_products_that_make_workspaces_are_known(device):
    head = load(device)
    cublas, cublaslt = f"+{spec_of(head).cublas_workspace_bytes}", f"+{CUBLASLT_WORKSPACE_BYTES}"
    seen = set()
    for name, line in head["cases"].items():
        op = name.partition("(")[0]
        if op.partition(".")[0] in (
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "_addmm_activation",
            "mv",
            "addmv",
            "dot",
        ):
            case = kernel_zoo.cases()[name]
            args, kwargs = case.build("meta")
            call = OpCall(case.overload, args, kwargs, spec_of(head))
            first = line[2].split() if len(line) > 2 else []
            assert (cublas in first) == uses_cublas(call), name
            assert (cublaslt in first) == uses_cublaslt(call), name
            seen.add((cublas in first, cublaslt in first))
    assert {(True, False), (True, True)} <= seen


def test_an_operator_without_a_rule_has_no_kernel():
    x = torch.empty(3, device="meta")
    call = OpCall(torch.ops.aten.neg.default, (x,), {}, spec_of(load("h200")), x)
    assert kernel_of(call) is None
    assert corrected_result(call) is None


def test_a_call_can_be_asked_again_for_another_batch_size():
    spec, op = spec_of(load("h200")), torch.ops.aten.sum.dim_IntList

    def call(batch):
        x = torch.empty(batch, 4096, device="meta")
        call = OpCall(op, (x, [0]), {"dtype": torch.float32}, spec, [x[0]])
        return kernel_rule(call), kernel_of(call)

    (small, few), (large, many) = call(2), call(4096)
    assert (small.function, small.constants) == (large.function, large.constants)
    assert small.function(*small.constants, *large.numbers) == many != few


def test_an_operator_without_a_rule_is_no_call():
    x = torch.empty(3, device="meta")
    spec = spec_of(load("h200"))
    assert kernel_rule(OpCall(torch.ops.aten.neg.default, (x,), {}, spec, [x])) is None


def test_shared_keys_and_values_have_a_gradient_for_each_head_in_the_workspace_of_cudnn():
    def workspace_bytes(heads):
        q = torch.empty(8, 8, 256, 32, dtype=torch.bfloat16, device="meta")
        k = torch.empty(8, heads, 256, 32, dtype=torch.bfloat16, device="meta")
        args = (
            q,
            q,
            k,
            k,
            q,
            torch.empty(8, 8, 256, 1, device="meta"),
            None,
            None,
            None,
            None,
            None,
            256,
            256,
            0.0,
            False,
        )
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        steps = kernel_of(OpCall(op, args, {}, spec_of(load("h200")), [q, k, k]))
        (taken,) = (step.size_bytes for step in steps if isinstance(step, AllocTemp))
        return taken

    assert (workspace_bytes(8), workspace_bytes(2)) == (
        2162944,
        4260096,
    )  # as PyTorch 2.11 asks for with cuDNN 9.19


@pytest.mark.parametrize(
    ("device", "num_slices", "scratch_bytes"),
    [
        ("h200", 64_512, 1279),
        ("h200", 64_513, 1535),
        ("h200", 200_000, 2047),
        ("a100", 61_440, 1279),
        ("a100", 61_441, 1535),
        ("t4", 36_864, 1279),
        ("t4", 36_865, 1535),
        ("t4", 110_593, 2047),
        # From 64 tiles on their keys take another 256 bytes.
        ("t4", 150_000, 2559),
        ("t4", 250_000, 3071),
    ],
)
def test_topk_of_many_rows_scans_by_key_in_tiles_of_the_card(device, num_slices, scratch_bytes):
    x = torch.empty(1024, num_slices, device="meta")
    largest = torch.empty(1, num_slices, device="meta")
    args = (x, 1, 0, True, True)
    steps = kernel_of(
        OpCall(torch.ops.aten.topk.default, args, {}, spec_of(load(device)), [largest, largest])
    )
    sizes = [step.size_bytes for step in steps if isinstance(step, AllocTemp)]
    assert sizes[-2:] == [scratch_bytes] * 2  # as PyTorch 2.11 asks for on virtual cards


@pytest.mark.parametrize(("rows", "parts"), [(80_000, 2500), (128_576, 2730)])
def test_partial_sums_of_a_layer_norm_are_at_most_as_many_as_blocks(rows, parts):
    x, statistic = torch.empty(rows, 384, device="meta"), torch.empty(rows, 1, device="meta")
    weight = torch.empty(384, device="meta")
    args = (x, x, [384], statistic, statistic, weight, weight, [True] * 3)
    op = torch.ops.aten.native_layer_norm_backward.default
    outputs = [x, weight, weight]
    steps = kernel_of(OpCall(op, args, {}, spec_of(load("a100")), outputs))
    sizes = [step.size_bytes for step in steps if isinstance(step, AllocTemp)]
    # 4,193,280 B for 128,576 rows, as PyTorch 2.11 asks for on a virtual RTX 3090.
    assert sizes.count(parts * 384 * 4) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_live_device_asks_for_what_its_recording_says():
    from recorded import record_kernels

    capability = torch.cuda.get_device_capability()
    heads = [load(name) for name in ("h200", "a100", "t4")]
    head = next(
        (
            h
            for h in heads
            if h["device"] == torch.cuda.get_device_name()
            and tuple(h["compute_capability"]) == capability
        ),
        None,
    )
    if head is None:
        pytest.skip(f"no recording of {torch.cuda.get_device_name()}")
    names = [name for name in sorted(head["cases"]) if said(name, head)][::20]
    assert {name: record_kernels.record(kernel_zoo.cases()[name])[:2] for name in names} == {
        name: head["cases"][name][:2] for name in names
    }
