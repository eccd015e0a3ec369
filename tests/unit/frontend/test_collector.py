"""The collector alone: when gradients are handed over, and which of them count in the end."""

from __future__ import annotations

import pytest
import torch

from paradis.errors import ConfigError, StateError
from paradis.frontend import collector as module
from paradis.frontend.collector import Collector
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.worker_memory import GroupMemory
from paradis.wire.messages import Segment, ShardPlan


class Bench:
    """Parameters a, b, c, d of two numbers each: a and b share shard 0, c is 1, d is 2.

    Attributes:
        ready: shards in the order in which they were handed over.
        airborne: the step before is on its way.
        begun: of each attempt to begin the step, whether it was to wait for the one before.
    """

    def __init__(self, *, debug: bool = False, deferred: bool = False) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
        self.memory = self._make_memory()
        self.memory.tensors = [
            BoundTensor(name, p) for name, p in zip("abcd", self.parameters, strict=True)
        ]
        # The second member of a bucket starts at the next multiple of 64 bytes.
        self.memory.add((_plan(0, (0, 0), (1, 16)), _plan(1, (2, 0)), _plan(2, (3, 0))))
        self.ready: list[int] = []
        self.airborne = False
        self.begun: list[bool] = []
        self.collector = Collector(self.memory, self.ready.extend, self._begin, debug=debug)
        self.collector.extend()
        if not deferred:
            self.next_step()

    def _make_memory(self) -> GroupMemory:
        return GroupMemory(detect_changes=False)

    def _begin(self, wait: bool) -> bool:
        self.begun.append(wait)
        self.airborne = self.airborne and not wait
        return not self.airborne

    def next_step(self, *, scaled: bool = False) -> None:
        """End the step as the optimizer does, gradients cleared."""
        for parameter in self.parameters:
            parameter.grad = None
        self.collector.end_step(scaled=scaled)
        self.ready.clear()

    def backward(self, factors: dict[str, float]) -> None:
        """Give the named parameters gradients; backward goes in reverse order of the names."""
        parts = [(self.parameters["abcd".index(n)] * f).sum() for n, f in factors.items()]
        for part in reversed(parts):
            part.backward()  # type: ignore[no-untyped-call]

    def gradient(self, shard: int) -> list[float]:
        """Return what would be pushed for a shard."""
        return torch.frombuffer(
            bytearray(b"".join(self.memory.shards[shard].gradient)), dtype=torch.float32
        ).tolist()


class FreeBench(Bench):
    """Gradients are taken where ``codes`` says so of a shard; a and b share shard 0.

    Attributes:
        codes: shards that travel as codes in this step.
    """

    def __init__(self) -> None:
        self.codes: dict[int, None] = {}
        super().__init__(deferred=True)

    def _make_memory(self) -> GroupMemory:
        memory = GroupMemory(detect_changes=False, frees=True)
        memory.codes = lambda shard: shard in self.codes  # type: ignore[method-assign]
        return memory

    def encode(self, shard: int) -> None:
        """Do what the compressor does when a code is made."""
        memory = self.memory.shards[shard]
        flats, memory.flats = memory.flats, ()
        self.collector.encoded(shard, flats)

    def held(self) -> list[str]:
        """Return the parameters whose gradient the collector holds."""
        every = zip("abcd", self.collector._handed, strict=True)
        return [name for name, each in every if each is not None and each.flat.numel()]


def _plan(shard: int, *members: tuple[int, int]) -> ShardPlan:
    segments = tuple(Segment(parameter, 0, 2, start) for parameter, start in members)
    return ShardPlan(shard=shard, server="server-0", dtype="float32", priority=shard,
                     length=segments[-1].start + 2, segments=segments, options_group=0)  # fmt: skip


ALL = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def test_shards_are_handed_over_while_backward_runs() -> None:
    bench = Bench()
    seen: list[list[int]] = []
    _, _, c, d = bench.parameters
    inner = c * 3.0
    inner.register_hook(lambda grad: seen.append(list(bench.ready)))  # type: ignore[no-untyped-call]
    (inner * d).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [[2]], "d's gradient goes while c's is still being made"
    assert bench.ready == [2, 1]
    bits, present, revised = bench.collector.close()
    assert (bits, present, revised) == (bytes([0b1100]), (1, 2), ())
    assert bench.ready == [2, 1], "closing hands nothing over twice"


def test_a_bucket_waits_for_its_last_member() -> None:
    bench = Bench()
    bench.backward({"b": 2.0})
    assert bench.ready == []
    bench.backward({"d": 4.0})
    assert bench.ready == [2]
    bench.backward({"a": 1.0})
    assert bench.ready == [2, 0]
    assert bench.gradient(0) == [1.0, 1.0, *[0.0] * 14, 2.0, 2.0]


