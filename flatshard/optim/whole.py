"""The whole side of an optimizer: it steps whole matrices, each on the rank that owns it.

    gradient shards  --in-->  owner: gradient, weight, state  --step-->  new weight  --out-->  weight shards

Matrices go in buckets (`flatshard.optim.routes`). While the owners step one, the next comes in and the one before goes
out. A rank has, beside its shards and the state of what it owns, the matrices of one bucket, and packed pieces of two:
with B the larger of ``bucket_bytes`` and the largest matrix, weight and gradient together, at most 5.5 B in float32,
and 3.5 B more for each further copy of the model among those who share the work (`Whole.most_bytes`).
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.engine.groups.registry import OWNER, generation, group_of
from flatshard.optim.calls import Calls
from flatshard.optim.choice import Choice
from flatshard.optim.local import Local, refuse_replaced
from flatshard.optim.matrices import Bucket, Seen
from flatshard.optim.owned import LABEL, joined, parts_of, shown, taken
from flatshard.optim.owners import Load, assign, in_buckets, matrices_of
from flatshard.optim.routes import Meeting, cut_axes, held_of, routes
from flatshard.optim.runs import State

_CAPTURED = "a step on whole matrices cannot be captured; leave the optimizer's step outside"


class Whole:
    """What of an optimizer's parameters is whole; the rest is stepped on shards, by `Local`.

    It has the members of `Local` that optimizers ask for. The state of a matrix is known by its stand-in here, and by
    its parameter from outside.
    """

    def __init__(self, choice: Choice, rest: Local) -> None:
        self.choice, self.rest = choice, rest
        self.state: defaultdict[Any, State] = defaultdict(dict)  # of the matrices that this rank owns
        self.batches: list[list[Seen]] = []  # parameters that came together; their owners do not change
        self.buckets: list[Bucket] = []
        self.model: weakref.ref[nn.Module] | None = None  # whose names parameters have, if it is known
        self._known: dict[torch.Tensor, bool] = {}  # all parameters that there have been, and whether they are whole
        self._listed: dict[torch.Tensor, int] = {}  # the numbers of the groups that they are in
        self._meetings: dict[Any, Meeting] = {}
        self._parts: dict[torch.Tensor, list[Seen]] = {}
        self._generation = -1
        self._compared = 0  # batches of which the ranks have the same
        self._lanes: dict[torch.device, Lane] = {}
        self._lent: Any = None  # what `optimizer.state` is for now
        self._shown: dict[Any, State] | None = None  # what it was when somebody looked, since the last step
        self._loaded: defaultdict[Any, State] | None = None  # what is being loaded, by parameter
        self._has_state = False

    @property
    def is_lent(self) -> bool:
        """Whether the optimizer's step is running, or something else that must see only what it is given."""
        return self._lent is not None or self.rest.is_lent

    @property
    def uncast(self) -> bool:
        return self.rest.uncast

    @uncast.setter
    def uncast(self, value: bool) -> None:
        self.rest.uncast = value

    # Plan

    @property
    def seen(self) -> Iterator[Seen]:
        return (each for batch in self.batches for each in batch)

    def add(self, named: Sequence[tuple[str, nn.Parameter, int]]) -> list[Seen]:
        """Make matrices of parameters, given with their names and the numbers of their groups, and choose owners."""
        batch: list[Seen] = []
        for name, parameter, number in named:
            meeting = self._meeting(parameter)
            try:
                matrices = matrices_of(
                    tuple(parameter.shape), self.choice.split_of(name, parameter), self.choice.unbind
                )
            except ValueError as error:
                raise ValueError(f"split of '{name}': {error}") from None
            batch += [Seen(name, parameter, matrix, number, meeting) for matrix in matrices]
        for meeting in dict.fromkeys(each.meeting for each in batch):
            here = [each for each in batch if each.meeting is meeting]
            loads = [0.0] * meeting.size  # of what came before, whose owners stay
            for each in self.seen:
                if each.meeting is meeting:
                    loads[each.owner] += self.choice.cost(each.matrix.shape)
            for each, owner in zip(here, self._assign(meeting, here, loads)[1]):
                each.owner = owner
        self.batches.append(batch)
        self._parts.clear()
        self._known.update({parameter: True for _, parameter, _ in named})
        self._generation = -1
        return batch

    def _assign(
        self, meeting: Meeting, here: Sequence[Seen], loads: Sequence[float] = ()
    ) -> tuple[list[int], list[int]]:
        holders = {id(each.parameter): meeting.holders(each.parameter) for each in here}
        most = [int(holders[id(each.parameter)].counts(each.matrix.box).argmax()) for each in here]
        return assign([self.choice.cost(each.matrix.shape) for each in here], most, meeting.size, loads)

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made of stand-ins have the parameters in its groups, each once; take its state."""
        seen = {id(each.tensor): each for each in self.seen}
        listed: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            params: list[torch.Tensor] = []
            for tensor in group["params"]:
                each = seen.get(id(tensor))
                if each is not None:
                    each.number = number
                    seen.pop(id(tensor))
                found = tensor if each is None else each.parameter
                if id(found) not in listed:
                    params.append(found)
                    listed.add(id(found))
                self._known.setdefault(found, False)
                self._listed.setdefault(found, number)
            group["params"] = params
            group.pop("param_names", None)
        if seen:
            name = next(iter(seen.values())).name
            raise ValueError(f"the factory has left out '{name}'; say with `whole` which parameters are to be whole")
        made = optimizer.__dict__["state"]
        for each in self.seen:
            state = made.pop(each.tensor, None)  # some optimizers make it at once
            if state is not None and each.is_mine:
                self.state[each.tensor] = state

    @property
    def leaves_any(self) -> bool:
        """Whether some of the optimizer's parameters are not whole."""
        return not all(self._known[parameter] for parameter in self._listed)

    def _meeting(self, parameter: nn.Parameter) -> Meeting:
        mesh: DeviceMesh | None = None
        axes: tuple[int, ...] = ()
        device = held_of(parameter).device
        if isinstance(parameter, DTensor):
            mesh, axes = parameter.device_mesh, cut_axes(parameter)
            if self.choice.owners == "all":
                axes = tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
            if axes and mesh.device_type != device.type:  # weights on the host, which communicate on the device
                device = torch.empty(0, device=mesh.device_type).device
        key = (mesh, axes, device)
        if key not in self._meetings:
            self._meetings[key] = Meeting(mesh, axes, device)
        return self._meetings[key]

    def plan(self, optimizer: Optimizer) -> None:
        """Know all parameters of the optimizer, and the buckets in which they go."""
        listed = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if listed != self._listed:
            self._list(listed)
        if any(parameter not in self._known for parameter in listed):
            names = self._names(optimizer)
            wanted = {p: self.choice.wants(names[p], p) for p in listed if p not in self._known}
            self._known.update(wanted)
            if any(wanted.values()):
                self.add([(names[p], p, listed[p]) for p, is_whole in wanted.items() if is_whole])
        if self._generation != generation():
            refuse_replaced(optimizer)
            self.buckets = [bucket for batch in self.batches for bucket in self._buckets(batch)]
            self._generation = generation()

    def _list(self, listed: dict[torch.Tensor, int]) -> None:
        """Matrices follow their parameters into other groups, and out of all of them: then they are not stepped."""
        for each in self.seen:
            before, now = self._listed.get(each.parameter), listed.get(each.parameter)
            if before != now and each.number != before:
                raise RuntimeError(
                    f"'{each.name}' is of another parameter group than other parts of its parameter, and groups have "
                    "been changed since; build a new optimizer"
                )
            each.number = now if each.number == before else each.number
        self._listed, self._generation = listed, -1

    def _names(self, optimizer: Optimizer) -> dict[torch.Tensor, str]:
        """Of all parameters: as in the model, where that is known, or as the optimizer was given them."""
        model = None if self.model is None else self.model()
        if model is not None:
            known = {parameter: name for name, parameter in model.named_parameters()}
            return {p: known.get(p, name_of(p)) for group in optimizer.param_groups for p in group["params"]}
        return {
            parameter: name
            for group in optimizer.param_groups
            for name, parameter in zip(group.get("param_names") or map(name_of, group["params"]), group["params"])
        }

    def _buckets(self, batch: Sequence[Seen]) -> list[Bucket]:
        found: list[Bucket] = []
        for meeting in dict.fromkeys(each.meeting for each in batch):
            here = [each for each in batch if each.meeting is meeting and each.number is not None]
            here = [here[number] for number in self._assign(meeting, here)[0]]
            holders = {id(each.parameter): meeting.holders(each.parameter) for each in here}
            loads = []
            for each in here:
                width = sum(dtype.itemsize for dtype in each.dtypes)
                loads.append(Load(each.matrix, holders[id(each.parameter)], width, each.owner))
            for bucket in in_buckets(loads, self.choice.bucket_bytes):
                numbered = [(place, loads[number]) for place, number in enumerate(bucket)]
                seen = [here[number] for number in bucket]
                ways = routes(meeting, numbered, [each.dtypes for each in seen], f"whole {len(found)}")
                found.append(Bucket(seen, *ways))
        return found

    def lane(self, meeting: Meeting) -> Lane:
        if meeting.device not in self._lanes:
            self._lanes[meeting.device] = Lane("whole", meeting.device)
        return self._lanes[meeting.device]

    def _compare(self, optimizer: Optimizer, after: bool) -> None:
        """Raise, on all ranks, if they do not have the same matrices; or, after a step, other options in their groups.

        Once for each batch: all ranks come to it.
        """
        for batch in self.batches[self._compared :]:
            for meeting in dict.fromkeys(each.meeting for each in batch):
                here = [each for each in batch if each.meeting is meeting]
                if not after:
                    lines = [f"{e.name} {e.matrix.shape} {e.dtypes}, owned by number {e.owner}" for e in here]
                    what, then = "other matrices to step", "build the optimizer alike on all of them"
                else:
                    numbers = sorted({each.number for each in here if each.number is not None})
                    lines = [line for number in numbers for line in _options(number, optimizer.param_groups[number])]
                    what = "other options after a step"
                    then = (
                        "build the optimizer alike on all of them; one that adds up over all parameters cannot be used"
                    )
                self._agree(meeting, lines, what, then)
        self._compared = len(self.batches) if after else self._compared

    def _agree(self, meeting: Meeting, lines: list[str], what: str, then: str) -> None:
        lane = self.lane(meeting)
        said = meeting.messages(lane, hashlib.sha256(repr((lines, self.choice.bucket_bytes)).encode()).digest())
        if len(set(said)) > 1:
            odd = next(rank for rank, each in enumerate(said) if each != said[0])
            told = [json.loads(each) for each in meeting.messages(lane, json.dumps(lines).encode())]
            pairs = zip_longest(told[0], told[odd], fillvalue="nothing")
            one, other = next((pair for pair in pairs if pair[0] != pair[1]), ("other options", "others"))
            raise RuntimeError(
                f"ranks have {what}: of those that share matrices the first has {one}, and number {odd} has {other}; "
                f"{then}"
            )

    # Step

    @torch.no_grad()
    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class, on shards for what is not whole, then bucket after bucket."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(_CAPTURED)
        self.plan(optimizer)
        self._notice(optimizer)
        is_new = self._compared < len(self.batches)
        if is_new:
            self._compare(optimizer, after=False)
        calls = Calls(optimizer, base)
        rest = [[p for p in group["params"] if not self._known[p]] for group in optimizer.param_groups]
        self._has_state = True
        try:
            if any(rest):
                with calls.lent(rest) as step:
                    calls.result = self.rest.step(optimizer, step)
            for number, bucket in enumerate(self.buckets):
                lane = self.lane(bucket.seen[0].meeting)
                if number == 0:
                    bucket.come(lane)
                bucket.arrive(self.uncast)
                if number + 1 < len(self.buckets):
                    following = self.buckets[number + 1]
                    following.come(self.lane(following.seen[0].meeting))
                self._step_on(calls, [bucket.seen[place] for place in bucket.mine])
                if number > 0:
                    self.buckets[number - 1].land()
                bucket.go(lane)
            if self.buckets:
                self.buckets[-1].land()
            self._step_on(calls, [])  # groups of which this rank owns nothing may count too
        except BaseException:
            for bucket in self.buckets:
                bucket.drop()
            raise
        calls.close()
        if is_new:
            self._compare(optimizer, after=True)
        return calls.result

    def _step_on(self, calls: Calls, mine: Sequence[Seen]) -> None:
        params: list[list[torch.Tensor]] = [[] for _ in calls.groups]
        for each in mine:
            assert each.number is not None
            params[each.number].append(each.tensor)
        missed: list[int] = []
        if not mine:
            numbers = dict.fromkeys(each.number for each in self.seen if each.number is not None)
            missed = [number for number in numbers if number not in calls.seen]
            if not missed:
                return
        with self.lending(self.state), calls.lent(params, missed) as step:
            calls.result = step()

    def rest_gradients(self) -> None:
        """Free the memory of gradients that have been set to None."""
        self.rest.rest_gradients()
        with _torch.PlainAttributes():
            for group in dict.fromkeys(group_of(each.parameter) for each in self.seen):
                if group is not None:
                    group.gradients.main_grads.rest()

    @property
    def most_bytes(self) -> int:
        """The most that a step has at once in matrices and packed pieces, besides what the optimizer itself takes."""
        largest, copies, share = 0, 1, 0.0
        for each in self.seen:
            gradient, weight = (dtype.itemsize for dtype in each.dtypes)
            largest = max(largest, each.matrix.box.numel * (gradient + weight), self.choice.bucket_bytes)
            copies = max(copies, max(each.meeting.holders(each.parameter).copies) + 1)
            share = max(share, weight / (gradient + weight))
        return int(largest * (2 + 2 * copies + 3 * copies * share))

    # State

    def look(self, optimizer: Optimizer) -> Any:
        """The state as others see it: of whole parameters, what this rank owns. The entries are ours."""
        if self._lent is not None:
            return self._lent
        if self.rest.is_lent or not self._has_state:
            return self.rest.look(optimizer)
        if self._shown is None:
            whole = {
                parameter: joined([(each.matrix.label, self.state.get(each.tensor, {})) for each in parts])
                for parameter, parts in self._by_parameter().items()
            }
            self._shown = defaultdict(dict, {**self.rest.look(optimizer), **whole})
        return self._shown

    def _notice(self, optimizer: Optimizer) -> None:
        """Take over what others have done to the state that they were shown: set, or taken away."""
        shown, self._shown = self._shown, None
        if shown is None:
            return
        outer = optimizer.__dict__["state"]
        for key in [key for key in outer if key not in shown]:
            del outer[key]
        outer.update({key: value for key, value in shown.items() if not self.has(key)})
        for each in self.seen:
            mine = parts_of(shown.get(each.parameter, {}), each.matrix.label) if each.is_mine else {}
            if mine:
                self.state[each.tensor] = mine
            else:
                self.state.pop(each.tensor, None)

    def _by_parameter(self) -> dict[torch.Tensor, list[Seen]]:
        if not self._parts:
            for each in self.seen:
                self._parts.setdefault(each.parameter, []).append(each)
        return self._parts

    def show(self, optimizer: Optimizer) -> dict[Any, State]:
        """The state by parameter, with the same entries on all ranks: whole parameters have DTensors. All call it."""
        self.plan(optimizer)
        self._notice(optimizer)
        outer = {key: value for key, value in self.look(optimizer).items() if not self.has(key)}
        seen = list(self.seen)
        found: dict[int, Any] = {}
        for meeting in dict.fromkeys(each.meeting for each in seen):
            here = {number: each for number, each in enumerate(seen) if each.meeting is meeting}
            mine = {n: self.state[each.tensor] for n, each in here.items() if each.tensor in self.state}
            found.update(shown(meeting, self.lane(meeting), mine, {n: each.owner for n, each in here.items()}))
        parts: dict[nn.Parameter, list[tuple[str, State]]] = {}
        for number, state in sorted(found.items()):
            parts.setdefault(seen[number].parameter, []).append((seen[number].matrix.label, state))
        outer.update({parameter: joined(entries) for parameter, entries in parts.items()})
        order = [p for group in optimizer.param_groups for p in group["params"] if p in outer]
        return {key: outer[key] for key in dict.fromkeys([*order, *outer])}

    @contextmanager
    def lending(self, state: Any) -> Iterator[None]:
        """In it, this is `optimizer.state`."""
        before, self._lent = self._lent, state
        try:
            yield
        finally:
            self._lent = before

    @contextmanager
    def loading(self) -> Iterator[defaultdict[Any, State]]:
        """In it, `optimizer.state` is what `apart` is given, by parameter: the same entries on all ranks."""
        self._loaded = loaded = defaultdict[Any, State](dict)
        try:
            with self.lending(loaded):
                yield loaded
        finally:
            self._loaded = None

    @property
    def is_loading(self) -> bool:
        return self._loaded is not None

    @contextmanager
    def apart(self, state: Mapping[Any, State]) -> Iterator[dict[Any, State]]:
        """State that is being loaded, in which parts of parameters have entries by the names that optimizers know."""
        assert self._loaded is not None
        split = {p: parts for p, parts in self._by_parameter().items() if p in state and parts[0].matrix.label}
        found: dict[Any, State] = defaultdict(dict, {key: value for key, value in state.items() if key not in split})
        for parameter, parts in split.items():
            self.check(parameter, state[parameter])
            found.update({each.tensor: parts_of(state[parameter], each.matrix.label) for each in parts})
        with self.lending(found):
            yield found
        together = {p: joined([(e.matrix.label, found.pop(e.tensor)) for e in parts]) for p, parts in split.items()}
        self._loaded.update({**found, **together})

    @contextmanager
    def taking(self, optimizer: Optimizer, state: Mapping[Any, State]) -> Iterator[dict[Any, State]]:
        """Let what ``state`` has of whole parameters be that of their matrices; gives what it has of others.

        In it, `optimizer.state` has both, so that optimizers can bring old entries up to date. All ranks call it.
        """
        self.plan(optimizer)
        self._shown = None
        self.state.clear()
        self._has_state = bool(state)
        rest = {key: value for key, value in state.items() if not self.has(key)}
        for parameter, parts in self._by_parameter().items():
            entries = state.get(parameter, {})
            self.check(parameter, entries)
            for each in parts:
                mine = taken(each.meeting, each.owner, parts_of(entries, each.matrix.label))
                if mine:
                    self.state[each.tensor] = mine
        with self.lending(defaultdict(dict, {**rest, **self.state})):
            yield defaultdict(dict, rest)

    def check(self, parameter: torch.Tensor, keys: Iterable[Any]) -> None:
        """ValueError unless these are keys of the state of a whole parameter that is split as this one is."""
        labels = [each.matrix.label for each in self._by_parameter()[parameter]]
        for key in keys:
            label = LABEL.search(str(key))
            if (label is not None or labels != [""]) and (label is None or label.group() not in labels):
                raise ValueError(
                    f"'{key}' is of a parameter that was split in another way than here, where its parts are "
                    f"{', '.join(labels[:4]) or 'one'}{', ...' if len(labels) > 4 else ''}"
                )

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is whole."""
        return self._known.get(parameter, False)

    def owns(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether this rank has an entry of the state of a whole parameter."""
        parts = self._by_parameter()[parameter]
        return any(each.is_mine and (len(parts) == 1 or key.endswith(each.matrix.label)) for each in parts)

    def tensors(self) -> list[torch.Tensor]:
        """Those of the state, for a captured step, which has none of it."""
        raise NotImplementedError(_CAPTURED)

    def settle(self) -> bool:
        """Of a step that is to be captured: it cannot be."""
        raise NotImplementedError(_CAPTURED)


def name_of(parameter: torch.Tensor) -> str:
    """The name of a sharded parameter, from its unit down."""
    known = parameter.__dict__.get(OWNER)
    return "" if known is None else str(known[0])


def _options(number: int, group: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in group.items() if isinstance(value, (int, float, str))}
    return [f"{key}={plain[key]!r} in parameter group {number}" for key in sorted(plain)]
