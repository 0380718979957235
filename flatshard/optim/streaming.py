"""Steps on the device of weights and state that are in host memory, in pieces that pass through a few slots.

copy in     | piece 2 | piece 3 |
step        | piece 1 | piece 2 |
copy out    | piece 0 | piece 1 |
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from flatshard import _torch
from flatshard.buffer import DONE, Lane, Ticket
from flatshard.engine.gradients.main_grads import Reduced
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.weights.offload import Home
from flatshard.optim.flat_params import PER_PARAMETER, FlatParam, Rows, State, set_grad
from flatshard.optim.split_step import SplitStep

PIECE = 1 << 24  # elements of a tensor that are stepped at a time
_SLOTS = 3  # pieces on the device: one arrives, one is stepped, one leaves
_GROUPS = 2  # groups whose gradients wait for their step while the backward goes on
Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
OverridingState: TypeAlias = Callable[[Any], AbstractContextManager[None]]


class _Slot:
    """The device memory of a piece: kept until it has been copied out."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_out = DONE


class Stream:
    """Three lanes of one device, and the slots between them."""

    def __init__(self, device: torch.device) -> None:
        self._copy_in, self._step, self._copy_out = (Lane(name, device) for name in ("state in", "step", "state out"))
        with self._copy_in.after_current_stream():  # what is still written to host memory comes first
            pass
        self._slots = deque(_Slot() for _ in range(_SLOTS))
        self._gradients: deque[tuple[Ticket, object]] = deque()  # which are being read, and until when
        self.stepped = self.saved = DONE  # when the last piece has been stepped, and when it is in host memory

    def follow(self) -> None:
        """Order steps after all work that has been enqueued on the current stream."""
        with self._step.after_current_stream():
            pass

    def run(self, inputs: Sequence[torch.Tensor], step: Callable[[Sequence[torch.Tensor]], Pairs]) -> None:
        """Copy tensors to the device, call ``step`` with them, and copy out what it returns.

        ``step`` returns pairs of a tensor on the device and one in host memory.
        """
        slot = self._slots[0]
        self._slots.rotate(-1)
        with self._copy_in.entered((slot.is_out,)):
            slot.tensors = []  # both lanes that have allocated them come after their last use
            for tensor in inputs:
                slot.tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=self._copy_in.device))
                slot.tensors[-1].copy_(tensor, non_blocking=True)
            arrived = self._copy_in.mark()
        with self._step.entered((arrived,)):
            pairs = step(slot.tensors)
            self.stepped = self._step.mark()
        slot.tensors += [tensor for tensor, _ in pairs]
        with self._copy_out.entered((self.stepped,)):
            # Versions tell changes by users.
            with _torch.keeping_versions([host for _, host in pairs]):
                for tensor, host in pairs:
                    host.copy_(tensor, non_blocking=True)
            self.saved = slot.is_out = self._copy_out.mark()

    def keep(self, gradients: object) -> None:
        """Keep gradients until they have been read; the current stream waits for those of earlier groups."""
        self._gradients.append((self.stepped, gradients))
        while len(self._gradients) > _GROUPS:
            self._gradients[0][0].wait()
            self._gradients.popleft()

    def join(self) -> None:
        """Order the current stream after all steps, and later copies from host memory after those to it."""
        self.stepped.wait()
        self._gradients.clear()
        with self._step.entered((self.saved,)):
            pass
        with self._copy_in.entered((self.saved,)):
            for slot in self._slots:
                slot.tensors = []


