"""The worker's way up: which gradient goes where and when, and what is sent again.

Invariants:
* a shard goes through the window once a step, in admission order; whatever comes after that
  (a revision, a resend, a change of route) goes through the lane;
* a shard is sent only when backward (or ``step()``) has produced its gradient in this step;
* before ``step()`` a shard that was sent is not sent again, for its bytes may have moved on: it is
  marked void and pushed again when ``step()`` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paradis.core.codes import NUMBERS
from paradis.core.flow import ASSIGN, PUSH, Outbox
from paradis.core.turns import Turns
from paradis.ids import LEADER, NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_state import Group, Shard, WorkerConfig, commit_with_revisions
from paradis.wire import messages as msg


class WorkerPushes:
    """Pushes and commits of one worker; `paradis.roles.worker.WorkerRole` is the whole role.

    Args:
        config: rank and the settings that bound and time it.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.node = worker_id(config.rank)
        self.incarnation = 0
        self.view: msg.View | None = None
        self.groups: dict[int, Group] = {}
        self._boxes: dict[tuple[str, int], Outbox] = {}
        self._up: dict[str, None] = {}
        self._lost_agents: dict[str, None] = {}
        self._out: list[fx.Effect] = []

    # --------------------------------------------------------- subclass duties

    def _send_assign(self, group: Group, shard: Shard) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _queue_changed(self, group: Group) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _finish_if_done(self, group: Group) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _acknowledged(self, group: Group) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _install_early(self, group: Group) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def members(self, group: Group) -> tuple[int, ...]:
        """Return the ranks that train a group and have not left."""
        assert self.view is not None
        return group.among(self.view.members)

    def _hand_over(self, group: Group, shard: Shard) -> bool:
        raise AssertionError("subclass")  # pragma: no cover

    def _close_with_host(self, group: Group, shard: Shard, *, revised: bool) -> bool:
        raise AssertionError("subclass")  # pragma: no cover

    def _closed_to_host(self, group: Group, *, commit: bool) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _go_alone(self, group: Group, shard: Shard) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _send_host_sum(self, group: Group, shard: Shard) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    # ------------------------------------------------------------------ routes

    def _agent(self) -> str:
        """Return the rack agent that this worker goes through, or an empty name."""
        if self.view is not None:
            for agent, ranks in self.view.racks.values():
                if self.config.rank in ranks and agent not in self._lost_agents:
                    return agent
        return ""

    def _rack_size(self, agent: str) -> int:
        """Return how many workers a rack agent serves."""
        assert self.view is not None
        return sum(len(ranks) for name, ranks in self.view.racks.values() if name == agent)

    def _reroute(self) -> None:
        """Leave out an agent that is no longer ours."""
        agent = self._agent()
        for group in self.groups.values():
            for shard in group.ordered():
                if shard.target not in (shard.server, agent):
                    self._go_direct(group, shard)

    def _go_direct(self, group: Group, shard: Shard) -> None:
        """Leave the rack agent out for this shard, from now on."""
        if shard.target == shard.server:
            return
        old = self._boxes.get((shard.target, group.index))
        if old is not None:
            old.settle(shard.plan.shard)
            old.returned(shard.plan.shard)
            old.lane_drop(shard.plan.shard)
        group.turns.received(shard.plan.shard)
        shard.target = shard.server
        shard.acked = False
        shard.detour = True
        if not shard.trainable:
            return
        box = self._begin(group, shard.server)
        if shard.sent:
            self._push_again(group, shard)
        elif shard.ready:
            box.lane_add(shard.plan.shard, shard.plan.priority)

    # ------------------------------------------------------------------ window

    def _begin(self, group: Group, target: str) -> Outbox:
        """Return the outbox to a receiver, started for the group's present step and parts."""
        key = (target, group.index)
        box = self._boxes.get(key)
        if box is None:
            box = self._boxes[key] = Outbox(quota=self.config.quota_bytes, reserve=0)
        begun = group.started.get(target)
        if begun != (group.step, group.parts):
            group.started[target] = (group.step, group.parts)
            box.grow(max((s.nbytes for s in group.shards.values()), default=0))
            shards = [s for s in group.ordered() if s.target == target and s.trainable]
            same = begun is not None and begun[0] == group.step
            box.begin({s.plan.shard: s.nbytes for s in shards}, keep_lane=same)
            for shard in shards:
                self._enter(group, shard, box)
        return box

    @staticmethod
    def _enter(group: Group, shard: Shard, box: Outbox) -> None:
        """Say where a shard stands when its outbox is begun."""
        if shard.shares:
            passed, ready = not shard.mine, shard.sum_held
        else:
            passed, ready = group.closed and not shard.present, shard.ready
        if shard.sent or shard.detour or passed:
            box.settle(shard.plan.shard)
        elif ready:
            box.ready(shard.plan.shard)

    def _on_ready(self, event: ev.ShardsReady) -> None:
        group = self.groups[event.group]
        if event.step not in (-1, group.step):
            return  # made late, of a step that has been skipped
        targets: dict[str, None] = {}
        for shard_id in event.shards:
            shard = group.shards[shard_id]
            if not shard.ready and shard.trainable:
                shard.whole = self.config.early_update and not group.closed
                self._make_ready(group, shard)
                targets[shard.target] = None
        self._pump_boxes(group, targets)

    def _make_ready(self, group: Group, shard: Shard) -> None:
        """The gradient exists: queue it in the window, or in the lane if its place has passed."""
        shard.ready = True
        if self._hand_over(group, shard):
            return
        box = self._begin(group, shard.target)
        if shard.detour or box.settled(shard.plan.shard):
            shard.detour = True
            box.lane_add(shard.plan.shard, shard.plan.priority)
        else:
            box.ready(shard.plan.shard)

    # ----------------------------------------------------------- step and norm

    def _close(self, event: ev.StepClosed | ev.NormAsked, *, commit: bool) -> None:
        group = self.groups[event.group]
        present = dict.fromkeys(event.present)
        revised = dict.fromkeys(event.revised)
        late = dict.fromkeys(event.late) if isinstance(event, ev.StepClosed) else {}
        group.closed = True
        for shard in group.ordered():
            if shard.trainable:
                self._close_shard(group, shard, present, revised, late)
        self._closed_to_host(group, commit=commit)
        group.commit = commit_with_revisions(event.commit, group)
        if commit:
            # Before `committed`: a thread that receives an update looks at both without a lock.
            trainable = [s for s in group.shards.values() if s.trainable]
            group.waiting = {s.plan.shard: None for s in trainable
                             if s.plan.shard not in group.early}  # fmt: skip
            if self.config.early_update:
                group.confirming = dict.fromkeys(s.server for s in trainable)
            group.found_inf = False
            group.closed_steps += 1
        else:
            group.squares = {}
            group.norm_round += 1
            group.norm_from = dict.fromkeys(s.server for s in group.shards.values() if s.trainable)
        group.committed = commit
        self._send_commit(group)
        if commit and self.config.early_update:
            self._install_early(group)
        if commit and group.commit.changed:
            self._queue_changed(group)
        self._pump(group)
        if commit:
            self._finish_if_done(group)
        elif not group.norm_from:
            self._out.append(fx.Complete(group.index, "norm", group.step))

    def _close_shard(
        self, group: Group, shard: Shard, present: Mapping[int, None],
        revised: Mapping[int, None], late: Mapping[int, None],
    ) -> None:  # fmt: skip
        shard_id = shard.plan.shard
        shard.present = shard_id in present
        if self._close_with_host(group, shard, revised=shard_id in revised):
            return
        if not shard.present:
            box = self._begin(group, shard.target)
            box.settle(shard_id)
            box.lane_drop(shard_id)
            return
        if shard_id in revised:
            shard.revision += 1
            shard.acked = False
        if shard.sent and (shard_id in revised or shard.void):
            self._push_again(group, shard)
        elif not shard.ready:
            if shard_id not in late:
                self._make_ready(group, shard)
        elif not shard.sent and self._begin(group, shard.target).settled(shard_id):
            shard.detour = True  # absent at an earlier closing of this step, present again
            self._begin(group, shard.target).lane_add(shard_id, shard.plan.priority)
        shard.void = False

    def _push_again(self, group: Group, shard: Shard) -> None:
        """Send the shard's gradient again: now if ``step()`` was called, else when it is.

        Not after the shard's update: nobody would answer, and its place in the lane would never
        come free.
        """
        if group.committed and shard.plan.shard not in group.waiting:
            return
        shard.acked = False
        if (group.closed and shard.present) or shard.sum_held:
            if shard.sent:  # else it is queued, and will go out with its present revision
                box = self._begin(group, shard.target)
                box.settle(shard.plan.shard)
                box.lane_add(shard.plan.shard, shard.plan.priority)
        elif shard.sent:
            shard.void = True

    # ----------------------------------------------------------------- sending

    def _pump(self, group: Group) -> None:
        self._pump_boxes(group, [t for t, index in self._boxes if index == group.index])

    def _pump_boxes(self, group: Group, targets: Iterable[str]) -> None:
        """Send what may go now, to some receivers and to whoever has waited for them."""
        turns = self._turns(group)
        for target in targets:
            if target in self._up:
                self._pump_lane(group, target)
                turns.ask(target)
        while (turn := turns.next()) is not None:
            shard_id = self._begin(group, turn).next_push() if turn in self._up else None
            if shard_id is None:
                turns.rest(turn)
                continue
            turns.sent(turn, shard_id, group.shards[shard_id].nbytes)
            self._send_push(group, group.shards[shard_id], turn)

    def _pump_lane(self, group: Group, target: str) -> None:
        """Send what may go past the window.

        An outbox of the step before first becomes one of this step: it may hold shards that the
        step did not need any more (it was skipped, say), and a late acknowledgement must not send
        those as gradients of this step.
        """
        box = self._begin(group, target)
        while (entry := box.lane_next()) is not None:
            shard_id, kind = entry
            shard = group.shards[shard_id]
            if kind == PUSH:
                self._send_push(group, shard, target)
            elif shard.assign is not None:
                self._send_assign(group, shard)
            else:
                box.lane_done(shard_id, ASSIGN)

    def _turns(self, group: Group) -> Turns:
        """Return whose turn it is, started for the group's present step and parts."""
        if group.turns_of != (group.step, group.parts):
            group.turns_of = (group.step, group.parts)
            nbytes: dict[str, int] = {}
            for shard in group.shards.values():
                if shard.trainable and (shard.mine or not shard.shares):
                    nbytes[shard.target] = nbytes.get(shard.target, 0) + shard.nbytes
            largest = max((s.nbytes for s in group.shards.values()), default=0)
            room = max(self.config.room_bytes, max(4, len(nbytes)) * largest)
            group.turns.begin(nbytes, room=room)
        return group.turns

    def _send_push(self, group: Group, shard: Shard, target: str) -> None:
        if shard.sum_held:
            self._send_host_sum(group, shard)
            return
        assert shard.ready, f"shard {shard.plan.shard} has no gradient in step {group.step}"
        shard.sent = True
        push = msg.Push(
            **self._head(group), shard=shard.plan.shard, step=group.step,
            version=shard.version if group.clocked else group.step, revision=shard.revision,
            codec=NUMBERS[shard.plan.codec] if group.coded else 0,
            sequence=int(shard.whole and not shard.revision),
        )  # fmt: skip
        self._send(target, push, fx.Gradient(group.index, shard.plan.shard))

    def _head(self, group: Group) -> dict[str, int]:
        assert self.view is not None
        return {
            "generation": self.view.generation,
            "group": group.index,
            "worker": self.config.rank,
            "incarnation": self.incarnation,
        }

    def _send_commit(self, group: Group, only: str = "") -> None:
        assert group.commit is not None
        targets = dict.fromkeys(s.server for s in group.shards.values() if s.trainable)
        targets.update(dict.fromkeys(s.target for s in group.shards.values() if s.trainable))
        kind = msg.Commit if group.committed else msg.NormRequest
        for target in targets:
            if target in self._up and (not only or target == only):
                self._send(target, kind(
                    **self._head(group), step=group.step, version=group.step,
                    sequence=group.norm_round, commit=group.commit,
                ))  # fmt: skip

    def _send(
        self, target: str, message: msg.DataMessage | msg.ControlMessage,
        payload: fx.Payload | None = None,
    ) -> None:  # fmt: skip
        self._out.append(fx.Send(NodeId(target), message, payload))

    # ----------------------------------------------------------------- answers

    def _on_ack(self, group: Group, source: NodeId, ack: msg.PushAck) -> None:
        box = self._boxes.get((source, group.index))
        shard = group.shards.get(ack.shard)
        if box is None or shard is None:
            return
        if ack.step == group.step:
            group.turns.received(ack.shard)
            if ack.revision == shard.tag and not shard.void:
                shard.acked = True
                if ack.credit:
                    box.lane_done(ack.shard)
            if ack.credit:
                box.returned(ack.shard)
        self._pump_boxes(group, (source,))
        self._acknowledged(group)

    def _on_resend(self, group: Group, resend: msg.Resend) -> None:
        shard = group.shards.get(resend.shard)
        if shard is not None and resend.direct and resend.step > group.step:
            shard.alone_at = resend.step  # others are there already
        if shard is None or resend.step != group.step:
            return
        if group.committed and resend.shard not in group.waiting:
            return
        if resend.direct and shard.target != shard.server:
            self._go_direct(group, shard)
        elif resend.direct and shard.shares:
            self._go_alone(group, shard)
        else:
            self._push_again(group, shard)
        self._pump(group)

    def _on_stale(self, group: Group, source: NodeId, stale: msg.Stale) -> None:
        shard = group.shards.get(stale.shard)
        if shard is None or stale.step != group.step or not shard.sent:
            return
        box = self._boxes.get((source, group.index))
        group.turns.received(stale.shard)
        if box is not None:
            box.returned(stale.shard)
            box.lane_done(stale.shard)
        if self.view is not None and stale.version <= self.view.generation:
            self._push_again(group, shard)
            self._pump(group)
        else:
            shard.stale = True

    def _on_refusal(self, group: Group, refusal: msg.Refusal) -> None:
        if refusal.step == group.step and group.closed:
            self._fail(refusal.error, refusal.text)
            self._send(LEADER, msg.Failed(error=refusal.error, text=refusal.text))

    def _fail(self, error: str, text: str) -> None:
        raise AssertionError("subclass")  # pragma: no cover
