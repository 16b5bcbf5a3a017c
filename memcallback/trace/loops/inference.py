"""Runs forward passes as an inference or evaluation loop does, from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.types import Phase
from memcallback.step.inference_step import Forward, InferenceStep
from memcallback.trace.growth import num_to_trace
from memcallback.trace.loops.passes import autocast
from memcallback.trace.marks import TraceMarks


@dataclass
class Inference:
    """A step with the copies that it runs on, none of which is the user's.

    Attributes:
        step: The step.
        model: The model.
        forward: The forward pass.
        new_batch: Makes the next batch, on the device.
        marks: Marks steps and phases in the trace.
        device_type: `cuda` or `cpu`, for autocast.
        period: After how many repetitions (tokens, batches) the same kernels run again.
    """

    step: InferenceStep
    model: Any
    forward: Forward
    new_batch: Callable[[], Any]
    marks: TraceMarks
    device_type: str
    period: int
    _kept: list[Any] = field(default_factory=list)

    def num_batches(self, num_to_settle: int) -> int:
        """How many batches are traced; where nothing grows, one after the memory has settled."""
        if self.step.num_batches is None:
            return num_to_settle + 1
        return num_to_trace(self.step.num_batches, self.period)

    def run(self, after_each: Callable[[], int]) -> None:
        """Run the batches; `after_each` gives after how many of them the memory has settled."""
        part = None
        if self.step.num_batches is not None:
            part = self.marks.repeated(self.step.num_batches, self.period)
        number, num_to_settle = 0, 1
        while number < self.num_batches(num_to_settle):
            if part is not None:
                part.cut()
            self._run_batch(number)
            num_to_settle = after_each()
            number += 1
        if part is not None:
            part.cut()

    def _run_batch(self, number: int) -> None:
        step = self.step
        with self.marks.step(step.stage):
            batch = self.new_batch()
            with self.marks.phase(Phase.FORWARD), self._modes():
                outputs = self._call(batch, number)
                if step.keep_outputs == "last":
                    # The variable of the loop holds the earlier ones until now.
                    self._kept.clear()
            if step.keep_outputs != "none":
                self._kept.append(outputs)
            del batch, outputs

    def _call(self, batch: Any, number: int) -> Any:
        step = self.step
        if step.lightning is not None:
            step.lightning.batch_number = number
        if step.generate is None:
            return self.forward(self.model, batch)
        with self._tokens(step.generate["max_new_tokens"]):
            given = batch if isinstance(batch, Mapping) else {"inputs": batch}
            return self.model.generate(**given, **step.generate)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Autograd and autocast as the step has them."""
        with ExitStack() as stack:
            modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
                "inference_mode": torch.inference_mode,
                "no_grad": torch.no_grad,
                "grad": torch.enable_grad,
            }
            stack.enter_context(modes[self.step.mode]())
            stack.enter_context(autocast(self.step, self.model, self.device_type))
            yield

    @contextmanager
    def _tokens(self, num_tokens: int) -> Iterator[None]:
        """Let `generate` run for some tokens inside, which end no sequence, and mark each."""
        name = "_has_unfinished_sequences"
        # A model may wrap the one that generates, as PEFT's do.
        generating = [part for part in self.model.modules() if hasattr(type(part), name)]
        if not generating:
            raise PredictionError(
                f"{type(self.model).__name__}.generate() has no {name}, which transformers calls "
                "for each token. Install a version of transformers that memcallback is tested with "
                "(docs/versions.md), or give forward=... with a loop of your own."
            )
        left = num_to_trace(num_tokens, self.period)
        part = self.marks.repeated(num_tokens, self.period)

        def has_unfinished(*_: object, **__: object) -> bool:
            nonlocal left
            part.cut()
            left -= 1
            return left >= 0

        for module in generating:
            setattr(module, name, has_unfinished)
        try:
            yield
        finally:
            for module in generating:
                delattr(module, name)
        if not part.cuts:
            raise PredictionError(
                f"{type(self.model).__name__}.generate() never called {name}, by which tokens are "
                "counted. Give forward=... with a loop of your own."
            )
