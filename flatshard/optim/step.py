"""fully_shard_optimizer: the step of an optimizer on plain local tensors, with an unchanged public interface."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard import _arguments, _torch
from flatshard.engine.gradients.gradients import partial_gradients
from flatshard.engine.gradients.main_grads import MAIN_GRAD
from flatshard.engine.groups.registry import group_of, is_replaced, successor_of
from flatshard.engine.schedule.reduces import join_reduces
from flatshard.optim.adamw8bit import ROWWISE, AdamW8bit
from flatshard.optim.assignment import BUCKET, Cost, Predicate, Splits, WholeOptions, newton_schulz
from flatshard.optim.combined import run_closure
from flatshard.optim.flat_params import is_elementwise, local_part
from flatshard.optim.local_step import STEPPER, LocalStep, refuse_replaced, stepped_by_others
from flatshard.optim.refusals import original_class, refuse_class
from flatshard.optim.whole_step import WholeStep

Opt = TypeVar("Opt", bound=Optimizer)

# Optimizers of torch whose update of an element reads nothing but that element and numbers that all elements share.
_NAMES = "SGD Adam AdamW NAdam RAdam Adagrad Adadelta Adamax RMSprop Rprop ASGD"
ELEMENTWISE: tuple[type[Optimizer], ...] = tuple(getattr(torch.optim, name) for name in _NAMES.split())


def fully_shard_optimizer(
    optimizer: Opt,
    *,
    precision_aware: bool = False,
    in_backward: bool = False,
    offload_state: bool | None = None,
    whole: bool | Predicate = False,
    split: Splits = None,
    cost: Cost = newton_schulz,
    owners: Literal["shards", "all"] = "shards",
    bucket_bytes: int = BUCKET,
) -> Opt:
    """Make ``step`` of an optimizer over sharded parameters work on plain local tensors; returns the optimizer itself.

    An optimizer works on sharded parameters without this call too, through DTensor, which costs host time for every
    parameter. With it, neighbours in a group's buffer that are of one parameter group, have a gradient, and have taken
    as many steps are stepped as one flat tensor, if the optimizer is one of torch's elementwise ones. Any other class
    is given the local part of each parameter, in its shape: that is right if its update of an element reads only that
    element. Optimizers known to read more (LBFGS, Adafactor, Muon, LAMB, ...) are refused, unless ``whole``.

    From outside nothing changes: ``param_groups``, ``state[p]`` (DTensors over the flat state), ``state_dict``,
    ``load_state_dict``, ``add_param_group``, hooks, schedulers and GradScaler. ``optimizer.state`` is brought up to
    date when it is asked for; a reference to it that was kept from before a step is not. A closure is evaluated once,
    before the step. Calling this again changes nothing but ``precision_aware``, and raises for other options.

    Gradients whose dtype is not that of the main weights (``MixedPrecisionPolicy(grad_dtype=...)``) are cast for the
    step; with ``precision_aware=True`` the optimizer is given them as they are.

    ``in_backward``: from the second step on, backwards step the parameters of a unit once their gradients are complete,
    and free these gradients. Steps are put off as long as the gradients that wait take no more memory than the input of
    the largest reduce, so that the last ones run beside the last reduce. ``step`` then does what is left. The weights
    are the same to the last bit. There is one backward per step that reduces gradients all the way (`microbatch`),
    hyperparameters are set before it, and gradients cannot be clipped or scaled between the two. For torch's
    elementwise optimizers and `AdamW8bit`. Units under `CPUOffloadPolicy` are stepped on the device then: gradients
    stay there, and main weights and state are copied to the device and back, in pieces.

    ``offload_state``: state is in host memory, pinned if there is an accelerator, and is copied to the device and back
    for a step, in pieces. For the same optimizers. Default: only under `CPUOffloadPolicy`, and not if the optimizer has
    ``fused=True``, which the CPU steps faster. False: step on the CPU there.

    ``whole``: step whole parameters: all (True), or those that a function of name and parameter selects. Each is owned
    by one of the ranks that hold it. The owner's optimizer sees the parameter, its gradient and its state as ordinary
    tensors, which is right for every optimizer that steps its parameters one by one (docs/optimizers.md). All ranks
    must call ``step`` and ``state_dict`` then. Names are those of ``named_parameters`` if the optimizer was built on
    that; otherwise they begin at the parameter's unit.
    ``split``: whole parameters that are several matrices, by patterns of names or as a function of name and parameter:
    how many equal parts of their rows, or the rows of each part. ``cost``: of a matrix, from its shape; owners are
    balanced by it. ``owners="all"``: ranks that hold copies of a shard (HSDP's outer axis) share the work as well.
    ``bucket_bytes``: gradients and weights that an owner is sent at a time.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    precision_aware = _arguments.flag("precision_aware", precision_aware)
    for name, value in (("in_backward", in_backward), ("offload_state", offload_state)):
        is_supported = whole is False and original_class(optimizer) in (*ELEMENTWISE, AdamW8bit)
        if value is not None and _arguments.flag(name, value) and not is_supported:
            raise ValueError(
                f"{name}=True supports torch's elementwise optimizers and AdamW8bit on shards, not "
                f"{type(optimizer).__name__}{'' if whole is False else ' on whole parameters'}; leave it out"
            )
    options = _whole_options(whole, split, cost, owners, bucket_bytes)
    if isinstance(optimizer, FSDPOptimizer):  # or a copy of one
        existing = _stepper_of(optimizer)
        local = existing.local if isinstance(existing, WholeStep) else existing
        others = {
            "`whole`, or options of it": options != (existing.options if isinstance(existing, WholeStep) else None),
            "in_backward": in_backward and local.early_step is None,
            "offload_state": offload_state not in (None, local.offload_state),
        }
        for name in [name for name, is_other in others.items() if is_other]:
            raise ValueError(
                f"fully_shard_optimizer was called on this {original_class(optimizer).__name__} before, with another "
                f"{name}; build a new optimizer"
            )
        local.keep_dtype = precision_aware or bool(local.rowwise)
        return optimizer
    stepper = _local_step(type(optimizer), precision_aware, offload_state if whole is False else False)
    if in_backward:
        stepper.early_step = _plain_step(type(optimizer))
        # With this mark, a GradScaler calls `step` with the optimizer's `found_inf` set, and `step` raises.
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        optimizer.register_load_state_dict_pre_hook(lambda *_: stepper.recover_if_broken())
    if options is None:
        if isinstance(optimizer, AdamW8bit) and not (in_backward or stepper.offload_state or _has_offloaded(optimizer)):
            return optimizer  # it steps shards by itself
        refuse_class(optimizer, "all")
        refuse_replaced(optimizer)
        return _install(optimizer, stepper)
    return _install(optimizer, WholeStep(options, stepper))


def _local_step(cls: type[Optimizer], keep_dtype: bool, offloads: bool | None = None) -> LocalStep:
    """The `LocalStep` of an optimizer of this class."""
    stepper = LocalStep(cls in ELEMENTWISE, keep_dtype, offloads)
    if cls is AdamW8bit:
        stepper.rowwise, stepper.keep_dtype = ROWWISE, True  # it casts gradients itself
    return stepper


def _has_offloaded(optimizer: Optimizer) -> bool:
    groups = (group_of(parameter) for each in optimizer.param_groups for parameter in each["params"])
    return any(group is not None and group.home.host for group in groups)


def whole_optimizer(
    factory: Callable[[list[nn.Parameter]], Opt],
    model: nn.Module,
    whole: Predicate | None = None,
    *,
    split: Splits = None,
    cost: Cost = newton_schulz,
    owners: Literal["shards", "all"] = "shards",
    bucket_bytes: int = BUCKET,
    precision_aware: bool = False,
) -> Opt:
    """An optimizer that ``factory`` makes of the matrices of a model, each stepped whole by the rank that owns it.

    For optimizers whose constructor must see the matrices as they will be, as torch's Muon does, which takes nothing
    but matrices. ``whole(name, parameter)`` says of which parameters that need gradients they are made; by default,
    those of two dims or more. A tensor of three dims (experts, rows, columns) is so many matrices, one of more dims is
    a matrix of as many rows as its first dim has; ``split`` splits rows, and all else is as in `fully_shard_optimizer`.

    ``factory`` is given a list of plain parameters, alike on all ranks, without values: shape, dtype, device and what
    users have put on the model's parameters are there, and ``matrix_name``. It may make several parameter groups of
    them, and put other parameters of the model beside them, which are stepped on shards. Afterwards the optimizer's
    groups hold the model's parameters. The model may be unsharded; then every rank steps everything.
    """
    _arguments.module("whole_optimizer", model)
    options = _whole_options(whole or (lambda name, p: p.dim() >= 2), split, cost, owners, bucket_bytes, unbind=True)
    assert options is not None
    stepper = WholeStep(options, LocalStep(False, _arguments.flag("precision_aware", precision_aware), False))
    stepper.model = weakref.ref(model)
    named = [(n, p, 0) for n, p in model.named_parameters() if p.requires_grad and options.wants(n, p)]
    if not named:
        raise ValueError("whole_optimizer: `whole` selects no parameter of the model that requires gradients")
    optimizer = factory([each.tensor for each in stepper.add(named)])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the factory must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    stepper.local.flat = type(optimizer) in ELEMENTWISE
    stepper.adopt(optimizer)
    return _install(optimizer, stepper)


def _whole_options(
    whole: Any, split: Any, cost: Any, owners: Any, bucket_bytes: Any, unbind: bool = False
) -> WholeOptions | None:
    if not isinstance(whole, bool) and not callable(whole):
        raise TypeError(f"whole={whole!r}: must be a bool, or a function of a name and a parameter")
    if whole is False:
        if split is not None:
            raise ValueError("split applies to whole parameters only; select them with `whole`")
        return None
    if split is not None and not callable(split) and not isinstance(split, Mapping):
        raise TypeError(f"split={split!r}: must be a dict by name pattern, or a function of a name and a parameter")
    if not callable(cost):
        raise TypeError(f"cost={cost!r}: must be a function of the shape of a matrix")
    if owners not in ("shards", "all"):
        raise ValueError(f"owners={owners!r}: must be 'shards' or 'all'")
    return WholeOptions(whole, split, cost, owners, _arguments.whole_number("bucket_bytes", bucket_bytes, 1), unbind)


def _install(optimizer: Opt, stepper: LocalStep | WholeStep) -> Opt:
    """Make ``step`` of an optimizer use ``stepper``."""
    scheduled = _torch.take_scheduler_patch(optimizer)
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"`step` of this {type(optimizer).__name__} was replaced on the instance, which would hide the step of "
            "fully_shard_optimizer; call fully_shard_optimizer before you replace `step`"
        )
    state = optimizer.__dict__["state"]
    if isinstance(stepper, WholeStep):
        plan_whole(optimizer, stepper)
    optimizer.__dict__[STEPPER] = stepper
    kind = FSDPWhole if isinstance(stepper, WholeStep) else FSDPOffloaded if stepper.offload_state else FSDPOptimizer
    optimizer.__class__ = _class_of(type(optimizer), kind)  # type: ignore[assignment, arg-type]
    if state:
        optimizer.state = state
    if scheduled:
        _torch.put_scheduler_patch(optimizer)
    for _, group in stepped_by_others(optimizer):  # by an optimizer that this one replaces, and that still exists
        group.gradients.on_final = None
    return optimizer


