"""Calls of convolutions that occur in training, and what they take: predicted, and on a CUDA
device.
"""

import ast
import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp
from memcallback.core.units import MiB
from memcallback.cuda.convolution.call import Convolution, Direction, Layout
from memcallback.devices.catalogue import DeviceSpec

aten = torch.ops.aten


def card(
    name,
    capability,
    multiprocessors,
    mib,
    optin,
    threads,
    blocks,
    l2_bytes,
    clock_khz,
    memory_clock_khz,
):
    return DeviceSpec(
        name=name,
        capacity_bytes=mib * MiB,
        compute_capability=capability,
        num_multiprocessors=multiprocessors,
        shared_memory_per_block_bytes=49152,
        shared_memory_per_block_optin_bytes=optin,
        max_threads_per_multiprocessor=threads,
        max_blocks_per_multiprocessor=blocks,
        l2_cache_bytes=l2_bytes,
        clock_khz=clock_khz,
        memory_clock_khz=memory_clock_khz,
        context_bytes=512 * MiB,
    )


CARDS = {
    "NVIDIA H200": card(
        "NVIDIA H200", (9, 0), 132, 143771, 232448, 2048, 32, 62914560, 1980000, 3201000
    ),
    "NVIDIA A100-SXM4-80GB": card(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 81920, 166912, 2048, 32, 41943040, 1410000, 1593000
    ),
    "NVIDIA GeForce RTX 3090": card(
        "NVIDIA GeForce RTX 3090", (8, 6), 82, 24576, 101376, 1536, 16, 6291456, 1695000, 9751000
    ),
    "NVIDIA L4": card("NVIDIA L4", (8, 9), 58, 23034, 101376, 1536, 24, 50331648, 2040000, 6251000),
    "Tesla T4": card("Tesla T4", (7, 5), 40, 15360, 65536, 1024, 16, 4194304, 1590000, 5001000),
    "Tesla V100-SXM2-16GB": card(
        "Tesla V100-SXM2-16GB", (7, 0), 80, 16384, 98304, 2048, 32, 6291456, 1530000, 877000
    ),
}


