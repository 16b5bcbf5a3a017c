"""Formulas for optimizer state sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, *, device_type: str | None = None
) -> Mapping[str, int] | None:
    """Find the bytes of an optimizer's state after updates of every parameter that requires
    gradients.

    Where the optimizer has state for a parameter already, that is its size for good. Where it has
    none, a table of formulas says what it will be; it covers every class in torch.optim of torch
    2.6 to 2.13, and subclasses of them. Parameters without `requires_grad` have no state. Scalars
    such as `step` count on the device where torch keeps them: the CPU, or the parameter's device if
    the group says `capturable` or `fused`.
    """
    formula = next(
        (
            _FORMULAS[kind.__name__]
            for kind in type(optimizer).__mro__
            if kind.__name__ in _FORMULAS
        ),
        None,
    )
    prefers_table = formula is not None and (formula.grows or device_type is not None)
    steady: dict[str, int] = {}
    for group in optimizer.param_groups:
        for members in _members(group, formula):
            part = _sum_by_device(
                _bytes_by_device(optimizer.state.get(parameter, {})) for parameter in members
            )
            if not _is_frozen(members) and (prefers_table or not part):
                if formula is None:
                    return None
                part = _from_formula(formula, members, group, device_type or members[0].device.type)
            elif device_type is not None:
                part = {device_type: sum(part.values())}
            steady = _sum_by_device((steady, part))
    return steady


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What a formula may know of a parameter.

    Attributes:
        shape: Its shape.
        itemsize_bytes: Bytes of an element.
        scalar_bytes: Bytes of a scalar such as `step`: 4, or 8 where torch's default dtype is
            float64 (`_get_scalar_dtype` in torch/optim/optimizer.py).
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    scalar_bytes: int = 4

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter, and of a state tensor like it."""
        return math.prod(self.shape) * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a formula gives.

    Attributes:
        device_bytes: On the parameter's device.
        host_bytes: On the CPU, wherever the parameter is.
    """

    device_bytes: int = 0
    host_bytes: int = 0


Options = Mapping[str, Any]
ParameterFormula = Callable[[ParameterSpec, Options], StateBytes]
GroupFormula = Callable[[Sequence[ParameterSpec], Options], StateBytes]


@dataclass(frozen=True, kw_only=True)
class _Formula:
    """How an optimizer's state follows from its parameters and a group's options; exactly one of
    the two is given.
    """

    of_parameter: ParameterFormula | None = None
    of_group: GroupFormula | None = None

    @property
    def grows(self) -> bool:
        """Whether the state there is after one update need not be all."""
        return self.of_group is not None


_FORMULAS: dict[str, _Formula] = {}


def _register(name: str, formula: _Formula) -> None:
    if name in _FORMULAS:
        raise ValueError(
            f"There is a formula for the state of {name} already. Change that one, or use another class name."
        )
    _FORMULAS[name] = formula


def _formula(*names: str) -> Callable[[ParameterFormula], ParameterFormula]:
    def register(function: ParameterFormula) -> ParameterFormula:
        for name in names:
            _register(name, _Formula(of_parameter=function))
        return function

    return register


def _group_formula(name: str) -> Callable[[GroupFormula], GroupFormula]:
    def register(function: GroupFormula) -> GroupFormula:
        _register(name, _Formula(of_group=function))
        return function

    return register


def _state(
    spec: ParameterSpec,
    options: Options,
    *,
    num_like: int,
    num_scalars: int = 1,
    on_device: bool | None = None,
) -> StateBytes:
    like_bytes, scalars_bytes = num_like * spec.num_bytes, num_scalars * spec.scalar_bytes
    if on_device is None:
        on_device = bool(options.get("capturable"))
    if on_device:
        return StateBytes(device_bytes=like_bytes + scalars_bytes)
    return StateBytes(device_bytes=like_bytes, host_bytes=scalars_bytes)


@_formula("SGD")
def _sgd(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/sgd.py: momentum_buffer, if momentum is not 0."""
    return _state(spec, options, num_like=int(options["momentum"] != 0), num_scalars=0)


