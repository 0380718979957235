"""fully_shard_optimizer: the step of an optimizer on plain local tensors, while it looks as before from outside."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard import _arguments, _torch
from flatshard.engine import steps
from flatshard.engine.homes import OWNER, generation, is_replaced, successor_of
from flatshard.engine.main_grads import MAIN_GRAD
from flatshard.optim.runs import Run, State, cut, cut_of, is_elementwise, local_part

Opt = TypeVar("Opt", bound=Optimizer)

# Optimizers of torch whose update of an element reads nothing but that element and numbers that all elements share.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
# Class names of optimizers, torch's and well-known others, that read a whole parameter: on a part of one they would
# compute something else without saying so.
_WHOLE = {
    **dict.fromkeys(("Adafactor", "CAME"), "factors second moments over rows and columns"),
    **dict.fromkeys(("Muon", "Shampoo", "DistributedShampoo", "SOAP"), "works on whole matrices"),
    **dict.fromkeys(("LAMB", "Lamb", "LARS", "Lars", "NovoGrad"), "scales by norms of whole parameters"),
    **dict.fromkeys(("Prodigy", "DAdaptAdam", "DAdaptSGD"), "sums over all parameters"),
}
_LOCAL = "_flatshard_local"
_CHECKED = "_flatshard_checked"
_SCALARS = "_flatshard_scalars"
_NUMBERS = {"step", "mu_product", "mu", "eta"}  # in the state of torch's optimizers, plain tensors for any parameter


def fully_shard_optimizer(optimizer: Opt, *, precision_aware: bool = False) -> Opt:
    """Make ``step`` of an optimizer over sharded parameters work on plain local tensors; returns the optimizer itself.

    An optimizer works on sharded parameters without this call too, through DTensor, which costs host time for every
    parameter. With it, neighbours in a group's buffer that are of one parameter group, have a gradient, and have taken
    as many steps are stepped as one flat tensor, if the optimizer is one of torch's elementwise ones. Any other class
    is given the local part of each parameter, in its shape: that is right if its update of an element reads only that
    element. Optimizers known to read more (LBFGS, Adafactor, Muon, LAMB, ...) are refused.

    From outside nothing changes: ``param_groups``, ``state[p]`` (DTensors over the flat state), ``state_dict``,
    ``load_state_dict``, ``add_param_group``, hooks, schedulers and GradScaler. ``optimizer.state`` is brought up to
    date when it is asked for; a reference to it that was kept from before a step is not. A closure is evaluated once,
    before the step. Calling this again changes nothing but ``precision_aware``.

    Gradients whose dtype is not that of the main weights (``MixedPrecisionPolicy(grad_dtype=...)``) are cast for the
    step; with ``precision_aware=True`` the optimizer is given them as they are.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    precision_aware = _arguments.flag("precision_aware", precision_aware)
    if _LOCAL in optimizer.__dict__:
        optimizer.__dict__[_LOCAL].uncast = precision_aware
        return optimizer
    _refuse(optimizer)
    _refuse_replaced(optimizer)
    scheduled = _torch.take_scheduler_patch(optimizer)
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"`step` of this {type(optimizer).__name__} has been replaced on the instance, which would go past the "
            "local step; call fully_shard_optimizer first and replace it then"
        )
    optimizer.__dict__[_LOCAL] = _Local(type(optimizer) in ELEMENTWISE, precision_aware)
    optimizer.__class__ = _local_class(type(optimizer))  # type: ignore[assignment]
    if scheduled:
        _torch.put_scheduler_patch(optimizer)
    return optimizer


def _refuse(optimizer: Optimizer) -> None:
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    name = names[0]
    if "LBFGS" in names:
        raise ValueError(
            f"{name} evaluates the model several times in a step and needs dot products over all parameters; "
            "use an elementwise optimizer such as AdamW"
        )
    if "SparseAdam" in names:
        raise ValueError(f"{name} takes sparse gradients; those of sharded parameters are dense: use Adam")
    for found in names:
        if found in _WHOLE:
            raise ValueError(
                f"{name} {_WHOLE[found]}, which a rank has only parts of; use it without fully_shard_optimizer, if it "
                "works on DTensor parameters, or an elementwise optimizer such as AdamW"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"{name}(differentiable=True): sharded main weights have no graph; leave it out")


# Class


_CLASSES: dict[type[Optimizer], type[Optimizer]] = {}


