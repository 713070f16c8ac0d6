"""The grid in this process behaves like Flower's: copies, state, errors, nodes that join and leave."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.flower.testing import LocalGrid


def counting() -> ClientApp:
    """App that replies with its number of calls, modifies its message, and raises on partition 2."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state: Any = context.state.get("count", ConfigRecord({"n": 0, "list": [1]}))
        state["n"] += 1
        state["list"].append(state["n"])
        context.state["count"] = state
        if context.node_config["partition-id"] == 2:
            raise KeyError("two")
        arrays: Any = message.content["arrays"]
        arrays["w"].shape = (7,)
        arrays["mine"] = arrays["w"]
        return Message(RecordDict({"arrays": arrays, "count": state}), reply_to=message)

    return app


def content() -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))})})


def ask(grid: LocalGrid, *nodes: int) -> list[Message]:
    return grid.send_and_receive([Message(content(), node, "train", group_id="5") for node in nodes])


def test_replies_come_in_order_with_state_kept_between_calls() -> None:
    grid = LocalGrid(counting(), 2, {"a": 1})
    nodes = grid.get_node_ids()
    for n in (1, 2, 3):
        replies = ask(grid, *reversed(nodes))
        assert [reply.metadata.src_node_id for reply in replies] == nodes[::-1]
        assert [reply.content["count"]["n"] for reply in replies] == [n, n]
        assert {reply.metadata.group_id for reply in replies} == {"5"}
        got: Any = replies[0].content["count"]
        got["list"].append(99)
    state: Any = grid.contexts[nodes[0]].state["count"]
    assert state["list"] == [1, 1, 2, 3]  # not what was done to a reply


def test_nodes_do_not_share_messages() -> None:
    grid, sent = LocalGrid(counting(), 3), content()
    grid.send_and_receive([Message(sent, node, "train") for node in grid.get_node_ids()])
    arrays: Any = sent["arrays"]
    assert list(arrays) == ["w"]
    assert arrays["w"].shape == (3,)


def test_an_exception_of_an_app_is_an_error_reply_and_its_state_is_unchanged() -> None:
    grid = LocalGrid(counting(), 3)
    node = grid.node_of(2)
    (reply,) = ask(grid, node)
    assert (reply.error.code, reply.error.reason) == (2, "<class 'KeyError'>:<''two''>")
    assert "KeyError" in grid.errors[0]
    assert not grid.contexts[node].state


def test_nodes_join_and_leave() -> None:
    grid = LocalGrid(counting(), 2, seed=1)
    assert grid.get_node_ids() == LocalGrid(counting(), 2, seed=1).get_node_ids()
    assert grid.get_node_ids() != LocalGrid(counting(), 2).get_node_ids()
    first, second = grid.get_node_ids()
    ask(grid, first)
    grid.leave(first)
    assert grid.get_node_ids() == [second]
    assert ask(grid, first)[0].error.code == 5
    assert grid.back(first) == first
    assert ask(grid, first)[0].content["count"]["n"] == 2
    anew = grid.back(first, anew=True)
    assert anew != first
    assert grid.node_of(0) == anew
    assert ask(grid, anew)[0].content["count"]["n"] == 1
    third = grid.join({"partition-id": 7})
    assert ask(grid, third)[0].metadata.src_node_id == third


def test_replies_can_be_changed_and_lost_and_pulled_later() -> None:
    grid = LocalGrid(counting(), 2, tamper=lambda reply: None if reply.metadata.src_node_id == first else reply)
    first, second = grid.get_node_ids()
    assert [reply.metadata.src_node_id for reply in ask(grid, first, second)] == [second]
    pushed = grid.push_messages([grid.create_message(content(), "train", second, "1")])
    (reply,) = grid.pull_messages(pushed)
    assert reply.metadata.reply_to_message_id == pushed[0]
    assert list(grid.pull_messages(pushed)) == []
    grid.set_run("mine")
    assert grid.run == "mine"