@_formula("Adam", "AdamW")
def _adam(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/adam.py: exp_avg, exp_avg_sq, max_exp_avg_sq with amsgrad, step."""
    on_device = bool(options.get("capturable") or options.get("fused"))
    return _state(spec, options, num_like=3 if options["amsgrad"] else 2, on_device=on_device)


@_formula("Adagrad")
def _adagrad(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/adagrad.py: sum, step; made at construction."""
    return _state(spec, options, num_like=1, on_device=bool(options.get("fused")))


@_formula("RMSprop")
def _rmsprop(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/rmsprop.py: square_avg, momentum_buffer with momentum, grad_avg if centered,
    step.
    """
    return _state(spec, options, num_like=1 + (options["momentum"] > 0) + bool(options["centered"]))


@_formula("Adadelta")
def _adadelta(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/adadelta.py: square_avg, acc_delta, step."""
    return _state(spec, options, num_like=2)


@_formula("Adamax")
def _adamax(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/adamax.py: exp_avg, exp_inf, step."""
    return _state(spec, options, num_like=2)


@_formula("NAdam")
def _nadam(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/nadam.py: exp_avg, exp_avg_sq, step, mu_product."""
    return _state(spec, options, num_like=2, num_scalars=2)


@_formula("RAdam")
def _radam(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/radam.py: exp_avg, exp_avg_sq, step."""
    return _state(spec, options, num_like=2)


@_formula("ASGD")
def _asgd(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/asgd.py: ax, and step, eta and mu, which are on the parameter's device always."""
    return _state(spec, options, num_like=1, num_scalars=3, on_device=True)


@_formula("Rprop")
def _rprop(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/rprop.py: prev, step_size, step."""
    return _state(spec, options, num_like=2)


@_formula("SparseAdam")
def _sparse_adam(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/sparse_adam.py: exp_avg, exp_avg_sq, dense like the parameter; step is a Python
    number.
    """
    return _state(spec, options, num_like=2, num_scalars=0)


@_formula("Muon")
def _muon(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/_muon.py: momentum_buffer, whatever the momentum."""
    return _state(spec, options, num_like=1, num_scalars=0)


@_formula("Adafactor")
def _adafactor(spec: ParameterSpec, options: Options) -> StateBytes:
    """torch/optim/_adafactor.py: row_var and col_var of a matrix, variance of a vector; step on the
    CPU always.
    """
    if len(spec.shape) < 2:
        return _state(spec, options, num_like=1, on_device=False)
    *batch, num_rows, num_columns = spec.shape
    factors_bytes = math.prod(batch) * (num_rows + num_columns) * spec.itemsize_bytes
    return StateBytes(device_bytes=factors_bytes, host_bytes=spec.scalar_bytes)


@_group_formula("LBFGS")
def _lbfgs(specs: Sequence[ParameterSpec], options: Options) -> StateBytes:
    """torch/optim/lbfgs.py: with a full history.

    d, prev_flat_grad and the history's old_dirs and old_stps are as long as all parameters
    together, frozen ones included; H_diag and the history's ro and al are scalars, and with a line
    search t is one too.
    """
    history_size: int = options["history_size"]
    flat_bytes = sum(spec.num_bytes for spec in specs)
    num_scalars = 1 + 2 * history_size + (options["line_search_fn"] is not None)
    return StateBytes(
        device_bytes=(2 + 2 * history_size) * flat_bytes
        + num_scalars * max(spec.itemsize_bytes for spec in specs)
    )


def _members(group: Mapping[str, Any], formula: _Formula | None) -> list[list[torch.Tensor]]:
    """The parameters to size together: a whole group, or one by one."""
    parameters: list[torch.Tensor] = group["params"]
    return (
        [parameters] if formula and formula.of_group else [[parameter] for parameter in parameters]
    )


def _is_frozen(parameters: Sequence[torch.Tensor]) -> bool:
    return not any(parameter.requires_grad for parameter in parameters)


def _from_formula(
    formula: _Formula, members: Sequence[torch.Tensor], options: Options, device_type: str
) -> dict[str, int]:
    scalar_bytes = (
        8 if torch.get_default_dtype() == torch.float64 and not options.get("fused") else 4
    )
    specs = [
        ParameterSpec(
            shape=tuple(member.shape),
            itemsize_bytes=member.element_size(),
            scalar_bytes=scalar_bytes,
        )
        for member in members
    ]
    if formula.of_group:
        state = formula.of_group(specs, options)
    else:
        assert formula.of_parameter
        state = formula.of_parameter(specs[0], options)
    return _sum_by_device(({device_type: state.device_bytes}, {"cpu": state.host_bytes}))


def _bytes_by_device(state: object) -> dict[str, int]:
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return _sum_by_device(
        {tensor.device.type: tensor.untyped_storage().nbytes()} for tensor in storages.values()
    )


def _sum_by_device(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for device_type, num_bytes in part.items():
            if num_bytes:
                total[device_type] = total.get(device_type, 0) + num_bytes
    return total