def _local_class(cls: type[Optimizer]) -> type[Optimizer]:
    """A subclass of ``cls`` whose step and state are `_Local`'s."""
    if cls not in _CLASSES:
        base = cls.step
        if getattr(base, "hooked", False):  # hooks run around our step, not inside, where the optimizer is not itself
            base = base.__wrapped__  # type: ignore[attr-defined]
        step = Optimizer.profile_hook_step(_step_over(base))
        step.hooked = True  # type: ignore[attr-defined]
        members = {"step": step, "state": property(_get_state, _set_state), "zero_grad": _zero_grad}
        names = {"__doc__": cls.__doc__, "__module__": cls.__module__}
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (cls,), {**names, **members})
    return _CLASSES[cls]


def _step_over(base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = _local(self).step(self, functools.partial(base, self, *((None, *args) if args else ()), **kwargs))
        return result if closure is None else loss

    return step


def _local(optimizer: Optimizer) -> _Local:
    if _LOCAL not in optimizer.__dict__:  # a copy: it has its parameters and its state, not the rest
        optimizer.__dict__[_LOCAL] = _Local(type(optimizer).__mro__[1] in ELEMENTWISE, False)
    found = optimizer.__dict__[_LOCAL]
    assert isinstance(found, _Local)
    return found


def _get_state(self: Optimizer) -> Any:
    return _local(self).look(self)


def _set_state(self: Optimizer, state: Any) -> None:
    self.__dict__["state"] = state


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """As `Optimizer.zero_grad`; main gradients are zeroed by one call for all, or their memory is freed at once."""
    if not set_to_none:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if grads and all(hasattr(grad, MAIN_GRAD) for grad in grads):
            torch._foreach_zero_([_torch.local_of(grad) for grad in grads])
            return
    type(self).__mro__[1].zero_grad(self, set_to_none)  # type: ignore[attr-defined]
    if set_to_none:
        _local(self).rest_gradients()


# Step


class _Local:
    """The local side of one optimizer: what its step sees, and how that becomes the state that others see.

    The state that others see is the optimizer's own dict. It is older than ours after a step, until somebody looks;
    what somebody did to it is noticed at the next step, and ours is then made anew from it.
    """

    def __init__(self, flat: bool, uncast: bool) -> None:
        self.flat = flat
        self.uncast = uncast
        self._runs: list[Run] | None = None
        self._generation = 0  # when the runs were cut
        self._absent: Sequence[torch.Tensor] = []
        self._others: list[list[torch.Tensor]] = []
        self._ids: list[list[int]] = []
        self._state: defaultdict[Any, State] = defaultdict(dict)
        self._outer: Any = None  # the optimizer's dict as we know it
        self._outdated = False
        self._looked = True
        self._lent = False

    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class on the runs."""
        groups = optimizer.param_groups
        if not self._is_prepared(optimizer):
            self._prepare(optimizer)
        assert self._runs is not None
        tensors: list[list[torch.Tensor]] = [list(others) for others in self._others]
        for run in self._runs:
            tensors[run.number].append(run.tensor)
        lent = [{**group, "params": params} for group, params in zip(groups, tensors)]
        optimizer.param_groups, self._lent = lent, True
        self._outdated, self._looked = True, False
        try:
            return base()
        finally:
            optimizer.param_groups, self._lent = groups, False
            for group, mine in zip(groups, lent):
                mine["params"] = group["params"]
                group.update(mine)  # some optimizers count in their parameter groups
            for run in self._runs:
                run.tensor.grad = None  # so that `zero_grad` frees the gradients at once

    def rest_gradients(self) -> None:
        """Free the memory of gradients that have been set to None."""
        with _torch.PlainAttributes():
            for group in dict.fromkeys(run.group for run in self._runs or ()):
                if group is not None:
                    group.gradients.main_grads.rest()

    def look(self, optimizer: Optimizer) -> Any:
        """The state as others see it, up to date; during the step, ours."""
        if self._lent:
            return self._state
        outer = optimizer.__dict__["state"]
        if outer is not self._outer:
            self._forget()
            self._outer = outer
        self._looked = True
        if self._outdated and self._runs is not None:
            kinds, known = self._kinds(), len(outer)
            for run in self._runs:
                if run.tensor in self._state:
                    run.show(self._state[run.tensor], kinds, outer)
            ours = {id(run.tensor) for run in self._runs}
            for key, value in self._state.items():  # parameters that are not sharded, and what is of none
                if id(key) not in ours:
                    outer[key] = value
            if len(outer) != known:
                # Runs lie in another order on each rank, and whoever gathers the state goes by the order of its keys.
                order = [p for group in optimizer.param_groups for p in group["params"] if p in outer]
                entries = {key: outer.pop(key) for key in [*order, *(key for key in outer if key not in set(order))]}
                outer.update(entries)
            self._outdated = False
        return outer

    def places(self, optimizer: Optimizer) -> list[object]:
        """Where the state is, for those who must know if it is elsewhere later. Does not count as a look."""
        tensors = [value for state in self._state.values() for value in state.values()]
        outer = optimizer.__dict__["state"]
        return [id(outer), *[value.data_ptr() for value in tensors if isinstance(value, torch.Tensor)]]

    def settle(self) -> bool:
        """See now what others have done to the state, since a step that is captured cannot. Whether it is nothing."""
        if self._looked and self._runs is not None and self._agrees():
            self._looked = False
        return not self._looked

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        """Whether the runs are still right; if so they have their gradients."""
        if self._runs is None or optimizer.__dict__["state"] is not self._outer or self._generation != generation():
            return False
        if [list(map(id, group["params"])) for group in optimizer.param_groups] != self._ids:
            return False
        if any(parameter.grad is not None for parameter in self._absent):
            return False
        if not all(run.is_current and run.attach(self.uncast) for run in self._runs):
            return False
        return not self._looked or self._agrees()

    def _agrees(self) -> bool:
        """Whether those who have looked at the state have left it as it was."""
        assert self._runs is not None
        kinds, known = self._kinds(), {id(parameter) for parameter in self._absent}
        for run in self._runs:
            if not run.agrees(self._state.get(run.tensor, {}), kinds, self._outer):
                return False
            known.update(map(id, run.parameters))
        rest = {id(key): key for key in self._outer if id(key) not in known}
        ours = {id(run.tensor) for run in self._runs}
        mine = {id(key) for key in self._state if id(key) not in ours}
        return rest.keys() == mine and all(self._outer[key] is self._state[key] for key in rest.values())

    def _kinds(self) -> dict[Any, bool]:
        """Per name in the state, whether it has a number for each element. One parameter alone cannot always tell."""
        assert self._runs is not None
        kinds: dict[Any, bool] = {}
        for run in self._runs:
            for key, value in self._state.get(run.tensor, {}).items():
                same = isinstance(value, torch.Tensor) and value.shape == run.tensor.shape and key != "step"
                kinds[key] = kinds.get(key, True) and same
        return kinds

    def _prepare(self, optimizer: Optimizer) -> None:
        """Cut runs, and fill our state from the one that others see."""
        outer = self.look(optimizer)
        groups = optimizer.param_groups
        _cut_as_parameters(groups, outer)
        _refuse_replaced(optimizer)
        self._runs, self._absent, self._others = cut(groups, outer, self.flat)
        self._generation = generation()
        self._ids = [list(map(id, group["params"])) for group in groups]
        self._state = defaultdict(dict)
        sharded = set(map(id, self._absent))
        for run in self._runs:
            taken, kinds = run.take(outer)
            if taken:
                self._state[run.tensor] = taken
                run.show(taken, kinds, outer)  # views take the place of what was joined, which is freed
            sharded.update(map(id, run.parameters))
            if not run.attach(self.uncast):
                raise AssertionError("a run was cut that does not fit its gradients")
        for key, value in outer.items():
            if id(key) not in sharded:
                self._state[key] = value

    def _forget(self) -> None:
        self._runs, self._outdated, self._state = None, False, defaultdict(dict)


# Of one number per parameter, whatever its shape: names in the state of torch's optimizers.
_PER_PARAMETER = {"step", "mu_product", "eta", "mu"}


def _cut_as_parameters(groups: Sequence[dict[str, Any]], state: Any) -> None:
    """Cut state anew that was loaded in another form, as torch's full state dicts give it.

    In the order of the parameters: runs lie in another order on each rank, and gathering is collective.
    """
    for parameter in (p for group in groups for p in group["params"] if isinstance(p, DTensor)):
        for key, value in list(state.get(parameter, {}).items()):
            if isinstance(value, DTensor) and cut_of(value) != cut_of(parameter):
                fresh = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                state[parameter][key] = fresh.copy_(value)
            elif type(value) is torch.Tensor and value.shape == parameter.shape == () and key not in _PER_PARAMETER:
                state[parameter][key] = _torch.like_dtensor(parameter, value.to(parameter.device))


# Optimizers from before sharding


def _refuse_replaced(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = parameter.__dict__.get(OWNER)
            sharded = isinstance(parameter, DTensor)
            if not is_replaced(parameter) and (owner is None or sharded):
                continue
            known = "a parameter" if owner is None else f"'{owner[0]}' of {owner[1]}"
            when = (
                "as it was before another parameter was assigned in its place"
                if sharded
                else "as it was before fully_shard, or while it was unsharded"
            )
            raise RuntimeError(
                f"parameter group {number} of this {type(optimizer).__name__} holds {known} {when}; a step on it would "
                f"not train the model. Build the optimizer after {'that' if sharded else 'fully_shard'}, on "
                "model.parameters()"
            )


def _refuse_factored(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Raise if rows and columns of sharded matrices are asked for their moments, which DTensor fails in."""
    if not any(cls.__name__ in ("Adafactor", "CAME") for cls in type(optimizer).__mro__):
        return
    if any(isinstance(p, DTensor) and p.dim() > 1 and any(a.is_shard() for a in p.placements) for p in parameters):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} {_WHOLE['Adafactor']}, and these matrices are sharded: step each as a whole, on one rank, by "
            "fully_shard_optimizer(optimizer, whole=True), or use an elementwise optimizer such as AdamW"
        )


