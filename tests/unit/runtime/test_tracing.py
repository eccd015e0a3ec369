"""Which effects and events open and close which span."""

from __future__ import annotations

from collections.abc import Callable

from paradis.ids import NodeId
from paradis.observe.spans import Span
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.runtime.tracing import Tracer
from paradis.wire.messages import DataMessage, Push, PushAck, RackPush, Update

SERVER, WORKER, AGENT = NodeId("server-0"), NodeId("worker-2"), NodeId("dispatcher-1")
BYTES = [memoryview(b"abcd"), memoryview(b"ef")]


def told(tracer: Tracer) -> list[tuple[object, ...]]:
    """Return the spans without their times, which are looked at here."""
    spans = tracer.recorder.spans()
    assert all(s.enter_ns <= s.leave_ns for s in spans)
    return [_words(s) for s in spans]


def _words(s: Span) -> tuple[object, ...]:
    return (f"{s.stage} {s.what}".strip(), s.group, s.shard, s.step, s.worker, s.peer, s.bytes)


def arrives(tracer: Tracer, source: NodeId, message: DataMessage, lease: int = 0) -> None:
    tracer.event(ev.Received(source, message, lease))


def test_a_push_lasts_until_its_own_acknowledgement() -> None:
    tracer = Tracer(WORKER)
    tracer.sending(SERVER, Push(group=1, shard=5, step=4), BYTES, None)
    arrives(tracer, SERVER, PushAck(shard=5, step=3))
    arrives(tracer, AGENT, PushAck(shard=5, step=4))
    assert told(tracer) == []
    arrives(tracer, SERVER, PushAck(shard=5, step=4))
    arrives(tracer, SERVER, PushAck(shard=5, step=4, sequence=1))
    assert told(tracer) == [("push gradient", 1, 5, 4, 2, SERVER, 6)]


def test_a_repeated_push_has_one_span_and_a_revision_its_own() -> None:
    tracer = Tracer(WORKER)
    tracer.sending(SERVER, Push(shard=5, step=4), BYTES, None)
    tracer.sending(SERVER, Push(shard=5, step=4), BYTES, None)
    tracer.sending(SERVER, Push(shard=5, step=4, revision=1), BYTES[:1], None)
    arrives(tracer, SERVER, PushAck(shard=5, step=4))
    assert told(tracer) == [], "it was overtaken"
    arrives(tracer, SERVER, PushAck(shard=5, step=4, revision=1))
    assert told(tracer) == [("push gradient", 0, 5, 4, 2, SERVER, 4)]


def test_a_sum_lasts_from_its_first_contribution_to_its_own_end() -> None:
    tracer = Tracer(SERVER)
    arrives(tracer, WORKER, Push(group=1, shard=5, step=4))  # dropped: there was no memory
    tracer.summing(fx.Reduce(5, 1, (), 2, False), 12)
    tracer.event(ev.Reduced(5, 1))
    assert told(tracer) == []
    arrives(tracer, WORKER, Push(group=1, shard=5, step=4), lease=1)
    arrives(tracer, AGENT, RackPush(group=1, shard=5, step=4, included=()), lease=2)
    arrives(tracer, WORKER, Push(group=1, shard=5, step=3), lease=3)
    tracer.summing(fx.Reduce(5, 2, (), 2, False), 12)
    tracer.event(ev.Reduced(5, 1))
    assert told(tracer) == [], "an earlier sum, thrown away"
    tracer.event(ev.Reduced(5, 2))
    assert told(tracer) == [("aggregation", 1, 5, 4, -1, "", 12)]


def test_a_late_repetition_does_not_stretch_the_next_sum() -> None:
    tracer = Tracer(SERVER)
    for step, ticket in ((4, 1), (5, 2)):
        arrives(tracer, WORKER, Push(shard=5, step=step), lease=1)
        tracer.summing(fx.Reduce(5, ticket, (), 2, False), 12)
        tracer.event(ev.Reduced(5, ticket))
        arrives(tracer, WORKER, Push(shard=5, step=step), lease=2)
    first, second = tracer.recorder.spans()
    assert (first.step, second.step) == (4, 5)
    assert first.leave_ns <= second.enter_ns


def test_an_update_and_its_way_out() -> None:
    tracer = Tracer(SERVER)
    tracer.updating(fx.Apply(1, 5, 4, {}, (True,), 1.0, False), 6)
    tracer.event(ev.Applied(5, 4))
    tracer.event(ev.Applied(6, 4))
    calls: list[str] = []
    message = Update(group=1, shard=5, step=4, version=5)
    reports: list[Callable[[], None] | None] = [
        tracer.sending(WORKER, message, BYTES, lambda: calls.append("sent")),
        tracer.sending(AGENT, message, BYTES, None),
    ]
    assert len(told(tracer)) == 1
    for report in reports:
        assert report is not None
        report()
    assert calls == ["sent"]
    assert told(tracer) == [
        ("update", 1, 5, 4, -1, "", 6),
        ("push update", 1, 5, 4, 2, WORKER, 6),
        ("push update", 1, 5, 4, -1, AGENT, 6),
    ]


def test_answers_to_pulls_outside_of_steps_are_no_part_of_the_path() -> None:
    tracer = Tracer(SERVER)
    assert tracer.sending(WORKER, Update(shard=5, step=4, version=4), BYTES, None) is None
    worker = Tracer(WORKER)
    worker.installed(5, 6)
    assert told(tracer) == told(worker) == []


def test_a_worker_s_update_lasts_from_its_first_byte_until_it_is_installed() -> None:
    tracer = Tracer(WORKER)
    tracer.receiving(SERVER, 1, 5, 4)
    tracer.receiving(AGENT, 1, 5, 4)  # the first link broke in the middle
    tracer.installed(5, 6)
    tracer.installed(5, 6)
    assert told(tracer) == [("push update", 1, 5, 4, 2, AGENT, 6)]


def test_a_rack_agent_pushes_sums() -> None:
    tracer = Tracer(AGENT)
    tracer.sending(SERVER, RackPush(shard=5, step=4, revision=9, included=()), BYTES, None)
    arrives(tracer, SERVER, PushAck(shard=5, step=4, revision=9))
    assert told(tracer) == [("push sum", 0, 5, 4, -1, SERVER, 6)]
