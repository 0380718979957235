"""A unit: its hooks around forward and backward, and the phases it goes through."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.engine.gradients import Goal
from flatshard.engine.group import Group, Member, Site
from flatshard.engine.keep import plan_kept
from flatshard.engine.moved import Change, absorb, applying, check_change, is_moved
from flatshard.engine.plain import Plain
from flatshard.engine.schedule import Pass
from flatshard.engine.scope import Scope
from flatshard.engine.transforms import watch_transformed
from flatshard.engine.trees import cast_floating, to_device
from flatshard.engine.tying import tie
from flatshard.engine.watch import gradient_at_output, watch_inputs, watch_outputs
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
        self.is_auto = reshard_after_forward == "auto"  # under the budget of the root
        self.reshard_after_forward: bool | None = True if reshard_after_forward == "auto" else reshard_after_forward
        self.schedule = schedule
        self.name = type(modules[0]).__name__
        self.index = 0
        self.nests = False  # there are units below
        self.phase = Phase.RESTING
        self.scope: Scope | None = None
        self.is_first = self.is_last = True  # of the micro-batches of an optimizer step
        self.reduces = True  # off: gradients stay unreduced
        self.all_reduces = True  # off: gradients go no further than they rest between micro-batches
        self.reduces_unused = False  # on: what a backward does not use takes part in the reduces with zeros
        self.reshard_after_backward = True
        # The backward of an embedding reads the tokens, not the weights: gathering those again would be in vain. A
        # module that contains one may multiply with its weights, too.
        self.unshard_in_backward = not all(type(module) is nn.Embedding for module in modules)
        self.kept = False  # gathered on purpose: the next forward uses it as it is
        self.keeps_for_next = False  # between the micro-batches of a step
        self.max_reducing: int | None = None  # what the scope's policy says otherwise
        self.separate_groups: bool | None = None
        self.backward_done = False  # its backward of the running pass is over
        self.plain: list[Plain] = []  # frozen parameters that stay whole
        self.prefetch_in_forward: list[weakref.ref[Unit]] | None = None
        self.prefetch_in_backward: list[weakref.ref[Unit]] | None = None
        self._modules = [weakref.ref(module) for module in modules]
        self._is_leaf = not any(True for module in modules for _ in module.children())
        self._to_run: set[int] = set()  # modules of the unit whose forward of this pass is to come
        self._running: set[int] = set()  # modules of the unit whose forward has begun
        self._inputs_to_pass = 0  # forwards whose inputs' gradients are to come
        self._awaited = False  # a forward with gradients has been, its backward has not
        for group in self.groups:
            group.gradients.on_complete = functools.partial(_group_complete, weakref.ref(self), weakref.ref(group))
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
        self.unshard_in_backward = True
        if group not in self.needs:
            group.users = group.users or set()
            self.needs.append(group)
        if site.look() is not member.sharded:  # else two units share the module itself
            member.sites.append(site)
            site.put(member.sharded)

    @property
    def is_gathered(self) -> bool:
        for group in self.needs:
            if not group.is_gathered:
                return False
        return True

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
        scope = scope_of(self, module)
        recompute = _torch.in_backward()
        fresh = len(self._to_run) in (0, len(self._modules))
        if recompute:
            scope.begin_backward()
        elif fresh and scope.entry in (None, self):
            scope.begin_forward(self)
            if self.device.type != "cpu":
                args, kwargs = to_device(self.device, args), to_device(self.device, kwargs)
        if fresh:
            self._to_run = {id(ref()) for ref in self._modules}
        self._running.add(id(module))
        # Under a recompute that belongs to a graph of an earlier forward, the hooks of that forward do the work.
        attach = torch.is_grad_enabled() and not (recompute and (self._awaited or self.in_backward))
        if not recompute:
            self._enter(Phase.FORWARD)
        scope.need(self)
        args, kwargs = self._cast_inputs(args, kwargs)
        if attach:
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(policy.param_dtype, args), cast_floating(policy.param_dtype, kwargs)
        return args, kwargs

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Notice when the gradients of this forward's inputs are complete: then those of the weights are, too.

        Where no input needs a gradient, or units below have their turns in between, every parameter is asked as well.
        """
        args, kwargs, watched = watch_inputs(self, args, kwargs)
        self._inputs_to_pass += watched
        if self.nests or not watched:
            for group in self.groups:
                group.watch()
        return args, kwargs

    @_torch.uncompiled
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.policy.output_dtype is not None:
            output = cast_floating(self.policy.output_dtype, output)
        if _torch.transforming():
            output, grads = watch_transformed(functools.partial(gradient_at_output, weakref.ref(self)), output)
            with _torch.Untransformed():
                self._end(module, grads)
            return output
        self._end(module, torch.is_grad_enabled() and watch_outputs(self, output))
        return output

    def _end(self, module: nn.Module, grads: bool) -> None:
        """A forward has run; ``grads``: a gradient may come to its output."""
        scope = self.scope
        assert scope is not None
        self._running.discard(id(module))
        self._to_run.discard(id(module))
        if self._to_run and scope.entry is self and self.index:
            self._to_run.clear()  # a module of a list, called by itself: a loss by chunks, for example
        if self._to_run:
            self._awaited |= grads
        elif _torch.in_backward():
            self._after_recompute(scope, grads)
        else:
            self._after_forward(scope, grads)

    @_torch.uncompiled
    def _after_exception(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after every forward of a module; only where one raised is there something to do."""
        # A module that ended well has been struck off; a recompute that stops early raises too, but enters nothing.
        self._running.discard(id(module))
        running = self.phase is Phase.FORWARD and id(module) in self._to_run and not _torch.in_backward()
        if running and self.scope is not None and self.scope.entry is self:
            self.scope.entry = None  # what comes next starts a pass of its own, and clears what is left of this one

    def call_as_forward(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the modules as if it were its forward. Within a forward it is a plain call."""
        if id(module) in self._running:
            return method(*args, **kwargs)
        args, kwargs = self._pre_forward(module, args, kwargs)
        try:
            return self._post_forward(module, args, method(*args, **kwargs))
        finally:
            self._after_exception(module, args, None)

    def _after_forward(self, scope: Scope, grads: bool) -> None:
        self._awaited |= grads
        self._enter(Phase.AWAITING if self._awaited else Phase.RESTING)
        outermost = scope.entry is self
        keep = outermost if self.reshard_after_forward is None else not self.reshard_after_forward
        if not grads and not outermost:  # under reentrant checkpointing gradients come in spite of no_grad
            grads = scope.program.running is Pass.FORWARD
        if not (grads and keep):
            if grads:
                for group in self.groups:
                    group.park()
            self.release()
        if outermost:
            scope.end_forward()
            if not grads:
                for unit in scope.units:
                    if not unit.kept:
                        unit.release()

    def forward_over(self) -> None:
        """The forward of the outermost unit is over, and with it this one's, even if a module of it has not run."""
        if self.phase is Phase.FORWARD:
            assert self.scope is not None
            self._to_run.clear()
            self._after_forward(self.scope, self._awaited)

    def _after_recompute(self, scope: Scope, grads: bool) -> None:
        if self.in_backward:
            return
        self._awaited |= grads
        self._enter(Phase.AWAITING if self._awaited else Phase.RESTING)
        scope.retain(self)

    # Backward

    def gradient_at_output(self) -> None:
        """A gradient has reached an output: the weights are needed again."""
        scope = self.scope
        assert scope is not None
        scope.begin_backward()
        if self.in_backward:
            return
        self._enter(Phase.BACKWARD)
        self.backward_done = False
        scope.need(self, gather=self.unshard_in_backward)

    def inputs_passed(self) -> None:
        """The gradients of one forward's inputs are complete."""
        self._inputs_to_pass -= 1
        if self._inputs_to_pass <= 0:
            if self.phase is Phase.BACKWARD:
                # On the wire, what the next unit waits for goes before what nobody waits for; and it fits in once this
                # unit's weights, which nothing reads any more, are released.
                if self._reshards_now:
                    self.release()
                assert self.scope is not None
                self.scope.gather_ahead(self)
            self.finish_backward()
            self.rest()

    def group_complete(self, group: Group) -> None:
        """All gradients of a group have arrived. Its weights may still be read until the inputs' gradients are done."""
        scope = self.scope
        assert scope is not None
        scope.begin_backward()
        scope.reduce(self, group)
        # Backward reads a weight last in what gives its gradient. A frozen one gives none, and one of a child may give
        # several, if calls of the child are checkpointed: those stay until the end.
        if self._inputs_to_pass > 0 or not self._is_leaf:
            return
        if all(g.reduced and g.expected == len(g.members) for g in (other.gradients for other in self.groups)):
            self.rest()

    def finish_backward(self) -> None:
        """Reduce what has arrived and is not reduced."""
        scope = self.scope
        assert scope is not None
        for group in self.groups:
            if group.gradients.waiting:
                scope.reduce(self, group)

    def reduce_unused(self) -> None:
        """At the end of backward: take part in reduces that ranks which used this unit have launched."""
        scope = self.scope
        assert scope is not None
        for group in self.groups if self.reduces_unused and not self.backward_done else ():
            if group.gradients.expected and not group.gradients.reduced:
                scope.reduce(self, group)

    def flush(self) -> None:
        """Where gradients are to go all the way: reduce what earlier backwards left and the last one did not use."""
        for group in self.groups:
            if self.goal is Goal.FINAL and group.gradients.has_partial:
                assert self.scope is not None
                self.scope.reduce(self, group)
                group.gradients.reduced = False  # not by a backward that is running

    @property
    def goal(self) -> Goal:
        """How far gradients are reduced now."""
        if not self.reduces:
            return Goal.KEEP
        return Goal.FINAL if self.is_last and self.all_reduces else Goal.REST

    def rest(self) -> None:
        """No backward is pending: release and forget."""
        if self.phase is Phase.FORWARD:
            return  # a gradient was computed inside this unit's forward
        if self._reshards_now:
            self.release()
        else:
            self.kept = self.is_gathered
        self.phase = Phase.RESTING
        self.backward_done = True
        self._awaited = False
        self._inputs_to_pass = 0
        self._to_run.clear()  # a recompute that stopped early
        for group in self.groups:
            group.gradients.reduced = False
            group.unpark()

    @property
    def _reshards_now(self) -> bool:
        """Whether the weights are released after the backward that is running."""
        return self.reshard_after_backward and not self.is_kept_for_next

    @property
    def is_kept_for_next(self) -> bool:
        """Whether the running micro-batch leaves its weights to the next one."""
        return self.keeps_for_next and not self.is_last

    def reset(self) -> None:
        """Rest, whatever was going on; gradients that have not been reduced are lost."""
        for group in self.groups:
            group.gradients.take()
            group.gradients.drop_partial()
        self.phase = Phase.RESTING
        self._running.clear()
        self.rest()
        self.release()

    def swap_in(self) -> None:
        """Wait for the gathers and show the full parameters to the modules."""
        for group in self.needs:
            group.swap_in()
            if group.users is not None:
                group.users.add(id(self))

    def release(self) -> None:
        """Give the gathered weights back, unless another unit needs them still."""
        self.kept = False
        for group in self.needs:
            if group.users is not None:
                group.users.discard(id(self))
            if not group.users:
                group.release()

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
                absorb(group, self._awaited, root=self._root, wait=True, ours=True)
        for group in self.groups:
            group.mark_stale()  # also within the micro-batches of a step

    def absorb(self, ours: bool = False) -> None:
        """Take over what the modules were given in the place of our parameters, or raise; or wait for the rest of it.

        Of the modules of a list, each is converted or loaded by itself. ``ours``: the parameter objects stay.
        """
        for group in self.groups:
            absorb(group, self._awaited, root=self._root, wait=True, ours=ours)
        for plain in self.plain:
            plain.guard()

    def absorb_moved(self) -> None:
        """The same, for what was done to a module in here that tells nobody. The parameters are about to be used."""
        for group in list(self.groups):
            if not group.is_full and is_moved(group):
                group.release()  # it may have been gathered ahead
                if not self._awaited:
                    tie(self, group)
                absorb(group, self._awaited, root=self._root)

    @property
    def _root(self) -> nn.Module | None:
        """Where names in errors start from, as far as is known."""
        units = self.scope.units if self.scope is not None else [self]
        return next(iter(units[0].modules), None) if units and len(units[0].modules) == 1 else None

    def check_change(self, change: Change) -> None:
        """Raise if this change of all parameters could not be taken over."""
        for group in self.groups:
            check_change(group, change, self._awaited, self._root)

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


def _group_complete(unit: weakref.ref[Unit], group: weakref.ref[Group]) -> None:
    found, of = unit(), group()
    if found is not None and of is not None:
        found.group_complete(of)


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
