"""The leader's duty of deciding when groups travel as codes: when 1-bit Adam freezes its variance,
and whether codes make steps faster at all.

Invariant: the leader only says what may be, with a step; a group changes when the commits of all
its workers have said that they know (`paradis.core.codes.CodedSteps`).
"""

from __future__ import annotations

import msgspec

from paradis.core.benefit import BenefitTrial, benefit_text
from paradis.roles import effects as fx
from paradis.roles.freezing import Freezing, freezes, rule_of
from paradis.roles.leader_views import LeaderConfig, LeaderViews
from paradis.wire import messages as msg

_BOTH_WAYS = ("bf16", "int8")
"""Codecs of groups that may go back to steps in full."""


class LeaderCodes(LeaderViews):
    """Decisions on codes; `paradis.roles.leader.LeaderRole` is the whole role."""

    def __init__(self, config: LeaderConfig) -> None:
        super().__init__(config)
        self._freezing: dict[int, Freezing] = {}
        self._trials: dict[int, BenefitTrial] = {}
        self._codecs: dict[int, str] = {}
        self._told: dict[int, tuple[int, int]] = {}

    # --------------------------------------------------------- 1-bit Adam's freeze

    def _watch_variance(self, plan: msg.Plan) -> None:
        """Decide when a group of 1-bit Adam may freeze its variance, unless its user did."""
        servers = {s.server for s in plan.shards if s.codec}
        watch = self._freezing.get(plan.group)
        if watch is not None:
            watch.extend(servers)
        elif plan.part == 0 and servers and freezes(plan.optimizer, plan.coded_from):
            warm_up = plan.options[0].get("warm_up_steps", 0)
            assert isinstance(warm_up, int)
            self._freezing[plan.group] = Freezing(
                rule_of(plan.options[0]), servers, warm_up_steps=warm_up
            )

    def _on_variance(self, message: msg.Variance) -> None:
        watch = self._freezing.get(message.group)
        step = watch.on_variance(message) if watch is not None else None
        if step is None:
            return
        del self._freezing[message.group]
        self._announce("info", f"group {message.group}: the variance is steady; gradients and "
                       f"updates travel as one bit per element from step {step} on")  # fmt: skip
        self._tell_workers(msg.Freeze(group=message.group, step=step))

    def _tell_workers(self, message: msg.Freeze) -> None:
        for node in self._of_role("worker"):
            if not self.nodes[node].gone:
                self._send(node, message)

    # ------------------------------------------------------------ measured benefit

    def _with_trial(self, plan: msg.Plan, register: msg.Register) -> msg.Plan:
        """Begin to measure a new group, where the settings want it; return its plan."""
        codec = next((s.codec for s in plan.shards if s.codec), "")
        wanted = self.config.settings.compression_benefit == "measured" and plan.mode == "sync"
        if plan.part or plan.backup or plan.ranks or not wanted or codec in ("", "lion"):
            return plan
        judged = codec in _BOTH_WAYS
        rule = self.config.benefit
        self._codecs[plan.group] = codec
        self._told[plan.group] = (plan.coded_from, plan.coded_until)
        self._trials[plan.group] = BenefitTrial(
            rule, taken=register.benefit if judged else "", judged=judged
        )
        if judged and register.benefit:
            return plan
        return msgspec.structs.replace(
            plan, settle_steps=rule.settle_steps, window_steps=rule.window_steps
        )

    def _on_pace(self, pace: msg.Pace) -> None:
        trial = self._trials.get(pace.group)
        if trial is not None:
            trial.take(pace.rank, coded=pace.coded, times_ns=pace.times_ns)
            self._weigh(pace.group, pace.step)

    def _weigh_all(self) -> None:
        """A worker has left: the windows of those who go on may be complete."""
        for group in self._trials:
            self._weigh(group, 0)

    def _weigh(self, group: int, step: int) -> None:
        """Go on with the measurement of a group, if all windows are here.

        Args:
            step: one that has been done.
        """
        assert self.view is not None
        trial = self._trials[group]
        known = trial.decision
        if trial.turn(self.view.members):
            begin, end = self._told[group]
            later = max(begin, end, step) + 1
            self._told[group] = (later, end) if trial.coded else (begin, later)
            begin, end = self._told[group]
            self._tell_workers(msg.Freeze(group=group, step=begin, until=end))
        if trial.decision != known:
            codec = self._codecs[group]
            what = f"compression {codec}" if codec in _BOTH_WAYS else "1-bit Adam"
            level = "warning" if trial.decision == "off" else "info"
            text = benefit_text(what, group, trial.comparison(), trial.decision)
            self._announce(level, text)

    def _with_benefit(self, manifest: fx.WriteManifest) -> fx.WriteManifest:
        """Return what a manifest is to say of the group's measurement: a resumed run goes by it."""
        trial = self._trials.get(manifest.info.group)
        codec = self._codecs.get(manifest.info.group, "")
        if trial is None or not trial.decision or codec not in _BOTH_WAYS:
            return manifest
        return msgspec.structs.replace(manifest, benefit=f"{codec} {trial.decision}")

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        super().check()
        for trial in self._trials.values():
            trial.check()