def test_yielded_is_the_order_of_handing_over() -> None:
    bench = Bench()
    bench.backward(ALL)
    assert bench.ready == [2, 1, 0]
    bench.collector.close()
    assert list(bench.collector.yielded) == [2, 1, 0]
    bench.next_step()
    bench.backward({"c": 3.0})
    bench.collector.close()
    assert list(bench.collector.yielded) == [1]


def test_nothing_is_handed_over_under_no_sync() -> None:
    bench = Bench()
    bench.collector.pushing = False
    bench.backward(ALL)
    assert bench.ready == []
    bench.collector.pushing = True
    bench.backward({"c": 3.0})
    assert bench.ready == [1]
    assert bench.gradient(1) == [6.0, 6.0], "what was accumulated before is in it"
    bits, present, revised = bench.collector.close()
    assert (bits, present, revised) == (bytes([0b1111]), (0, 1, 2), ())
    assert bench.gradient(2) == [4.0, 4.0], "made ready by closing"


def test_the_first_step_hands_over_at_its_end() -> None:
    bench = Bench(deferred=True)
    assert bench.collector.deferred
    bench.backward(ALL)
    assert bench.ready == []
    _, present, revised = bench.collector.close()
    assert (present, revised) == ((0, 1, 2), ())
    assert bench.collector.yielded == ()
    bench.next_step()
    assert not bench.collector.deferred


def test_a_scaler_defers_all_later_steps() -> None:
    bench = Bench()
    bench.next_step(scaled=True)
    for _ in range(2):
        assert bench.collector.deferred
        bench.backward(ALL)
        assert bench.ready == []
        assert bench.collector.close()[1:] == ((0, 1, 2), ())
        bench.next_step()


def test_what_a_scaler_changed_unseen_is_revised() -> None:
    bench = Bench()
    bench.backward(ALL)
    assert bench.collector.close(all_changed=True)[1:] == ((0, 1, 2), (0, 1, 2))
    assert not bench.collector.rewritten


def test_a_second_backward_after_handing_over_is_a_revision_and_no_rewriting() -> None:
    bench = Bench()
    bench.backward({"c": 3.0, "d": 4.0})
    bench.backward({"c": 10.0})
    assert bench.ready == [2, 1], "the new gradient is not pushed during backward"
    _, present, revised = bench.collector.close()
    assert (present, revised) == ((1, 2), (1,))
    assert bench.gradient(1) == [13.0, 13.0]
    assert not bench.collector.rewritten


@pytest.mark.parametrize("in_place", [True, False])
def test_what_the_script_changes_after_backward_is_revised(in_place: bool) -> None:
    bench = Bench()
    bench.backward(ALL)
    parameter = bench.parameters[1]
    assert parameter.grad is not None
    if in_place:
        parameter.grad.mul_(5.0)
    else:
        parameter.grad = torch.full((2,), 10.0)
    _, present, revised = bench.collector.close()
    assert (present, revised) == ((0, 1, 2), (0,))
    assert bench.gradient(0)[-2:] == [10.0, 10.0]
    assert bench.collector.rewritten


def test_parameters_that_changed_after_they_were_pushed_are_named() -> None:
    bench = Bench()
    bench.backward({"b": 2.0, "c": 3.0, "d": 4.0})  # shard 0 lacks a, so b is not pushed
    with torch.no_grad():
        for index in (1, 2):
            bench.parameters[index].grad.mul_(2.0)  # type: ignore[union-attr]
    bench.parameters[3].grad = None
    bench.collector.close()
    assert bench.collector.altered == ["c", "d"]
    bench.next_step()
    bench.backward(ALL)
    bench.collector.close()
    assert bench.collector.altered == []


def test_absent_parameters_get_zeros_and_no_presence() -> None:
    bench = Bench()
    bench.backward({"b": 2.0, "d": 4.0})
    bits, present, revised = bench.collector.close()
    assert (bits, present, revised) == (bytes([0b1010]), (0, 2), ())
    assert bench.gradient(0) == [*[0.0] * 16, 2.0, 2.0]


def test_a_gradient_dropped_after_handing_over_counts_as_zeros() -> None:
    bench = Bench()
    bench.backward(ALL)
    bench.parameters[0].grad = bench.parameters[2].grad = None
    bits, present, revised = bench.collector.close()
    assert (bits, present, revised) == (bytes([0b1010]), (0, 2), (0,))
    assert bench.gradient(0) == [*[0.0] * 16, 2.0, 2.0]
    assert not bench.collector.rewritten


