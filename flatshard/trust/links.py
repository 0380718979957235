"""A tree of connections among the ranks of a job, over which every rank is notified of the end of another one.

Rank r connects to rank (r - 1) // 8, whose address it reads from the store of the process group. A message goes to all
ranks: a rank that receives it passes it on to its other connections. Only a goodbye goes to the neighbours alone, which
remember it: every rank ends, and otherwise each would receive one from each. A connection that closes without a goodbye
means that the process has ended, for whatever reason; the kernel of a stopped process keeps its connections open, and
one that does not answer for five minutes is gone. The ranks below a rank that is gone connect to the next rank above it
that answers. While all ranks run, they send nothing, and do not read the store.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
_Location: TypeAlias = tuple[str, int, str]  # where a rank listens: its name, port and token

_FANOUT = 8
_PATIENCE = 5.0  # seconds for one attempt to connect
_LONGEST = 1 << 18  # bytes of a message
# Seconds until the kernel asks whether the other one is there, and between such questions; and milliseconds in which it
# must answer. By default a node without power is found out after more than two hours.
_ANSWERS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30, "TCP_USER_TIMEOUT": 300_000}
_BACKLOG = 2 * _FANOUT * _FANOUT  # connections at once: those of all ranks below a node that is gone


class Links:
    """The connections of one rank. Only one thread may use them: the one that runs ``selector``.

    ``on_message(message)`` is called for each message of another rank, and with ``{"lost": rank}`` for a rank whose
    process has ended without sending ``{"left": ranks}``: itself, and the ranks that have said goodbye to it. Keys of
    the selector carry a function without arguments, which is to be called.
    """

    def __init__(
        self, store: Any, rank: int, world: int, selector: selectors.BaseSelector, on_message: Callable[[Message], None]
    ) -> None:
        """``store``: of this rank alone; it is dropped once the addresses are known. Opens no connection."""
        self._store, self._rank, self._selector, self._on_message = store, rank, selector, on_message
        self._links: list[_Link] = []
        self._earlier_lines: list[bytes] = []  # what those who connect later must hear
        self._pending = set(range(_FANOUT * rank + 1, min(_FANOUT * (rank + 1) + 1, world)))  # ranks to connect here
        self._parent: _Link | None = None
        self._above: list[_Location] = []  # of the ranks above, the parent first
        self._listener: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self.left: set[int] = set()  # ranks that have ended well, as far as the neighbours knew

    def are_complete(self) -> bool:
        """Whether all neighbours in the tree have connected."""
        is_welcome = self._parent is None or self._parent.rank is not None
        return is_welcome and not self._pending and not self._needs_parent()

    def _needs_parent(self) -> bool:
        """Whether the parent is still to be found."""
        return self._rank > 0 and self._parent is None and self._store is not None

    def is_connected(self) -> bool:
        return bool(self._links)

    def open(self) -> None:
        """Listen for the children, and publish the address. OSError, RuntimeError: no address, or no store."""
        if self._pending:
            address, name = _own_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            location = [name, self._listener.getsockname()[1], self._token]
            self._store.set(f"links/{self._rank}", json.dumps(location))

    def connect_to_parent(self) -> None:
        """Connect to the parent, once its address is published. RuntimeError: the store is gone."""
        key = f"links/{(self._rank - 1) // _FANOUT}"
        if self._needs_parent() and self._store.check([key]):
            self._above = [json.loads(self._store.get(key))]
            self._parent = self._connect(*self._above[0])  # None: again with the next call

    def _replace_parent(self) -> None:
        """Connect to the next rank above that answers: the parent is gone, or its address is now of another process."""
        self._parent = None
        while self._parent is None and len(self._above) > 1:
            self._above.pop(0)
            self._parent = self._connect(*self._above[0])

    def _connect(self, name: str, port: int, token: str) -> _Link | None:
        try:
            connected = socket.create_connection((name, port), _PATIENCE)
        except OSError:
            return None
        link = self._add(connected)
        link.send(_line({"hello": self._rank, "token": token}))
        return link

    def stored(self, key: str) -> str | None:
        """The value of a key in the store, for messages from before all were connected; None without a store."""
        if self._store is None or not self._store.check([key]):
            return None
        value: str = self._store.get(key).decode(errors="replace")
        return value

    def reads_store(self) -> bool:
        """Whether the store has not been dropped."""
        return self._store is not None

    def forget_store(self) -> None:
        """Drop the store: children that have not connected, and the parent, are then not waited for."""
        self._store = None
        self._pending.clear()

    def tell(self, message: Message, by: _Link | None = None) -> None:
        """Send a message to all ranks, or pass on what has come ``by`` a connection."""
        line = _line(message)
        if not message.keys() & {"ask", "state"}:
            self._earlier_lines.append(line)
        for link in list(self._links):
            if link is not by and link.rank is not None:
                link.send(line)

    def close(self) -> None:
        """Say goodbye, and close all connections."""
        goodbye = _line({"left": sorted(self.left | {self._rank})})
        for link in list(self._links):
            if link.rank is not None:
                link.send(goodbye)
            self._remove(link)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def drop(self) -> None:
        """In a forked process: close the parent's connections, so that its end can be detected."""
        for link in self._links:
            link.socket.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        self._add(connected)

    def _add(self, connected: socket.socket) -> _Link:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ANSWERS.items():
            if hasattr(socket, option):  # on Linux
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        link = _Link(connected, self._selector)
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._ready(link))
        self._links.append(link)
        return link

    def _ready(self, link: _Link) -> None:
        """Data have arrived, or more can be sent."""
        if link not in self._links:  # closed since the selector has seen it
            return
        link.send(b"")
        lines, is_open = link.receive()
        is_valid = all(self._handle_line(link, line) for line in lines)
        if is_open and is_valid:
            return
        self._remove(link)
        if is_valid and link.rank is not None and link.rank not in self.left:
            self.tell({"lost": link.rank})
            self._on_message({"lost": link.rank})
        if link is self._parent and link.rank not in self.left:  # perhaps before it has answered
            self._replace_parent()

    def _handle_line(self, link: _Link, line: bytes) -> bool:
        """Whether the other end follows the protocol of a rank of this job."""
        try:
            message = json.loads(line)
            if link.rank is None:
                return self._handle_greeting(link, message)
            if _line(message) in self._earlier_lines:
                return True  # from a rank that has replaced its parent
            if "above" in message:
                self._set_above(message["above"])
                return True
            if "left" in message:
                self.left.update(map(int, message["left"]))
            else:
                self.tell(message, by=link)
            self._on_message(message)
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _handle_greeting(self, link: _Link, message: Message) -> bool:
        """The first message: the other end identifies itself, and both sides send earlier messages."""
        if link is self._parent:
            link.rank = int(message["welcome"])
            self._set_above(message["above"])
        elif hmac.compare_digest(str(message["token"]), self._token):
            link.rank = int(message["hello"])
            self._pending.discard(link.rank)
            link.send(_line({"welcome": self._rank, "above": self._above}))
        else:
            return False
        for line in self._earlier_lines:
            link.send(line)
        return True

    def _set_above(self, above: list[_Location]) -> None:
        """Where the ranks above the parent are, for this rank and those below it."""
        self._above[1:] = above
        for link in self._links:
            if link is not self._parent and link.rank is not None:
                link.send(_line({"above": self._above}))

    def _remove(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.socket)
        link.socket.close()