def plan_whole(optimizer: Optimizer, stepper: WholeStep) -> None:
    """Plan which rank owns which whole parameter. Raises if the optimizer cannot step the others on shards."""
    stepper.plan(optimizer)
    is_all_whole = all(p in stepper.parts for group in optimizer.param_groups for p in group["params"])
    refuse_class(optimizer, "none" if is_all_whole else "rest")


# Classes


class FSDPOptimizer(Optimizer):
    """The class that `fully_shard_optimizer` puts before that of an optimizer. Its state is what `_stepper_of` shows.

    It adds no public name, which a user's class may have.
    """

    _flatshard_original: type[Optimizer]  # the class before that

    @property
    def state(self) -> Any:
        return _stepper_of(self).public_state(self)

    @state.setter
    def state(self, state: Any) -> None:
        stepper = self.__dict__.get(STEPPER)
        if isinstance(stepper, WholeStep):
            with stepper.taking_state(self, state) as state:
                pass
        self.__dict__["state"] = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `Optimizer.zero_grad`; main gradients are zeroed by one call for all, or their memory is freed at once.

        Gradients that earlier micro-batches have left unreduced are dropped too, if all of their group are this
        optimizer's.
        """
        _drop_unreduced(self)
        join_reduces(to_host=not set_to_none)
        if not set_to_none:
            _stepper_of(self).free_gradients()  # of parameters that a backward has stepped
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if grads and all(hasattr(grad, MAIN_GRAD) for grad in grads):
                torch._foreach_zero_([_torch.local_of(grad) for grad in grads])
                return
            super().zero_grad(set_to_none)
            return
        with _torch.PlainAttributes():  # reading a gradient would copy those that have stayed on the device
            super().zero_grad(set_to_none)
        _stepper_of(self).free_gradients()


class FSDPOffloaded(FSDPOptimizer):
    """With ``offload_state``."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own, which would copy all state to the device."""
        with _torch.loading_to_host():
            super().load_state_dict(state_dict)