def test_pushes_are_deferred_after_some_steps_that_revise_most() -> None:
    bench = Bench()
    for step in range(module._REVISED_STEPS_MAX):
        assert not bench.collector.deferred, step
        bench.backward(ALL)
        torch.nn.utils.clip_grad_norm_(bench.parameters, 0.5)
        assert bench.collector.close()[2] == (0, 1, 2)
        bench.next_step()
    assert bench.collector.deferred
    bench.backward(ALL)
    assert bench.ready == [] and bench.collector.close()[2] == ()


def test_a_few_revisions_do_not_defer() -> None:
    bench = Bench()
    for _ in range(3 * module._REVISED_STEPS_MAX):
        bench.backward(ALL)
        assert bench.parameters[3].grad is not None
        bench.parameters[3].grad.mul_(2.0)
        assert bench.collector.close()[2] == (2,)
        bench.next_step()
    assert not bench.collector.deferred


def test_an_unfrozen_parameter_gets_its_hook_when_a_step_closes() -> None:
    bench = Bench()
    bench.collector.detach()
    bench.parameters[2].requires_grad_(False)
    bench.collector.attach()
    bench.parameters[2].requires_grad_(True)
    bench.backward({"c": 3.0})
    assert bench.ready == []
    assert bench.collector.close()[1] == (1,)
    bench.next_step()
    bench.backward({"c": 3.0})
    assert bench.ready == [1]


def test_detached_hooks_do_nothing() -> None:
    bench = Bench()
    bench.collector.detach()
    bench.backward(ALL)
    assert bench.ready == []


def test_writes_that_no_version_counter_sees_are_found_by_debugging() -> None:
    bench = Bench(debug=True)
    bench.backward(ALL)
    assert bench.parameters[1].grad is not None
    bench.parameters[1].grad.data.numpy()[0] = 7.0
    with pytest.raises(StateError, match="gradient of b was changed after backward"):
        bench.collector.close()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    bench = Bench(deferred=True)
    bench.parameters[3].grad = torch.ones(2).to_sparse()
    with pytest.raises(ConfigError, match="gradient of d refused: it is sparse"):
        bench.collector.close()


def test_the_first_parameter_that_is_not_finite_is_named() -> None:
    bench = Bench()
    bench.backward({"a": 1.0, "b": float("nan"), "c": float("inf")})
    bench.collector.close()
    assert bench.collector.non_finite() == "b"
    bench.next_step()
    assert bench.collector.non_finite() == "b", "the step that was closed last may be on its way"
    bench.backward(ALL)
    bench.collector.close()
    assert bench.collector.non_finite() == ""


def test_what_cannot_go_yet_goes_with_the_next_gradient_that_can() -> None:
    bench = Bench()
    bench.airborne = True
    bench.backward({"d": 4.0})
    bench.backward({"c": 3.0})
    assert bench.ready == [] and bench.begun == [False, False]
    bench.airborne = False
    bench.backward({"a": 1.0})
    assert bench.ready == [2, 1], "in the order of backward"
    bench.backward({"b": 2.0})
    assert bench.ready == [2, 1, 0]
    bench.collector.flush()
    assert bench.collector.close()[1:] == ((0, 1, 2), ()) and bench.ready == [2, 1, 0]


def test_what_is_left_goes_when_the_step_before_is_finished() -> None:
    bench = Bench()
    bench.airborne = True
    bench.backward(ALL)
    assert bench.ready == []
    bench.collector.flush()
    assert bench.ready == [2, 1, 0] and bench.begun[-1] is True
    assert bench.gradient(1) == [3.0, 3.0]
    assert bench.collector.close()[1:] == ((0, 1, 2), ())


def test_a_gradient_that_changed_before_it_could_go_is_revised_as_any_other() -> None:
    bench = Bench()
    bench.airborne = True
    bench.backward(ALL)
    grad = bench.parameters[2].grad
    assert grad is not None
    with torch.no_grad():
        grad.mul_(2.0)
    bench.collector.flush()
    _, _, revised = bench.collector.close()
    assert revised == (1,) and bench.collector.altered == ["c"]
    assert bench.gradient(1) == [6.0, 6.0]


