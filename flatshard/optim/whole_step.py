"""The step of an optimizer on whole matrices, each on the rank that owns it.

    gradient shards  --in-->  owner: gradient, weight, state  --step-->  new weight  --out-->  weight shards

Matrices are sent in buckets (`flatshard.optim.matrices`). While the owners step one bucket, the next is sent in and
the previous one is sent out. In addition to its shards and the state of its matrices, a rank has the matrices of one
bucket, and packed pieces of two: with B the larger of ``bucket_bytes`` and the largest matrix, weight and gradient
together, at most 5.5 B in float32, and 3.5 B more for each further copy of the model among the ranks that share the
work.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.engine.groups.registry import OWNER, generation, group_of
from flatshard.engine.schedule.agreement import Agreement
from flatshard.optim.assignment import WholeOptions, assign, matrices_of
from flatshard.optim.clip import cut_axes
from flatshard.optim.flat_params import State
from flatshard.optim.local_step import LocalStep, refuse_replaced
from flatshard.optim.matrices import Bucket, MatrixParam, in_buckets
from flatshard.optim.owners import OwnerGroup, entries_of, join_entries, state_of_owner, state_on_all_ranks
from flatshard.optim.split_step import SplitStep

_LABEL = re.compile(r"\[\d+(, \d+:\d+|:\d+)?\]$")  # of a part of a parameter, at the end of the name of an entry
CAPTURED = "an optimizer step with whole=True cannot be captured; call optimizer.step() outside of the captured step"


class WholeStep:
    """Steps those parameters of one optimizer that are whole; a `LocalStep` steps the others, on shards.

    It has the members of `LocalStep` that optimizers use. Internally the key to the state of a matrix is the tensor of
    its `MatrixParam`; in the public state it is the parameter.
    """

    def __init__(self, options: WholeOptions, local: LocalStep) -> None:
        self.options, self.local = options, local
        self.state: defaultdict[Any, State] = defaultdict(dict)  # what this rank owns, by matrix
        self.batches: list[list[MatrixParam]] = []  # parameters that came together; their owners do not change
        self.buckets: list[Bucket] = []
        self.model: weakref.ref[nn.Module] | None = None  # whose names parameters have, if it is known
        self.parts: dict[torch.Tensor, list[MatrixParam]] = {}  # of whole parameters
        self._known: set[torch.Tensor] = set()  # all parameters that there have been
        self._listed: dict[torch.Tensor, int] = {}  # the numbers of the groups that they are in
        self._owner_group = functools.cache(OwnerGroup)
        self._lane = functools.cache(functools.partial(Lane, "whole"))  # one per device
        self._generation = -1
        self._compared = 0  # batches of which the ranks have the same
        self._read_state: dict[Any, State] | None = None  # the state that was read since the last step
        self._has_state = False

    @property
    def is_stepping(self) -> bool:
        return self.local.is_stepping

    # Plan

    @property
    def matrices(self) -> Iterator[MatrixParam]:
        return (each for batch in self.batches for each in batch)

    def add(self, named: Sequence[tuple[str, nn.Parameter, int]]) -> list[MatrixParam]:
        """Make matrices of parameters, given with their names and the numbers of their groups, and choose owners."""
        batch: list[MatrixParam] = []
        for name, parameter, number in named:
            owner_group = self._owner_group_of(parameter)
            split = self.options.split_of(name, parameter)
            try:
                matrices = matrices_of(tuple(parameter.shape), split, self.options.unbind)
            except ValueError as error:
                raise ValueError(f"split of '{name}': {error}") from None
            batch += [MatrixParam(name, parameter, matrix, number, owner_group) for matrix in matrices]
        for owner_group, members in _by_owner_group(batch):
            loads = [0.0] * owner_group.size  # what ranks own already stays theirs
            for each in self.matrices:
                if each.owner_group is owner_group:
                    loads[each.owner] += self.options.cost(each.matrix.shape)
            for each, owner in zip(members, self._assign(owner_group, members, loads)[1]):
                each.owner = owner
        self.batches.append(batch)
        for each in batch:
            self.parts.setdefault(each.parameter, []).append(each)
        self._known.update(self.parts)
        self._generation = -1
        return batch

    def _assign(
        self, owner_group: OwnerGroup, matrices: Sequence[MatrixParam], loads: Sequence[float] = ()
    ) -> tuple[list[int], list[int]]:
        holders = {id(each.parameter): owner_group.holders(each.parameter) for each in matrices}
        for each in matrices:
            each.holders = holders[id(each.parameter)]
        most = [int(each.holders.counts(each.matrix.box).argmax()) for each in matrices]
        return assign([self.options.cost(each.matrix.shape) for each in matrices], most, owner_group.size, loads)

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the stand-ins in an optimizer's groups by their parameters, each once, and take over its state."""
        stand_ins = {id(each.tensor): each for each in self.matrices}
        for number, group in enumerate(optimizer.param_groups):
            params: list[torch.Tensor] = []
            for tensor in group["params"]:
                each = stand_ins.pop(id(tensor), None)
                if each is not None:
                    each.number = number
                parameter = tensor if each is None else each.parameter
                if parameter not in self._listed:
                    params.append(parameter)
                    self._listed[parameter] = number
            group["params"] = params
            group.pop("param_names", None)
        if stand_ins:
            name = next(iter(stand_ins.values())).name
            raise ValueError(f"the optimizer of `factory` does not have '{name}'; leave it out of `whole`")
        self._known.update(self._listed)
        initial = optimizer.__dict__["state"]
        for each in self.matrices:
            state = initial.pop(each.tensor, None)  # some optimizers make it at once
            if state is not None and each.is_owned:
                self.state[each.tensor] = state

    def _owner_group_of(self, parameter: nn.Parameter) -> OwnerGroup:
        device = _torch.held_of(parameter).device
        if not isinstance(parameter, DTensor):
            return self._owner_group(None, (), device)
        mesh, axes = parameter.device_mesh, cut_axes(parameter)
        if self.options.owners == "all":
            axes = tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
        if axes and mesh.device_type != device.type:  # weights on the host, which communicate on the device
            device = torch.empty(0, device=mesh.device_type).device
        return self._owner_group(mesh, axes, device)

    def plan(self, optimizer: Optimizer) -> None:
        """Collect all parameters of the optimizer, and their buckets."""
        listed = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if listed != self._listed:
            self._follow_parameters(listed)
        if new := [parameter for parameter in listed if parameter not in self._known]:
            names = self._names(optimizer)
            named = [(names[p], p, listed[p]) for p in new if self.options.wants(names[p], p)]
            if named:
                self.add(named)
            self._known.update(new)
        if self._generation != generation():
            refuse_replaced(optimizer)
            self.buckets = [bucket for batch in self.batches for bucket in self._buckets(batch)]
            self._generation = generation()

    def _follow_parameters(self, listed: dict[torch.Tensor, int]) -> None:
        """Move matrices to the groups that list their parameters now; those that are in no group are not stepped."""
        for each in self.matrices:
            before, now = self._listed.get(each.parameter), listed.get(each.parameter)
            if before != now and each.number != before:
                raise RuntimeError(
                    f"'{each.name}' is in another parameter group than other parts of its parameter, and the groups "
                    "were changed since; build a new optimizer"
                )
            each.number = now if each.number == before else each.number
        self._listed, self._generation = listed, -1

    def _names(self, optimizer: Optimizer) -> dict[torch.Tensor, str]:
        """The names of all parameters: in the model if it is known, else in the optimizer, else in their units."""
        model = None if self.model is None else self.model()
        names: dict[torch.Tensor, str] = {}
        if model is not None:
            names.update((parameter, name) for name, parameter in model.named_parameters())
        for group in optimizer.param_groups:
            if model is None:
                names.update(zip(group["params"], group.get("param_names") or ()))
            for parameter in group["params"]:
                names.setdefault(parameter, parameter.__dict__.get(OWNER, ("",))[0])
        return names

    def _buckets(self, batch: Sequence[MatrixParam]) -> list[Bucket]:
        buckets: list[Bucket] = []
        for owner_group, members in _by_owner_group(each for each in batch if each.number is not None):
            ordered = [members[number] for number in self._assign(owner_group, members)[0]]
            for bucket in in_buckets(ordered, self.options.bucket_bytes):
                buckets.append(Bucket(bucket, self._lane(owner_group.device), f"whole {len(buckets)}"))
        return buckets

    def _compare(self, optimizer: Optimizer, after: bool) -> None:
        """Raise, on all ranks, if their matrices differ; or, after a step, the options of their groups.

        Once for each batch; all ranks call it.
        """
        for owner_group, members in _by_owner_group(e for batch in self.batches[self._compared :] for e in batch):
            what, then = "different matrices to step", "Build the same optimizer on all ranks"
            lines = [f"{e.name} {e.matrix.shape} {e.dtypes}, owned by number {e.owner}" for e in members]
            if after:
                what = "different options after a step"
                then += "; an optimizer that accumulates over all parameters cannot be used"
                lines = [
                    f"{key}={value!r} in parameter group {number}"
                    for number in sorted({each.number for each in members if each.number is not None})
                    for key, value in sorted(optimizer.param_groups[number].items())
                    if isinstance(value, (int, float, str))
                ]
            lines.append(f"bucket_bytes={self.options.bucket_bytes}")
            meshes = [] if owner_group.mesh is None else [owner_group.mesh]
            difference = Agreement(self._lane(owner_group.device), meshes).check(lines, "the optimizer")
            if difference is not None:
                raise RuntimeError(f"ranks have {what}. {difference}. {then}")
        self._compared = len(self.batches) if after else self._compared

    # Step

    @torch.no_grad()
    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class, on shards for what is not whole, then bucket after bucket."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(CAPTURED)
        self.plan(optimizer)
        self._apply_user_changes(optimizer)
        is_new = self._compared < len(self.batches)
        if is_new:
            self._compare(optimizer, after=False)
        split = SplitStep(optimizer, base)
        listed = ((number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"])
        rest = [(number, parameter) for number, parameter in listed if parameter not in self.parts]
        self._has_state = True
        try:
            if rest:
                with split.with_params(rest) as step:
                    split.result = self.local.step(optimizer, step)
            for number, bucket in enumerate(self.buckets):
                if number == 0:
                    bucket.send_in()
                bucket.receive_in(self.local.keep_dtype)
                if number + 1 < len(self.buckets):
                    self.buckets[number + 1].send_in()
                self._step_on(split, list(bucket.owned.values()))
                if number > 0:
                    self.buckets[number - 1].receive_out()
                bucket.send_out()
            if self.buckets:
                self.buckets[-1].receive_out()
            self._step_on(split, [])  # groups of which this rank owns nothing may count too
        except BaseException:
            for bucket in self.buckets:
                bucket.drop()
            raise
        split.close()
        if is_new:
            self._compare(optimizer, after=True)
        return split.result

    def _step_on(self, split: SplitStep, mine: Sequence[MatrixParam]) -> None:
        params = [(each.number, each.tensor) for each in mine if each.number is not None]
        missed: set[int] = set()
        if not mine:
            missed = {each.number for each in self.matrices if each.number is not None} - split.options_after.keys()
            if not missed:
                return
        with self.local.overriding_state(self.state), split.with_params(params, missed) as step:
            split.result = step()

    def free_gradients(self) -> None:
        """Free the memory of gradients that have been set to None."""
        self.local.free_gradients(group_of(each.parameter) for each in self.matrices)

    # State

    def public_state(self, optimizer: Optimizer) -> Any:
        """The public state: for whole parameters, what this rank owns. The entries are the internal ones."""
        if self.local.is_stepping or not self._has_state:
            return self.local.public_state(optimizer)
        if self._read_state is None:
            whole = {
                parameter: join_entries([(each.matrix.label, self.state.get(each.tensor, {})) for each in parts])
                for parameter, parts in self.parts.items()
            }
            self._read_state = defaultdict(dict, {**self.local.public_state(optimizer), **whole})
        return self._read_state

    def _apply_user_changes(self, optimizer: Optimizer) -> None:
        """Apply changes that users have made to the public state: entries set or removed."""
        read, self._read_state = self._read_state, None
        if read is None:
            return
        state = optimizer.__dict__["state"]
        for key in [key for key in state if key not in read]:
            del state[key]
        state.update({key: value for key, value in read.items() if key not in self.parts})
        for each in self.matrices:
            entries = entries_of(read.get(each.parameter, {}), each.matrix.label) if each.is_owned else {}
            if entries:
                self.state[each.tensor] = entries
            else:
                self.state.pop(each.tensor, None)

    def saved_state(self, optimizer: Optimizer) -> dict[Any, State]:
        """The state by parameter, with the same entries on all ranks: whole parameters have DTensors. All call it."""
        self.plan(optimizer)
        self._apply_user_changes(optimizer)
        public = {key: value for key, value in self.public_state(optimizer).items() if key not in self.parts}
        state_of: dict[torch.Tensor, State] = {}  # by the tensors of matrices
        for owner_group, members in _by_owner_group(self.matrices):
            owned = {number: self.state[e.tensor] for number, e in enumerate(members) if e.tensor in self.state}
            owners = [each.owner for each in members]
            states = state_on_all_ranks(owner_group, self._lane(owner_group.device), owned, owners)
            state_of.update({members[number].tensor: state for number, state in states.items()})
        for parameter, parts in self.parts.items():
            entries = [(each.matrix.label, state_of[each.tensor]) for each in parts if each.tensor in state_of]
            if entries:
                public[parameter] = join_entries(entries)
        order = [p for group in optimizer.param_groups for p in group["params"] if p in public]
        return {key: public[key] for key in dict.fromkeys([*order, *public])}

    @contextmanager
    def split_entries(self, state: Mapping[Any, State]) -> Iterator[dict[Any, State]]:
        """Within the context, state that is being loaded has the matrices of split parameters as keys.

        Optimizers know the names of their entries. Afterwards the state is by parameter again.
        """
        loaded = self.local.state_override
        split = {p: parts for p, parts in self.parts.items() if p in state and parts[0].matrix.label}
        visible: dict[Any, State] = defaultdict(dict, {key: value for key, value in state.items() if key not in split})
        for parameter, parts in split.items():
            self.check(parameter, state[parameter])
            visible.update({each.tensor: entries_of(state[parameter], each.matrix.label) for each in parts})
        with self.local.overriding_state(visible):
            yield visible
        together = {
            p: join_entries([(e.matrix.label, visible.pop(e.tensor)) for e in parts]) for p, parts in split.items()
        }
        loaded.update({**visible, **together})

    @contextmanager
    def taking_state(self, optimizer: Optimizer, state: Mapping[Any, State]) -> Iterator[dict[Any, State]]:
        """Take over the state of whole parameters, and yield that of all others. All ranks call it.

        Within the context, `optimizer.state` has both, so that optimizers can bring old entries up to date.
        """
        self.plan(optimizer)
        self._read_state = None
        self.state.clear()
        self._has_state = bool(state)
        rest = {key: value for key, value in state.items() if key not in self.parts}
        for parameter, parts in self.parts.items():
            entries = state.get(parameter, {})
            self.check(parameter, entries)
            for each in parts:
                own = state_of_owner(each.owner_group, each.owner, entries_of(entries, each.matrix.label))
                if own:
                    self.state[each.tensor] = own
        with self.local.overriding_state(defaultdict(dict, {**rest, **self.state})):
            yield defaultdict(dict, rest)

    def check(self, parameter: torch.Tensor, keys: Iterable[Any]) -> None:
        """ValueError unless these are keys of the state of a whole parameter that is split as this one is."""
        labels = [each.matrix.label for each in self.parts[parameter]]
        for key in keys:
            label = _LABEL.search(str(key))
            if (label is not None or labels != [""]) and (label is None or label.group() not in labels):
                raise ValueError(
                    f"'{key}' is state of a parameter that was saved with another `split`; its parts in this "
                    f"optimizer: {', '.join(labels[:4]) or 'one'}{', ...' if len(labels) > 4 else ''}"
                )

    def owned(self, parameter: torch.Tensor, keys: Iterable[str]) -> dict[str, bool]:
        """Whether this rank has each of these entries of the state of a whole parameter."""
        self.check(parameter, keys)
        labels = tuple(each.matrix.label for each in self.parts[parameter] if each.is_owned)
        return {key: str(key).endswith(labels) for key in keys}


def _by_owner_group(matrices: Iterable[MatrixParam]) -> Iterable[tuple[OwnerGroup, list[MatrixParam]]]:
    members_of: dict[OwnerGroup, list[MatrixParam]] = {}
    for each in matrices:
        members_of.setdefault(each.owner_group, []).append(each)
    return members_of.items()
