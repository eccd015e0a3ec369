"""What a server says about a step: contradictions, non-finite elements, who is waited for."""

from __future__ import annotations

from typing import Any

from paradis.roles.held import HeldGroup, HeldShard, parameter_present
from paradis.roles.step_rules import (
    contradiction,
    disagreement,
    early_refusal_text,
    parameter_at,
    sync_timeout_text,
)
from paradis.wire import messages as msg

SPECS = [
    msg.ParameterSpec(name=name, shape=(4,), dtype="float32", options_group=0)
    for name in ("a", "b")
]
PLAN = msg.ShardPlan(
    shard=7, server="server-0", dtype="float32", length=20, options_group=0, priority=0,
    segments=(msg.Segment(0, 0, 4, 0), msg.Segment(1, 0, 4, 16)),
)  # fmt: skip


def commit(**fields: Any) -> msg.StepCommit:
    """Return a commit with both parameters present."""
    plain = {"revisions": {}, "present": b"\x03", "options": [{"lr": 0.1}]}
    return msg.StepCommit(**{**plain, **fields})


def reason(*commits: msg.StepCommit) -> str:
    """Return why workers 0, 1, ... contradict each other."""
    return disagreement(dict(enumerate(commits)), SPECS, {7: HeldShard(PLAN, 0)}, 5)


def test_same_commits_agree() -> None:
    assert reason(commit(), commit()) == ""
    assert reason(commit(changed={7: [1, 2]}), commit(changed={7: [1, 2]})) == ""


def test_options_differ() -> None:
    text = reason(commit(), commit(options=[{"lr": 0.2}]))
    assert text.startswith("step 5 refused") and "0.1" in text and "0.2" in text


def test_clips_differ() -> None:
    assert "clip_grad_norm_" in reason(commit(), commit(clip=0.5))


def test_gradients_are_not_equally_late() -> None:
    text = reason(commit(), commit(delay=1))
    assert "0 steps late on worker 0 and 1 on worker 1" in text and "optimizer.wait()" in text


def test_changed_values_name_the_parameter_and_the_workers() -> None:
    text = reason(commit(changed={7: [1, 2]}), commit(changed={7: [1, 3]}))
    assert "value of b differently on workers 0 and 1" in text
    assert "value of a" in reason(commit(), commit(changed={7: [1, 0]}))


def test_shards_of_other_servers_are_none_of_our_business() -> None:
    assert reason(commit(changed={9: [1]}), commit()) == ""


def test_parameter_of_an_element() -> None:
    assert parameter_at(PLAN, SPECS, 3) == "a"
    assert parameter_at(PLAN, SPECS, 16) == "b"
    assert parameter_at(PLAN, SPECS, 10) == "shard 7"


def test_presence_bits_beyond_the_map_are_absent() -> None:
    assert parameter_present(commit(), 1)
    assert not parameter_present(commit(), 2) and not parameter_present(commit(), 99)


def test_sync_timeout_names_step_shard_parameter_and_workers() -> None:
    group = HeldGroup(0, 5)
    group.specs = SPECS
    group.shards[7] = HeldShard(PLAN, 5)
    text = sync_timeout_text("server-0", group, [1, 2], 12_500_000_000)
    for part in ("Gradient sync timeout", "step 5", "12.5 s", "worker 1, worker 2", "shard 7: a"):
        assert part in text


def refused(*commits: msg.StepCommit, members: int = 2) -> str:
    """Return what commits say against an early update that counted revision 0 of each member."""
    shard = HeldShard(PLAN, 0)
    shard.early = (dict.fromkeys(range(members), 0), {"lr": 0.1})
    return contradiction(shard, SPECS, dict(enumerate(commits)))


def test_commits_confirm_an_early_update() -> None:
    assert refused(commit(), commit()) == ""


def test_commits_that_contradict_an_early_update_are_told_by_rank_and_name() -> None:
    cases = {
        "changed the gradient of a, b": commit(revisions={7: 1}),
        "changed the gradient of a": commit(present=b"\0"),
        "changed lr of a, b from 0.1 to 0.2": commit(options=[{"lr": 0.2}]),
        "changed the value of a, b": commit(changed={7: [1, 2]}),
        "clipped the gradient of a, b": commit(clip=0.5),
    }
    for told, second in cases.items():
        assert f"worker 1 {told}" in refused(commit(), second)
    assert "GradScaler on worker 1" in refused(commit(), commit(found_inf=True))
    assert "worker 2 has ended between backward and step()" in refused(
        commit(), commit(), members=3
    )


def test_an_early_refusal_says_what_to_do() -> None:
    text = early_refusal_text(5, "worker 1 did it")
    assert text.startswith("step 5 refused: worker 1 did it; ")
    assert "no_sync" in text and "training.early_update: false" in text
