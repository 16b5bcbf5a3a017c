"""CopiedRun: a training, and forward passes after it, on copies of fake tensors."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from memcallback.core.module_table import ModuleInfo
from memcallback.cuda.decompositions.rnn import flatten_rnn_weights
from memcallback.step.beside import plain_tensors
from memcallback.step.copies.functions import optimizers_in_hooks
from memcallback.step.copies.objects import fake_copy
from memcallback.step.copies.optimizers import (
    fill_history,
    moved_to,
    optimizer_from,
    optimizer_parts,
    run_to_the_end,
)
from memcallback.step.inference_step import InferenceStep
from memcallback.step.lightning_batch import parts_with_tensors, stand_in
from memcallback.step.pipeline import Pipeline, PipelineError
from memcallback.step.ranks import Ranks
from memcallback.step.training_step import TrainingStep
from memcallback.trace.caveats import caveats
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.dispatch.real_tensors import addresses, owning_parts
from memcallback.trace.loops.batches import Batches, hook_error
from memcallback.trace.loops.inference import Inference
from memcallback.trace.loops.loop import run_window
from memcallback.trace.loops.passes import Training
from memcallback.trace.marks import TraceMarks, in_order_of_moving
from memcallback.trace.moving import Moving
from memcallback.trace.on_device import holders_in, is_on_device, show_device
from memcallback.trace.patches.compiled import CompiledCode
from memcallback.trace.repetitions import Irregular, grown
from memcallback.trace.request import TraceRequest
from memcallback.trace.traced_step import TracedStep

_FULL_HISTORY = (
    "LBFGS is assumed to run all its iterations, and to have a full history from the second update "
    "on."
)
_UNCHECKED = (
    "A prediction leaves out the checks that metrics of torchmetrics make of their arguments "
    "(validate_args). In training they need some memory for a moment."
)


class CopiedRun:
    """A training on copies of fake tensors, from moving the model to the device on."""

    def __init__(
        self, request: TraceRequest, mode: TraceMode, code: CompiledCode, ranks: Ranks | None
    ) -> None:
        self._request, self._mode, self._code, self._ranks = request, mode, code, ranks
        step = request.step
        #: The training, and the forward passes that are predicted after it.
        self._training = request.training
        self._inference = step if isinstance(step, InferenceStep) else None
        training = self._training
        parts = (
            [optimizer_parts(optimizer) for optimizer in training.given_optimizers]
            if training
            else []
        )
        beside = step.beside()
        # By where they are: on the host, or on the device. Before the model is on a device, those
        # on the host may be moved with it. A buffer that is still on the host then stays there.
        is_moved = any(one.device.type not in ("cpu", "meta") for one in step.model.parameters())
        attributes = {
            is_host: plain_tensors(step.model, on_host=is_host)
            if mode.spec and (is_moved or not is_host)
            else {}
            for is_host in (True, False)
        }
        host_buffers = [
            buffer
            for buffer in step.model.buffers()
            if mode.spec and is_moved and buffer.device.type == "cpu"
        ]
        self._parts_of_datamodule = parts_with_tensors(request.datamodule)
        try:
            (
                self._model,
                self._examples,
                self._parts,
                self._beside,
                self._losses,
                self._forward,
                self._attributes,
                self._host_buffers,
                self._copies_for_datamodule,
            ) = fake_copy(
                (
                    step.model,
                    {one.stage: request.batch_of(one) for one in (training, step) if one},
                    parts,
                    beside,
                    training.functions_to_copy() if training else (),
                    self._inference.functions_to_copy() if self._inference else (),
                    attributes,
                    host_buffers,
                    self._parts_of_datamodule,
                ),
                mode,
                compiles=request.compiles,
            )
        except Exception as error:  # a user's object can refuse to be copied in any way
            if not self._parts_of_datamodule:
                raise
            name = type(request.datamodule).__name__
            raise hook_error(f"{name} cannot be copied", error) from error
        on_host = {name for name, it in beside.items() if not is_on_device(it)}
        self._left_on_host = on_host if is_on_device(step.model) else set()
        #: Of what is there whether it runs or not: where its storages lie, and their fakes.
        held = step.held()
        self._held = {
            name: (addresses(it), list(owning_parts(self._beside[name])))
            for name, it in beside.items()
            if name in held
        }
        moving = {name: it for name, it in beside.items() if name not in self._left_on_host}
        self._moving = Moving(
            (step.model, self._model), *((it, self._beside[name]) for name, it in moving.items())
        )
        self._is_of_datamodule_on_host = {
            attribute: [mode.spec is not None and not is_on_device(one) for one in holders_in(part)]
            for attribute, part in self._parts_of_datamodule.items()
        }
        if mode.spec:
            roots = *self._beside.values(), *self._copies_for_datamodule.values()
            show_device((self._model, *roots))
        for module in self._model.modules():
            if type(module).__module__.startswith("torchmetrics.") and getattr(
                module, "validate_args", False
            ):
                vars(module)["validate_args"] = False
                mode.assumed[_UNCHECKED] = None
        self._in_hooks: list[torch.optim.Optimizer] = []
        self.marks = TraceMarks(mode, self._model)
        #: Parts that a pipeline cuts a batch into, each with the samples of one batch.
        self._num_parts = 1
        self._infos: tuple[ModuleInfo, ...] = ()
        #: Of the model's last call, if the training keeps them.
        self._outputs: Any = None
        #: Totals at the end of each update.
        self._num_flops, self._sent_bytes = [0], [0]

    def run(self) -> None:
        """Run the updates, and the forward passes after them."""
        request, mode = self._request, self._mode
        for one in (self._training, self._inference):
            if one is not None and one.prepare is not None:
                self._examples[one.stage] = one.prepare(self._model, self._examples[one.stage])
        if mode.spec:
            if self._ranks is None:
                self._moving.run()
            flatten_rnn_weights(self._model)
        if self._ranks is None:
            mode.is_recording = True
            on_host = set(map(id, self._host_buffers))
            self.marks.add_model(
                "cpu" if id(tensor) in on_host else "cuda"
                for _, tensor in in_order_of_moving(self._model)
            )
        else:
            self._parallelize(self._ranks)
        batches = Batches(
            request,
            self._examples,
            self._model,
            self._copied_datamodule(),
            marks=self.marks,
            mode=mode,
            num_parts=self._num_parts,
        )
        for is_host, attributes in self._attributes.items():
            while attributes:  # and not kept: the model may replace them
                name, tensors = attributes.popitem()
                self.marks.add_beside(name, tensors, is_host=is_host)
        for name, it in self._beside.items():
            is_host = name in self._left_on_host
            if name in self._held:
                self.marks.add_beside(name, it, is_host=is_host)
                mode.real_tensors.are_recorded(*self._held.pop(name), mode.ledger)
            else:
                self.marks.add_when_it_runs(name, it, is_host=is_host)
        optimizers = self._optimizers()
        self._infos = self.marks.module_infos()
        with self.marks.modules_followed(), closing(batches):
            if self._training is not None:
                self._train(self._training, optimizers, batches)
            if self._inference is not None:
                self._code.end_training()
                self._infer(self._inference, batches)

    def _copied_datamodule(self) -> Any:
        """A copy of the DataModule whose hooks run; what it has on the device is recorded."""
        datamodule = self._request.datamodule
        if datamodule is None:
            return None
        for attribute, are_on_host in self._is_of_datamodule_on_host.items():
            copies = holders_in(self._copies_for_datamodule[attribute])
            for is_host, copy in zip(are_on_host, copies, strict=True):
                name = f"{type(datamodule).__name__}.{attribute}"
                self.marks.add_beside(name, copy, is_host=is_host)
        return stand_in(datamodule, self._copies_for_datamodule)

    def _train(
        self,
        step: TrainingStep,
        optimizers: tuple[torch.optim.Optimizer, ...],
        batches: Batches,
    ) -> None:
        mode = self._mode
        training = Training(
            step=step,
            model=self._model,
            losses=self._losses or step.losses,
            optimizers=optimizers,
            make_batches=partial(batches.new, step),
            marks=self.marks,
            device_type=self._device_type,
            reads=mode.placeholders.reads,
            assumed=mode.assumed,
        )
        hooks = ExitStack()
        if step.keep_outputs == "last":
            hooks.callback(self._model.register_forward_hook(self._keep_outputs).remove)
        if self._ranks:
            mode.num_windows_to_settle = self._ranks.num_updates_to_settle
        number, num_to_settle = 0, mode.num_windows_to_settle
        with hooks:
            # Compiled code tells in the first update how many it takes.
            while number < (self._request.num_updates or num_to_settle + 1):
                num_to_settle = self._update(training)
                if number == 0 and fill_history(optimizers):
                    self.marks.label_states(optimizers)
                    mode.assumed[_FULL_HISTORY] = None
                number += 1
            if not self._request.num_updates and self._request.follows_other_batch:
                self._follow_other_batch(training, number, batches)

    def _update(self, training: Training) -> int:
        """Run an update; gives the number of those after which all are alike."""
        run_window(training)
        self.marks.label_states(self._in_hooks)
        return self._count_work()

    def _follow_other_batch(self, training: Training, num_to_settle: int, batches: Batches) -> None:
        """Run an update with a batch of another size, and some more with the step's own."""
        step, code = training.step, self._code
        own = batches.sizes(step)
        other = own.other(step)
        # A pipeline's stages agree on the sizes before the first batch.
        if other == own or not code.has_compiled_passes or isinstance(self._model, Pipeline):
            return
        code.say_other_batch(own, other)
        # A graph warms up with the first batch of a size, and is recorded with the second.
        for _ in range(2 if code.has_graphs else 1):
            batches.other, self.marks.other_batch_size = other, other.batch_size
            self._update(training)
            batches.other = self.marks.other_batch_size = None
            for _ in range(num_to_settle):
                self._update(training)

    def _keep_outputs(self, model: torch.nn.Module, batch: object, outputs: Any) -> None:
        self._outputs = outputs

    def _infer(self, step: InferenceStep, batches: Batches) -> None:
        if step.frees_gradients and step.lightning is not None:
            step.lightning.free_gradients(self._model)
        elif step.frees_gradients:
            self._model.zero_grad(set_to_none=True)
        if step.after is not None or step.lightning is not None:
            self._model.eval()
        (forward,) = self._forward or (step.forward,)
        Inference(
            step=step,
            model=self._model,
            forward=forward,
            new_batch=lambda: batches.new(step).pop(),
            marks=self.marks,
            device_type=self._device_type,
            period=self._request.period,
        ).run(self._count_work)

    def _count_work(self) -> int:
        """Note the totals so far; gives the number of windows after which all are alike."""
        self._mode.num_windows += 1
        self._num_flops.append(self._mode.num_flops)
        self._sent_bytes.append(self._mode.sent_bytes)
        return self._mode.num_windows_to_settle

    @property
    def _device_type(self) -> str:
        return "cuda" if self._mode.spec else "cpu"

    def close(self) -> None:
        """Stop recording, and release what keeps the trace alive."""
        mode = self._mode
        mode.is_recording = False
        self._outputs = None
        if self._training is not None and self._training.lightning is not None:
            self._training.lightning.outputs = {}
        mode.ledger.close()
        mode.in_flight.close()
        # Python's garbage collector does not see that a tensor refers to its gradient: left there,
        # it would keep all this alive.
        for parameter in self._model.parameters():
            parameter.grad = None
        mode.modules = None

    def as_traced(self, code: CompiledCode) -> TracedStep | Irregular:
        """What was recorded; why parts that are to be repeated do not repeat."""
        ledger, request = self._mode.ledger, self._request
        batch_size = request.batch_size or request.step.batch_size.batch_size
        assert batch_size
        traced = TracedStep(
            trace=ledger.trace(),
            batch_size=batch_size,
            calls=ledger.calls,
            caveats=(
                *caveats(
                    request.step,
                    ledger.calls,
                    card=request.device,
                    is_compilation_told=code.has_compiled or code.is_noted,
                    has_no_operators=code.has_no_operators,
                ),
                *self._mode.assumed,
            ),
            num_flops=self._num_flops[-1] - self._num_flops[-2],
            sent_bytes=self._sent_bytes[-1] - self._sent_bytes[-2],
            num_batches=(self._training.accumulate if self._training else 1) * self._num_parts,
            origins=ledger.origins,
            modules=self._infos,
            has_compiled_passes=code.has_compiled_passes,
        )
        try:
            return grown(traced, self.marks.repeated_parts, ledger.cuts())
        except Irregular as error:
            return error

    def _parallelize(self, ranks: Ranks) -> None:
        """Parallelize the model, as the training does before its first step."""
        step, mode = self._request.step, self._mode
        # Its tensors start where the user's are.
        self.marks.add_model(tensor.device.type for _, tensor in in_order_of_moving(step.model))
        mode.is_recording = True
        before = dict(self._model.named_parameters())
        parallel = ranks.parallelize(self._model, "cuda" if mode.spec else "cpu")
        if isinstance(parallel, Pipeline):
            if step.lightning is not None:
                raise PipelineError(
                    "A LightningModule cannot run in a pipeline: Lightning has no strategy for "
                    "that. Give the step of the module in it: "
                    "TrainingStep(model, batch, loss=...)."
                )
            self._model, self._num_parts = parallel.named, parallel.num_microbatches
        self.marks.follow(self._model, parallel if ranks.compiles_wrapper else None)
        self.marks.label_model()
        after = dict(self._model.named_parameters())
        # A stage may have other names for the same parameters; parameters that have replaced
        # others elsewhere have the same names.
        own = {id(parameter) for parameter in before.values()}
        successors = {
            id(parameter if id(parameter) in own else before.get(name)): parameter
            for name, parameter in after.items()
        }
        if successors.keys() != own or any(
            number != id(parameter) for number, parameter in successors.items()
        ):
            self._parts = [moved_to(part, successors) for part in self._parts]
        if step.lightning is None:
            self._model = parallel
        else:
            step.lightning.call_through(self._model, parallel)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        step, parts = self._training, self._parts
        if step is None:
            return ()
        optimizers = tuple(map(optimizer_from, parts)) if parts else step.optimizers_of(self._model)
        if step.change_optimizers is not None:
            optimizers = tuple(step.change_optimizers(optimizers))
        if parts:
            self.marks.add_states(optimizers)
        # Those that update in the backward pass.
        self._in_hooks = [
            optimizer
            for optimizer in optimizers_in_hooks(self._model.modules())
            if optimizer not in optimizers
        ]
        self.marks.add_states(self._in_hooks)
        run_to_the_end(optimizers)
        return optimizers
