"""A unit: its hooks around forward and backward, and the phases it goes through."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.engine.calls import Call, anchored, gradient_at_output
from flatshard.engine.changes import Change, absorb, applying, check_change, is_moved
from flatshard.engine.keep import plan_kept
from flatshard.engine.parameters import Member, Plain, Site
from flatshard.engine.program import Pass
from flatshard.engine.reduction import Goal
from flatshard.engine.scope import Scope
from flatshard.engine.transforms import watch_transformed
from flatshard.engine.trees import cast_floating, tensors_in, to_device
from flatshard.engine.tying import tie
from flatshard.engine.weights import Group
from flatshard.policy import MixedPrecisionPolicy, SchedulePolicy


class Phase(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function, and this is asked for at every step

    RESTING = "resting"
    FORWARD = "forward"
    AWAITING = "awaiting backward"  # a forward with gradients is over
    BACKWARD = "backward"  # a gradient has reached an output


# A recompute is not a forward: it happens on the way to, or in, BACKWARD and does not change the phase by itself.


_NEXT = {
    Phase.RESTING: {Phase.FORWARD, Phase.AWAITING, Phase.BACKWARD},
    Phase.FORWARD: {Phase.RESTING, Phase.FORWARD, Phase.AWAITING},
    Phase.AWAITING: {Phase.RESTING, Phase.FORWARD, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.RESTING},
}


@dataclass
class Settings:
    """What policies, setters and `microbatch` say of a unit. The engine reads it and changes nothing here."""

    reshard_after_forward: bool | None  # None: unless it is the outermost unit of a forward
    is_auto: bool = False  # `reshard_after_forward` is chosen by the budget of the root
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keeps_for_next: bool = False  # gathered between the micro-batches of a step
    is_first: bool = True  # of the micro-batches of an optimizer step
    is_last: bool = True
    reduces: bool = True  # off: gradients stay unreduced
    all_reduces: bool = True  # off: gradients go no further than they rest between micro-batches
    reduces_unused: bool = False  # on: what a backward does not use takes part in the reduces with zeros
    max_reducing: int | None = None  # what the scope's policy says otherwise
    separate_groups: bool | None = None
    prefetch_in_forward: list[weakref.ref[Unit]] | None = None
    prefetch_in_backward: list[weakref.ref[Unit]] | None = None


class Unit:
    """The state of one `fully_shard` call. Its modules own it through their hooks; it knows them weakly."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        mesh: DeviceMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | Literal["auto"] | None,
        schedule: SchedulePolicy | None = None,
        hooked: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.needs = list(groups)  # and those of other units, whose parameters are tied to its own
        self.borrowed: list[tuple[Group, Member, Site]] = []  # those parameters, and where it has them
        self.mesh = mesh
        self.device = device
        self.policy = policy
        is_auto = reshard_after_forward == "auto"  # under the budget of the root
        self.settings = Settings(True if reshard_after_forward == "auto" else reshard_after_forward, is_auto)
        # The backward of an embedding reads the tokens, not the weights: gathering those again would be in vain. A
        # module that contains one may multiply with its weights, too.
        self.settings.unshard_in_backward = not all(type(module) is nn.Embedding for module in modules)
        self.schedule = schedule
        self.name = type(modules[0]).__name__
        self.index = 0
        self.numbers = range(0)  # of its groups in the program
        self.nests = False  # there are units below
        self.parks = False  # between forward and backward its weights stay, sharded over a smaller mesh
        self.phase = Phase.RESTING
        self.scope: Scope | None = None
        self.call: Call | None = None  # the forward that is running
        self.kept: list[tuple[int, ...]] | None = (
            None  # gathered on purpose, with weights of this state: the next forward uses them as they are
        )
        self.plain: list[Plain] = []  # frozen parameters that stay whole
        self._modules = [weakref.ref(module) for module in modules]
        self._ids = frozenset(map(id, modules))
        self._me = weakref.ref(self)
        self._calls: list[weakref.ref[Call]] = []  # that await, or have had, their backward
        self._unseen = False  # a forward within one with gradients has been without: a recompute may follow
        self._differentiated = False  # a backward has made a graph that another will go through, reading the weights
        self._left_behind: list[tuple[weakref.ref[nn.Module], str]] | None = None
        for index, group in enumerate(self.groups):
            group.gradients.on_complete = functools.partial(_group_complete, weakref.ref(self), index)
        for module in modules if hooked else ():
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_forward_hook(self._after_exception, always_call=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_state_dict_post_hook(_after_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load_state_dict)
            module.register_load_state_dict_post_hook(self._after_load_state_dict)

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self._modules) if module is not None]

    def borrow(self, group: Group, member: Member, site: Site) -> None:
        """Use a parameter of another unit too, which is tied to that at ``site``."""
        self.borrowed.append((group, member, site))
        self.settings.unshard_in_backward = True
        if group not in self.needs:
            group.users = group.users or set()
            self.needs.append(group)
        if site.look() is not member.sharded:  # else two units share the module itself
            member.sites.append(site)
            site.put(member.sharded)

    @property
    def is_gathered(self) -> bool:
        for group in self.needs:
            if group.ticket is None:
                return False
        return True

    @property
    def is_at_rest(self) -> bool:
        """Whether the running backward has left this unit for good, or has not been here."""
        return self.phase is Phase.RESTING and self.call is None and not self._unseen and not self.is_gathered

    @property
    def _is_anchored(self) -> bool:
        """Whether a backward is to come to this unit, and to go beyond it, even if this rank uses nothing there.

        Other ranks may, and gather and reduce at those moments.
        """
        return self.settings.reduces_unused and any(group.gradients.expected for group in self.groups)

    @property
    def in_backward(self) -> bool:
        return self.phase is Phase.BACKWARD

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase] and phase is not self.phase:
            raise RuntimeError(
                f"unit '{self.name}' cannot go from {self.phase.value} to {phase.value}; if an exception interrupted "
                "the last step, call reset() on the root"
            )
        self.phase = phase

    # Forward

    @_torch.uncompiled
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _torch.transforming():
            return self._begin(module, args, kwargs)
        with _torch.Untransformed():
            self._begin(module, (), {})
        if self.device.type != "cpu":
            args, kwargs = to_device(self.device, args), to_device(self.device, kwargs)
        return self._cast_inputs(args, kwargs)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward is to run; what it is to be called with."""
        scope = scope_of(self, module) if self.scope is None else self.scope
        recompute = _torch.in_backward()
        call = self.call
        if call is None or not call.goes_on_with(module):
            if recompute:
                scope.begin_backward()
            elif scope.entry is None or scope.entry == self.index:
                scope.begin_forward(self)
                if self.device.type != "cpu":
                    args, kwargs = to_device(self.device, args), to_device(self.device, kwargs)
            call = self.call = Call(self._me, self._ids, scope.forwards, call, recompute)
        elif recompute:
            scope.begin_backward()
        call.running.add(id(module))
        call.watches = torch.is_grad_enabled() and not (recompute and self._has_graph())
        if not recompute:
            self._enter(Phase.FORWARD)
        scope.need(self)
        if self.policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if call.watches:
            args, kwargs, watched = call.watch_inputs(args, kwargs)
            if not watched and self._is_anchored:
                args, kwargs, watched = call.watch_inputs(*anchored((args, kwargs)))
            if self.nests or not watched:  # then every parameter is asked as well
                for group in self.groups:
                    group.watch()
        return args, kwargs

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(policy.param_dtype, args), cast_floating(policy.param_dtype, kwargs)
        return args, kwargs

    @_torch.uncompiled
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.policy.output_dtype is not None:
            output = cast_floating(self.policy.output_dtype, output)
        call = self.call
        assert call is not None
        if _torch.transforming():
            output, grads = watch_transformed(functools.partial(gradient_at_output, call), output)
            with _torch.Untransformed():
                self._end(module, call, grads)
            return output
        grads = False
        if torch.is_grad_enabled():
            grads = call.watch_outputs(output)
            if not grads and self._is_anchored:
                output = anchored(output)
                grads = call.watch_outputs(output)
            grads = grads and call.watches
        if grads and self._left_behind != []:
            self._watch_left_behind(call)
        self._end(module, call, grads)
        return output

    def _watch_left_behind(self, call: Call) -> None:
        """Watch what a forward leaves on its modules (an auxiliary loss) as its outputs are; where it does, it always
        does, so the first forward tells."""
        if self._left_behind is None:
            self._left_behind = []
            for module in (below for each in self.modules for below in ((each,) if self.nests else each.modules())):
                for name, value in module.__dict__.items():
                    looked_at = not name.startswith("_") and isinstance(value, (torch.Tensor, list, tuple, dict))
                    if looked_at and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                        self._left_behind.append((weakref.ref(module), name))
        for ref, name in self._left_behind:
            found = ref()
            if found is not None:
                call.watch_outputs([t for t in tensors_in(found.__dict__.get(name)) if t.grad_fn is not None])

    def _end(self, module: nn.Module, call: Call, grads: bool) -> None:
        """A forward has run; ``grads``: a gradient may come to its output."""
        scope = self.scope
        assert scope is not None
        which = id(module)
        call.running.discard(which)
        call.left.discard(which)
        if grads:
            self._await(call)
        left = call.left
        if left and scope.entry == self.index and self.index:
            call.left.clear()  # a module of a list, called by itself: a loss by chunks, for example
        if call.left:
            return
        self.call = call.outer
        if _torch.in_backward():
            self._after_recompute(scope)
        else:
            self._after_forward(scope, grads)

    @_torch.uncompiled
    def _after_exception(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after every forward of a module; only where one raised is there something to do."""
        call = self.call
        if call is None or id(module) not in call.running:
            return
        # A recompute that stops early raises too, but enters nothing.
        call.running.discard(id(module))
        scope = self.scope
        if self.phase is Phase.FORWARD and not _torch.in_backward() and scope is not None and scope.entry == self.index:
            scope.entry = None  # what comes next starts a pass of its own, and clears what is left of this one

    def call_as_forward(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the modules as if it were its forward. Within a forward it is a plain call."""
        if self.call is not None and id(module) in self.call.running:
            return method(*args, **kwargs)
        args, kwargs = self._pre_forward(module, args, kwargs)
        try:
            return self._post_forward(module, args, method(*args, **kwargs))
        finally:
            self._after_exception(module, args, None)

    def _after_forward(self, scope: Scope, grads: bool) -> None:
        self._enter(Phase.AWAITING if self.is_awaited else Phase.RESTING)
        settings, outermost = self.settings, scope.entry == self.index
        keep = outermost if settings.reshard_after_forward is None else not settings.reshard_after_forward
        if not grads and not outermost and scope.program.running is Pass.FORWARD:
            grads = self._unseen = True  # under reentrant checkpointing gradients come in spite of no_grad
        if not grads and self.index and settings.reshard_after_forward is None:
            keep = False  # no backward will need it, and the root of the model is another unit
        if not keep:
            if grads and self.parks:
                for group in self.groups:
                    group.park()
            self.release()
        else:
            self.keep()
            if not grads:
                self.hide()  # whoever asks for parameters now, to build an optimizer, wants the sharded ones
        if outermost:
            scope.end_forward()

    def forward_over(self) -> None:
        """The forward of the outermost unit is over, and with it this one's, even if a module of it has not run."""
        if self.phase is Phase.FORWARD:
            assert self.scope is not None
            self.call = None
            self._after_forward(self.scope, self.is_awaited)

    def _after_recompute(self, scope: Scope) -> None:
        if self.in_backward:
            return
        self._enter(Phase.AWAITING if self.is_awaited else Phase.RESTING)
        scope.retain(self)

    # Backward

    def _await(self, call: Call) -> None:
        """A backward through this call may come."""
        others = [ref for ref in self._calls if (known := ref()) is not None and known is not call and not known.passed]
        self._calls = [*others, weakref.ref(call)]

    def _has_graph(self) -> bool:
        """Within a recompute: whether it belongs to the graph of an earlier forward, whose hooks then do the work.

        Otherwise checkpointing is reentrant, and makes a graph now. A unit that is used both ways is taken to be of the
        first kind: nothing tells when its inputs are passed, so its turn is over at the end of the backward.
        """
        for ref in self._calls:
            call = ref()
            if call is not None and not call.in_recompute and not call.passed:
                return True
        return False

    @property
    def is_awaited(self) -> bool:
        """Whether the backward of a forward is to come. A graph that is gone awaits none."""
        for ref in self._calls:
            call = ref()
            if call is not None and not call.passed:
                return True
        return False

    @property
    def is_ahead(self) -> bool:
        """Within a backward: whether it is going to come here, or to come again."""
        return self._unseen or self._has_calls_ahead()

    def _has_calls_ahead(self) -> bool:
        for ref in self._calls:
            call = ref()
            if call is not None and not call.passed:
                assert self.scope is not None
                if call.is_ahead(self.scope.backwards, self.scope.is_nested):
                    return True
        return False

    def gradient_at_output(self, call: Call) -> None:
        """A gradient has reached an output: the weights are needed again."""
        scope = self.scope
        assert scope is not None
        scope.begin_backward()
        if call.backward != scope.backwards:
            call.backward = scope.backwards
            if call.passed or not call.watches:
                call.await_again()
                self._await(call)
        if self.in_backward:
            return
        self._enter(Phase.BACKWARD)
        self._unseen = False
        if torch.is_grad_enabled():
            self._prepare_second_backward()
        scope.need(self, gather=self.settings.unshard_in_backward)

    def _prepare_second_backward(self) -> None:
        """This backward makes a graph. What goes through that reads the weights, and comes to no output of ours."""
        self._differentiated = True
        for group in self.groups:
            group.watch()

    def inputs_passed(self) -> None:
        """The gradients of one forward's inputs are complete, and with them those of its weights."""
        if self._has_calls_ahead():
            return
        scope = self.scope
        assert scope is not None
        if self.phase is Phase.BACKWARD:
            # On the wire, what the next unit waits for goes before what nobody waits for; and it fits in once this
            # unit's weights, which nothing reads any more, are released.
            if self._reshards_now:
                self.release()
            scope.gather_ahead(self)
        scope.unit_left(self)
        self.rest()

    def group_complete(self, index: int) -> None:
        """All gradients of a group have arrived. Its weights may still be read until the inputs' gradients are done."""
        scope = self.scope
        assert scope is not None
        scope.begin_backward()
        scope.group_complete(self.numbers[index])

    @property
    def goal(self) -> Goal:
        """How far gradients are reduced now."""
        settings = self.settings
        if not settings.reduces:
            return Goal.UNREDUCED
        return Goal.FINAL if settings.is_last and settings.all_reduces else Goal.REST

    def backward_over(self) -> None:
        """The backward is over, here and everywhere."""
        if _torch.in_backward():
            for call in (ref() for ref in self._calls):
                if call is not None and self.scope is not None and call.is_ahead(self.scope.backwards, False):
                    call.passed = True
        self.rest()

    def rest(self) -> None:
        """The backward has left this unit: release and forget."""
        if self.phase is Phase.FORWARD:
            return  # a gradient was computed inside this unit's forward
        if self._differentiated:
            self.hide()  # until the next forward
        elif self.is_gathered and self._reshards_now:
            self.release()
        elif self.is_gathered:
            self.keep()
        self.call = None  # a recompute that stopped early, or of a part of a list
        self.phase = Phase.AWAITING if self.is_awaited else Phase.RESTING
        self._unseen = False
        for group in self.groups if self.parks else ():
            group.source.unpark()

    @property
    def _reshards_now(self) -> bool:
        """Whether the weights are released after the backward that is running."""
        return self.settings.reshard_after_backward and not self.is_kept_for_next and not self._differentiated

    @property
    def is_kept_for_next(self) -> bool:
        """Whether the running micro-batch leaves its weights to the next one."""
        return self.settings.keeps_for_next and not self.settings.is_last

    def recover(self, broken_backward: bool) -> None:
        """An exception broke a pass off: release. What a broken backward has left here is of no use."""
        self.call, self._unseen = None, False
        scope = self.scope
        assert scope is not None
        for call in (ref() for ref in self._calls):
            if call is not None and (broken_backward or call.forward == scope.forwards):
                call.passed = True
        if broken_backward:
            for group in self.groups:
                group.gradients.drop()
        self.phase = Phase.AWAITING if self.is_awaited else Phase.RESTING
        self.release()

    def reset(self) -> None:
        """Rest, whatever was going on; gradients that have not been reduced are lost."""
        self._calls = []
        for group in self.groups:
            group.gradients.drop()
            group.gradients.drop_partial()
        self.phase = Phase.RESTING
        self.rest()
        self.release()

    # Gathered weights

    def keep(self) -> None:
        """Leave the gathered weights to the next pass, should they still be those of main by then."""
        self.kept = [group.state for group in self.needs]

    def keeps(self) -> bool:
        """Whether a forward that begins uses the gathered weights as they are."""
        settings = self.settings
        if self.kept is None or self._differentiated or (settings.keeps_for_next and settings.is_first):
            return False
        return self.kept == [group.state for group in self.needs] and not any(map(is_moved, self._hidden()))

    def _hidden(self) -> list[Group]:
        """Groups that show sharded parameters."""
        return [group for group in self.groups if not group.is_full]

    def swap_in(self) -> None:
        """Wait for the gathers and show the full parameters to the modules."""
        for group in self.needs:
            group.swap_in()
            if group.users is not None:
                group.users.add(id(self))

    def release(self) -> None:
        """Give the gathered weights back, unless another unit needs them still."""
        self.kept, self._differentiated = None, False
        for group in self.needs:
            if group.users is not None:
                group.users.discard(id(self))
            if not group.users:
                group.release()

    def hide(self) -> None:
        """Show sharded parameters, and keep the full ones."""
        for group in self.needs:
            if not group.users:
                group.swap_out()

    def reshard(self) -> None:
        """Show sharded parameters, whoever needs the full ones: a pass that does gathers them again."""
        for group in self.needs:
            if group.users is not None:
                group.users.clear()
        self.release()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """State dicts hold main weights: sharded."""
        self.reshard()

    def _before_load_state_dict(self, module: nn.Module, *args: Any) -> None:
        self.reshard()
        self.absorb()  # what the user has put there before; what comes now is not the user's

    def _after_load_state_dict(self, module: nn.Module, keys: Any) -> None:
        self.absorb(ours=True)
        for group, member, site in self.borrowed:
            if site.look() is not member.sharded:
                absorb(group, self.is_awaited, root=self._root, wait=True, ours=True)
        for group in self.groups:
            group.mark_stale()  # also within the micro-batches of a step

    def absorb(self, ours: bool = False) -> None:
        """Take over what the modules were given in the place of our parameters, or raise; or wait for the rest of it.

        Of the modules of a list, each is converted or loaded by itself. ``ours``: the parameter objects stay.
        """
        for group in self.groups:
            absorb(group, self.is_awaited, root=self._root, wait=True, ours=ours)
        for plain in self.plain:
            plain.guard()

    def absorb_moved(self) -> None:
        """The same, for what was done to a module in here that tells nobody. The parameters are about to be used."""
        for group in list(self.groups):
            if not group.is_full and is_moved(group):
                group.release()  # it may have been gathered ahead
                if not self.is_awaited:
                    tie(self, group)
                absorb(group, self.is_awaited, root=self._root)

    @property
    def _root(self) -> nn.Module | None:
        """Where names in errors start from, as far as is known."""
        units = self.scope.units if self.scope is not None else [self]
        return next(iter(units[0].modules), None) if units and len(units[0].modules) == 1 else None

    def check_change(self, change: Change) -> None:
        """Raise if this change of all parameters could not be taken over."""
        for group in self.groups:
            check_change(group, change, self.is_awaited, self._root)

    @contextmanager
    def applying(self, change: Change) -> Iterator[None]:
        """Around `module._apply(change)`."""
        self.reshard()
        self.absorb()  # what was assigned before: it has gradients of its own
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(applying(group, change))
            yield
            self.absorb()


def _after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A detached DTensor has the offset of its local part, which torch's asynchronous checkpoints stumble over."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor) and value.storage_offset():
            state[name] = _torch.like_dtensor(value, _torch.local_of(value))


def _group_complete(unit: weakref.ref[Unit], index: int) -> None:
    found = unit()
    if found is not None:
        found.group_complete(index)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of this module, if it did."""
    found = module.__dict__.get("_flatshard_unit")
    assert found is None or isinstance(found, Unit)
    return found


def scope_of(unit: Unit, module: nn.Module) -> Scope:
    """The scope of a unit. Where it has none, ``module`` is the root of one, and all units below it share it."""
    if unit.scope is not None:
        return unit.scope
    units: list[Unit] = []
    at: dict[str, Unit] = {}
    count = 0
    if any(parameter.is_meta for parameter in module.parameters()):
        from flatshard.engine.materialize import materialize  # it builds on units

        materialize(module)
    for name, child in module.named_modules():
        found = unit_of(child)
        if found is None:
            continue
        at[name] = found
        if found in units:
            continue
        if found.scope is not None and found.scope.program.running is not None:
            raise RuntimeError(f"unit '{name}' is in a pass of its own; finish that before running its parent")
        found.release()
        found.name = name or type(child).__name__
        found.index = len(units)
        found.numbers = range(count, count + len(found.groups))
        count += len(found.groups)
        found.nests = False
        units.append(found)
        above = name
        while above:
            above = above.rpartition(".")[0]
            if above in at:
                at[above].nests = True
    policy = unit.schedule or SchedulePolicy()
    plan_kept(units, policy)
    scope = Scope(units, unit.device, policy)
    for found in units:
        found.scope = scope
    return scope