class FSDPWhole(FSDPOptimizer):
    """With ``whole``. All ranks call these methods."""

    def state_dict(self) -> Any:
        """As `Optimizer.state_dict`. Tensors of whole parameters are DTensors that their owners hold."""
        stepper = _stepper_of(self)
        with stepper.local.overriding_state(stepper.saved_state(self)):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own, which may read and change what it has loaded: it sees all of it."""
        loaded: defaultdict[Any, Any] = defaultdict(dict)  # by parameter, with the same entries on all ranks
        with _stepper_of(self).local.overriding_state(loaded):
            super().load_state_dict(state_dict)
        self.state = loaded

    def __setstate__(self, state: dict[str, Any]) -> None:
        if STEPPER not in self.__dict__ or "state" not in state:
            super().__setstate__(state)
            return
        stepper, loaded = _stepper_of(self), state["state"]
        is_loading = stepper.is_stepping  # `load_state_dict` lends it what it loads
        with stepper.split_entries(loaded) if is_loading else stepper.taking_state(self, loaded) as seen:
            super().__setstate__({**state, "state": seen})


@functools.cache
def _class_of(cls: type[Optimizer], kind: type[FSDPOptimizer]) -> type[Optimizer]:
    """A subclass of ``cls`` whose step is that of a `LocalStep`, or of a `WholeStep`."""
    base = _plain_step(cls)

    @functools.wraps(base)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = run_closure(closure)
        result = _stepper_of(self).step(self, functools.partial(base, self, *((None, *args) if args else ()), **kwargs))
        return result if closure is None else loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    members = {"step": hooked, "_flatshard_original": cls, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(f"FSDP{cls.__name__}", (kind, cls), members)


def _plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class without hooks: hooks run around our step, not within it, where the optimizer is changed."""
    base = cls.step
    return base.__wrapped__ if getattr(base, "hooked", False) else base  # type: ignore[attr-defined]


