"""Calls of PyTorch's operators forward and backward, and a log of what reaches the kernels below
autograd.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from memcallback.cuda.decompositions.rnn import flatten_rnn_weights
from memcallback.step.copies.objects import fake_copy


class Maker:
    """Makes the tensors and modules of a case, on CUDA or as fakes that stand for it."""

    def __init__(self, fake_mode=None):
        self.fake_mode = fake_mode
        self.device = "cpu" if fake_mode else "cuda"
        self.weight_bytes = 0
        self.kept = []

    def __call__(self, *shape, dtype=torch.float32, grad=True):
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor.requires_grad_(grad and dtype.is_floating_point)

    def ints(self, *shape, dtype=torch.int64):
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def module(self, module_class, *args, dtype=torch.float32, **kwargs):
        with _disable_current_modes():
            module = module_class(*args, **kwargs).to(dtype)
            if not self.fake_mode:
                before = torch.cuda.memory_stats()["requested_bytes.all.current"]
                module = module.to(self.device)
                self.kept.append(module)
                self.weight_bytes += (
                    torch.cuda.memory_stats()["requested_bytes.all.current"] - before
                )
                return module
            copy = fake_copy(module, self.fake_mode)
        with _disable_current_modes(), self.fake_mode:
            flatten_rnn_weights(copy)
        self.kept.append(copy)
        return copy


class OpLog(TorchDispatchMode):
    """Each operator below autograd, with the bytes of the new storages among its outputs."""

    def __init__(self, corrected=None):
        super().__init__()
        self.corrected = corrected or (lambda op, args, kwargs, outputs: None)
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func.namespace != "aten":  # prim.device, which fake tensors are asked for
            return outputs
        given = {
            t.untyped_storage()._cdata
            for t in tree_iter((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        tensors = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor)]
        sizes = [
            t.untyped_storage().nbytes() if t.is_cuda or not torch.cuda.is_available() else 0
            for t in tensors
        ]
        corrected = self.corrected(func, args, kwargs, outputs)
        if corrected is not None:
            assert len(corrected) == len(tensors)
            sizes = corrected
        new = [
            text(t, size)
            for t, size in zip(tensors, sizes, strict=True)
            if size and t.untyped_storage()._cdata not in given
        ]
        self.lines.append(" ".join([str(func).removeprefix("aten."), *new]))
        return outputs


def text(tensor, size):
    """Bytes of the storage; and the strides, where they are not those of a contiguous tensor."""
    strides = ":" + ",".join(
        str(step) if size > 1 else "-"
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    strides = "" if tensor.is_contiguous() else strides
    return f"{size}{strides}"


def logged(case, maker, corrected=None):
    """The log of a case: forward, then backward of all its outputs that need a gradient."""
    with OpLog(corrected) as log:
        outputs = [
            t for t in tree_iter(case(maker)) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        log.lines.append("-- backward")
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return log.lines


class HeldBytes(TorchDispatchMode):
    """The bytes of the storages made by operators that are alive, and the most that were."""

    def __init__(self, corrected):
        super().__init__()
        self.corrected = corrected
        self.current = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {
            t.untyped_storage()._cdata
            for t in tree_iter((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        outputs = func(*args, **kwargs)
        tensors = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor)]
        sizes = self.corrected(func, args, kwargs, outputs) or [
            t.untyped_storage().nbytes() for t in tensors
        ]
        for tensor, size in zip(tensors, sizes, strict=True):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known | given and size:
                self.known.add(storage._cdata)
                self.current += size
                weakref.finalize(storage, self._freed, storage._cdata, size)
        self.peak = max(self.peak, self.current)
        return outputs

    def _freed(self, key, size):
        self.known.discard(key)
        self.current -= size


def held(case, maker, corrected):
    """Bytes that a case holds after forward, at most, and after backward, beyond its weights."""
    if maker.fake_mode:
        with HeldBytes(corrected) as mode:
            outputs = [
                t for t in tree_iter(case(maker)) if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            after_forward = mode.current
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            return after_forward, mode.peak, mode.current
    maker.weight_bytes = 0
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_stats()["requested_bytes.all.current"]
    outputs = [t for t in tree_iter(case(maker)) if isinstance(t, torch.Tensor) and t.requires_grad]
    after_forward = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    stats = torch.cuda.memory_stats()
    peak, after_backward = stats["requested_bytes.all.peak"], stats["requested_bytes.all.current"]
    return tuple(
        size - start - maker.weight_bytes for size in (after_forward, peak, after_backward)
    )


# --- attention ------------------------------------------------------------------------------------


def attention(
    dtype=torch.float16,
    heads=(4, 4),
    lengths=(64, 64),
    size=64,
    value_size=None,
    mask=None,
    layout="bhsd",
    grad=True,
    **options,
):
    def run(make):
        def tensor(heads, length, size):
            if layout == "bshd":
                return make(2, length, heads, size, dtype=dtype, grad=grad).transpose(1, 2)
            if layout == "packed":
                return make(2, length, 3, heads, size, dtype=dtype, grad=grad)[:, :, 1].transpose(
                    1, 2
                )
            if layout == "hsd":
                return make(heads, length, size, dtype=dtype, grad=grad)
            return make(2, heads, length, size, dtype=dtype, grad=grad)

        query = tensor(heads[0], lengths[0], size)
        key, value = (
            tensor(heads[1], lengths[1], size),
            tensor(heads[1], lengths[1], value_size or size),
        )
        bias = None
        if mask is not None:
            kind, *shape = mask
            bias = make(
                *shape,
                dtype={"bool": torch.bool, "float": dtype, "grad": dtype}[kind],
                grad=kind == "grad",
            )
        return F.scaled_dot_product_attention(query, key, value, bias, **options)

    return run


HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

ATTENTION = {
    **{
        f"sdpa-{str(d)[6:]}-{size}": attention(d, size=size)
        for d in (HALF, BF16, FLOAT)
        for size in (32, 64, 80, 96, 128, 256, 40, 33, 10, 1, 264)
    },
    **{
        f"sdpa-{str(d)[6:]}-causal-{size}": attention(d, size=size, is_causal=True)
        for d in (HALF, BF16, FLOAT)
        for size in (64, 33)
    },
    **{f"sdpa-{str(d)[6:]}-dropout": attention(d, dropout_p=0.1) for d in (HALF, BF16, FLOAT)},
    **{
        f"sdpa-{str(d)[6:]}-dropout16-causal": attention(d, dropout_p=0.125, is_causal=True)
        for d in (HALF, BF16, FLOAT)
    },
    **{
        f"sdpa-{str(d)[6:]}-{kind}-{'x'.join(map(str, shape))}": attention(
            d, mask=(kind, *shape), lengths=(shape[-2] if shape[-2] > 1 else 64, shape[-1])
        )
        for d in (HALF, BF16, FLOAT)
        for kind in ("bool", "float", "grad")
        for shape in (
            (64, 64),
            (2, 4, 64, 64),
            (2, 1, 1, 64),
            (2, 1, 60, 60),
            (1, 1, 33, 50),
            (60, 70),
        )
    },
    "sdpa-double": attention(DOUBLE),
    "sdpa-double-causal-dropout": attention(DOUBLE, is_causal=True, dropout_p=0.1),
    **{
        f"sdpa-{str(d)[6:]}-gqa": attention(d, heads=(8, 2), enable_gqa=True) for d in (HALF, FLOAT)
    },
    **{
        f"sdpa-{str(d)[6:]}-mqa-causal": attention(d, heads=(8, 1), enable_gqa=True, is_causal=True)
        for d in (HALF, FLOAT)
    },
    **{
        f"sdpa-{str(d)[6:]}-{layout}": attention(d, layout=layout)
        for d in (HALF, FLOAT)
        for layout in ("bshd", "packed", "hsd")
    },
    **{
        f"sdpa-{str(d)[6:]}-bshd-{size}": attention(d, layout="bshd", size=size, is_causal=True)
        for d in (HALF, FLOAT)
        for size in (40, 33)
    },
    **{f"sdpa-{str(d)[6:]}-no-grad": attention(d, grad=False) for d in (HALF, FLOAT)},
    **{
        f"sdpa-{str(d)[6:]}-lengths-{a}-{b}": attention(d, lengths=(a, b))
        for d in (HALF, FLOAT)
        for a, b in ((50, 77), (1, 64), (64, 1), (300, 200))
    },
    **{
        f"sdpa-{str(d)[6:]}-causal-lengths-50-77": attention(d, lengths=(50, 77), is_causal=True)
        for d in (HALF, FLOAT)
    },
    **{
        f"sdpa-{str(d)[6:]}-value-{a}-{b}": attention(d, size=a, value_size=b)
        for d in (HALF, FLOAT)
        for a, b in ((64, 32), (192, 128))
    },
    **{f"sdpa-{str(d)[6:]}-scale": attention(d, scale=0.5) for d in (HALF, FLOAT)},
    "sdpa-half-no-length": attention(lengths=(0, 64)),
    "sdpa-half-mask-dropout": attention(mask=("bool", 2, 1, 1, 64), dropout_p=0.1),
}


# --- everything else ------------------------------------------------------------------------------


def of_module(module_class, *args, shape=(4, 8), dtypes=(FLOAT,), **kwargs):
    """One case per dtype: a module on an input of one shape."""
    arguments = "".join("-" + str(a).replace(" ", "") for a in args)
    keywords = "".join("-" + k + str(v) for k, v in kwargs.items())
    size = "x".join(map(str, shape))
    return {
        f"{module_class.__name__}{arguments}-{size}-{str(dtype)[6:]}{keywords}": (
            lambda make, dtype=dtype: make.module(module_class, *args, dtype=dtype, **kwargs)(
                make(*shape, dtype=dtype)
            )
        )
        for dtype in dtypes
    }


def of_function(name, function, *shapes, dtypes=(FLOAT,)):
    return {
        f"{name}-{str(dtype)[6:]}": (
            lambda make, dtype=dtype: function(*(make(*shape, dtype=dtype) for shape in shapes))
        )
        for dtype in dtypes
    }


ALL = (FLOAT, HALF, BF16)
IMAGE = (2, 4, 8, 8)


def loss(name, target, shape=(4, 8), dtypes=(FLOAT,), **options):
    return {
        f"{name}-{str(dtype)[6:]}{''.join('-' + k + str(v) for k, v in options.items())}": (
            lambda make, dtype=dtype: getattr(F, name)(
                make(*shape, dtype=dtype), target(make, dtype), **options
            )
        )
        for dtype in dtypes
    }


def same(make, dtype, shape=(4, 8)):
    return make(*shape, dtype=dtype, grad=False)


def labels(make, dtype):
    return make.ints(4)


def indexed(function):
    return lambda make: function(make(6, 8), make.ints(5))


def ctc(make, **options):
    return F.ctc_loss(make(10, 2, 6).log_softmax(-1), make.ints(2, 4), (10, 10), (4, 4), **options)


def in_place(function):
    def run(make):
        x = make(4, 8) * 1
        return function(x)

    return run


SURVEY = {
    **of_module(nn.Dropout, 0.1, dtypes=ALL),
    **of_module(nn.Dropout, 0.0),
    **of_module(nn.Dropout, 1.0),
    **of_module(nn.Dropout, 0.1, inplace=False, shape=(0, 8)),
    "dropout_": in_place(lambda x: F.dropout(x, 0.1, inplace=True)),
    "dropout-input-no-grad": lambda make: F.dropout(make(4, 8, grad=False), 0.1),
    "dropout-eval": lambda make: F.dropout(make(4, 8), 0.1, training=False),
    **of_module(nn.AlphaDropout, 0.1),
    **of_module(nn.FeatureAlphaDropout, 0.1, shape=IMAGE),
    **of_module(nn.Dropout1d, 0.1, shape=(2, 4, 8)),
    **of_module(nn.Dropout2d, 0.1, shape=IMAGE),
    **of_module(nn.Dropout3d, 0.1, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.RMSNorm, 8, dtypes=ALL),
    **of_module(nn.RMSNorm, 8, elementwise_affine=False),
    **of_module(nn.RMSNorm, (4, 8), shape=(2, 4, 8)),
    "rms-norm-mixed": lambda make: F.rms_norm(make(4, 8, dtype=BF16), (8,), make(8)),
    **of_module(nn.LayerNorm, 8, dtypes=ALL),
    **of_module(nn.GroupNorm, 2, 4, shape=IMAGE, dtypes=ALL),
    **of_module(nn.BatchNorm1d, 8, dtypes=ALL),
    **of_module(nn.BatchNorm2d, 4, shape=IMAGE, dtypes=ALL),
    **of_module(nn.BatchNorm3d, 4, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.BatchNorm2d, 4, shape=IMAGE, track_running_stats=False),
    **of_module(nn.BatchNorm2d, 4, shape=IMAGE, affine=False),
    "batch-norm-half-input": lambda make: make.module(nn.BatchNorm2d, 4)(make(*IMAGE, dtype=HALF)),
    "batch-norm-channels-last": lambda make: make.module(nn.BatchNorm2d, 4)(
        make(*IMAGE).contiguous(memory_format=torch.channels_last)
    ),
    "batch-norm-eval": lambda make: make.module(nn.BatchNorm2d, 4).eval()(make(*IMAGE)),
    **of_module(nn.InstanceNorm2d, 4, shape=IMAGE, dtypes=ALL),
    **of_module(nn.InstanceNorm2d, 4, shape=IMAGE, affine=True, track_running_stats=True),
    **of_module(nn.LocalResponseNorm, 2, shape=IMAGE),
    **of_module(nn.Linear, 8, 5, dtypes=ALL),
    **of_module(nn.Linear, 8, 5, shape=(2, 4, 8), dtypes=ALL),
    **of_module(nn.Linear, 8, 5, False, shape=(2, 4, 8)),
    **of_module(nn.Linear, 8, 5, shape=(8,)),
    **of_module(nn.Linear, 8, 5, shape=(2, 3, 4, 8)),
    "linear-transposed": lambda make: make.module(nn.Linear, 8, 5)(make(2, 8, 4).transpose(1, 2)),
    "bilinear": lambda make: make.module(nn.Bilinear, 8, 6, 5)(make(4, 8), make(4, 6)),
    **of_function("matmul-3-2", torch.matmul, (2, 4, 8), (8, 5)),
    **of_function("matmul-3-3", torch.matmul, (2, 4, 8), (2, 8, 5), dtypes=ALL),
    **of_function("matmul-4-3", torch.matmul, (2, 3, 4, 8), (3, 8, 5)),
    **of_function("matmul-2-3", torch.matmul, (4, 8), (2, 8, 5)),
    **of_function("matmul-3-1", torch.matmul, (2, 4, 8), (8,)),
    **of_function("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 4, 8), (2, 8, 5)),
    **of_function(
        "einsum-sum", lambda a, b: torch.einsum("bhld,bhsd->bhls", a, b), (2, 3, 4, 8), (2, 3, 5, 8)
    ),
    **of_function("einsum-outer", lambda a, b: torch.einsum("i,j->ij", a, b), (4,), (8,)),
    **of_function(
        "einsum-four", lambda a, b: torch.einsum("bqhd,hdm->bqm", a, b), (2, 3, 4, 8), (4, 8, 5)
    ),
    **of_function("baddbmm", torch.baddbmm, (2, 4, 5), (2, 4, 8), (2, 8, 5)),
    **of_function("tensordot", lambda a, b: torch.tensordot(a, b, 1), (2, 4, 8), (8, 5)),
    **of_function("softmax", lambda x: x.softmax(-1), (4, 8), dtypes=ALL),
    **of_function("softmax-to-float", lambda x: x.softmax(-1, dtype=FLOAT), (4, 8), dtypes=ALL),
    **of_function(
        "log-softmax-to-float", lambda x: x.log_softmax(-1, dtype=FLOAT), (4, 8), dtypes=ALL
    ),
    **of_function("softmax-to-half", lambda x: x.softmax(-1, dtype=HALF), (4, 8)),
    **of_function(
        "softmax-to-double", lambda x: x.softmax(-1, dtype=DOUBLE), (4, 8), dtypes=(HALF,)
    ),
    **of_module(nn.Softmin, -1),
    **of_module(nn.Softmax2d, shape=IMAGE),
    **{
        key: case
        for activation in (
            nn.ReLU,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.ELU,
            nn.SELU,
            nn.CELU,
            nn.Sigmoid,
            nn.Tanh,
            nn.Softplus,
            nn.Softsign,
            nn.Hardswish,
            nn.Hardtanh,
            nn.Hardsigmoid,
            nn.LeakyReLU,
            nn.PReLU,
            nn.RReLU,
            nn.LogSigmoid,
            nn.Softshrink,
            nn.Hardshrink,
            nn.Tanhshrink,
            nn.GLU,
            nn.ReLU6,
            nn.Threshold,
        )
        for key, case in of_module(
            activation, *((0.1, 0.2) if activation is nn.Threshold else ()), dtypes=(FLOAT, HALF)
        ).items()
    },
    "gelu-tanh": lambda make: F.gelu(make(4, 8), approximate="tanh"),
    "rrelu-eval": lambda make: F.rrelu(make(4, 8)),
    **of_function("gumbel-softmax", lambda x: F.gumbel_softmax(x), (4, 8)),
    **of_module(nn.Conv1d, 4, 6, 3, shape=(2, 4, 8)),
    **of_module(nn.Conv2d, 4, 6, 3, shape=IMAGE, dtypes=ALL),
    **of_module(nn.Conv2d, 4, 6, 3, shape=IMAGE, padding="same"),
    **of_module(nn.Conv2d, 4, 6, 4, shape=IMAGE, padding="same"),
    **of_module(nn.Conv2d, 4, 6, 3, shape=IMAGE, padding=1, padding_mode="reflect"),
    **of_module(nn.Conv2d, 4, 4, 3, shape=IMAGE, groups=4),
    **of_module(nn.Conv2d, 4, 6, 3, shape=(4, 8, 8)),
    **of_module(nn.Conv3d, 4, 6, 3, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.ConvTranspose2d, 4, 6, 3, shape=IMAGE),
    **of_module(nn.Unfold, 3, shape=IMAGE),
    **of_module(nn.Fold, (4, 4), 3, shape=(2, 36, 4)),
    **of_module(nn.MaxPool1d, 2, shape=(2, 4, 8)),
    **of_module(nn.MaxPool2d, 2, shape=IMAGE),
    **of_module(nn.MaxPool3d, 2, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.AvgPool1d, 2, shape=(2, 4, 8)),
    **of_module(nn.AvgPool2d, 2, shape=IMAGE),
    **of_module(nn.AvgPool3d, 2, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.AdaptiveAvgPool1d, 2, shape=(2, 4, 8)),
    **of_module(nn.AdaptiveAvgPool2d, 1, shape=IMAGE),
    **of_module(nn.AdaptiveAvgPool2d, 3, shape=IMAGE),
    **of_module(nn.AdaptiveAvgPool3d, 1, shape=(2, 4, 8, 8, 8)),
    **of_module(nn.AdaptiveMaxPool1d, 3, shape=(2, 4, 8)),
    **of_module(nn.AdaptiveMaxPool2d, 3, shape=IMAGE),
    **of_module(nn.LPPool2d, 2, 2, shape=IMAGE),
    **of_module(nn.FractionalMaxPool2d, 2, shape=IMAGE, output_size=(4, 4)),
    **of_module(nn.PixelShuffle, 2, shape=IMAGE),
    **of_module(nn.PixelUnshuffle, 2, shape=IMAGE),
    **of_module(nn.ChannelShuffle, 2, shape=IMAGE),
    **of_module(nn.ZeroPad2d, 1, shape=IMAGE),
    **of_module(nn.ReflectionPad2d, 1, shape=IMAGE),
    **of_module(nn.ReplicationPad2d, 1, shape=IMAGE),
    **of_module(nn.CircularPad2d, 1, shape=IMAGE),
    **{
        key: case
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        for key, case in of_function(
            f"interpolate-{mode}",
            lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),
            IMAGE,
            dtypes=(FLOAT, HALF),
        ).items()
    },
    "interpolate-linear": lambda make: F.interpolate(make(2, 4, 8), scale_factor=2, mode="linear"),
    "interpolate-trilinear": lambda make: F.interpolate(
        make(2, 4, 4, 4, 4), scale_factor=2, mode="trilinear"
    ),
    "interpolate-antialias": lambda make: F.interpolate(
        make(*IMAGE), scale_factor=0.5, mode="bilinear", antialias=True
    ),
    "interpolate-channels-last": lambda make: F.interpolate(
        make(*IMAGE).contiguous(memory_format=torch.channels_last), scale_factor=2
    ),
    **of_function("grid-sample", F.grid_sample, IMAGE, (2, 5, 5, 2)),
    **of_function("grid-sample-3d", F.grid_sample, (2, 4, 4, 4, 4), (2, 3, 3, 3, 3)),
    **of_function("affine-grid", lambda theta: F.affine_grid(theta, (2, 4, 8, 8)), (2, 2, 3)),
    "embedding": lambda make: make.module(nn.Embedding, 10, 8)(make.ints(4, 5)),
    "embedding-padding": lambda make: make.module(nn.Embedding, 10, 8, padding_idx=0)(
        make.ints(4, 5)
    ),
    "embedding-max-norm": lambda make: make.module(nn.Embedding, 10, 8, max_norm=1.0)(
        make.ints(4, 5)
    ),
    "embedding-scale-grad": lambda make: make.module(nn.Embedding, 10, 8, scale_grad_by_freq=True)(
        make.ints(4, 5)
    ),
    **{
        f"embedding-bag-{mode}": (
            lambda make, mode=mode: make.module(nn.EmbeddingBag, 10, 8, mode=mode)(make.ints(4, 5))
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding-bag-offsets": lambda make: make.module(nn.EmbeddingBag, 10, 8)(
        make.ints(20), make.ints(4)
    ),
    "embedding-bag-weights": lambda make: make.module(nn.EmbeddingBag, 10, 8, mode="sum")(
        make.ints(4, 5), per_sample_weights=make(4, 5)
    ),
    **loss("cross_entropy", labels, dtypes=ALL),
    **loss("cross_entropy", labels, label_smoothing=0.1),
    **loss("cross_entropy", same),
    "cross-entropy-2d": lambda make: F.cross_entropy(make(*IMAGE), make.ints(2, 8, 8)),
    **loss("nll_loss", labels),
    **loss("binary_cross_entropy", same),
    **loss("binary_cross_entropy_with_logits", same, dtypes=ALL),
    "bce-with-logits-weights": lambda make: F.binary_cross_entropy_with_logits(
        make(4, 8), make(4, 8, grad=False), make(8, grad=False), pos_weight=make(8, grad=False)
    ),
    **loss("mse_loss", same, dtypes=ALL),
    **loss("l1_loss", same),
    **loss("smooth_l1_loss", same),
    **loss("huber_loss", same),
    **loss("kl_div", same),
    **loss("kl_div", same, log_target=True),
    **loss("poisson_nll_loss", same),
    **loss("soft_margin_loss", same),
    **loss("multilabel_soft_margin_loss", same),
    **loss("multi_margin_loss", labels),
    "multilabel-margin-loss": lambda make: F.multilabel_margin_loss(make(4, 8), make.ints(4, 8)),
    **loss("hinge_embedding_loss", same),
    "gaussian-nll": lambda make: F.gaussian_nll_loss(
        make(4, 8), make(4, 8, grad=False), make(4, 8)
    ),
    **of_function("triplet-margin", F.triplet_margin_loss, (4, 8), (4, 8), (4, 8)),
    "cosine-embedding": lambda make: F.cosine_embedding_loss(
        make(4, 8), make(4, 8), make(4, grad=False)
    ),
    "margin-ranking": lambda make: F.margin_ranking_loss(make(4), make(4), make(4, grad=False)),
    **of_function("cosine-similarity", F.cosine_similarity, (4, 8), (4, 8), dtypes=ALL),
    **of_function("pairwise-distance", F.pairwise_distance, (4, 8), (4, 8)),
    **of_function("cdist", torch.cdist, (4, 8), (5, 8)),
    **of_function("cdist-large", torch.cdist, (30, 8), (50, 8)),
    **of_function("pdist", F.pdist, (4, 8)),
    **of_function("normalize", F.normalize, (4, 8), dtypes=ALL),
    **{
        f"ctc-{reduction}": (lambda make, reduction=reduction: ctc(make, reduction=reduction))
        for reduction in ("mean", "sum", "none")
    },
    **{
        f"{name}{suffix}": (
            lambda make, name=name, options=options: getattr(torch, name)(make(4, 8), **options)
        )
        for name in (
            "norm",
            "std",
            "var",
            "mean",
            "sum",
            "amax",
            "logsumexp",
            "cumsum",
            "median",
            "max",
            "prod",
            "argsort",
            "sort",
            "cummax",
            "mode",
            "nansum",
            "std_mean",
            "var_mean",
        )
        for suffix, options in (("", {}), ("-dim", {"dim": 1}))
        if not (name in ("argsort", "cumsum", "cummax", "logsumexp") and not options)
    },
    "topk": lambda make: make(4, 8).topk(3),
    "vector-norm": lambda make: torch.linalg.vector_norm(make(4, 8), dim=1),
    "matrix-norm": lambda make: torch.linalg.matrix_norm(make(4, 8)),
    "where": lambda make: torch.where(make(4, 8, dtype=torch.bool), make(4, 8), make(4, 8)),
    "where-scalar": lambda make: torch.where(make(4, 8, dtype=torch.bool), make(4, 8), 0.0),
    "masked-fill": lambda make: make(4, 8).masked_fill(make(4, 8, dtype=torch.bool), 0.0),
    "masked-fill_": in_place(lambda x: x.masked_fill_(torch.ones_like(x, dtype=torch.bool), 0.0)),
    "tensor-split": lambda make: make(4, 8).tensor_split(3, 1),
    "chunk": lambda make: make(4, 8).chunk(3, 1),
    "unbind": lambda make: make(4, 8).unbind(0),
    "cat": lambda make: torch.cat([make(4, 8), make(4, 8)]),
    "stack": lambda make: torch.stack([make(4, 8), make(4, 8)]),
    "index": indexed(lambda x, i: x[i]),
    "index-2": lambda make: make(6, 8)[make.ints(5), make.ints(5)],
    "index-put": indexed(lambda x, i: (x * 1).index_put((i,), x[:5] * 1)),
    "index-put_": indexed(lambda x, i: (x * 1).index_put_((i,), x[:5] * 1, accumulate=True)),
    "index-select": indexed(lambda x, i: x.index_select(0, i)),
    "index-add": indexed(lambda x, i: x.index_add(0, i, x[:5] * 1)),
    "gather": lambda make: make(6, 8).gather(1, make.ints(6, 3)),
    "scatter-add": lambda make: make(6, 8).scatter_add(1, make.ints(6, 3), make(6, 3)),
    "scatter": lambda make: make(6, 8).scatter(1, make.ints(6, 3), make(6, 3)),
    "scatter-reduce": lambda make: make(6, 8).scatter_reduce(
        0, make.ints(5, 8), make(5, 8), "mean"
    ),
    "take-along-dim": lambda make: make(6, 8).take_along_dim(make.ints(6, 3), 1),
    "repeat-interleave": lambda make: make(4, 8).repeat_interleave(2, 0),
    "repeat": lambda make: make(4, 8).repeat(2, 2),
    "roll": lambda make: make(4, 8).roll(1, 0),
    "flip": lambda make: make(4, 8).flip(0),
    "tril": lambda make: make(4, 8).tril(),
    "one-hot": lambda make: F.one_hot(make.ints(4), 5),
    "addcmul": lambda make: torch.addcmul(make(4, 8), make(4, 8), make(4, 8)),
    "lerp": lambda make: torch.lerp(make(4, 8), make(4, 8), 0.5),
    "pow": lambda make: make(4, 8) ** 3,
    "clamp": lambda make: make(4, 8).clamp(0, 1),
    "reshape": lambda make: make(2, 4, 8).transpose(1, 2).reshape(2, 32),
    "expand": lambda make: make(4, 1).expand(4, 8) * 2,
    "contiguous": lambda make: make(4, 8).t().contiguous(),
    "to-half": lambda make: make(4, 8).half(),
    "weight-norm": lambda make: nn.utils.parametrizations.weight_norm(make.module(nn.Linear, 8, 5))(
        make(4, 8)
    ),
    "spectral-norm": lambda make: nn.utils.parametrizations.spectral_norm(
        make.module(nn.Linear, 8, 5)
    )(make(4, 8)),
    "svd": lambda make: torch.linalg.svdvals(make(4, 4)),
    "cholesky": lambda make: torch.linalg.cholesky(make(4, 4)),
    "inverse": lambda make: torch.linalg.inv(make(4, 4)),
    "fft": lambda make: torch.fft.rfft(make(4, 8)).abs(),
    "stft": lambda make: torch.stft(make(2, 64), 16, return_complex=True).abs(),
    "multi-head-attention": lambda make: make.module(
        nn.MultiheadAttention, 64, 4, 0.1, batch_first=True
    )(*[make(2, 10, 64)] * 3, need_weights=False)[0],
    "multi-head-attention-weights": lambda make: make.module(
        nn.MultiheadAttention, 64, 4, 0.1, batch_first=True
    )(*[make(2, 10, 64)] * 3)[0],
    "encoder-layer": lambda make: make.module(
        nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True
    )(make(2, 10, 64)),
    "encoder-layer-half": lambda make: make.module(
        nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True, norm_first=True, dtype=HALF
    )(make(2, 10, 64, dtype=HALF)),
    "encoder-layer-padding": lambda make: make.module(
        nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True
    )(make(2, 10, 64), src_key_padding_mask=make(2, 10, dtype=torch.bool)),
    "decoder-layer": lambda make: make.module(
        nn.TransformerDecoderLayer, 64, 4, 128, batch_first=True
    )(make(2, 10, 64), make(2, 12, 64)),
    "bernoulli": lambda make: torch.bernoulli(make(4, 8)),
    "randn-like": lambda make: torch.randn_like(make(4, 8)) * make(4, 8),
    "grad-penalty": lambda make: grad_penalty(make),
    **of_module(nn.LSTMCell, 8, 16, dtypes=(FLOAT, HALF)),
    **of_module(nn.GRUCell, 8, 16, dtypes=(FLOAT, HALF)),
    **of_module(nn.GRUCell, 8, 16, False),
    **of_module(nn.RNNCell, 8, 16),
}

#: cuDNN's recurrent layers: the operators differ by name, what they allocate does not.
RECURRENT = {
    **of_module(nn.LSTM, 8, 16, shape=(5, 4, 8), dtypes=(FLOAT, HALF, BF16, DOUBLE)),
    **of_module(nn.LSTM, 8, 16, 2, shape=(4, 5, 8), batch_first=True, dropout=0.1),
    **of_module(nn.LSTM, 8, 16, shape=(5, 4, 8), proj_size=4),
    **of_module(nn.GRU, 8, 16, 2, shape=(5, 4, 8), bidirectional=True),
    **of_module(nn.RNN, 8, 16, shape=(5, 4, 8)),
    **of_module(nn.RNN, 8, 16, shape=(5, 4, 8), nonlinearity="relu"),
    "lstm-packed": lambda make: (
        make.module(nn.LSTM, 8, 16)(
            nn.utils.rnn.PackedSequence(make(12, 8), torch.tensor([4, 4, 2, 1, 1])),
            (make(1, 4, 16), make(1, 4, 16)),
        )[0].data
    ),
    "lstm-autocast": lambda make: autocast(make, nn.LSTM),
    "gru-autocast": lambda make: autocast(make, nn.GRU),
}


def autocast(make, module_class):
    module = make.module(module_class, 8, 16)
    with torch.autocast(make.device, HALF):
        return module(make(5, 4, 8))[0]


def grad_penalty(make):
    x = make(4, 8)
    y = F.softplus(make.module(nn.Linear, 8, 1)(x)).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return gradient.pow(2).sum()
