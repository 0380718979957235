"""A unit: its hooks around forward and backward, and the phases it goes through."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.engine.gradients.reduction import Goal
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.parameters.sharded_param import Plain, ShardedParam, Site
from flatshard.engine.program import Pass, Program
from flatshard.engine.rows import Rows
from flatshard.engine.units.intent import Intent
from flatshard.engine.units.leases import FullWeights, Lease
from flatshard.engine.units.stray_use import explain
from flatshard.engine.watch.calls import (
    Call,
    Calls,
    ModuleForward,
    StoredTensors,
    anchored,
    pre_backward_hook,
    watch_transformed,
)
from flatshard.engine.watch.trees import cast_floating, to_device
from flatshard.policy import MixedPrecisionPolicy, SchedulePolicy


class Phase(Enum):
    """A recompute does not change the phase: it happens on the way to `BACKWARD`, or within it.

    Megatron-FSDP's `FsdpModule.Phase` has these names.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function, and this is called at every step

    RESTING = "resting"  # no pass is running through it; a graph may still need a backward: `Calls.are_awaited`
    FORWARD = "forward"
    BACKWARD = "backward"  # a gradient has reached an output


_UNIT = "_flatshard_unit"
_numbers = itertools.count()


class GathersProtocol(Protocol):
    """The members of `Gathers` that units use."""

    # fmt: off
    @property
    def lane(self) -> Lane: ...
    def prefetch(self, unit: Unit, is_released: bool = False) -> None: ...
    def look_up(self, unit: Unit, tokens: torch.Tensor) -> torch.Tensor: ...
    # fmt: on