def _stepper_of(optimizer: Optimizer) -> Any:
    """Its `LocalStep`, or `WholeStep`."""
    if STEPPER not in optimizer.__dict__:  # a copy: it has its parameters and its state, not the rest
        if isinstance(optimizer, (FSDPOffloaded, FSDPWhole)):
            raise RuntimeError(
                "a copy of an optimizer with whole=True or offload_state=True cannot be used; build an optimizer and "
                "call fully_shard_optimizer"
            )
        optimizer.__dict__[STEPPER] = _local_step(original_class(optimizer), False)
    return optimizer.__dict__[STEPPER]


def _drop_unreduced(optimizer: Optimizer) -> None:
    """Drop what backwards have left unreduced in groups whose parameters are all of the optimizer.

    Parameters that have been frozen since count too: another optimizer may wait for their gradients.
    """
    partial = partial_gradients()
    own = {id(parameter) for group in optimizer.param_groups if partial for parameter in group["params"]}
    for gradients in partial:
        params = [param.sharded for param in gradients.partial_params]
        # torch's get_optimizer_state_dict makes state by a step with zeros that it has put there, and clears them.
        are_zeros_of_torch = all(each.grad is not None and not hasattr(each.grad, MAIN_GRAD) for each in params)
        if all(id(each) in own for each in params) and not are_zeros_of_torch:
            gradients.drop_partial()


def replace_parameters(optimizer: Optimizer) -> None:
    """Replace parameters that `fully_shard` has sharded by the sharded ones, and shard their state.

    Tensors of a parameter's shape are sharded as the parameter; all other entries of its state are kept.
    """
    for group in optimizer.param_groups:
        for place, original in enumerate(group["params"]):
            if not is_replaced(original):
                continue
            sharded = successor_of(original)
            if sharded is None:
                raise RuntimeError("the model of this optimizer was deleted; build an optimizer for the new model")
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
