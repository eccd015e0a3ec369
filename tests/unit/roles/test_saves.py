"""When a checkpoint is complete."""

from __future__ import annotations

from paradis.roles import effects as fx
from paradis.roles.saves import Saves
from paradis.wire import messages as msg


def plan(part: int, server: str) -> msg.Plan:
    shard = msg.ShardPlan(
        shard=part, server=server, dtype="float32", length=4, options_group=0, priority=part,
        segments=(msg.Segment(part, 0, 4, 0),),
    )  # fmt: skip
    return msg.Plan(
        generation=1, group=0, part=part, first_parameter=part, parameters=(), optimizer="SGD",
        options=[], step=0, shards=(shard,),
    )  # fmt: skip


def saved(node: str) -> msg.Saved:
    return msg.Saved(node=node, checkpoint="c", group=0, step=3, pieces=(), scalars={})


INFO = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={})


def test_a_plan_made_meanwhile_is_not_waited_for() -> None:
    """Parameters added after the save was asked for are in no part of it."""
    saves, first = Saves(), plan(0, "server-0")
    assert saves.note(INFO, [first]) is None
    done = saves.note(saved("server-0"), [first, plan(1, "server-1")])
    assert isinstance(done, fx.WriteManifest)
    assert done.plans == (first,) and [p.node for p in done.parts] == ["server-0"]


def test_parts_may_come_before_the_info() -> None:
    saves, plans = Saves(), [plan(0, "server-0"), plan(1, "server-1")]
    assert saves.note(saved("server-0"), plans) is None
    assert saves.note(INFO, plans) is None and saves
    assert isinstance(saves.note(saved("server-1"), plans), fx.WriteManifest)


def test_a_user_hears_of_a_checkpoint_when_all_worker_groups_are_in_it() -> None:
    saves = Saves()
    first, second = (
        msg.CheckpointDone(checkpoint=f"{p}/group-{g}", path=p, step=3)
        for p, g in (("step-3", 0), ("step-3", 1))
    )
    assert not saves.whole(first, 2) and not saves.whole(first, 2)
    assert saves.whole(second, 2) and saves.whole(first, 2)
    assert saves.whole(msg.CheckpointDone(checkpoint="c", path="", step=6, error="full"), 2)
    assert saves.whole(msg.CheckpointDone(checkpoint="d", path="step-6", step=6), 1)


def test_a_part_that_is_written_has_been_copied() -> None:
    """Its worker may end in between, and the checkpoint be complete before anybody hears of it."""
    saves, plans = Saves(), [plan(0, "server-0")]
    info = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={}, workers=(0, 1))
    assert saves.note(info, plans) is None
    saves.ask_workers(info)
    told = saves.implied(saved("worker-1"))
    assert told == msg.MemoriesCopied(rank=1, checkpoint="c", group=0)
    assert saves.implied(saved("worker-1")) is None and saves.implied(saved("server-0")) is None


def test_a_manifest_is_written_once() -> None:
    """A scheduled save and the script's own may meet at one step, while the manifest is written."""
    saves, plans = Saves(), [plan(0, "server-0")]
    info = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={}, workers=(1,))
    assert saves.note(info, plans) is None
    assert saves.note(saved("server-0"), plans) is None
    assert isinstance(saves.note(saved("worker-1"), plans), fx.WriteManifest)
    assert saves.note(info, plans) is None and saves.note(saved("worker-1"), plans) is None
    assert saves.left(1) == ([], [])
    done = saves.close("c", "path", "")
    assert done is not None and saves.note(info, plans) == done