class _Link:
    """One connection. ``rank``: of its other end, once that is known to be a rank of this job."""

    def __init__(self, connected: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket, self._selector = connected, selector
        self.rank: int | None = None
        self._incoming, self._outgoing = b"", b""

    def send(self, line: bytes) -> None:
        """Send what can be sent now; `_ready` is called when there is room for the rest."""
        had = bool(self._outgoing)
        self._outgoing += line
        try:
            with contextlib.suppress(BlockingIOError):  # the rest follows
                while self._outgoing:
                    self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except OSError:
            self._outgoing = b""  # reading tells that it is closed
        if had != bool(self._outgoing):
            key = self._selector.get_key(self.socket)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self.socket, events, key.data)

    def receive(self) -> tuple[list[bytes], bool]:
        """The lines that have come, and whether more may."""
        is_open = True
        try:
            with contextlib.suppress(BlockingIOError):  # that is all for now
                while is_open:
                    data = self.socket.recv(1 << 16)
                    self._incoming += data
                    is_open = bool(data)
        except OSError:
            is_open = False
        *lines, self._incoming = self._incoming.split(b"\n")
        return lines, is_open and len(self._incoming) <= _LONGEST


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _own_address() -> tuple[str, str]:
    """The address to listen on, and the name for other ranks: of the interface that faces the first node."""
    first = os.environ.get("MASTER_ADDR", "localhost")
    world, local_world = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if (world is not None and world == local_world) or _is_loopback(first):
        return "127.0.0.1", "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(first, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses a route, and sends nothing
        own: str = probe.getsockname()[0]
    # This is the first node, and calls itself by an address that is none for the others.
    return ("", first) if _is_loopback(own) else (own, own)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
