"""A Triton kernel, launched as programs launch one; importing it needs Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(inputs, outputs, factor, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(outputs + at, tl.load(inputs + at, at < num) * factor, at < num)


tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK": size}) for size in (256, 512)], key=["num"], restore_value=["outputs"]
)(scale_kernel)


def launch(inputs, factor):
    outputs = torch.empty_like(inputs)
    num = inputs.numel()
    scale_kernel[(triton.cdiv(num, 256),)](inputs, outputs, factor, num, BLOCK=256)
    return outputs


def launch_tuned(inputs, factor):
    outputs, num = torch.empty_like(inputs), inputs.numel()
    tuned_kernel[lambda meta: (triton.cdiv(num, meta["BLOCK"]),)](inputs, outputs, factor, num)
    return outputs


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, factor, how):
        ctx.factor, ctx.how = factor, how
        ctx.save_for_backward(inputs)
        return how(inputs, factor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.how(gradient.contiguous(), ctx.factor), None, None