@dataclass(frozen=True)
class Case:
    """A convolution; layouts are `c` contiguous, `cl` channels last, `t` of a 1d tensor with its
    last two dimensions swapped.
    """

    name: str
    shape: tuple
    weight: tuple
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    bias: bool = False
    transposed: bool = False
    output_padding: int = 0
    dtype: str = "float32"
    layouts: tuple = ("c", "c", "c")
    mask: tuple = ()

    def __str__(self):
        mask = "".join(str(int(one)) for one in self.mask)
        return f"{self.name}-{self.dtype}-{'.'.join(self.layouts)}-{self.shape[0]}-{mask}"

    def geometry(self):
        dims = len(self.shape) - 2
        return [
            [self.stride] * dims,
            [self.padding] * dims,
            [self.dilation] * dims,
            self.transposed,
            [self.output_padding] * dims,
            self.groups,
        ]

    def out_shape(self):
        spatial = []
        for size, kernel in zip(self.shape[2:], self.weight[2:], strict=True):
            reach = self.dilation * (kernel - 1)
            if self.transposed:
                spatial.append(
                    (size - 1) * self.stride - 2 * self.padding + reach + 1 + self.output_padding
                )
            else:
                spatial.append((size + 2 * self.padding - reach - 1) // self.stride + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (self.shape[0], channels, *spatial)

    def call(self, device):
        """Operator and arguments, on a device."""

        def empty(shape, layout):
            dtype = getattr(torch, self.dtype)
            if layout == "t":
                return torch.empty(
                    shape[0], shape[2], shape[1], dtype=dtype, device=device
                ).transpose(1, 2)
            strides = Layout.dense(shape, self.dtype, channels_last=layout == "cl").strides
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        input_, weight = empty(self.shape, self.layouts[0]), empty(self.weight, self.layouts[1])
        channels = self.out_shape()[1]
        if not self.mask:
            bias = (
                torch.empty(channels, dtype=getattr(torch, self.dtype), device=device)
                if self.bias
                else None
            )
            return aten.convolution.default, (input_, weight, bias, *self.geometry())
        gradient = empty(self.out_shape(), self.layouts[2])
        sizes = [channels] if self.mask[2] else [0]
        return aten.convolution_backward.default, (
            gradient,
            input_,
            weight,
            sizes,
            *self.geometry(),
            list(self.mask),
        )


def variants(
    case,
    dtypes=("float32", "float16", "bfloat16"),
    layouts=(("c", "c", "c"), ("cl", "cl", "cl")),
    batches=(8,),
):
    """A case forward and backward, with and without the input's gradient, in several dtypes,
    layouts and batch sizes.
    """
    for dtype in dtypes:
        for one in layouts:
            for batch in batches:
                here = replace(case, dtype=dtype, layouts=one, shape=(batch, *case.shape[1:]))
                yield here
                yield replace(here, mask=(True, True, case.bias))
                yield replace(here, mask=(False, True, case.bias))
                if dtype == "bfloat16":
                    yield replace(here, mask=(True, False, False))


PLAIN = (("c", "c", "c"),)
MIXED = (
    ("c", "c", "c"),
    ("cl", "cl", "cl"),
    ("cl", "c", "c"),
    ("c", "cl", "c"),
    ("c", "c", "cl"),
    ("cl", "cl", "c"),
    ("cl", "c", "cl"),
)
CASES = [
    *variants(
        Case("3x3", (8, 64, 56, 56), (64, 64, 3, 3), padding=1), batches=(1, 7, 32), layouts=MIXED
    ),
    *variants(Case("1x1", (8, 256, 56, 56), (64, 256, 1, 1)), batches=(1, 8, 64), layouts=MIXED),
    *variants(Case("1x1s2", (8, 256, 56, 56), (512, 256, 1, 1), stride=2)),
    *variants(
        Case("7x7s2", (8, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3), batches=(2, 5, 32)
    ),
    *variants(
        Case("3x3s2", (8, 128, 56, 56), (128, 128, 3, 3), stride=2, padding=1), batches=(3, 16)
    ),
    *variants(Case("3x3small", (8, 512, 7, 7), (512, 512, 3, 3), padding=1), batches=(1, 13, 64)),
    *variants(
        Case("vgg", (8, 128, 112, 112), (256, 128, 3, 3), padding=1, bias=True), batches=(4, 16)
    ),
    *variants(Case("bias1", (8, 64, 28, 28), (1, 64, 1, 1), bias=True)),
    *variants(Case("bias10", (8, 1, 28, 28), (10, 1, 5, 5), bias=True), batches=(1, 64)),
    *variants(
        Case("onebyone", (8, 512, 1, 1), (32, 512, 1, 1), bias=True), batches=(1, 32), layouts=MIXED
    ),
    *variants(
        Case("patch16", (8, 3, 224, 224), (768, 3, 16, 16), stride=16, bias=True), batches=(2, 32)
    ),
    *variants(Case("dilated", (8, 64, 32, 32), (64, 64, 3, 3), padding=2, dilation=2)),
    *variants(
        Case("grouped", (8, 128, 28, 28), (128, 4, 3, 3), padding=1, groups=32), batches=(1, 32)
    ),
    *variants(
        Case("depthwise3", (8, 96, 56, 56), (96, 1, 3, 3), padding=1, groups=96), layouts=MIXED
    ),
    *variants(
        Case(
            "depthwise3s2",
            (8, 144, 28, 28),
            (144, 1, 3, 3),
            padding=1,
            stride=2,
            groups=144,
            bias=True,
        ),
        batches=(1, 32),
    ),
    *variants(Case("depthwise7", (8, 96, 56, 56), (96, 1, 7, 7), padding=3, groups=96, bias=True)),
    *variants(Case("multiplier", (8, 32, 28, 28), (64, 1, 3, 3), padding=1, groups=32)),
    *variants(
        Case(
            "transposed2", (8, 128, 28, 28), (128, 64, 2, 2), stride=2, transposed=True, bias=True
        ),
        layouts=MIXED,
    ),
    *variants(
        Case("transposed4", (8, 100, 8, 8), (100, 64, 4, 4), stride=2, padding=1, transposed=True),
        batches=(1, 64),
    ),
    *variants(
        Case(
            "transposed3op",
            (8, 64, 16, 16),
            (64, 32, 3, 3),
            stride=2,
            padding=1,
            output_padding=1,
            transposed=True,
        )
    ),
    *variants(
        Case("conv1d", (8, 80, 300), (384, 80, 3), padding=1, bias=True),
        layouts=(*PLAIN, ("t", "c", "c"), ("c", "c", "t"), ("t", "c", "t")),
    ),
    *variants(
        Case("conv1d1", (8, 512, 100), (512, 512, 1), bias=True), layouts=(*PLAIN, ("t", "c", "t"))
    ),
    *variants(
        Case("conv1dgrouped", (8, 768, 49), (768, 48, 128), padding=64, groups=16, bias=True),
        layouts=(*PLAIN, ("t", "c", "t")),
    ),
    *variants(
        Case("conv1ddepthwise", (8, 256, 100), (256, 1, 31), padding=15, groups=256),
        layouts=(*PLAIN, ("t", "c", "t")),
    ),
    *variants(
        Case(
            "transposed1d",
            (8, 64, 100),
            (64, 32, 4),
            stride=2,
            padding=1,
            transposed=True,
            bias=True,
        ),
        layouts=PLAIN,
    ),
    *variants(
        Case("conv3d", (8, 16, 8, 28, 28), (32, 16, 3, 3, 3), padding=1, bias=True), batches=(1, 4)
    ),
    *variants(Case("conv3d1", (8, 16, 8, 28, 28), (32, 16, 1, 1, 1)), batches=(4,)),
    *variants(
        Case("depthwise3dsmall", (4, 3, 6, 6, 6), (3, 1, 1, 1, 1), groups=3),
        layouts=(("c", "c", "c"), ("c", "c", "cl")),
    ),
    *variants(
        Case("depthwise3d", (4, 16, 8, 28, 28), (16, 1, 3, 3, 3), padding=1, groups=16, bias=True),
        batches=(4,),
    ),
    *variants(
        Case(
            "transposed3d",
            (4, 32, 4, 8, 8),
            (32, 16, 2, 2, 2),
            stride=2,
            transposed=True,
            bias=True,
        ),
        batches=(4,),
    ),
    *variants(
        Case("double", (4, 32, 28, 28), (32, 32, 3, 3), padding=1, bias=True),
        dtypes=("float64",),
        batches=(4,),
    ),
    *variants(Case("nobatch", (0, 32, 28, 28), (32, 32, 3, 3), padding=1, bias=True), batches=(0,)),
]


#: Stands among sizes in bytes for the first product of matrices, where cuBLAS's workspace comes
#: into being.
MULTIPLY = "multiply"


def predicted(kernel, outputs):
    """The allocations (positive) and frees (negative) of a kernel in bytes, those of 0 bytes are
    none; and where it first multiplies matrices.
    """
    sizes = [
        Layout(one[0], one[1], str(one[2]).removeprefix("torch.")).size_bytes
        for one in outputs
        if one is not None
    ]
    takes, made, steps = [], set(), []
    for step in kernel:
        if isinstance(step, AllocTemp):
            takes.append(step.size_bytes)
            steps.append(step.size_bytes)
        elif isinstance(step, FreeTemp):
            steps.append(-takes[step.index])
            takes[step.index] = 0
        elif isinstance(step, AllocOutput):
            made.add(step.index)
            steps.append(sizes[step.index])
        else:
            steps.append(MULTIPLY)
    steps += [size for index, size in enumerate(sizes) if index not in made]
    steps += [-size for size in takes]
    return [size for size in steps if size]


def once(steps):
    """What is taken and given back anew for every sample, once; at the first, matrices may be
    multiplied for the first time.
    """
    kept = []
    for step in steps:
        kept.append(step)
        taken = [size for size in kept if size != MULTIPLY]
        if len(taken) >= 4 and taken[-2:] == taken[-4:-2] and sum(taken[-2:]) == 0:
            del kept[-2:]
    return kept


def significant(shape, strides):
    """The strides that say where elements lie: those of dimensions of more than one element."""
    return (
        []
        if 0 in shape
        else [stride for size, stride in zip(shape, strides, strict=True) if size > 1]
    )


def truth(case):
    """What a CUDA device does for a case: the sequence of sizes, with `MULTIPLY` for cuBLAS's
    workspace, and each output's strides.
    """
    op, args = case.call("cuda")
    matrix = torch.ones(2, 2, device="cuda")
    with torch.no_grad():
        matrix @ matrix
        held_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch._C._cuda_clearCublasWorkspaces()
        workspace_bytes = held_bytes - torch.cuda.memory_stats()["requested_bytes.all.current"]
        results = op(*args)  # cuDNN's first call makes its handle
        del results
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.memory._record_memory_history(context=None, max_entries=100000)
        try:
            results = op(*args)
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    steps = [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]
    steps = [MULTIPLY if step == workspace_bytes else step for step in steps]
    results = results if isinstance(results, (tuple, list)) else (results,)
    return steps, [None if one is None else list(one.stride()) for one in results]


def key(convolution, input_shape):
    """A question to cuDNN as text."""
    geometry = (
        convolution.weight_shape,
        convolution.padding,
        convolution.stride,
        convolution.dilation,
    )
    flags = (convolution.channels_last, convolution.allow_tf32, convolution.deterministic)
    return (
        f"{convolution.direction.name} {convolution.dtype} {geometry} {flags} {tuple(input_shape)}"
    )


def recorded(folder="convolutions"):
    """What tests/recorded/record_convolutions.py has written, one dictionary for each device."""
    folder = Path(__file__).parent / "recorded" / folder
    return [
        json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))
    ]


def questions(record):
    """A record's questions to cuDNN: convolution, shape of its input, answer in bytes or None."""
    return [(*question(text), answer) for text, answer in record["workspaces"].items()]


def question(text):
    """What `key` was made from."""
    direction, dtype, rest = text.split(" ", 2)
    geometry, flags, input_shape = ast.literal_eval(f"[{rest.replace(') (', '), (')}]")
    channels_last, allow_tf32, deterministic = flags
    return Convolution(
        Direction[direction], *geometry, dtype, channels_last, allow_tf32, deterministic
    ), input_shape
