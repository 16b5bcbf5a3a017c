"""Operators of libraries that allocate more than they return, or in another order.

bitsandbytes: `bitsandbytes/backends/cuda/ops.py`, 0.50.
"""

from __future__ import annotations

import math

from memcallback.core.kernel import AllocOutput, Kernel
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule

#: Up to as many rows bitsandbytes multiplies packed weights on every card
#: (`_GEMM_4BIT_CUSTOM_FLOOR_M`), if blocks do not cross rows.
_MOST_PACKED_ROWS = 4


def _scales_first(_: OpCall) -> Kernel:
    """What is quantized comes after the scales of its blocks."""
    return AllocOutput(1), AllocOutput(0)


def _gemm_4bit(call: OpCall) -> Kernel | None:
    """`_dequant_linear_fallback`: unpack the scales, if they are quantized too, and the weight.

    Then `linear` multiplies. Between 5 and 1,536 rows some cards multiply packed weights, depending
    on the weight's size. Here they are always unpacked: too high by at most one unpacked weight.
    """
    arguments = call.by_name
    factor, scales = arguments["A"], arguments["absmax_8bit"]
    width = factor.shape[-1]
    if factor.numel() <= _MOST_PACKED_ROWS * width and width % arguments["blocksize"] == 0:
        return None
    kernel = KernelBuilder()
    if scales is not None:
        kernel.alloc(4 * scales.numel())
        kernel.alloc(4 * scales.numel())
    kernel.alloc(factor.element_size() * math.prod(arguments["shapeB"]))
    kernel.output(0)
    kernel.open_blas()
    return kernel.build()


#: By the name with its namespace.
RULES: dict[str, Rule] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::quantize_4bit": _scales_first,
    "bitsandbytes::quantize_blockwise": _scales_first,
}
