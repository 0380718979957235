"""The tree of connections among ranks: what one says all hear, and an end without a goodbye is noticed at once."""

from __future__ import annotations

import json
import os
import selectors
import socket
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from flatshard.trust.links import Links
from flatshard.trust.watch import Survey, Verdict, Watch, Watched


class Tree:
    """Ranks of one process, which take turns on one selector."""

    def __init__(self, world, connected=None):
        self.store, self.selector = dist.HashStore(), selectors.DefaultSelector()
        self.heard = {rank: [] for rank in range(world)}
        self.links = {
            rank: Links(self.store, rank, world, self.selector, self.heard[rank].append) for rank in range(world)
        }
        self.connect(range(world) if connected is None else connected)

    def connect(self, ranks):
        for rank in ranks:
            self.links[rank].open()
        for rank in ranks:
            self.links[rank].connect_to_parent()
        self.run()

    def kill(self, *victims):
        for victim in victims:
            links = self.links[victim]
            for key in list(self.selector.get_map().values()):
                if key.fileobj is links._listener or any(key.fileobj is link.socket for link in links._links):
                    self.selector.unregister(key.fileobj)
            links.drop()
        self.run()

    def run(self):
        while ready := self.selector.select(0.05):
            for key, _ in ready:
                key.data()


@pytest.fixture
def tree(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    made = []

    def make(*args, **kwargs):
        made.append(Tree(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        for links in each.links.values():
            links.drop()


@pytest.mark.parametrize("speaker", [0, 1, 13, 19])
def test_all_ranks_hear_once_what_one_says(tree, speaker):
    ranks = tree(20)
    assert all(links.are_complete() for links in ranks.links.values())
    ranks.links[speaker].tell({"raised": "ValueError: no data", "rank": speaker})
    ranks.run()
    for rank, heard in ranks.heard.items():
        assert heard == ([] if rank == speaker else [{"raised": "ValueError: no data", "rank": speaker}])


@pytest.mark.parametrize("victim", [0, 2, 11])
def test_a_rank_that_is_gone_is_missed_by_all(tree, victim):
    ranks = tree(20)
    ranks.kill(victim)
    assert all({"lost": victim} in heard for rank, heard in ranks.heard.items() if rank != victim)


@pytest.mark.parametrize("victims", [[1], [1, 2], [9, 1], [1, 9, 10]])
@pytest.mark.parametrize("speaker", [0, 11, 73, 90])
def test_ranks_below_one_that_is_gone_stay_connected_to_the_others(tree, victims, speaker):
    ranks = tree(91)  # 73 to 80 are below 9, which is below 1
    ranks.kill(*victims)
    message = {"raised": "ValueError: no data", "rank": speaker}
    ranks.links[speaker].tell(message)
    ranks.run()
    for rank, heard in ranks.heard.items():
        if rank not in victims:
            lost = sorted(each["lost"] for each in heard if "lost" in each)
            assert lost == sorted(victims), rank  # once each
            assert heard.count(message) == (rank != speaker)


def test_a_rank_above_that_is_gone_before_it_has_answered_is_replaced_too(tree):
    """The kernel connects those below to a rank whose process then does not live to answer."""
    ranks = tree(74)
    links = ranks.links[73]
    with mock.patch.object(ranks, "run"):
        ranks.kill(9)
    links._ready(links._parent)  # and only this rank sees it
    ranks.kill(1)
    links.tell({"raised": "ValueError: no data", "rank": 73})
    ranks.run()
    assert {"raised": "ValueError: no data", "rank": 73} in ranks.heard[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not Linux")
def test_the_kernel_asks_whether_a_node_is_still_there(tree):
    ranks = tree(2)
    for links in ranks.links.values():
        (link,) = links._links
        assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


def test_a_rank_that_says_goodbye_is_not_missed(tree):
    ranks = tree(10)
    ranks.links[9].close()
    ranks.run()
    ranks.links[1].close()
    ranks.run()
    assert ranks.heard[0] == [{"left": [1, 9]}]  # and nothing was passed on: all ranks end, and each would hear of each
    assert ranks.heard[5] == []


def test_a_rank_that_connects_late_hears_what_was_said_before(tree):
    ranks = tree(3, connected=[0, 1])
    assert not ranks.links[0].are_complete()
    ranks.links[1].tell({"raised": "OSError: full", "rank": 1})
    ranks.run()
    ranks.connect([2])
    assert ranks.heard[2] == [{"raised": "OSError: full", "rank": 1}]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1, "token": "guessed"}\n', b"[]\n", b"x" * 100_000, b"\xff\n"]
)
def test_strangers_are_not_heard(tree, said):
    ranks = tree(2, connected=[0])
    _, port, _ = json.loads(ranks.store.get("links/0"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said + b'{"raised": "lies", "rank": 1}\n')
        ranks.run()
    ranks.run()
    assert ranks.heard[0] == []
    assert not ranks.links[0].are_complete()
    ranks.connect([1])
    assert ranks.links[0].are_complete()


def test_a_forked_child_does_not_keep_a_rank_alive(tree):
    """Workers of a DataLoader would hide the end of the process that has started them."""
    ranks = tree(2)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        ranks.links[1].drop()
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        ranks.kill(1)
    finally:
        os.write(go[1], b".")
    os.waitpid(child, 0)
    assert ranks.heard[0] == [{"lost": 1}]


def test_a_message_that_does_not_fit_is_sent_as_there_is_room(tree):
    ranks = tree(2)
    for number in range(200):
        ranks.links[1].tell({"raised": "x" * 30_000, "rank": number})
    ranks.run()
    assert [message["rank"] for message in ranks.heard[0]] == list(range(200))


def test_a_question_that_many_ask_at_once_is_answered_once_by_each(tree, monkeypatch):
    """Where one rank waits in vain, all do; each would answer each."""
    ranks = tree(10)
    surveys = [Survey(rank, 10) for rank in range(10)]

    def answer(rank, question):
        ranks.links[rank].tell({**question, "state": "waits", "rank": rank})

    def hear(rank, message):
        ranks.heard[rank].append(message)
        is_new = "ask" in message and surveys[rank].begin()
        surveys[rank].hear(message)
        if is_new:
            answer(rank, {})

    for rank in range(10):
        monkeypatch.setattr(ranks.links[rank], "_on_message", partial(hear, rank))
        if surveys[rank].begin():
            answer(rank, {"ask": rank})
    ranks.run()
    assert all(survey.is_complete() for survey in surveys)
    assert {len(heard) for heard in ranks.heard.values()} == {9}
    surveys[3].hear({"state": "waits", "rank": 2, "gone": [5]})
    assert "rank 5 has ended" in surveys[3].summary()


def test_a_message_in_the_store_is_read_after_all_have_connected(tree):
    """Of a rank that has ended before it was connected at both ends."""
    ranks = tree(2)
    ranks.store.set("raised", "1 ValueError: no data")
    watch = Watch(Watched(store=lambda name: None, kept=None, rank=0, world=2), "", mock.Mock(), Verdict())
    watch._links = ranks.links[0]
    assert watch._find_others()
    assert watch.verdict.reason == "rank 1 raised ValueError: no data"
    assert not watch._links.reads_store()
