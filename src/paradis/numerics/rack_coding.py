"""1-bit Adam in a rack agent that makes one code of its workers' codes.

    a = sum of the decoded codes, in summing order, + E;  push C(a);  E = a - C(a)

A third error memory, beside those of workers and server; so over all steps what the servers got,
plus what all three kinds have left out, is the sum of what the workers computed. The sum is not
divided: a server adds what racks send as it adds what workers send, and divides by all workers.

Source: Tang et al., 1-bit Adam, ICML 2021, whose two stages (worker, server) are three here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paradis.numerics.codecs.codec import array
from paradis.numerics.codecs.onebit import OneBit
from paradis.numerics.frozen_shard import FrozenShard


class RackCoder:
    """One shard in a rack agent.

    Args:
        spans: (start, length) of each segment in the shard, in elements.
        length: of the shard.
        codec: that of its workers and of its server.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], length: int, codec: OneBit) -> None:
        self._shard = FrozenShard(codec, [n for _, n in spans], "rack_error")
        self._spans = [slice(start, start + n) for start, n in spans]
        self._sum = torch.zeros(length, dtype=codec.dtype)
        self._counts = False

    @property
    def code_bytes(self) -> int:
        """Bytes of a code of the shard."""
        return self._shard.code_bytes

    def begin(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over what workers' coders start from, too: it says which elements have variance.

        Args:
            memories: ``momentum`` and ``inverse``, as `OneBitAdamServer.start` has them. Copied.
        """
        self._shard.load_memories(memories)
        self._shard.drop_momenta()

    def combine(self, codes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write one code of several; what it leaves out is noted, until `counts`.

        May be called again before: the last call counts.

        Args:
            codes: one or more, (code_bytes,) uint8, in summing order. Not modified.
            out: (code_bytes,) uint8, written in place.

        Raises:
            NonFiniteGradient: a scale is not finite, or the sum overflows. No memory is changed.
        """
        if self._counts:
            self._shard.settle()
            self._counts = False
        self._shard.forget()
        shard = self._shard
        given = [array(code, "code", shard.code_bytes, torch.uint8) for code in codes]
        target = array(out, "code", shard.code_bytes, torch.uint8)
        numbers = array(self._sum, "sum", self._sum.numel(), shard.codec.dtype)
        for segment, (span, place) in enumerate(zip(self._spans, shard.slices, strict=True)):
            used = [code[place] for code in given if code[place].any()]
            if not used:  # absent everywhere in the rack: nothing of it may be taken from memory
                target[place] = 0
                continue
            for index, code in enumerate(used):
                shard.codec.take(code, numbers[span], shard.mask(segment), add=index > 0)
            shard.encode(segment, self._sum[span], target[place])

    def counts(self) -> None:
        """The last code is in the step's update: what it has left out is the error memory."""
        self._counts = True

    def errors(self) -> Sequence[torch.Tensor]:
        """Return the error memory per segment; nothing before `begin`."""
        if self._counts:
            self._shard.settle()
            self._counts = False
        return self._shard.errors().get("rack_error", ())
