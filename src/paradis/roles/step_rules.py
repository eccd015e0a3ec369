"""Sentences about a step: do the workers agree, and who is waited for. Pure text and comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paradis.core.registration import compare_options
from paradis.roles.held import HeldGroup, HeldShard
from paradis.wire import messages as msg


def disagreement(
    commits: Mapping[int, msg.StepCommit],
    specs: Sequence[msg.ParameterSpec],
    shards: Mapping[int, HeldShard],
    step: int,
) -> str:
    """Return why the workers' commits contradict each other, or an empty text."""
    different = compare_options({r: c.options for r, c in commits.items()})
    if different:
        return f"step {step} refused: the workers' hyper-parameters differ: {different}"
    clips = {r: c.clip for r, c in commits.items()}
    if len(set(clips.values())) > 1:
        return (
            f"step {step} refused: clip_grad_norm_ was called with different results: {clips}; "
            "call it on every worker with the same max_norm"
        )
    first_rank, first = next(iter(commits.items()))
    for rank, commit in commits.items():
        if commit.delay != first.delay:
            return (
                f"step {step} refused: the gradient is {first.delay} steps late on worker "
                f"{first_rank} and {commit.delay} on worker {rank}; call optimizer.wait(), "
                "state_dict() and save_checkpoint() on every worker, or on none"
            )
    for rank, commit in commits.items():
        for shard_id in sorted({*first.changed, *commit.changed}):
            if shard_id not in shards:
                continue
            ours, theirs = first.changed.get(shard_id), commit.changed.get(shard_id)
            if ours != theirs:
                name = _changed_name(shards[shard_id].plan, specs, ours, theirs)
                return (
                    f"step {step} refused: the script changed the value of {name} differently on "
                    f"workers {first_rank} and {rank} (or on only one of them); make the same "
                    "change on every worker, or none"
                )
    return ""


def _changed_name(
    plan: msg.ShardPlan,
    specs: Sequence[msg.ParameterSpec],
    ours: Sequence[int] | None,
    theirs: Sequence[int] | None,
) -> str:
    for i, segment in enumerate(plan.segments):
        a = ours[i] if ours is not None and i < len(ours) else 0
        b = theirs[i] if theirs is not None and i < len(theirs) else 0
        if a != b:
            return specs[segment.parameter].name
    return ", ".join(specs[s.parameter].name for s in plan.segments)


def contradiction(
    shard: HeldShard, specs: Sequence[msg.ParameterSpec], commits: Mapping[int, msg.StepCommit]
) -> str:
    """Return what of a shard's early update the commits of all members do not confirm, or "".

    Args:
        shard: applied ahead of the commits.
    """
    assert shard.early is not None
    counted, options = shard.early
    names = _names(shard.plan, specs)
    gone = [r for r in counted if r not in commits]
    if gone:
        return f"worker {gone[0]} has ended between backward and step() and took part in {names}"
    for rank, commit in commits.items():
        if commit.found_inf:
            return f"a GradScaler on worker {rank} saw an overflow after {names} was updated"
        if commit.clip != 1.0:
            return f"worker {rank} clipped the gradient of {names} after backward"
        if shard.plan.shard in commit.changed:
            return f"worker {rank} changed the value of {names} after backward had begun"
        own = commit.options[shard.plan.options_group]
        keys = [k for k in {**options, **own} if repr(options.get(k)) != repr(own.get(k))]
        if keys:
            return (
                f"worker {rank} changed {keys[0]} of {names} from {options.get(keys[0])} to "
                f"{own.get(keys[0])} after backward had begun"
            )
        here = shard.present_in(commit)
        if (commit.revisions.get(shard.plan.shard, 0) if here else None) != counted.get(rank):
            return f"worker {rank} changed the gradient of {names} after backward"
    return ""


def early_refusal_text(step: int, reason: str) -> str:
    """Return the line that ends a job whose commits do not confirm an early update."""
    return (
        f"step {step} refused: {reason}; with training.early_update the servers have updated it "
        "already: leave gradients, values and options alone between backward and step() and "
        "accumulate under no_sync(), or set training.early_update: false"
    )


_NAMES_MAX = 3


def _names(plan: msg.ShardPlan, specs: Sequence[msg.ParameterSpec]) -> str:
    """Return the names of a shard's parameters; a bucket may have many."""
    names = list(dict.fromkeys(specs[s.parameter].name for s in plan.segments))
    more = f" or {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return ", ".join(names[:_NAMES_MAX]) + more


def parameter_at(plan: msg.ShardPlan, specs: Sequence[msg.ParameterSpec], element: int) -> str:
    """Return the name of the parameter that owns an element of the shard."""
    for segment in plan.segments:
        if segment.start <= element < segment.start + segment.length:
            return specs[segment.parameter].name
    return f"shard {plan.shard}"


def early_finish_text(rank: int, steps: int, members: Sequence[int]) -> str:
    """Return the line that says that the others go on without a worker that ran out of batches."""
    at = f"step {steps}" if steps >= 0 else "the step it committed last"
    left = ", ".join(str(r) for r in members)
    return (
        f"worker {rank} finished early, after {at}; the mean is now over {len(members)} workers: "
        f"{left}"
    )


def sync_timeout_text(node: str, group: HeldGroup, missing: Sequence[int], waited_ns: int) -> str:
    """Return the ``Gradient sync timeout`` line: step, shard, parameter, and who is missing."""
    shard = next(iter(group.shards.values()))
    name = group.specs[shard.plan.segments[0].parameter].name if shard.plan.segments else "-"
    who = ", ".join(f"worker {r}" for r in missing)
    return (
        f"Gradient sync timeout: step {group.step} of group {group.index} on {node} has waited "
        f"{waited_ns / 1e9:.1f} s for {who} (first shard {shard.plan.shard}: {name}, version "
        f"{shard.version}); it is alive but has not called step(): look at its log"
    )


def transfer_timeout_text(
    node: str, group: HeldGroup, lacking: Sequence[int], waited_ns: int
) -> str:
    """Return the ``Gradient sync timeout`` line where a version may not be overwritten yet.

    Args:
        lacking: ranks that have not said that they have it.
    """
    who = ", ".join(f"worker {r}" for r in lacking)
    return (
        f"Gradient sync timeout: step {group.step} of group {group.index} on {node} has waited "
        f"{waited_ns / 1e9:.1f} s for {who} to receive the values of version {group.step}, which "
        "are kept for it until then; its link is slow or cut, or it hangs: look at its log"
    )


def bound_timeout_text(
    node: str, group: int, waiting: tuple[int, int], slow: Sequence[int], bound: int, waited_ns: int
) -> str:
    """Return the ``Gradient sync timeout`` line of mode ssp: who waits for whom.

    Args:
        waiting: rank and step of the worker that waits.
        slow: the workers that are more than ``bound`` steps behind it.
    """
    rank, step = waiting
    who = ", ".join(f"worker {r}" for r in slow)
    return (
        f"Gradient sync timeout: worker {rank} has finished step {step} of group {group} on "
        f"{node} and has waited {waited_ns / 1e9:.1f} s for {who}, which training.staleness = "
        f"{bound} lets it leave no further behind; it is "
        "alive but has not called step(): look at its log"
    )