def test_no_gradient_is_added_to_one_that_is_sent_yet() -> None:
    """Backward of the first one has added to it already: it waits, before others are."""
    bench = Bench()
    bench.backward(ALL)
    bench.collector.close()
    bench.collector.end_step(scaled=False)  # and nobody clears gradients
    bench.ready.clear()
    bench.airborne, bench.begun = True, []
    bench.backward({"d": 4.0})
    assert bench.begun == [True] and bench.ready == [2]
    bench.next_step()
    bench.airborne, bench.begun = True, []
    bench.backward({"d": 4.0})
    assert bench.begun == [False] and bench.ready == [], "a new gradient disturbs nothing"


def test_gradients_of_the_step_on_its_way_are_looked_at_first() -> None:
    bench = Bench()
    bench.backward({**ALL, "b": float("nan")})
    bench.collector.close()
    bench.next_step()
    bench.airborne = True
    bench.backward({"d": float("inf")})
    assert bench.collector.non_finite() == "b"


def test_what_closing_has_handed_over_is_not_put_off_any_more() -> None:
    """As with `clip_grad_norm_`, which closes the step before ``step()`` does."""
    bench = Bench()
    bench.airborne = True
    bench.backward(ALL)
    bench.parameters[2].grad = None
    assert bench.collector.close()[1] == (0, 2)
    bench.collector.flush()
    assert bench.ready == [], "closing says itself what there is"


# ------------------------------------------------------------------- gradients that are let go


def test_a_gradient_is_taken_and_held_until_its_codes_are_made() -> None:
    bench = FreeBench()
    bench.codes = {0: None, 1: None}
    bench.backward({"b": 2.0, "c": 3.0, "d": 4.0})
    assert [p.grad is None for p in bench.parameters] == [True, True, True, False]
    assert bench.ready == [2, 1], "from the first step on, and the bucket waits for its last"
    bench.encode(1)
    assert bench.held() == ["b", "d"]
    bits, present, revised = bench.collector.close()
    assert (bits, present, revised) == (bytes([0b1110]), (0, 1, 2), ())
    bench.encode(0)
    assert bench.held() == ["d"]
    assert bench.collector.reachable() == []
    assert bench.collector.close() == (bits, present, revised)


def test_of_a_tensor_in_pieces_the_last_code_lets_go() -> None:
    bench = FreeBench()
    bench.memory.add((_plan(3, (2, 0)),))
    bench.collector.extend()
    bench.codes = {1: None, 3: None}
    bench.backward({"c": 3.0})
    assert bench.ready == [1, 3]
    bench.encode(1)
    assert bench.held() == ["c"]
    bench.encode(3)
    assert bench.held() == []


def test_a_code_of_the_step_before_lets_nothing_of_this_one_go() -> None:
    bench = FreeBench()
    bench.codes = {1: None}
    bench.backward({"c": 3.0})
    late = bench.memory.shards[1].flats
    bench.collector.close()
    bench.next_step()
    bench.airborne = True
    bench.backward({"c": 5.0})
    assert bench.held() == ["c"] and bench.ready == []
    bench.collector.encoded(1, late)
    assert bench.held() == ["c"]


def test_what_backward_yielded_before_codes_began_is_taken_in_step() -> None:
    """The step before is on its way, so nobody knows yet how this one travels."""
    bench = FreeBench()
    bench.airborne = True
    bench.backward(ALL)
    assert all(p.grad is not None for p in bench.parameters) and bench.ready == []
    bench.codes = {0: None, 1: None}
    bench.collector.flush()
    assert bench.ready == [2]
    assert bench.collector.close() == (bytes([0b1111]), (0, 1, 2), ())
    assert [p.grad is None for p in bench.parameters] == [True, True, True, False]


def test_what_comes_after_a_taken_gradient_is_refused() -> None:
    bench = FreeBench()
    bench.codes = {1: None}
    bench.backward({"c": 3.0, "d": 4.0})
    for name in "cd":
        with pytest.raises(StateError, match=f"gradient of {name} refused.*no_sync"):
            bench.backward({name: 1.0})
    with pytest.raises(StateError, match="gradient of c refused"):
        bench.collector.close()  # backward has made one before the hook could refuse it
    with pytest.raises(StateError, match="zero_grad refused.*gradient of c counts"):
        bench.collector.refuse_taken("zero_grad")
    bench.next_step()
    bench.collector.refuse_taken("zero_grad")


@pytest.mark.parametrize("how", ["changed", "dropped"])
def test_a_gradient_in_full_must_stay_as_it_will_have_to(how: str) -> None:
    bench = FreeBench()
    bench.backward(ALL)
    gradient = bench.parameters[3].grad
    assert gradient is not None
    if how == "changed":
        gradient.mul_(0.5)
    else:
        bench.parameters[3].grad = None
    with pytest.raises(StateError, match="gradient of d was changed or dropped"):
        bench.collector.close()
