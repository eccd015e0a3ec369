"""A real rack agent: what its role asks for, done with tensors."""

from __future__ import annotations

import torch

from paradis.numerics.coders import rack_coder
from paradis.numerics.rack_coding import RackCoder
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.runtime.server_node import SummingNode
from paradis.runtime.shard_store import split_sections
from paradis.wire.messages import ShardPlan


class AgentNode(SummingNode):
    """A rack agent."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._dtypes = {}
        self._coders: dict[int, tuple[ShardPlan, RackCoder]] = {}

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a rack agent's role asks for."""
        match effect:
            case fx.OpenPlan():
                super().carry_own(effect)
                for plan in effect.shards:
                    if plan.recompressed:
                        spans = [(s.start, s.length) for s in plan.segments]
                        self._coders[plan.shard] = plan, rack_coder(plan.codec, spans, plan.length)
            case fx.TakeMemories():
                self._take_memories(effect)
            case fx.SumCounted(shard=shard):
                self._coders[shard][1].counts()
            case fx.Reduce(coded=True):
                self._put_together(effect)
            case _:
                super().carry_own(effect)

    def _put_together(self, effect: fx.Reduce) -> None:
        """Make one code of the workers' codes; or put them one after the other, in that order."""
        flat = [lease for group in effect.sources for lease in group]
        codes = [self.arena.bytes_of(lease) for lease in flat]
        coder = self._coders[effect.shard][1] if effect.shard in self._coders else None
        size = sum(code.numel() for code in codes) if coder is None else coder.code_bytes
        target = self.arena.sum_target(effect.shard, flat, size)
        if self.tracer is not None:
            self.tracer.summing(effect, sum(code.numel() for code in codes))

        def job() -> ev.Event:
            if coder is not None:
                coder.combine(codes, target)
            elif codes[0] is not target:  # the only one may lie there already
                torch.cat(codes, out=target)
            return ev.Reduced(effect.shard, effect.ticket)

        what = "putting codes together" if coder is None else "recompressing"
        self.run_job(f"{what}, shard {effect.shard}", job, nbytes=size)

    def _take_memories(self, effect: fx.TakeMemories) -> None:
        plan, coder = self._coders[effect.shard]
        data = self.arena.bytes_of(effect.lease)

        def job() -> ev.Event:
            try:
                columns = split_sections(data, plan, effect.keys, effect.dtypes)
                coder.begin({
                    key: [column[s.start : s.start + s.length] for s in plan.segments]
                    for key, column in columns.items()
                })  # fmt: skip
            finally:
                self.arena.release(effect.lease)
            return ev.Stored(effect.shard, 0)

        self.run_job(f"starting codes of shard {effect.shard}", job, nbytes=data.numel())
