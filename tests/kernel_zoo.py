"""Calls of operators, as they occur in training steps, that can be built on a CUDA device and as
fakes.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._pytree import tree_flatten, tree_map

SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.uint64: "u64",
}
f32, bf16, f16, f64, i64, i32, u8, b8, c64, u64 = SHORT
HALVES = (f32, bf16, f16)


@dataclass(frozen=True)
class T:
    """A tensor to be: shape, dtype, and its layout: `c` contiguous, `cl` channels last, `t` the
    last two dimensions swapped, or its strides.
    """

    shape: tuple
    dtype: torch.dtype = torch.float32
    layout: object = "c"

    def strides(self):
        if isinstance(self.layout, tuple):
            return self.layout
        order = list(range(len(self.shape)))
        if self.layout == "t":
            order[-2:] = order[-1], order[-2]
        elif self.layout == "cl":
            order = [0, *order[2:], 1]
        elif self.layout == "bshd":
            order = [0, 2, 1, 3]
        strides, size = [0] * len(order), 1
        for d in reversed(order):
            strides[d] = size
            size *= max(self.shape[d], 1)
        return tuple(strides)

    def build(self, device):
        return torch.empty_strided(self.shape, self.strides(), dtype=self.dtype, device=device)

    def __str__(self):
        layout = "" if self.layout == "c" else f":{self.layout}".replace(" ", "")
        return f"{SHORT[self.dtype]}[{','.join(map(str, self.shape))}]{layout}"


class Device:
    """Stands for the device in arguments."""

    def __str__(self):
        return "DEVICE"


DEVICE = Device()


def text(value):
    """An argument in the name of a case."""
    if isinstance(value, (list, tuple)):
        parts = [text(v) for v in value]
        if len(parts) > 3 and len(set(parts)) == 1:
            return f"[{len(parts)}x{parts[0]}]"
        return f"[{', '.join(parts)}]"
    return str(value)


@dataclass(frozen=True)
class Case:
    """One call of one operator."""

    op: str
    args: tuple
    kwargs: dict

    @property
    def name(self):
        parts = [text(a) for a in self.args] + [f"{k}={text(v)}" for k, v in self.kwargs.items()]
        return f"{self.op}({', '.join(parts)})"

    @property
    def overload(self):
        packet, _, overload = self.op.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload or "default")

    def build(self, device):
        """Its arguments: tensors on `device`, or fakes under a fake mode."""

        def one(value):
            if isinstance(value, T):
                return value.build(device)
            return torch.device(device) if isinstance(value, Device) else value

        return tree_map(one, self.args), tree_map(one, self.kwargs)


def tensors(tree):
    """The tensors that an operator returned, in order."""
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def storage_bytes(tensor):
    return tensor.untyped_storage().nbytes()


CASES = []


def C(op, *args, **kwargs):
    CASES.append(Case(op, args, kwargs))


def normalisation():
    for d in HALVES:
        for shape in ((4, 8, 64), (8, 512, 768), (2, 7, 100)):
            n, w = [shape[-1]], T((shape[-1],), d)
            C("native_layer_norm", T(shape, d), n, w, w, 1e-5)
            stat = T((*shape[:-1], 1))
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                C("native_layer_norm_backward", T(shape, d), T(shape, d), n, stat, stat, w, w, mask)
        C("native_layer_norm", T((8, 16, 64), d), [16, 64], None, None, 1e-5)
        C("native_layer_norm", T((8, 16, 64), d, "t"), [64], T((64,), d), T((64,), d), 1e-5)
        C(
            "native_layer_norm_backward",
            T((8, 16, 64), d),
            T((8, 16, 64), d),
            [64],
            T((8, 16, 1)),
            T((8, 16, 1)),
            None,
            None,
            [True, False, False],
        )
        C(
            "native_layer_norm_backward",
            T((8, 16, 64), d, "t"),
            T((8, 16, 64), d, "t"),
            [64],
            T((8, 16, 1)),
            T((8, 16, 1)),
            T((64,), d),
            T((64,), d),
            [True] * 3,
        )
        for rows in (32, 63, 64, 65, 127, 128, 129, 256, 1000, 4096, 100000):
            C(
                "native_layer_norm_backward",
                T((rows, 256), d),
                T((rows, 256), d),
                [256],
                T((rows, 1)),
                T((rows, 1)),
                T((256,), d),
                T((256,), d),
                [True] * 3,
            )
        C(
            "native_layer_norm_backward",
            T((100000, 16), d),
            T((100000, 16), d),
            [16],
            T((100000, 1)),
            T((100000, 1)),
            T((16,), d),
            T((16,), d),
            [True] * 3,
        )
        C(
            "native_layer_norm_backward",
            T((100000, 96), d),
            T((100000, 96), d),
            [96],
            T((100000, 1)),
            T((100000, 1)),
            T((96,), d),
            T((96,), d),
            [True] * 3,
        )
        for shape, layout in (
            ((4, 32, 8, 8), "c"),
            ((4, 32, 8, 8), "cl"),
            ((2, 64, 32, 32), "c"),
            ((2, 64, 32, 32), "cl"),
            ((4, 32, 1, 1), "c"),
            ((4, 32), "c"),
            ((200, 32, 4, 4), "c"),
        ):
            n, c = shape[:2]
            hw = 1
            for s in shape[2:]:
                hw *= s
            for groups in (8, 1, c):
                C(
                    "native_group_norm",
                    T(shape, d, layout),
                    T((c,), d),
                    T((c,), d),
                    n,
                    c,
                    hw,
                    groups,
                    1e-5,
                )
                for mask in ([True] * 3, [True, False, False]):
                    C(
                        "native_group_norm_backward",
                        T(shape, d, layout),
                        T(shape, d, layout),
                        T((n, groups), d),
                        T((n, groups), d),
                        T((c,), d),
                        n,
                        c,
                        hw,
                        groups,
                        mask,
                    )
            C("native_group_norm", T(shape, d, layout), None, None, n, c, hw, 8, 1e-5)
            C(
                "native_group_norm_backward",
                T(shape, d, layout),
                T(shape, d, layout),
                T((n, 8), d),
                T((n, 8), d),
                None,
                n,
                c,
                hw,
                8,
                [True, False, False],
            )
        for p in (d, f32) if d != f32 else (f32,):
            c = T((32,), p)
            s = T((32,))
            for shape, layout in (
                ((8, 32, 16, 16), "c"),
                ((8, 32, 16, 16), "cl"),
                ((64, 32), "c"),
                ((8, 32, 100), "c"),
                ((32, 32, 64, 64), "cl"),
                ((1000, 32), "c"),
                ((100000, 32), "c"),
            ):
                x = T(shape, d, layout)
                for train in (True, False):
                    C("native_batch_norm", x, c, c, s, s, train, 0.1, 1e-5)
                    C("_native_batch_norm_legit", x, c, c, s, s, train, 0.1, 1e-5)
                    saved = s if train else T((0,))
                    C(
                        "native_batch_norm_backward",
                        x,
                        x,
                        c,
                        s,
                        s,
                        saved,
                        saved,
                        train,
                        1e-5,
                        [True] * 3,
                    )
                C(
                    "native_batch_norm_backward",
                    x,
                    x,
                    c,
                    s,
                    s,
                    s,
                    s,
                    True,
                    1e-5,
                    [False, True, True],
                )
                C("_batch_norm_with_update", x, c, c, s, s, 0.1, 1e-5)
                C("native_batch_norm", x, None, None, None, None, True, 0.1, 1e-5)
                C("_native_batch_norm_legit.no_stats", x, c, c, True, 0.1, 1e-5)
                C("cudnn_batch_norm", x, s, s, s, s, True, 0.1, 1e-5)
                C("cudnn_batch_norm_backward", x, x, s, s, s, s, s, 1e-5, T((0,), u8))
            C(
                "batch_norm_backward",
                T((8, 32, 16, 16), d),
                T((8, 32, 16, 16), d),
                c,
                s,
                s,
                s,
                s,
                True,
                1e-5,
                [True] * 3,
                T((0,), u8),
            )
        for shape in ((4, 8, 64), (8, 512, 768), (8, 512, 4096)):
            C("_fused_rms_norm", T(shape, d), [shape[-1]], T((shape[-1],), d), 1e-5)
            C("_fused_rms_norm", T(shape, d), [shape[-1]], None, None)
            for mask in ([True, True], [True, False]):
                C(
                    "_fused_rms_norm_backward",
                    T(shape, d),
                    T(shape, d),
                    [shape[-1]],
                    T((*shape[:-1], 1)),
                    T((shape[-1],), d),
                    mask,
                )


def softmax_and_losses():
    for d in HALVES:
        for shape, dim in (
            ((8, 12, 64, 64), -1),
            ((4096, 1000), 1),
            ((512, 50257), 1),
            ((4, 21, 32, 32), 1),
            ((64, 2), 1),
            ((64, 1025), -1),
        ):
            x = T(shape, d)
            for op in ("_softmax", "_log_softmax"):
                C(op, x, dim, False)
                C(f"{op}_backward_data", x, x, dim, d)
                if d == f16:
                    C(op, x, dim, True)
                    C(f"{op}_backward_data", T(shape), T(shape), dim, f16)
        C("_softmax", T((8, 16, 64), d, "t"), -1, False)
        for shape in ((8, 12, 64, 64), (4, 8, 33, 77), (2, 100000)):
            C("_safe_softmax", T(shape, d), -1)
        C("_log_softmax", T((8, 16, 64), d, "t"), 1, False)
        C("_softmax_backward_data", T((8, 16, 64), d, "t"), T((8, 16, 64), d), -1, d)
        C("_log_softmax_backward_data", T((512, 100), d, (0, 0)), T((512, 100), d), 1, d)
        for shape, target, op in (
            ((512, 1000), (512,), "nll_loss"),
            ((32, 10), (32,), "nll_loss"),
            ((4, 21, 32, 32), (4, 32, 32), "nll_loss2d"),
            ((10,), (), "nll_loss"),
        ):
            for reduction in (0, 1, 2):
                for weight in (None, T((shape[min(1, len(shape) - 1)],), d)):
                    x = T(shape, d)
                    C(f"{op}_forward", x, T(target, i64), weight, reduction, -100)
                    grad = T(target if reduction == 0 else (), d)
                    C(f"{op}_backward", grad, x, T(target, i64), weight, reduction, -100, T((), d))
        C("nll_loss2d_forward", T((4, 21, 32, 32), d, "cl"), T((4, 32, 32), i64), None, 1, -100)
        C(
            "nll_loss2d_backward",
            T((), d),
            T((4, 21, 32, 32), d, "cl"),
            T((4, 32, 32), i64),
            None,
            1,
            -100,
            T((), d),
        )
        for shape in ((64, 1), (100000,), (8, 3, 256, 256)):
            x = T(shape, d)
            for reduction in (0, 1, 2):
                grad = x if reduction == 0 else T((), d)
                C("binary_cross_entropy", x, x, None, reduction)
                C("binary_cross_entropy", x, x, x, reduction)
                C("binary_cross_entropy_backward", grad, x, x, None, reduction)
                C("binary_cross_entropy_backward", grad, x, x, x, reduction)
                C("binary_cross_entropy_with_logits", x, x, None, None, reduction)
                C("binary_cross_entropy_with_logits", x, x, x, T((1,), d), reduction)
                C("mse_loss", x, x, reduction)
                C("mse_loss_backward", grad, x, x, reduction)
                C("smooth_l1_loss", x, x, reduction, 1.0)
                C("smooth_l1_loss_backward", grad, x, x, reduction, 1.0)
                C("huber_loss", x, x, reduction, 1.0)
                C("huber_loss_backward", grad, x, x, reduction, 1.0)
                C("soft_margin_loss", x, x, reduction)
                C("soft_margin_loss_backward", grad, x, x, reduction)
        C("multi_margin_loss", T((64, 10), d), T((64,), i64), 1, 1.0, None, 1)
        C("multi_margin_loss", T((640000, 10), d), T((640000,), i64), 1, 1.0, None, 1)
        C("multi_margin_loss_backward", T((), d), T((64, 10), d), T((64,), i64), 1, 1.0, None, 1)
        C("multilabel_margin_loss_forward", T((64, 10), d), T((64, 10), i64), 1)
        C(
            "multilabel_margin_loss_backward",
            T((), d),
            T((64, 10), d),
            T((64, 10), i64),
            1,
            T((64, 10), d),
        )
    C("_ctc_loss", T((50, 16, 20)), T((16, 30), i64), [50] * 16, [30] * 16, 0, False)
    C("_ctc_loss", T((50, 16, 20)), T((16 * 30,), i64), [50] * 16, [30] * 16, 0, False)
    C("_ctc_loss.Tensor", T((50, 16, 20)), T((16, 30), i64), T((16,), i64), T((16,), i64), 0, False)
    C(
        "_ctc_loss_backward",
        T((16,)),
        T((50, 16, 20)),
        T((16, 30), i64),
        [50] * 16,
        [30] * 16,
        T((16,)),
        T((16, 50, 61)),
        0,
        False,
    )
    for zero_infinity in (False, True):
        C(
            "_ctc_loss_backward",
            T((16,)),
            T((500, 16, 20)),
            T((16, 30), i64),
            [500] * 16,
            [30] * 16,
            T((16,)),
            T((16, 500, 61)),
            0,
            zero_infinity,
        )
    C("_cdist_forward", T((4, 100, 32)), T((4, 50, 32)), 2.0, None)
    C("_cdist_forward", T((4, 100, 32)), T((4, 50, 32)), 1.0, None)
    C("_cdist_forward", T((100, 32)), T((50, 32)), 2.0, 1)
    C("_cdist_backward", T((4, 100, 50)), T((4, 100, 32)), T((4, 50, 32)), 2.0, T((4, 100, 50)))
    C("_pdist_forward", T((100, 32)), 2.0)
    C("_pdist_backward", T((4950,)), T((100, 32)), 2.0, T((4950,)))


def reductions():
    shapes = (
        (4, 5),
        (1000,),
        (100000,),
        (1000000,),
        (10000000,),
        (100000000,),
        (64, 1000),
        (4096, 4096),
        (1, 1000000),
        (8, 512, 768),
        (32, 64, 56, 56),
        (4096, 50257),
        (3, 7, 11),
    )
    for shape in shapes:
        nd = len(shape)
        dims = (
            [[], [-1], [0]]
            + ([[0, 1], list(range(nd - 1))] if nd > 2 else [])
            + ([[2, 3], [0, 2, 3]] if nd == 4 else [])
        )
        for d in (f32, bf16):
            x = T(shape, d)
            C("sum", x)
            C("sum", x, dtype=f32)
            C("mean", x)
            for dim in dims:
                for keep in (True, False)[: 1 + (dim == [-1])]:
                    C("sum.dim_IntList", x, dim, keep)
                    C("mean.dim", x, dim, keep)
                    C("var.correction", x, dim or None, correction=1, keepdim=keep)
                    C("var_mean.correction", x, dim or None, correction=0, keepdim=keep)
                    C("std.correction", x, dim or None, correction=1, keepdim=keep)
                    C("linalg_vector_norm", x, 2, dim or None, keep)
                    C("amax", x, dim, keep)
                    C("amin", x, dim, keep)
                    C("norm.ScalarOpt_dim", x, 2, dim, keep)
                    C("logsumexp", x, dim or [0], keep)
                if len(dim) == 1:
                    for op in (
                        "max.dim",
                        "min.dim",
                        "argmax",
                        "any.dim",
                        "all.dim",
                        "prod.dim_int",
                        "argmin",
                        "median.dim",
                    ):
                        C(op, x, dim[0], False)
                    C("cumsum", x, dim[0])
                    C("cumprod", x, dim[0])
                    C("cummax", x, dim[0])
                    C("logcumsumexp", x, dim[0])
                    C("sort", x, dim[0])
                    C("sort.stable", x, stable=True, dim=dim[0], descending=True)
                    C("argsort.stable", x, stable=True, dim=dim[0])
                    C("kthvalue", x, 1, dim[0])
                    for k in (1, 2, 100):
                        if k <= shape[dim[0]]:
                            C("topk", x, k, dim[0])
            for op in (
                "max",
                "min",
                "any",
                "all",
                "argmax",
                "prod",
                "median",
                "aminmax",
                "linalg_vector_norm",
                "norm.Scalar",
                "nonzero",
                "_unique2",
            ):
                C(op, x)
        for d in (i64, b8):
            x = T(shape, d)
            C("sum", x)
            C("any", x)
            C("all", x)
            C("sum.dim_IntList", x, [0], False)
            C("cumsum", x, 0)
            C("nonzero", x)
            if d == i64:
                C("max", x)
                C("sort", x, 0)
                C("_unique2", x)
                C("_unique2", x, True, True, True)
                C("unique_dim", x, 0)
                C("unique_consecutive", x)
                C("bincount", T((max(shape),), i64))
                C("topk", x, 1)
                C("cummax", x, 0)
    for d in HALVES:
        C("sum.dim_IntList", T((32, 64, 56, 56), d, "cl"), [0, 2, 3], True)
        C("sum.dim_IntList", T((32, 64, 56, 56), d, "cl"), [2, 3], True)
        C("mean.dim", T((32, 2048, 7, 7), d), [-1, -2], True)
        C("mean.dim", T((32, 2048, 7, 7), d, "cl"), [-1, -2], True)
        C("sum.dim_IntList", T((4096, 768), d, (0, 0)), [0], True)
        C("sum.dim_IntList", T((32, 197, 768), d), [0, 1], True)
        for rows in (64, 256, 1024, 4096, 8192, 16384, 65536, 262144):
            for cols in (1, 3, 10, 64, 768, 1000, 3072, 50257):
                if rows * cols < 2**31:
                    C("sum.dim_IntList", T((rows, cols), d), [0], True)
                    C("sum.dim_IntList", T((cols, rows), d), [1], True)
    C("histc", T((1000,)), 10, 0, 1)
    C("bincount", T((1000,), i64), None, 10)
    C("count_nonzero", T((100000,)))
    C("masked_select", T((1000,)), T((1000,), b8))
    C("masked_select", T((1000, 1000)), T((1000, 1000), b8))
    C("masked_select", T((1000, 1000)), T((1000,), b8))
    C("searchsorted.Tensor", T((100,)), T((1000,)))
    C("bucketize.Tensor", T((1000,)), T((10,)))
    C("isin.Tensor_Tensor", T((1000,), i64), T((10,), i64))
    C("equal", T((1000,)), T((1000,)))


def indexing():
    for d in HALVES:
        for rows, width, ids in (
            (1000, 64, (32,)),
            (50257, 768, (8, 512)),
            (50257, 768, (2, 100)),
            (30522, 768, (64, 128)),
            (10, 16, (5000,)),
            (1000, 64, (3072,)),
            (1000, 64, (3073,)),
        ):
            n = 1
            for i in ids:
                n *= i
            for it in (i64, i32):
                C("embedding", T((rows, width), d), T(ids, it))
                C("embedding_dense_backward", T((*ids, width), d), T(ids, it), rows, -1, False)
                C("embedding_dense_backward", T((*ids, width), d), T(ids, it), rows, 0, True)
                for mode in (0, 1, 2):
                    C(
                        "_embedding_bag",
                        T((rows, width), d),
                        T((n,), it),
                        T((max(n // 4, 1),), it),
                        False,
                        mode,
                    )
                    C(
                        "_embedding_bag_forward_only",
                        T((rows, width), d),
                        T((n,), it),
                        T((max(n // 4, 1),), it),
                        False,
                        mode,
                    )
                C(
                    "_embedding_bag",
                    T((rows, width), d),
                    T((n,), it),
                    T((max(n // 4, 1) + 1,), it),
                    False,
                    0,
                    False,
                    T((n,), d),
                    True,
                    -1,
                )
                bags = max(n // 4, 1)
                for mode in (0, 1, 2):
                    C(
                        "_embedding_bag_dense_backward",
                        T((bags, width), d),
                        T((n,), it),
                        T((n,), it),
                        T((bags,), it),
                        T((bags, width) if mode == 2 else (0,), it),
                        rows,
                        False,
                        mode,
                        None,
                        -1,
                    )
                C(
                    "_embedding_bag_dense_backward",
                    T((bags, width), d),
                    T((n,), it),
                    T((n,), it),
                    T((bags,), it),
                    T((0,), it),
                    rows,
                    True,
                    0,
                    T((n,), d),
                    -1,
                )
                C(
                    "_embedding_bag_per_sample_weights_backward",
                    T((bags, width), d),
                    T((rows, width), d),
                    T((n,), it),
                    T((bags,), it),
                    T((n,), it),
                    0,
                )
            C("embedding_dense_backward", T((*ids, width), d, "t"), T(ids, i64), rows, -1, False)
        C("index.Tensor", T((1000, 64), d), [T((300,), i64)])
        C("index.Tensor", T((32, 100, 64), d), [T((32,), i64), T((32,), i64)])
        C("index.Tensor", T((32, 100, 64), d), [None, T((50,), i64)])
        C("index.Tensor", T((32, 100, 64), d), [None, None, T((50,), i64)])
        C("index.Tensor", T((32, 100, 64), d), [T((32,), i64), None, T((32,), i64)])
        C("index.Tensor", T((1000, 64), d), [T((1000,), b8)])
        C("index.Tensor", T((1000, 64), d), [T((1000, 64), b8)])
        C("index.Tensor", T((49 * 49, 3), d), [T((49 * 49,), i64)])
        for accumulate in (True, False):
            for op in ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"):
                C(op, T((1000, 64), d), [T((300,), i64)], T((300, 64), d), accumulate)
            C("index_put", T((50257, 768), d), [T((4096,), i64)], T((4096, 768), d), accumulate)
            C(
                "index_put",
                T((32, 100, 64), d),
                [T((32,), i64), T((32,), i64)],
                T((32, 64), d),
                accumulate,
            )
            C(
                "index_put",
                T((32, 100, 64), d),
                [None, T((50,), i64)],
                T((32, 50, 64), d),
                accumulate,
            )
            C(
                "index_put",
                T((32, 100, 64), d),
                [None, None, T((50,), i64)],
                T((32, 100, 50), d),
                accumulate,
            )
            C(
                "index_put",
                T((32, 100, 64), d),
                [T((32,), i64), None, T((32,), i64)],
                T((32, 100), d),
                accumulate,
            )
            C("index_put", T((49 * 49, 3), d), [T((49 * 49,), i64)], T((49 * 49, 3), d), accumulate)
            C("index_put", T((169, 4), d), [T((49 * 49,), i64)], T((49 * 49, 4), d), accumulate)
            C("index_put", T((1000, 64), d), [T((300,), i64)], T((), d), accumulate)
            C("index_put", T((1000,), d), [T((100000,), i64)], T((100000,), d), accumulate)
            C("index_put", T((1000, 64), d), [T((1000,), b8)], T((), d), accumulate)
        C("gather", T((512, 1000), d), 1, T((512, 1), i64))
        C("scatter.value", T((512, 1000), d), 1, T((512, 1), i64), 1.0)
        C("scatter.src", T((512, 1000), d), 1, T((512, 1), i64), T((512, 1), d))
        C("scatter_add", T((512, 1000), d), 1, T((512, 1), i64), T((512, 1), d))
        C("scatter_add_", T((512, 1000), d), 1, T((512, 1), i64), T((512, 1), d))
        C("scatter_add", T((5000,), d), 0, T((100000,), i64), T((100000,), d))
        C("scatter_reduce.two", T((512, 1000), d), 1, T((512, 10), i64), T((512, 10), d), "sum")
        C("scatter_reduce.two", T((512, 1000), d), 1, T((512, 10), i64), T((512, 10), d), "mean")
        C(
            "scatter_reduce.two",
            T((512, 1000), d),
            1,
            T((512, 10), i64),
            T((512, 10), d),
            "amax",
            include_self=False,
        )
        for reduce in ("mean", "prod", "amax"):
            arguments = T((100, 64), d), 0, T((300,), i64), T((300, 64), d), reduce
            C("index_reduce", *arguments)
            C("index_reduce_", *arguments, include_self=False)
        C("index_add", T((1000, 64), d), 0, T((3000,), i64), T((3000, 64), d))
        C("index_add_", T((1000, 64), d), 0, T((3000,), i64), T((3000, 64), d))
        C("index_add_", T((1000, 64), d), 1, T((30,), i64), T((1000, 30), d))
        C("index_select", T((1000, 64), d), 0, T((3000,), i64))
        C("index_select", T((1000, 64), d), 1, T((30,), i64))
        C("index_copy_", T((1000, 64), d), 0, T((300,), i64), T((300, 64), d))
        C("index_fill_.int_Scalar", T((1000, 64), d), 0, T((300,), i64), 1.0)
        C("take", T((1000, 64), d), T((300,), i64))
        C("put_", T((1000, 64), d), T((300,), i64), T((300,), d), True)
        C("masked_fill.Scalar", T((8, 12, 64, 64), d), T((64, 64), b8), -1e4)
        C("masked_fill.Tensor", T((8, 12, 64, 64), d), T((8, 1, 64, 64), b8), T((), d))
        C("masked_fill_.Scalar", T((8, 12, 64, 64), d), T((64, 64), b8), -1e4)
        C("masked_scatter", T((1000, 64), d), T((1000, 64), b8), T((64000,), d))
        C("masked_scatter", T((1, 64), d), T((1000, 64), b8), T((64000,), d))
        C("masked_scatter", T((1000, 64), d), T((1, 64), b8), T((64000,), d))
        C("nanmedian", T((100000,), d))
        C("nanmedian", T((64, 100), d))
        for length, count in ((100000, 5000), (1000000, 100000)):
            C("topk", T((length,), d), count)
            C("topk", T((4, length), d), count)
            C("topk", T((4, length), d), count, 1, True, False)
        C("where.self", T((64, 64), b8), T((8, 12, 64, 64), d), T((), d))
        C("where.self", T((64, 64), b8), T((8, 12, 64, 64), d), T((), f32))
        C("tril", T((512, 512), d))
        C("triu", T((512, 512), d), 1)
        C("roll", T((8, 56, 56, 96), d), [-3, -3], [1, 2])
        C("roll", T((1000,), d), [3])
        C("flip", T((8, 3, 32, 32), d), [3])
        C("repeat", T((1, 1, 768), d), [32, 1, 1])
        C("repeat", T((10, 768), d), [3, 2])
        C("repeat_interleave.Tensor", T((100,), i64))
        C("repeat_interleave.Tensor", T((100,), i64), output_size=500)
        C("constant_pad_nd", T((8, 3, 32, 32), d), [1, 1, 1, 1], 0.0)
        C("constant_pad_nd", T((8, 3, 32, 32), d, "cl"), [1, 1, 1, 1], 0.0)
        for layout in ("c", "cl"):
            x = T((8, 4, 32, 32), d, layout)
            y = T((8, 4, 34, 34), d, layout)
            for op in ("reflection_pad2d", "replication_pad2d"):
                C(op, x, [1, 1, 1, 1])
                C(f"{op}_backward", y, x, [1, 1, 1, 1])
        C("reflection_pad1d", T((8, 4, 32), d), [1, 1])
        C("reflection_pad1d_backward", T((8, 4, 34), d), T((8, 4, 32), d), [1, 1])
        C("im2col", T((8, 4, 32, 32), d), [3, 3], [1, 1], [1, 1], [1, 1])
        C("col2im", T((8, 36, 1024), d), [32, 32], [3, 3], [1, 1], [1, 1], [1, 1])
        C("slice_backward", T((8, 3, 16), d), [8, 10, 16], 1, 0, 3, 1)
        C("select_backward", T((8, 16), d), [8, 10, 16], 1, 0)
        C("slice_scatter", T((8, 10, 16), d), T((8, 3, 16), d), 1, 0, 3)
        C("select_scatter", T((8, 10, 16), d), T((8, 16), d), 1, 0)
        C("unfold_backward", T((8, 10, 3), d), [8, 12], 1, 3, 1)
        C("diagonal_backward", T((8, 16), d), [8, 16, 16], 0, 1, 2)
        for n in (2, 5, 16, 100, 600):
            C("cat", [T((8, 3, 16), d)] * n, 1)
            C("stack", [T((8, 16), d)] * n, 0)
        C("cat", [T((8, 3, 16, 16), d, "cl")] * 3, 1)
        C("cat", [T((8, 3, 16, 16), d, "cl"), T((8, 5, 16, 16), d)], 1)
        C("cat", [T((8, 3, 16), d, "t")] * 2, 1)
        C("cat", [T((8, 3), d), T((8, 3), f32)], 1)
        C("cat", [T((8,), d), T((0,), d)], 0)
        C("split_with_sizes_copy", T((8, 30), d), [10, 10, 10], 1)


def random():
    for d in HALVES:
        for shape in ((8, 512, 768), (1000,), (3, 5)):
            x = T(shape, d)
            C("native_dropout", x, 0.1, True)
            C("native_dropout", x, 0.0, True)
            C("native_dropout", x, 0.1, False)
            C("native_dropout_backward", x, T(shape, b8), 1.1)
            C("bernoulli", x)
            C("bernoulli_.float", x, 0.5)
            C("bernoulli.p", x, 0.5)
            C("rand_like", x)
            C("randn_like", x)
            C("normal_", x)
            C("uniform_", x)
            C("exponential_", x)
            C("rrelu_with_noise", x, x, 0.1, 0.3, True)
            C("randn", list(shape), dtype=d, device=DEVICE)
            C("rand", list(shape), dtype=d, device=DEVICE)
        C("native_dropout", T((8, 64, 16), d, "t"), 0.1, True)
        C("native_dropout", T((8, 64, 16, 16), d, "cl"), 0.1, True)
        C("multinomial", T((64, 1000), d), 1)
        C("multinomial", T((64, 1000), d), 5)
        C("multinomial", T((64, 1000), d), 5, True)
        C("multinomial", T((1000,), d), 5, True)
        C("normal.Tensor_Tensor", T((1000,), d), T((1000,), d))
        C("normal.Tensor_float", T((1000,), d), 1.0)
        C("poisson", T((1000,), d))
    for n in (10, 1000, 29999, 30000, 100000, 5000000):
        C("randperm", n, device=DEVICE)
    C("randint", 10, [1000], device=DEVICE)
    C("randint.low", 1, 10, [1000], device=DEVICE)
    C("arange", 1000, device=DEVICE)
    C("arange.start", 0, 1000, device=DEVICE)
    C("arange.start_step", 0, 1000, 2, device=DEVICE)
    C("linspace", 0.0, 1.0, 100, device=DEVICE)
    C("zeros", [1000], device=DEVICE)
    C("ones", [1000], device=DEVICE)
    C("full", [1000], 1.0, device=DEVICE)
    C("eye", 10, device=DEVICE)
    C("scalar_tensor", 1.0, device=DEVICE)
    C("tril_indices", 100, 100, device=DEVICE)
    C("empty_like", T((1000,)))
    C("zeros_like", T((8, 3, 32, 32), bf16, "cl"))
    C("ones_like", T((1000,)))
    C("full_like", T((1000,)), 1.0)
    C("new_zeros", T((1000,)), [10])
    C("lift_fresh", T((10,)))


def matrices():
    for d in HALVES:
        for m, k, n in (
            (64, 128, 256),
            (4096, 768, 3072),
            (7, 13, 5),
            (32, 2048, 1000),
            (1, 128, 10),
            (128, 64, 1),
            (100, 1, 100),
            (32, 8, 33),
        ):
            a, b = T((m, k), d), T((k, n), d)
            bt = T((k, n), d, "t")
            at = T((m, k), d, "t")
            C("mm", a, b)
            C("mm", a, bt)
            C("mm", at, b)
            C("mm", at, bt)
            C("mm", T((m, k), d, (k + 3, 1)), b)
            C("mm", T((m, k), d, (2 * k, 2)), b)
            for x in (a, at):
                C("addmm", T((n,), d), x, bt)
            C("addmm", T((n,), d), a, b)
            C("addmm", T((n,), d), T((m, k), d, (2 * k, 2)), b)
            C("addmm", T((m, n), d), a, b)
            C("addmm", T((n,), d, (2,)), a, b)
            C("addmm", T((1, n), d), a, b)
            C("addmm", T((m, 1), d), a, b)
            C("addmm", T((n,), d), a, bt, beta=0.5)
            C("addmm", T((n,), d), a, bt, alpha=2)
            C("_addmm_activation", T((n,), d), a, bt)
            C("_addmm_activation", T((n,), d), a, bt, use_gelu=True)
            C("addmv", T((m,), d), a, T((k,), d))
            C("mv", a, T((k,), d))
            C("mv", at, T((k,), d))
        C("mm", T((64, 0), d), T((0, 32), d))
        C("addmm", T((32,), d), T((64, 0), d), T((0, 32), d))
        for b, m, k, n in (
            (8, 64, 128, 256),
            (96, 512, 64, 512),
            (3, 7, 13, 5),
            (16, 1, 64, 100),
            (4, 100, 1, 100),
            (1, 64, 64, 64),
        ):
            x, y = T((b, m, k), d), T((b, k, n), d)
            C("bmm", x, y)
            C("bmm", x, T((b, k, n), d, "t"))
            C("bmm", T((b, m, k), d, "t"), y)
            C("bmm", T((b, m, k), d, (0, k, 1)), y)
            C("bmm", T((b, m, k), d, (k, b * k, 1)), T((b, k, n), d, (n, b * n, 1)))
            C("bmm", T((b, m, k), d, (2 * m * k, 2 * k, 2)), y)
            C("baddbmm", T((b, m, n), d), x, y)
            C("baddbmm", T((1, 1, n), d), x, y)
            C("baddbmm", T((b, m, n), d), x, T((b, k, n), d, "t"), beta=0, alpha=0.5)
        for n, a, b, o in (
            (2048, 64, 48, 4),
            (37, 5, 3, 7),
        ):  # nn.Bilinear, forward and the three gradients
            x, weight, y, gradient = T((n, a), d), T((o, a, b), d), T((n, b), d), T((n, o), d)
            C("_trilinear", x, weight, y, [1, 3], [0], [1, 2], [2, 3])
            C("_trilinear", gradient, weight, y, [2, 3], [0], [1, 2], [1, 3])
            C("_trilinear", x, gradient, y, [1, 3], [2, 3], [1, 2], [0])
            C("_trilinear", x, weight, gradient, [1, 3], [0], [2, 3], [1, 2])
        C("dot", T((1000,), d), T((1000,), d))
        C("vdot", T((1000,), d), T((1000,), d))
        C("addr", T((100, 50), d), T((100,), d), T((50,), d))
        C("addbmm", T((64, 256), d), T((8, 64, 128), d), T((8, 128, 256), d))
        C("_weight_norm_interface", T((64, 32, 3), d), T((64, 1, 1), d), 0)
        C(
            "_weight_norm_interface_backward",
            T((64, 32, 3), d),
            T((64, 32, 3), d),
            T((64, 1, 1), d),
            T((64, 1, 1)),
            0,
        )
        C("_weight_norm_interface", T((64, 32, 3), d), T((1, 1, 3), d), 2)
    C("linalg_inv_ex", T((8, 16, 16)))
    C("_linalg_det", T((8, 16, 16)))
    C("linalg_cholesky_ex", T((8, 16, 16)))
    C("_linalg_svd", T((8, 16, 16)))
    C("_linalg_eigh", T((8, 16, 16)))
    C("_linalg_solve_ex", T((8, 16, 16)), T((8, 16, 4)))
    C("linalg_solve_triangular", T((8, 16, 16)), T((8, 16, 4)), upper=True)
    C("triangular_solve", T((8, 16, 4)), T((8, 16, 16)))


def foreach():
    for d in HALVES:
        for n, shape in (
            (4, (64, 64)),
            (160, (512, 64)),
            (3, (50257, 768)),
            (1, (10,)),
            (600, (7,)),
        ):
            x = [T(shape, d)] * n
            s = [T((), f32)] * n
            C("_foreach_norm.Scalar", x, 2)
            C("_foreach_norm.Scalar", x, float("inf"))
            C("_foreach_max", x)
            C("_foreach_add.Scalar", x, 1.0)
            C("_foreach_add_.Scalar", x, 1.0)
            C("_foreach_add_.List", x, x)
            C("_foreach_add.List", x, x)
            C("_foreach_mul.Scalar", x, 2.0)
            C("_foreach_mul_.Scalar", x, 2.0)
            C("_foreach_mul_.Tensor", x, T(()))
            C("_foreach_mul.Tensor", x, T(()))
            C("_foreach_mul_.List", x, x)
            C("_foreach_div_.Scalar", x, 2.0)
            C("_foreach_div_.ScalarList", x, [2.0] * n)
            C("_foreach_div.List", x, x)
            C("_foreach_sqrt", x)
            C("_foreach_sqrt_", x)
            C("_foreach_neg", x)
            C("_foreach_abs", x)
            C("_foreach_pow.ScalarAndTensor", 0.9, x)
            C("_foreach_pow.Scalar", x, 2.0)
            C("_foreach_reciprocal", x)
            C("_foreach_lerp_.Scalar", x, x, 0.1)
            C("_foreach_lerp_.List", x, x, x)
            C("_foreach_addcmul_.Scalar", x, x, x, 0.1)
            C("_foreach_addcdiv_.Scalar", x, x, x, 0.1)
            C("_foreach_addcdiv_.ScalarList", x, x, x, [0.1] * n)
            C("_foreach_addcdiv.Scalar", x, x, x, 0.1)
            C("_foreach_maximum_.List", x, x)
            C("_foreach_clamp_max_.Scalar", x, 2.0)
            C("_foreach_zero_", x)
            C("_foreach_sign", x)
            C("_foreach_copy_", x, x)
            C("_foreach_copy_", [T(shape)] * n, x)
            C("_foreach_add_.Scalar", s, 1)
            C("_foreach_add_.Tensor", x, T((), d), alpha=1.0)
            C("_amp_foreach_non_finite_check_and_unscale_", x, T((1,)), T((1,)))
            kw = {
                "lr": 1e-3,
                "beta1": 0.9,
                "beta2": 0.99,
                "weight_decay": 0.1,
                "eps": 1e-8,
                "amsgrad": False,
                "maximize": False,
            }
            for op in ("_fused_adam_", "_fused_adamw_"):
                C(op, x, x, x, x, [], s, **kw)
                C(op, x, x, x, x, [], s, **kw, grad_scale=T(()), found_inf=T(()))
            C("_fused_adam_", x, x, x, x, x, s, **(kw | {"amsgrad": True}))
            C(
                "_fused_sgd_",
                x,
                x,
                x,
                weight_decay=0.1,
                momentum=0.9,
                lr=1e-3,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            C(
                "_fused_sgd_",
                x,
                x,
                [],
                weight_decay=0.1,
                momentum=0.0,
                lr=1e-3,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            C(
                "_fused_adagrad_",
                x,
                x,
                x,
                s,
                lr=1e-3,
                lr_decay=0.0,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )
    C("_foreach_norm.Scalar", [T((64, 64)), T((10,)), T((1000000,))], 2)
    C("_foreach_norm.Scalar", [T((64, 64)), T((64, 32), f32, "t")], 2)
    C("_foreach_norm.Scalar", [T((64, 64)), T((0,))], 2)
    C("_foreach_norm.Scalar", [T((64, 64)), T((64, 64), bf16)], 2)
    C("_foreach_norm.Scalar", [T((64, 64)), T((64, 64))], 1)
    C("_foreach_mul_.Tensor", [T((64, 64)), T((64, 64), bf16)], T(()))
    C("_foreach_add_.List", [T((64, 64)), T((64, 64), f32, "t")], [T((64, 64)), T((64, 64))])
    C("_amp_update_scale_", T((1,)), T((1,), i32), T((1,)), 2.0, 0.5, 2000)


def pooling_and_sampling():
    for d in HALVES:
        for layout in ("c", "cl"):
            x = T((8, 64, 32, 32), d, layout)
            y = T((8, 64, 16, 16), d, layout)
            yi = T((8, 64, 16, 16), i64, layout)
            C("max_pool2d_with_indices", x, [2, 2], [2, 2])
            C("max_pool2d_with_indices_backward", y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, yi)
            C("max_pool2d_with_indices", x, [3, 3], [2, 2], [1, 1])
            C("max_pool2d_with_indices_backward", y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, yi)
            C("avg_pool2d", x, [2, 2])
            C("avg_pool2d_backward", y, x, [2, 2], [2, 2], [0, 0], False, True, None)
            C("_adaptive_avg_pool2d", x, [7, 7])
            C("_adaptive_avg_pool2d", x, [1, 1])
            C("_adaptive_avg_pool2d_backward", T((8, 64, 7, 7), d, layout), x)
            C("_adaptive_avg_pool2d_backward", T((8, 64, 7, 7), d), x)
            C("adaptive_max_pool2d", x, [7, 7])
            C(
                "adaptive_max_pool2d_backward",
                T((8, 64, 7, 7), d, layout),
                x,
                T((8, 64, 7, 7), i64, layout),
            )
            up = T((8, 64, 64, 64), d, layout)
            C("upsample_nearest2d", x, [64, 64])
            C("upsample_nearest2d", x, [64, 64], 2.0, 2.0)
            C("upsample_nearest2d_backward", up, [64, 64], [8, 64, 32, 32])
            C("upsample_bilinear2d", x, [64, 64], False)
            C("upsample_bilinear2d_backward", up, [64, 64], [8, 64, 32, 32], False)
            C("upsample_bicubic2d", x, [64, 64], False)
            C("upsample_bicubic2d_backward", up, [64, 64], [8, 64, 32, 32], False)
            C("_upsample_bilinear2d_aa", x, [16, 16], False)
            C("_upsample_bilinear2d_aa_backward", y, [16, 16], [8, 64, 32, 32], False)
            C("_upsample_nearest_exact2d", x, [64, 64])
            C("upsample_nearest2d", T((8, 3, 32, 32), d, layout), [64, 64])
            C("upsample_nearest2d_backward", T((8, 3, 64, 64), d, layout), [64, 64], [8, 3, 32, 32])
            C("upsample_bilinear2d", T((8, 3, 32, 32), d, layout), [64, 64], True)
            C(
                "upsample_bilinear2d_backward",
                T((8, 3, 64, 64), d, layout),
                [64, 64],
                [8, 3, 32, 32],
                True,
            )
            C("grid_sampler_2d", x, T((8, 16, 16, 2), d), 0, 0, False)
            C("grid_sampler_2d_backward", y, x, T((8, 16, 16, 2), d), 0, 0, False, [True, True])
            C("pixel_shuffle", x, 2)
            C("pixel_unshuffle", x, 2)
            C("channel_shuffle", x, 4)
        C("max_pool2d_with_indices", T((64, 32, 32), d), [2, 2], [2, 2])
        C("max_pool3d_with_indices", T((2, 4, 8, 8, 8), d), [2, 2, 2], [2, 2, 2])
        C(
            "max_pool3d_with_indices_backward",
            T((2, 4, 4, 4, 4), d),
            T((2, 4, 8, 8, 8), d),
            [2] * 3,
            [2] * 3,
            [0] * 3,
            [1] * 3,
            False,
            T((2, 4, 4, 4, 4), i64),
        )
        C("avg_pool3d", T((2, 4, 8, 8, 8), d), [2, 2, 2])
        C(
            "avg_pool3d_backward",
            T((2, 4, 4, 4, 4), d),
            T((2, 4, 8, 8, 8), d),
            [2] * 3,
            [2] * 3,
            [0] * 3,
            False,
            True,
            None,
        )
        C("_adaptive_avg_pool3d", T((2, 4, 8, 8, 8), d), [1, 1, 1])
        C("_adaptive_avg_pool3d_backward", T((2, 4, 1, 1, 1), d), T((2, 4, 8, 8, 8), d))
        C("upsample_linear1d", T((8, 4, 32), d), [64], False)
        C("upsample_linear1d_backward", T((8, 4, 64), d), [64], [8, 4, 32], False)
        C("upsample_nearest1d", T((8, 4, 32), d), [64])
        C("upsample_nearest3d", T((2, 4, 8, 8, 8), d), [16, 16, 16])
        C("upsample_nearest3d_backward", T((2, 4, 16, 16, 16), d), [16, 16, 16], [2, 4, 8, 8, 8])
        C("upsample_trilinear3d", T((2, 4, 8, 8, 8), d), [16, 16, 16], False)
        C(
            "upsample_trilinear3d_backward",
            T((2, 4, 16, 16, 16), d),
            [16, 16, 16],
            [2, 4, 8, 8, 8],
            False,
        )
        up = T((2, 4, 64), d, "t")
        C("upsample_nearest1d_backward", up, [64], [2, 4, 32])
        C("upsample_linear1d_backward", up, [64], [2, 4, 32], False)
        up = T((2, 4, 16, 16), d, "t")
        C("upsample_nearest2d_backward", up, [16, 16], [2, 4, 8, 8])
        C("_upsample_nearest_exact2d_backward", up, [16, 16], [2, 4, 8, 8])
        C("upsample_bilinear2d_backward", up, [16, 16], [2, 4, 8, 8], False)
        C("_upsample_bicubic2d_aa_backward", up, [16, 16], [2, 4, 8, 8], False)
        up = T((2, 4, 16, 16, 16), d, "t")
        C("upsample_nearest3d_backward", up, [16, 16, 16], [2, 4, 8, 8, 8])
        C("_upsample_nearest_exact3d_backward", up, [16, 16, 16], [2, 4, 8, 8, 8])
        C("upsample_trilinear3d_backward", up, [16, 16, 16], [2, 4, 8, 8, 8], False)
        up = T((2, 4, 16, 16, 16), d, "cl")
        C("upsample_nearest3d_backward", up, [16, 16, 16], [2, 4, 8, 8, 8])
        C("upsample_trilinear3d_backward", up, [16, 16, 16], [2, 4, 8, 8, 8], False)
        C("grid_sampler_3d", T((2, 4, 8, 8, 8), d), T((2, 4, 4, 4, 3), d), 0, 0, False)
        C("affine_grid_generator", T((8, 2, 3), d), [8, 3, 32, 32], False)


def recurrent():
    for d in HALVES:
        for b, h in ((32, 64), (128, 512)):
            g = T((b, 4 * h), d)
            c = T((b, h), d)
            bias = T((4 * h,), d)
            C("_thnn_fused_lstm_cell", g, g, c, bias, bias)
            C("_thnn_fused_lstm_cell_backward_impl", c, c, c, c, g, True)
            C("_thnn_fused_lstm_cell_backward_impl", c, c, c, c, g, False)
            C("_thnn_fused_lstm_cell_backward_impl", c, None, c, c, g, True)


def attention():
    for layout in ("c", "bshd"):
        for d in (bf16, f16, f32):
            for b, h, s, kv, e in (
                (8, 12, 512, 512, 64),
                (2, 4, 100, 100, 64),
                (2, 4, 100, 77, 40),
                (2, 8, 256, 256, 128),
                (1, 2, 33, 65, 96),
                (2, 4, 197, 197, 192),
                (2, 4, 64, 64, 256),
                (2, 4, 1, 128, 64),
                (2, 4, 130, 130, 72),
            ):
                q, k = T((b, h, s, e), d, layout), T((b, h, kv, e), d, layout)
                lse = T((b, h, s))
                for causal in (False, True):
                    if d != f32:
                        for p in (0.0, 0.1):
                            rng = T((2,), u64)
                            C("_scaled_dot_product_flash_attention", q, k, k, p, causal)
                            C(
                                "_scaled_dot_product_flash_attention_backward",
                                q,
                                q,
                                k,
                                k,
                                q,
                                lse,
                                None,
                                None,
                                s,
                                kv,
                                p,
                                causal,
                                rng,
                                T((), u64),
                            )
                        if e <= 128:
                            C(
                                "_scaled_dot_product_cudnn_attention",
                                q,
                                k,
                                k,
                                None,
                                True,
                                0.0,
                                causal,
                            )
                            C(
                                "_scaled_dot_product_cudnn_attention_backward",
                                q,
                                q,
                                k,
                                k,
                                q,
                                T((b, h, s, 1)),
                                T((), i64),
                                T((), i64),
                                None,
                                None,
                                None,
                                s,
                                kv,
                                0.0,
                                causal,
                            )
                    for lse_needed in (True, False):
                        C(
                            "_scaled_dot_product_efficient_attention",
                            q,
                            k,
                            k,
                            None,
                            lse_needed,
                            0.0,
                            causal,
                        )
                    C("_scaled_dot_product_efficient_attention", q, k, k, None, True, 0.1, causal)
                    elided = T((b, h, (s + 31) // 32 * 32))
                    C(
                        "_scaled_dot_product_efficient_attention_backward",
                        q,
                        q,
                        k,
                        k,
                        None,
                        q,
                        elided,
                        T((), i64),
                        T((), i64),
                        0.0,
                        [True, True, True, False],
                        causal,
                    )
                pad = (kv + 7) // 8 * 8
                bias = T((b, h, s, kv), d, (0, 0, pad, 1))
                full = T((b, h, s, kv), d, (h * s * pad, s * pad, pad, 1))
                C("_scaled_dot_product_efficient_attention", q, k, k, bias, True, 0.0, False)
                for bb, grad in ((bias, False), (full, False), (full, True), (bias, True)):
                    C(
                        "_scaled_dot_product_efficient_attention_backward",
                        q,
                        q,
                        k,
                        k,
                        bb,
                        q,
                        elided,
                        T((), i64),
                        T((), i64),
                        0.0,
                        [True, True, True, grad],
                        False,
                    )
                if d != f32 and e <= 128:
                    C("_scaled_dot_product_cudnn_attention", q, k, k, full, True, 0.1, False)
    for d in (bf16, f16):
        q, k = T((2, 32, 128, 64), d), T((2, 8, 128, 64), d)
        C("_scaled_dot_product_flash_attention", q, k, k, 0.0, True)
        C(
            "_scaled_dot_product_flash_attention_backward",
            q,
            q,
            k,
            k,
            q,
            T((2, 32, 128)),
            None,
            None,
            128,
            128,
            0.0,
            True,
            T((2,), u64),
            T((), u64),
        )
        C("_scaled_dot_product_cudnn_attention", q, k, k, None, True, 0.0, True)
        x = T((8, 512, 12, 64), d)
        C("_flash_attention_forward", x, x, x, None, None, 512, 512, 0.0, True, False)
        C("_efficient_attention_forward", x, x, x, None, None, None, None, None, 0.0, 1, True)


def copies():
    for d in HALVES:
        x = T((8, 64, 32, 32), d)
        for other in HALVES:
            C("_to_copy", x, dtype=other)
            C("copy_", x, T((8, 64, 32, 32), other))
            C("copy_", x, T((8, 64, 32, 32), other, "cl"))
            C("add.Tensor", x, T((8, 64, 32, 32), other))
            C("mul.Tensor", x, T((64, 1, 1), other))
            C("add_.Tensor", T((8, 64, 32, 32)), T((8, 64, 32, 32), other))
        C("_to_copy", x, dtype=b8)
        C("_to_copy", x, dtype=i64)
        C("_to_copy", x, memory_format=torch.channels_last)
        C("_to_copy", T((8, 64, 32, 32), d, "t"), dtype=f32)
        C("clone", x)
        C("clone", T((8, 64, 32, 32), d, "t"), memory_format=torch.contiguous_format)
        C("clone", T((8, 64, 32, 32), d, "cl"))
        C("clone", T((8, 64, 32, 32), d), memory_format=torch.channels_last)
        C("clone", T((8, 64, 32, 32), d, (0, 1, 0, 0)))
        C("_unsafe_view", x, [8, 64, 1024])
        C("expand_copy", T((8, 1), d), [8, 10])


def pointwise():
    unary = (
        "abs neg exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu gelu silu mish softplus "
        "hardswish hardsigmoid erf sign floor isnan isinf isfinite logical_not log1p expm1 "
        "log_sigmoid_forward leaky_relu elu hardtanh round trunc"
    )
    for d in HALVES:
        for x in (
            T((8, 512, 768), d),
            T((8, 64, 32, 32), d, "cl"),
            T((8, 64, 32), d, "t"),
            T((8, 64, 32), d, (4096, 64, 2)),
            T((8, 64, 32), d, (32, 0, 1)),
            T((), d),
        ):
            for op in unary.split():
                C(op, x)
            y = T(x.shape, d)
            for op in (
                "tanh_backward",
                "sigmoid_backward",
                "gelu_backward",
                "silu_backward",
                "mish_backward",
                "hardswish_backward",
                "hardsigmoid_backward",
            ):
                C(op, y, x)
            C("threshold_backward", y, x, 0)
            C("leaky_relu_backward", y, x, 0.1, False)
            C("elu_backward", y, 1.0, 1.0, 1.0, False, x)
            C("softplus_backward", y, x, 1.0, 20.0)
            C("hardtanh_backward", y, x, 0.0, 6.0)
            C("log_sigmoid_backward", y, x, T((0,), d))
            C("add.Tensor", x, y)
            C("add.Tensor", x, T((), f32))
            C("mul.Tensor", x, T((), f64))
            C("div.Tensor", x, y)
            C("sub.Tensor", y, x)
            C("rsub.Scalar", x, 1.0)
            C("pow.Tensor_Scalar", x, 2)
            C("pow.Tensor_Scalar", x, 3.0)
            C("pow.Tensor_Tensor", x, y)
            C("pow.Scalar", 2.0, x)
            C("addcmul", x, y, y)
            C("addcdiv", x, y, y)
            C("lerp.Scalar", x, y, 0.1)
            C("clamp", x, 0, 1)
            C("clamp_min", x, 0.1)
            C("maximum", x, y)
            C("atan2", x, y)
            C("fmod.Scalar", x, 2)
            C("remainder.Scalar", x, 2)
            C("nan_to_num", x)
            C("xlogy.Tensor", x, y)
            C("relu_", x) if x.layout != (32, 0, 1) else None
            C("add_.Tensor", y, x)
            C("mul_.Tensor", y, x)
            C("div_.Tensor", y, T((), f32))
            C("sub_.Tensor", y, x)
            C("addcmul_", y, x, x)
            C("fill_.Scalar", y, 1.0)
            C("zero_", y)
            for op in ("eq.Tensor", "lt.Tensor", "logical_and"):
                C(op, x, y)
            C("eq.Scalar", x, 1)
            C("gt.Scalar", x, 1)
        C("glu", T((8, 64, 32), d))
        C("glu_backward", T((8, 64, 16), d), T((8, 64, 32), d), -1)
        C("_prelu_kernel", T((8, 64, 32), d), T((1, 64, 1), d))
        C("_prelu_kernel_backward", T((8, 64, 32), d), T((8, 64, 32), d), T((1, 64, 1), d))
        C("add.Tensor", T((8, 512, 768), d), T((768,), d))
        C("add.Tensor", T((8, 512, 1), d), T((1, 1, 768), d))
        C("add.Tensor", T((8, 64, 32, 32), d, "cl"), T((8, 64, 32, 32), d))
        C("mul.Tensor", T((8, 64, 1, 1), d), T((8, 64, 32, 32), d, "cl"))
        C("mul.Tensor", T((3000, 1, 500), f32), T((1, 200, 500), d))
        C("add.Tensor", T((3, 1100000000), bf16), T((), d))
    C("add.Tensor", T((100,), i64), T((100,), f32))
    C("bitwise_and.Tensor", T((100,), b8), T((100,), b8))
    C("bitwise_not", T((100,), b8))
    C("complex", T((100,)), T((100,)))
    C("polar", T((100,)), T((100,)))
    C("mul.Tensor", T((8, 100), c64), T((100,), c64))
    C("_conj_physical", T((8, 100), c64))
    C("abs", T((8, 100), c64))
    C("angle", T((8, 100), c64))
    for n in (64, 100, 1021):
        C("_fft_r2c", T((8, 16, n)), [2], 0, True)
        C("_fft_r2c", T((8, n, n)), [1, 2], 0, True)
        C("_fft_c2r", T((8, 16, n // 2 + 1), c64), [2], 0, n)
        C("_fft_c2r", T((8, n, n // 2 + 1), c64), [1, 2], 0, n)
        C("_fft_c2c", T((8, 16, n), c64), [2], 0, True)
        C("_fft_c2c", T((8, n, n), c64), [1], 0, True)
    C("mm", T((64, 32), c64), T((32, 16), c64))
    C("mm", T((64, 32), f64), T((32, 16), f64))


GROUPS = (
    normalisation,
    softmax_and_losses,
    reductions,
    indexing,
    random,
    matrices,
    foreach,
    pooling_and_sampling,
    recurrent,
    attention,
    copies,
    pointwise,
)


@cache
def cases():
    """All calls by name."""
    CASES.clear()
    for group in GROUPS:
        group()
    found = {}
    for case in CASES:
        found.setdefault(case.name, case)
    return found


def sample(count):
    """At most so many calls of every operator, evenly chosen."""
    by_op = {}
    for name, case in cases().items():
        by_op.setdefault(case.op, []).append(name)
    chosen = {
        names[i * len(names) // min(count, len(names))]
        for names in by_op.values()
        for i in range(min(count, len(names)))
    }
    return {name: case for name, case in cases().items() if name in chosen}
