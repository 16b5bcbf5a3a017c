"""What is to be known of a traced step: what was assumed of it, and to which side that errs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.kernel import KernelCall
from memcallback.core.tensors import torch_version
from memcallback.cuda.convolution import cudnn
from memcallback.cuda.convolution.rule import workspaces_are_known
from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.inference_step import InferenceStep
from memcallback.step.step import Step

#: The newest PyTorch whose rules were read in its source or its machine code.
_NEWEST_TORCH = (2, 13)
_UNKNOWN_WORKSPACES = (
    "Convolution workspaces are estimates. For cuDNN's own values install the version that your "
    "training uses (pip install nvidia-cudnn-cu12==...) and turn benchmark mode off. cuDNN 9.28 "
    "needs a CUDA driver."
)
#: On the card: `accuracy.md` of benchmarks/results/nvidia-h200-2026-11-27. With another version:
#: reserved memory of published trainings of convolution nets.
_VERSION = (
    "Convolution workspaces are what the installed cuDNN {} answers without a device. Where it "
    "leaves out algorithms, rules found with cuDNN 9.19 say what they take. On the card cuDNN may "
    "choose others: of 76 trainings with convolutions on an H200, 73 reserved within 5 % of the "
    "prediction, and two reserved 64 and 89 % more. Another version of cuDNN changed the "
    "predicted reserved memory of convolution nets by -18 to +8 %."
)
_RECURRENT = (
    "The memory that cuDNN takes for a recurrent layer (LSTM, GRU, RNN), its workspace and what it "
    "keeps for the backward pass, follows formulas that we fitted to 1,704 layers on an H200 with "
    "cuDNN 9.19; NVIDIA does not publish the sizes. With another card or version the step may need "
    "more or less."
)
_FUSED = (
    "nn.TransformerEncoderLayer in evaluation mode is predicted as separate operators. A CPU may "
    "run it as one fused operator, which needs less."
)
_COMPILED = (
    "A compiled module was traced as it would run without compilation, which mostly needs more "
    "memory."
)
_NOTHING_COMPILED = (
    "torch.compile compiles no operator of this step, which PyTorch runs as without compilation."
)
_PASSED_OVER = (
    " Called as {} it passes over the forward pass of PyTorch's own classes, such as "
    "nn.Sequential. {} compiles that too."
)
_AROUND = (
    "torch.compile(DistributedDataParallel(model))",
    "DistributedDataParallel(torch.compile(model))",
)
_IN_PLACE = "module.compile()", "module.forward = torch.compile(module.forward)"
_NOT_COMPILED = (
    "Compiled code was traced as it would run without compilation, which may need more or less "
    "memory. What Inductor generates could not be traced: {}"
)


def not_compiled(said: tuple[str, ...], error: PredictionError) -> tuple[str, ...]:
    """The caveats of a step that was traced again, without the compilation that failed."""
    return (*(caveat for caveat in said if caveat != _COMPILED), _NOT_COMPILED.format(error))


def caveats(
    step: Step,
    calls: tuple[KernelCall, ...],
    *,
    card: DeviceSpec | None,
    is_compilation_told: bool,
    has_no_operators: bool,
) -> Iterator[str]:
    """What to know of a traced step, without its compiled code where that was told of.

    `has_no_operators`: torch.compile has found none to compile.
    """
    if torch_version() > _NEWEST_TORCH:
        yield (
            f"PyTorch {torch.__version__} is newer than {'.'.join(map(str, _NEWEST_TORCH))}, the "
            "newest that memcallback knows. Workspaces and kernels of the newer one may take more "
            "or less."
        )
    if step.batch_size.is_ambiguous:
        yield step.batch_size.doubt
    modules = list(step.model.modules())
    is_in_place = any(module._compiled_call_impl is not None for module in modules)
    is_compiled = is_in_place or any(
        type(module).__name__ == "OptimizedModule" for module in modules
    )
    is_outside = step.ranks is not None and step.ranks.compiles_wrapper
    if has_no_operators:
        ways = _AROUND if is_outside else _IN_PLACE if is_in_place else None
        yield _NOTHING_COMPILED + (_PASSED_OVER.format(*ways) if ways else "")
    elif (is_compiled or is_outside) and not is_compilation_told:
        yield _COMPILED
    if (
        card is None
        and isinstance(step, InferenceStep)
        and step.mode != "grad"
        and any(isinstance(module, nn.TransformerEncoderLayer) for module in step.model.modules())
    ):
        yield _FUSED
    if isinstance(step, InferenceStep) and (window := step.window_within()):
        yield (
            f"The sliding window of {window} tokens is assumed not to fill while tokens are "
            "generated. Once it is full, less memory is needed."
        )
    if step.ranks is not None:
        rank = f"Rank {step.ranks.rank} of {step.ranks.world_size} under {step.ranks.name}"
        yield f"{rank}: collectives are assumed to take no time."
    if card is None or card.amd_architecture:
        return  # on AMD MIOpen runs in place of cuDNN; the card says so
    if any(isinstance(module, nn.RNNBase) for module in step.model.modules()):
        yield _RECURRENT
    if any("convolution" in call.operator for call in calls):
        if not workspaces_are_known():
            yield _UNKNOWN_WORKSPACES
            return
        major, rest = divmod(cudnn.version() or 0, 10_000)
        yield _VERSION.format(f"{major}.{rest // 100}.{rest % 100}")