def is_settled(optimizer: Optimizer) -> bool:
    """Before a step is captured: whether it can go without reading what others have done to its state."""
    local: _Local | None = optimizer.__dict__.get(_LOCAL)
    return local is None or local.settle()


def state_places(optimizer: Optimizer) -> list[object]:
    """Where the state of an optimizer is."""
    local: _Local | None = optimizer.__dict__.get(_LOCAL)
    if local is not None:
        return local.places(optimizer)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    locals_ = [_torch.local_of(value) if isinstance(value, DTensor) else value for value in tensors]
    return [value.data_ptr() for value in locals_ if isinstance(value, torch.Tensor)]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before every step of every optimizer: looks at parameters only when there can be something new.

    In a compiled step it is traced, and does no more than to count.
    """
    steps.note()
    if torch.compiler.is_compiling():
        return
    now = (generation(), sum(len(group["params"]) for group in optimizer.param_groups))
    if now[0] and optimizer.__dict__.get(_CHECKED) != now:
        _refuse_replaced(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if _LOCAL not in optimizer.__dict__:
            _refuse_factored(optimizer, parameters)
            for parameter in parameters:
                if isinstance(parameter.grad, DTensor) and parameter.grad.dtype != parameter.dtype:
                    raise RuntimeError(
                        f"gradients have dtype {parameter.grad.dtype} and main weights {parameter.dtype}; call "
                        "fully_shard_optimizer(optimizer), which casts them"
                    )
        optimizer.__dict__[_CHECKED] = now
        optimizer.__dict__[_SCALARS] = [p for p in parameters if isinstance(p, DTensor) and p.dim() == 0]
    if now[0] and optimizer.__dict__[_SCALARS] and _LOCAL not in optimizer.__dict__:
        _wrap_scalars(optimizer)


def _wrap_scalars(optimizer: Optimizer) -> None:
    """Let loaded state of parameters without dims be DTensors, as what the optimizer has made itself is.

    torch's functions that distribute a whole state dict leave every number as it is.
    """
    for parameter in optimizer.__dict__[_SCALARS]:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            loaded = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() == 0
            if loaded and key not in _NUMBERS:
                state[key] = _torch.like_dtensor(parameter, value.to(_torch.local_of(parameter).device))


register_optimizer_step_pre_hook(_before_step)


def repoint(optimizer: Optimizer) -> None:
    """Put sharded parameters in the place of those that `fully_shard` has replaced, and shard their state.

    Tensors of a parameter's shape are cut as the parameter is; all else in its state is kept as it is.
    """
    for group in optimizer.param_groups:
        for place, original in enumerate(group["params"]):
            if not is_replaced(original):
                continue
            sharded = successor_of(original)
            if sharded is None:
                raise RuntimeError("the model that this optimizer was built for has been deleted")
            group["params"][place] = sharded
            state = optimizer.state.pop(original, None)
            if state is None:
                continue
            local = _torch.local_of(sharded)
            for key, value in state.items():
                full = isinstance(value, torch.Tensor) and key != "step" and value.shape == sharded.shape
                if full or is_elementwise(value, sharded):
                    part = local_part(sharded, value).detach().to(local.device, local.dtype, copy=True)
                    state[key] = _torch.like_dtensor(sharded, part)
            optimizer.state[sharded] = state