class StreamedStep:
    """Steps flat parameters piece by piece. State, and main weights of groups with `Home.host`, are in host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream] = {}

    @torch.no_grad()
    def step(
        self,
        flat_params: Sequence[FlatParam],
        states: Mapping[Any, State],
        split: SplitStep,
        overriding_state: OverridingState,
        keep_dtype: bool,
        reduced: Reduced | None = None,
    ) -> Ticket:
        """Step flat parameters with the gradients that are attached to them, or with those that are on the device.

        ``reduced``: those, of a group whose backward is running.

        ``overriding_state(state)``: a context in which this is the state of the optimizer.
        Returns a ticket after which their weights can be read; waiting for it blocks the host if they are there.
        """
        tickets: list[Ticket] = []
        by_group: dict[ParamGroup | None, list[FlatParam]] = {}
        for each in flat_params:
            by_group.setdefault(each.group(), []).append(each)
        for group, group_params in by_group.items():
            assert group is not None
            device = group.home.device
            if device not in self._streams:
                self._streams[device] = Stream(device)
            stream = self._streams[device]
            stream.follow()
            ready = reduced or group.gradients.main_grads.on_device
            for each in group_params:
                param = _PiecewiseParam(each, group, states[each.tensor], split, keep_dtype, ready)
                for rows in each.pieces(PIECE):
                    stream.run(param.inputs(rows), functools.partial(param.step, rows, overriding_state))
            stream.keep([ready, *(each.tensor.grad for each in group_params)])
            tickets.append(Ticket(then=stream.saved.synchronize) if group.home.host else stream.stepped)

        def wait() -> None:
            for ticket in tickets:
                ticket.wait()

        return Ticket(then=wait)

    def join(self) -> None:
        """Order the current stream after all steps, before any is stepped again; frees slots and gradients."""
        for stream in self._streams.values():
            stream.join()

    def synchronize(self) -> None:
        """Block the host until all that has been stepped is in host memory."""
        for stream in self._streams.values():
            stream.saved.synchronize()


class _PiecewiseParam:
    """A flat parameter that is stepped piece by piece, each from the same numbers."""

    def __init__(
        self,
        flat_param: FlatParam,
        group: ParamGroup,
        state: State,
        split: SplitStep,
        keep_dtype: bool,
        reduced: Reduced | None,
    ) -> None:
        self._flat_param, self._state, self._split = flat_param, state, split
        self._keep_dtype, self._reduced = keep_dtype, reduced
        self._initial = dict(state)
        self._copied_keys = [key for key, value in state.items() if is_per_element(key, value)]
        self._home = state_home(group.home)
        self._on_host = group.home.host
        self._weight = flat_param.tensor.detach()
        gradient = flat_param.tensor.grad if reduced is None else flat_param.part(reduced.buffer)
        assert gradient is not None
        self._gradient = gradient
        copied = group.source.host_copy
        self._compute = None
        if copied is not None and copied.buffer is not None:
            copied.settle()  # a late cast would write over the results
            self._compute = flat_param.part(copied.buffer)
        options = split.groups[flat_param.number]
        self._counts_on_device = bool(options.get("fused") or options.get("capturable"))

    def inputs(self, rows: Rows) -> list[torch.Tensor]:
        """What is to be copied to the device."""
        inputs = [self._initial[key][rows] for key in self._copied_keys]
        if self._on_host:
            inputs.append(self._weight[rows])
            if self._reduced is None:
                inputs.append(self._gradient[rows])
        return inputs

    def step(self, rows: Rows, overriding_state: OverridingState, arrived: Sequence[torch.Tensor]) -> Pairs:
        parameter, entries = self._parameter(rows, arrived)
        lent: defaultdict[Any, State] = defaultdict(dict, {parameter: entries} if entries else {})
        with overriding_state(lent), self._split.with_params([(self._flat_param.number, parameter)]) as step:
            self._split.result = step()
        return self._results(rows, parameter, lent[parameter])

    def _parameter(self, rows: Rows, arrived: Sequence[torch.Tensor]) -> tuple[nn.Parameter, State]:
        """A parameter with its gradient, and its state, on the device."""
        rest = list(arrived[len(self._copied_keys) :])
        parameter = nn.Parameter(rest.pop(0) if self._on_host else self._weight[rows])
        parameter.__dict__.update(self._flat_param.tensor.__dict__)
        gradient = rest.pop() if rest else self._gradient[rows]
        set_grad(parameter, gradient if self._reduced is None else self._reduced.final(gradient), self._keep_dtype)
        wide = dict(zip(self._copied_keys, arrived))
        state = {k: wide[k] if k in wide else self._copied_value(v, parameter.device) for k, v in self._initial.items()}
        return parameter, state

    def _copied_value(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(device if self._counts_on_device else value.device, copy=True)
        return copy.copy(value)

    def _results(self, rows: Rows, parameter: nn.Parameter, state: State) -> Pairs:
        """Tensors to copy, and where in host memory. Entries that have no elements are those of the last piece."""
        pairs: Pairs = []
        for key, value in state.items():
            if not is_per_element(key, value):
                self._state[key] = value
                continue
            if key not in self._state:
                shape = torch.Size((*self._weight.shape[:1], *value.shape[1:]))
                self._state[key] = self._home.empty(shape.numel(), value.dtype).view(shape)
            pairs.append((value, self._state[key][rows]))
        if self._on_host:
            pairs.append((parameter.detach(), self._weight[rows]))
            if self._compute is not None:
                pairs.append((parameter.detach().to(self._compute.dtype), self._compute[rows]))
        return pairs


def is_per_element(key: Any, value: Any) -> bool:
    """Whether an entry of a state has numbers for the elements of its parameter."""
    return isinstance(value, torch.Tensor) and key not in PER_PARAMETER


def state_home(home: Home) -> Home:
    """Where the state of a group is in host memory."""
    return home if home.host else Home(home.device, True, home.device.type != "cpu", asker="offload_state=True")