class RootProtocol(Protocol):
    """The members of a root that its units and its parts use: the state of the current pass, all-gathers, reduces."""

    program: Program
    meshes: list[DeviceMesh]
    entry: int | None  # the outermost unit whose forward is running
    forwards: int  # their number so far
    backwards: int
    has_optional: bool  # some of its units are

    # fmt: off
    @property
    def units(self) -> list[Unit]: ...
    @property
    def gathers(self) -> GathersProtocol: ...
    @property
    def joins(self) -> bool: ...
    @property
    def is_nested(self) -> bool: ...
    def begin_forward(self, entry: Unit) -> None: ...
    def end_forward(self, grads: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def need(self, unit: Unit, gather: bool = True) -> None: ...
    def reshard_later(self, unit: Unit, grads: bool) -> None: ...
    def keep_recomputed(self, unit: Unit) -> None: ...
    def check_forward(self, forward: int) -> None: ...
    def unit_left(self, unit: Unit) -> None: ...
    def group_complete(self, number: int) -> None: ...
    def set_precision(self, units: Sequence[Unit], policy: MixedPrecisionPolicy) -> None: ...
    def recover_if_broken(self) -> None: ...
    @property
    def is_broken(self) -> bool: ...
    # fmt: on


Borrowed: TypeAlias = tuple[ParamGroup, ShardedParam, Site]  # a parameter of another unit, and where it is used
FindRoot: TypeAlias = Callable[["Unit", nn.Module], RootProtocol]


class Unit(FullWeights):
    """The state of one `fully_shard` call. Its modules own it through their hooks; it has weak references to them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        mesh: DeviceMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        intent: Intent,
        find_root: FindRoot,
        schedule: SchedulePolicy | None = None,
        hooked: bool = True,
    ) -> None:
        """``find_root``: creates the root of a unit that has none, with this module as the root module."""
        super().__init__(groups)
        self.borrowed: list[Borrowed] = []  # parameters of other units that are tied to its own, and their sites
        self.mesh, self.device, self.policy, self.intent = mesh, device, policy, intent
        self.is_last = True  # of the micro-batches of an optimizer step
        # The backward of an embedding reads the tokens, not the weights, so it needs no all-gather. A module that
        # contains an embedding may also multiply by its weights.
        self.embeddings = frozenset(id(module) for module in modules if type(module) is nn.Embedding)
        self._find_root, self.schedule = find_root, schedule
        self.choices: Any = None  # the arguments of `fully_shard`, for copies of the module
        self.copier: Callable[[nn.Module, dict[int, Any]], nn.Module] | None = None  # implements `copy.deepcopy`
        self.number = next(_numbers)  # the units of this process in the order of their `fully_shard` calls
        self.phase = Phase.RESTING
        self.root: RootProtocol | None = None
        self.call: Call | None = None  # the forward that is running
        self.is_written = False  # the modules hold whole copies, for the user to write to
        self.rows: Rows | None = None  # of an embedding by rows
        self.plain: list[Plain] = []  # frozen parameters that stay whole
        self._modules = [weakref.ref(module) for module in modules]
        self._ids = frozenset(map(id, modules))
        self._me = weakref.ref(self)
        self.calls = Calls()
        self.may_recompute = False  # ran without gradients within a forward that has them: a recompute may follow
        self._stored_tensors = StoredTensors()
        for index, group in enumerate(self.groups):
            group.owner = self._me
            group.gradients.on_arrival = functools.partial(_gradient_arrives, self._me, index)
        for module in modules if hooked else ():
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_forward_hook(self._after_exception, always_call=True)
        # Its place under its root, set again with every root.
        self.name, self.index = type(modules[0]).__name__, 0  # the index is in the order of registration
        self.numbers = range(0)  # the numbers of its groups in the program
        self.parent: int | None = None  # the index of the unit around it
        self.nests = False  # it contains other units
        self.is_optional = False  # it, or a unit around it, is optional; never the root
        self.stays_for_backward = False  # only if `reshard_after_forward` is "auto"
        self.derive()

    def configure(self, **changes: Any) -> None:
        """Replace these fields of the unit's `Intent`."""
        self.intent = replace(self.intent, **changes)
        self.derive()

    def derive(self) -> None:
        """Derive the values that every pass reads from the settings and the place."""
        intent = self.intent
        reshard = intent.reshard_after_forward
        self.reshard_after_forward = not self.stays_for_backward if reshard == "auto" else reshard
        # Whether full weights may stay from one pass to the next.
        stays = self.reshard_after_forward is False or not intent.reshard_after_backward
        self.may_stay = stays or self.keeps_for_next
        self.unshard_in_forward = self.rows is None
        reads = self.rows is None and (bool(self.borrowed) or len(self.embeddings) < len(self._ids))
        self.unshard_in_backward = reads if intent.unshard_in_backward is None else intent.unshard_in_backward
        # How far gradients are reduced.
        self.goal = Goal.UNREDUCED
        if intent.reduces:
            self.goal = Goal.FINAL if self.is_last and intent.all_reduces else Goal.REST

    def set_batch(self, is_first: bool, is_last: bool) -> None:
        """The next passes are of the first, or the last, micro-batch of an optimizer step."""
        self.is_first, self.is_last = is_first, is_last
        self.derive()

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self._modules) if module is not None]

    def borrow(self, group: ParamGroup, param: ShardedParam, site: Site) -> None:
        """Use a parameter of another unit too, which is tied to this unit's parameter at ``site``."""
        if group.by_rows:
            raise ValueError(
                f"parameter '{param.name}' is tied to another layer, which needs all rows: call fully_shard on its "
                "embedding without rows=True"
            )
        self.borrowed.append((group, param, site))
        self.derive()
        if group not in self.needs:
            group.borrowers.append(self._me)
            self.needs.append(group)
        if site.look() is not param.sharded:  # otherwise two units share the module
            param.sites.append(site)
            site.put(param.sharded)

    @property
    def is_at_rest(self) -> bool:
        """Whether the running backward has finished this unit, or has not reached it."""
        if self.phase is not Phase.RESTING or self.call is not None or self.may_recompute:
            return False
        for group in self.needs:
            if group.ticket is None:
                return not self.calls.are_awaited()
        return False

    @property
    def _is_anchored(self) -> bool:
        """Whether backwards must go through this unit even if this rank uses none of its parameters, as others may."""
        if not self.intent.reduces_unused or self.is_optional:
            return False
        return any(group.gradients.expected for group in self.groups)

    @property
    def in_backward(self) -> bool:
        return self.phase is Phase.BACKWARD

    def _refuse(self, phase: Phase) -> None:
        raise RuntimeError(
            f"unit '{self.name}' cannot go from {self.phase.value} to {phase.value}; if an exception interrupted the "
            "last step, call reset() on the root module"
        )

    # Forward

    @_torch.uncompiled
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], transformed: bool = False
    ) -> Any:
        """Prepare a forward and return its arguments. ``transformed``: torch.func transforms the forward."""
        if not transformed and _torch.transforming():
            with _torch.Untransformed():
                self._pre_forward(module, (), {}, transformed=True)
            if self.device.type != "cpu":
                args, kwargs = to_device(self.device, args), to_device(self.device, kwargs)
            return self._cast_inputs(args, kwargs)
        root = self._find_root(self, module) if self.root is None else self.root
        recompute = _torch.graph_task() != -1
        call, which = self.call, id(module)
        if call is not None and call.inner is not None and which in call.running:  # within `call_as_forward`
            call.inner += 1
            return self._cast_inputs(args, kwargs)
        if recompute:
            root.begin_backward()
        if call is None or not call.goes_on_with(module):
            if not recompute and (root.entry is None or root.entry == self.index):
                root.begin_forward(self)
                if self.device.type != "cpu":
                    args, kwargs = to_device(self.device, args), to_device(self.device, kwargs)
            call = self.call = Call(self._me, self._ids, root.forwards, call, recompute)
        run = call.running[which] = ModuleForward(recompute, transformed)
        call.watches = torch.is_grad_enabled() and not (recompute and self.calls.have_graph())
        if not recompute:
            if self.phase is Phase.BACKWARD:
                self._refuse(Phase.FORWARD)
            self.phase = Phase.FORWARD
        root.need(self, gather=self.unshard_in_forward)
        if self.policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if call.watches:
            args, kwargs, watched = call.watch_inputs(run, args, kwargs)
            if not watched and self._is_anchored:
                args, kwargs, watched = call.watch_inputs(run, *anchored((args, kwargs), once=True))
            if not watched:
                call.unwatched += 1
                call.unwatched_readers += which not in self.embeddings
            if self.nests or not watched:  # then every parameter has a hook too
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
        if call.inner:
            return output
        which = id(module)
        run = call.running[which]
        if run.is_transformed:
            output, grads = watch_transformed(functools.partial(pre_backward_hook, call, run), output)
            with _torch.Untransformed():
                self._end(which, call, grads)
            return output
        grads = False
        if torch.is_grad_enabled():
            grads = call.watch_outputs(run, output)
            if not grads and self._is_anchored:
                output = anchored(output)
                grads = call.watch_outputs(run, output)
            grads = grads and call.watches
        if grads and self._stored_tensors.places != []:
            self._stored_tensors.watch(call, run, self.modules, self.nests)
        self._end(which, call, grads)
        return output

    def _end(self, which: int, call: Call, grads: bool) -> None:
        """The forward of module ``which``, an id, has ended. ``grads``: its output may get a gradient."""
        root = self.root
        assert root is not None
        run = call.running.pop(which)
        call.left.discard(which)
        if grads:
            self.calls.expect(call)
        if call.left and root.entry == self.index and self.index:
            call.left.clear()  # one module of a list is called alone, for example a head for a loss by chunks
        if call.left:
            return
        self.call = call.outer
        if not run.is_recompute:
            self._after_forward(root, grads)
        elif not self.in_backward:
            root.keep_recomputed(self)

    @_torch.uncompiled
    def _after_exception(self, module: nn.Module, args: Any, output: Any) -> None:
        """Runs after every forward of a module, and cleans up if the forward raised."""
        call = self.call
        if call is None or id(module) not in call.running:
            return
        if call.inner:
            call.inner -= 1
            return
        explain(sys.exc_info()[1], self.rows is not None)
        call.running.pop(id(module))  # also if a recompute stops early
        if call.outer is not None and not call.running:
            self.call = call.outer  # a forward that goes on: the recompute was for a backward within it
        root = self.root
        if self.phase is Phase.FORWARD and not _torch.in_backward() and root is not None and root.entry == self.index:
            root.entry = None  # so that the next forward starts a new pass

    def call_as_forward(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the modules as its forward. Within a forward it is a plain call.

        Forwards of the module within this method are plain calls too: they are part of the same pass.
        """
        if self.call is not None and id(module) in self.call.running:
            return method(*args, **kwargs)
        args, kwargs = self._pre_forward(module, args, kwargs)
        assert self.call is not None
        self.call.inner = 0
        try:
            return self._post_forward(module, args, method(*args, **kwargs))
        finally:
            self._after_exception(module, args, None)

    def _after_forward(self, root: RootProtocol, grads: bool) -> None:
        self.phase = Phase.RESTING
        outermost = root.entry == self.index
        keep = outermost if self.reshard_after_forward is None else not self.reshard_after_forward
        if not grads and not outermost and root.program.running is Pass.FORWARD:
            grads = self.may_recompute = True  # reentrant checkpointing computes gradients in spite of no_grad
        if not grads and self.reshard_after_forward is None:
            keep = False  # no backward needs the weights
        if self.is_optional and not (keep or outermost or self.nests or Lease.USER in self.leases):
            root.reshard_later(self, grads)
        else:
            self.leave(keep, grads)
        if outermost:
            root.end_forward(grads)

    def leave(self, keep: bool, grads: bool) -> None:
        """The forward has left this unit. ``keep``: keep it gathered; ``grads``: a backward may follow."""
        if Lease.USER in self.leases:
            return  # a rank may run it alone, and its leases must stay equal to those of other ranks
        if keep:
            self.keep()
            if not grads:
                self.hide()  # an optimizer may be built next, from the sharded parameters
            return
        for group in self.groups if grads else ():
            if group.post_forward_mesh is not None and group.ticket is not None:
                group.source.keep_post_forward_shard(group.post_forward_mesh)
        self.release()

    def end_skipped(self) -> None:
        """The running pass has skipped this unit and those nested in it: release it, and reduce it in a backward."""
        root = self.root
        assert root is not None
        for group in self.needs:
            if group.ticket is not None:
                group.ticket.wait()
        if root.program.running is Pass.BACKWARD:
            if self.is_gathered and self._reshards_now:
                self.release()
            root.gathers.prefetch(self, is_released=True)
            root.unit_left(self)
            self.reset_after_backward()
        else:
            for group in self.groups:
                group.update_requires_grad()  # as the forward does on ranks that use the unit
            self.leave(keep=self.reshard_after_forward is False, grads=root.program.running is Pass.FORWARD)
            self.hide()

    def end_forward(self, grads: bool) -> None:
        """The forward of the outermost unit has ended, and so has this unit's, even if a module of it has not run.

        ``grads``: that forward has a graph, so a recompute may follow.
        """
        if self.phase is Phase.FORWARD:
            assert self.root is not None
            self.call = None
            self._after_forward(self.root, self.calls.are_awaited())
        if self.may_recompute and not grads:
            self.may_recompute = False
            self.hide()

    # Backward

    @property
    def is_ahead(self) -> bool:
        """Within a backward: whether it has this unit, or another call of it, still ahead."""
        assert self.root is not None
        return self.may_recompute or self.calls.any_ahead(self.root)

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached an output of a call: gather the weights again."""
        root = self.root
        assert root is not None
        root.begin_backward()
        if call.backward != root.backwards:
            if root.has_optional and not call.in_recompute:
                root.check_forward(call.forward)
            call.backward = root.backwards
            if call.passed or not call.watches:
                call.restart()
                self.calls.expect(call)
        if self.phase is Phase.BACKWARD:
            return
        if self.phase is Phase.FORWARD:
            self._refuse(Phase.BACKWARD)
        self.phase = Phase.BACKWARD
        self.may_recompute = False
        if torch.is_grad_enabled():
            self._prepare_second_backward()
        if not (self.intent.reduces or self.intent.reshard_after_backward or root.joins or self.shows_full):
            self._refuse_split_backward()
        root.need(self, gather=self.unshard_in_backward)

    def _refuse_split_backward(self) -> None:
        """Raise if a pipeline schedule computes weight gradients in a separate backward but has sharded parameters.

        The schedule reads the parameters of the modules before the first of the two backwards.
        """
        if "torch.distributed.pipelining" not in sys.modules:
            return
        params = [param for group in self.groups if not group.by_rows for param in group.params]
        wanted = [param.full for param in params if param.full is not None and param.full.requires_grad]
        nodes = [torch.autograd.graph.get_gradient_edge(full).node for full in wanted]
        if not all(map(_torch.will_be_executed, nodes)):
            raise RuntimeError(
                f"unit '{self.name}' was resharded after its forward, but this pipeline schedule computes the "
                "gradients of weights and of inputs in separate backwards, which needs unsharded weights: call "
                "fully_shard with reshard_after_forward=False in the stages"
            )

    def _prepare_second_backward(self) -> None:
        """This backward creates a graph. A backward of that graph reads the weights without reaching an output."""
        assert self.root is not None
        if self.root.has_optional:
            raise RuntimeError(
                "backward with create_graph=True is not supported for a model with optional units: ranks that skip a "
                "unit would launch other all-gathers. Call fully_shard without optional=True"
            )
        self.leases[Lease.GRAPH] = True
        for group in self.groups:
            group.watch()

    def post_backward(self) -> None:
        """The gradients of a forward's inputs are complete, and so are those of its weights."""
        root = self.root
        assert root is not None
        if self.calls.any_ahead(root):
            has_read = all(call.has_read for call in self.calls)
            if has_read and self.in_backward and self._reshards_now and self.is_gathered:
                self.release()  # what is ahead is an embedding, whose backward does not read them
                root.gathers.prefetch(self, is_released=True)
            return
        if self.phase is Phase.BACKWARD:
            # The next unit's all-gather is launched before this unit's reduce, because only the former is waited for;
            # and after this unit's weights are released, so that it can use their memory.
            if self._reshards_now:
                self.release()
            root.gathers.prefetch(self, is_released=True)
        root.unit_left(self)
        self.reset_after_backward()

    def end_backward(self) -> None:
        """The backward of the root has ended."""
        if _torch.in_backward():
            for call in self.calls:
                if self.root is not None and call.is_ahead(self.root.backwards, False):
                    call.passed = True
        self.reset_after_backward()

    def reset_after_backward(self) -> None:
        """Release the weights, unless a setting or a lease keeps them, and reset the state of the pass."""
        if self.phase is Phase.FORWARD:
            return  # the backward was called within this unit's forward
        if Lease.GRAPH in self.leases:
            self.keep()
            self.hide()
        elif Lease.USER in self.leases:
            if self.root is not None and self.root.program.has_launched:  # otherwise a rank may run it alone
                self.leases = {Lease.USER: self.leases[Lease.USER]}
        elif self.is_gathered:
            if self._reshards_now:
                self.release()
            else:
                self.keep()
                if self.intent.reshard_after_backward:
                    self.hide()  # the weights are kept for the next micro-batch, but users see sharded parameters
        self.call = None  # there may be one of a recompute that stopped early, or ran only some modules of a list
        self.phase = Phase.RESTING
        self.may_recompute = False
        for group in self.groups:
            if group.post_forward_mesh is not None:
                group.source.drop_post_forward_shard()

    @property
    def _reshards_now(self) -> bool:
        """Whether the weights are released after the backward that is running."""
        return (
            self.intent.reshard_after_backward
            and (not self.keeps_for_next or self.is_last)
            and Lease.GRAPH not in self.leases
            and Lease.USER not in self.leases
        )

    @property
    def stays(self) -> bool:
        """Whether the weights stay gathered after the running pass has left this unit."""
        assert self.root is not None
        if self.root.program.running is Pass.BACKWARD:
            return not self._reshards_now
        return self.reshard_after_forward is False or Lease.USER in self.leases

    def recover(self, broken_backward: bool) -> None:
        """Release the weights after an exception in a pass. Gradients of an interrupted backward are dropped."""
        self.call, self.may_recompute = None, False
        root = self.root
        assert root is not None
        for call in self.calls:
            if broken_backward or call.forward == root.forwards:
                call.passed = True
        if broken_backward:
            for group in self.groups:
                group.gradients.drop()
        self.phase = Phase.RESTING
        if Lease.USER not in self.leases:
            self.release(always=True)
        elif broken_backward:
            self.leases = {Lease.USER: self.leases[Lease.USER]}
        else:
            self.leases.pop(Lease.PREFETCH, None)

    def reset(self) -> None:
        """Reset the unit in any state, and drop gradients that have not been reduced."""
        self.calls = Calls()
        for group in self.groups:
            group.gradients.drop()
            group.gradients.drop_partial()
        self.phase = Phase.RESTING
        self.reset_after_backward()
        self.release(always=True)

    def reshard(self) -> None:
        """Put the sharded parameters back. Later passes gather again; a running backward would not, so this raises."""
        if self.in_backward and _torch.in_backward():
            raise RuntimeError(
                f"unit '{self.name}' is in its backward, which reads its weights; call reshard, state_dict or save "
                "after the backward has returned"
            )
        has_graph = Lease.GRAPH in self.leases
        self.release()
        for group in self.needs if not has_graph else ():
            group.release()
        for group in self.groups:
            group.forget()


def _gradient_arrives(unit: weakref.ref[Unit], index: int, is_complete: bool) -> None:
    """The first gradient of a group has arrived or, if ``is_complete``, the last one.

    It starts the backward pass if the parameter was used outside of any forward.
    """
    known = unit()
    if known is not None and known.root is not None:
        known.root.begin_backward()
        if is_complete:
            known.root.group_complete(known.numbers[index])


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of this module, if it did."""
    found: Unit | None = module.__dict__.get(_UNIT)
    return found


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Register a unit for `unit_of`."""
    module.__dict__[_UNIT] = unit


def unit_with(group: ParamGroup) -> Unit | None:
    """The unit that owns a group, while it exists."""
    found: Unit | None = None if group.owner is None else group.owner()
    return found
