"""From a seed to a scenario, its run, and its result; ``python -m paradis.sim.scenario`` replays.

Invariant: a seed and a workload name one run for ever (of one revision of the code).
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paradis.sim.checkers import Violation
from paradis.sim.driver import Result, Simulation
from paradis.sim.job import MS, Change, Fault, Habits, Job, Model, Weather

WORKLOADS = ("counting", "floats")

MODES = ("ssp", "async")
"""Workloads in which workers do not wait for each other, counting or with floats by seed."""

QUORUM = "quorum"
"""Workload in which a step does without some workers."""

GROUPS = "groups"
"""Workload of several worker groups, of any mode by seed, that read each other's models."""

_SIZES = (1, 3, 8, 20, 33, 40)


def scenario(seed: int, workload: str) -> Job:
    """Return the job of a seed.

    Args:
        seed: any number of at least 0.
        workload: ``counting``, ``floats``, ``ssp``, ``async``, ``quorum`` or ``groups``.
    """
    if workload in MODES:
        return _stale(seed, workload)
    if workload == QUORUM:
        return _quorum(seed)
    if workload == GROUPS:
        return _grouped(seed)
    source = random.Random(seed * 2 + WORKLOADS.index(workload))
    racks_count = source.choice((0, 0, 2))
    workers = source.randint(2, 4) if racks_count else source.randint(1, 4)
    servers = source.randint(1, 3)
    racks = tuple(sorted(source.randrange(max(1, racks_count)) for _ in range(workers)))
    dispatchers = max(1, racks_count)
    weather = _weather(source)
    steps = source.randint(3, 5)
    leaves = {}
    if workers > 1 and source.random() < 0.2:
        leaves[source.randrange(workers)] = source.randint(1, steps - 1)
    tree: tuple[tuple[int, ...], ...] = ()
    if source.random() < 0.2 and workers > 2:
        ranks = list(range(workers))
        source.shuffle(ranks)
        tree = (tuple(ranks[:2]), tuple(ranks[2:]))
    hosts, severed = _hosts(random.Random(f"hosts {seed}"), workers, racks_count)
    if hosts:
        everybody = range(workers)
        tree = tuple(tuple(r for r in everybody if hosts[r] == h) for h in dict.fromkeys(hosts))
    job = Job(
        hosts=hosts,
        seed=seed, workload=workload, workers=workers, servers=servers, steps=steps,
        models=_models(source), racks=racks, dispatchers=dispatchers, tree=tree,
        quota_bytes=source.choice((1, 1, 600, 1 << 20)), habits=_habits(source), weather=weather,
        faults=(*_faults(source, workers, servers, racks if racks_count else ()), *severed),
        leaves=leaves, slow=_slow(source, workers, servers),
        **_coded(random.Random(seed * 31 + 7), workers, steps),
    )  # fmt: skip
    job = _perhaps_back(job)
    if racks_count:
        recompress = (
            job.coded and not job.measured and random.Random(f"recompress {seed}").random() < 0.5
        )
        return replace(job, recompress=recompress)
    return _perhaps_early(job)


def _perhaps_early(job: Job) -> Job:
    """Let servers update ahead of the commits in some jobs: those whose workers push directly.

    In most of these no script does what a commit cannot confirm: such a job must not fail.
    """
    source = random.Random(f"early {job.seed} {job.workload}")
    if source.random() < 0.5:
        return job
    habits = replace(job.habits, norm=0.0)
    if source.random() < 0.75:
        habits = replace(habits, revise=0.0, drop=0.0, found_inf=0.0)
    return replace(job, early=True, habits=habits)


def _coded(source: random.Random, workers: int, steps: int) -> dict[str, Any]:
    coded = source.random() < 0.25
    if not coded or source.random() < 0.5:
        return {"coded": coded}
    heard = tuple(source.randint(0, 2) for _ in range(workers))
    freeze = Change(step=source.randint(0, steps), until=-1, heard=heard)
    return {"coded": True, "coded_late": True, "changes": (freeze,)}


def _perhaps_back(job: Job) -> Job:
    """Let some jobs whose steps travel as codes go back to steps in full, and perhaps on again.

    Either the leader decides on what it measures, or it says so at any moments.
    """
    source = random.Random(f"changes {job.seed} {job.workload}")
    if not job.coded or source.random() < 0.3:
        return job
    if not job.coded_late and source.random() < 0.4:
        return replace(job, measured=True, steps=job.steps + source.randint(2, 6))
    changes = [*job.changes]
    for _ in range(source.randint(1, 4)):
        last = changes[-1] if changes else Change(step=0, until=-1, heard=(-1,) * job.workers)
        later = max(last.step, last.until) + source.choice((1, 1, 4))
        back = last.step > last.until
        step, until = (last.step, later) if back else (later, last.until)
        heard = tuple(at + source.choice((1, 1, 2)) for at in last.heard)
        changes.append(Change(step=step, until=until, heard=heard))
    return replace(job, changes=tuple(changes), steps=job.steps + source.randint(2, 6))


def _stale(seed: int, mode: str) -> Job:
    """Return a job without what needs all workers alike, with workers of very different speed."""
    source = random.Random(f"{mode} {seed}")
    job = scenario(seed, source.choice(WORKLOADS))
    slow = {f"worker-{r}": source.choice((1.0, 3.0, 10.0, 40.0)) for r in range(job.workers)}
    return replace(
        job, mode=mode, staleness=source.choice((1, 1, 2, 3)), slow=slow,
        scaling=mode == "async" and source.random() < 0.5,
        habits=replace(job.habits, norm=0.0, change=0.0), steps=job.steps + source.randint(0, 4),
        early=False, coded=False, coded_late=False, changes=(), measured=False, hosts=(),
        faults=tuple(f for f in job.faults if f.kind != "sever"),
    )  # fmt: skip


def _quorum(seed: int) -> Job:
    """Return a job of workers of very different speed, of which some are not waited for.

    Without what needs all workers at one step: norms, and parts that are registered later.
    """
    source = random.Random(f"quorum {seed}")
    job = scenario(seed, source.choice(WORKLOADS))
    workers = max(2, job.workers)
    slow = {f"worker-{r}": source.choice((1.0, 1.0, 3.0, 10.0, 40.0)) for r in range(workers)}
    models = tuple(replace(m, parts=m.parts[:1]) for m in job.models)
    return replace(
        job, workers=workers, models=models, slow=slow, steps=job.steps + source.randint(1, 5),
        backup=source.randint(1, workers - 1),
        racks=(0,) * workers, dispatchers=1, tree=tuple(g for g in job.tree if g),
        habits=replace(job.habits, norm=0.0, look=0.0), early=False, hosts=(),
        leaves={source.randrange(workers): 2} if source.random() < 0.25 else {},
        faults=_faults(source, workers, job.servers, ()),
    )  # fmt: skip


def _grouped(seed: int) -> Job:
    """Return a job of two or three worker groups of very different speed; some end early."""
    source = random.Random(f"groups {seed}")
    mode = source.choice(("sync", "sync", *MODES))
    job = _stale(seed, mode) if mode in MODES else scenario(seed, source.choice(WORKLOADS))
    sizes = tuple(source.randint(1, 2) for _ in range(source.choice((2, 2, 3))))
    workers, steps = sum(sizes), source.randint(3, 8)
    slow: dict[str, float] = {}
    leaves: dict[int, int] = {}
    for group, size in enumerate(sizes):
        first = sum(sizes[:group])
        speed = source.choice((1.0, 1.0, 5.0, 30.0))
        end = source.choice((steps, steps, source.randint(1, steps)))
        for rank in range(first, first + size):
            slow[f"worker-{rank}"] = speed
            if source.random() < 0.15:
                end = source.randint(1, end)
            if end < steps:
                leaves[rank] = end
    modes: tuple[str, ...] = ()
    if mode != "sync" and source.random() < 0.5:
        modes = ("sync", mode, "async")[: len(sizes)]
    sizes_of = [tuple(source.choice(_SIZES) for _ in range(source.randint(1, 4))) for _ in sizes]
    buffer = source.choice((0, 5))
    faults = (f for f in job.faults if f.kind in ("pause", "cut"))
    weather = job.weather
    if source.random() < 0.3:  # answers that come when the next question is out
        weather = replace(weather, repeat=0.4, reorder=True, jitter_ns=3_000_000)
    return replace(
        job, workers=workers, groups=sizes, steps=steps, slow=slow, leaves=leaves,
        bounds=tuple(source.choice((0, 1, 1, 2, 4)) or int(mode == "ssp") for _ in sizes),
        models=tuple(Model(parts=(p,), buffer=0 if i else buffer) for i, p in enumerate(sizes_of)),
        weather=weather, modes=modes, scaling=job.scaling and not modes,
        racks=(0,) * workers, dispatchers=1, hosts=(), tree=(), early=False,
        changes=(), measured=False, coded_late=False, faults=tuple(
            f for f in faults
            if all(_index(n) < workers for n in (f.node, f.peer) if n.startswith("worker"))
            and not f.node.startswith("dispatcher") and not f.peer.startswith("dispatcher")
        ),
    )  # fmt: skip


def _index(node: str) -> int:
    return int(node.rpartition("-")[2])


def _hosts(
    source: random.Random, workers: int, racks: int
) -> tuple[tuple[int, ...], tuple[Fault, ...]]:
    """Return the host of each worker, where hosts reduce first, and when their workers are severed.

    From a source of its own: what came before it stays as it was.
    """
    if racks or workers < 2 or source.random() < 0.5:
        return (), ()
    count = source.choice((1, 1, 2))
    hosts = tuple(source.randrange(count) for _ in range(workers))
    if source.random() < 0.7:
        return hosts, ()
    node, at_ns = f"worker-{source.randrange(workers)}", int(source.random() * 15 * MS) + MS
    return hosts, (Fault(kind="sever", at_ns=at_ns, node=node),)


def _models(source: random.Random) -> tuple[Model, ...]:
    models = []
    for _ in range(source.choice((1, 1, 1, 2))):
        parts = [tuple(source.choice(_SIZES) for _ in range(source.randint(3, 6)))]
        if source.random() < 0.2:
            parts.append((source.choice(_SIZES), source.choice(_SIZES)))
        if source.random() < 0.15:
            parts[0] = (*parts[0], 0)
        models.append(Model(parts=tuple(parts), buffer=source.choice((0, 0, 5))))
    return tuple(models)


def _habits(source: random.Random) -> Habits:
    def sometimes(chance: float, value: float) -> float:
        return value if source.random() < chance else 0.0

    return Habits(
        absent=sometimes(0.5, 0.2), revise=sometimes(0.5, 0.4), drop=sometimes(0.3, 0.3),
        late=sometimes(0.5, 0.3), norm=sometimes(0.35, 0.4), change=sometimes(0.3, 0.3),
        found_inf=sometimes(0.3, 0.15), look=sometimes(0.3, 0.2), snapshot=sometimes(0.3, 0.3),
    )  # fmt: skip


def _weather(source: random.Random) -> Weather:
    if source.random() < 0.4:
        return Weather()
    return Weather(
        loss=source.choice((0.0, 0.01, 0.05)), repeat=source.choice((0.0, 0.05, 0.1)),
        no_memory=source.choice((0.0, 0.0, 0.05)), reorder=source.random() < 0.6,
        jitter_ns=source.choice((200_000, 1_000_000)), calm_ns=source.choice((50, 200)) * MS,
    )  # fmt: skip


def _slow(source: random.Random, workers: int, servers: int) -> dict[str, float]:
    if source.random() < 0.6:
        return {}
    names = [f"worker-{i}" for i in range(workers)] + [f"server-{i}" for i in range(servers)]
    return {source.choice(names): 8.0}


def _faults(
    source: random.Random, workers: int, servers: int, racks: Sequence[int]
) -> tuple[Fault, ...]:
    if source.random() < 0.5:
        return ()
    names = [f"worker-{i}" for i in range(workers)] + [f"server-{i}" for i in range(servers)]
    faults = []
    for _ in range(source.randint(1, 3)):
        at_ns = int(source.random() * 25 * MS) + MS
        worker = f"worker-{source.randrange(workers)}"
        kind = source.choice(("pause", "cut", "cut", "crash"))
        lasting_ns = int(source.random() * 20 * MS)
        if kind == "pause":
            faults.append(Fault(kind="pause", at_ns=at_ns, node=source.choice(names),
                                duration_ns=lasting_ns))  # fmt: skip
        elif kind == "crash" and 1 in racks:
            faults.append(Fault(kind="crash", at_ns=at_ns, node="dispatcher-1"))
        elif racks and source.random() < 0.5:
            agent = f"dispatcher-{racks[int(worker.rpartition('-')[2])]}"
            faults.append(Fault(kind="cut", at_ns=at_ns, node=worker, peer=agent,
                                duration_ns=lasting_ns))  # fmt: skip
        else:
            one = worker if not racks or source.random() < 0.7 else f"dispatcher-{racks[0]}"
            faults.append(Fault(kind="cut", at_ns=at_ns, node=one, duration_ns=lasting_ns,
                                peer=f"server-{source.randrange(servers)}"))  # fmt: skip
    return tuple(faults)


def replay_command(seed: int, workload: str) -> str:
    """Return the one command that shows the run again."""
    return f"python -m paradis.sim.scenario --seed {seed} --workload {workload}"


def run_seed(seed: int, workload: str, show: Callable[[str], None] | None = None) -> Result:
    """Run the scenario of a seed.

    Raises:
        Violation: an invariant is broken; the message names the seed and how to replay it.
    """
    try:
        return Simulation(scenario(seed, workload), show).run()
    except Exception as error:
        raise Violation(
            f"seed {seed} of {workload}: {type(error).__name__}: {error}\n"
            f"replay: {replay_command(seed, workload)}"
        ) from error


def run_many(seeds: Sequence[int], workload: str) -> tuple[int, list[str]]:
    """Run many seeds; return a checksum of all traces and the texts of all failures."""
    total, failures = 0, []
    for seed in seeds:
        try:
            result = run_seed(seed, workload)
        except Violation as error:
            failures.append(str(error))
        else:
            total = zlib.crc32(result.trace.encode(), total)
    return total, failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the trace of one seed and how it ended."""
    parser = argparse.ArgumentParser(prog="python -m paradis.sim.scenario", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="number of the scenario")
    parser.add_argument(
        "--workload", choices=(*WORKLOADS, *MODES, QUORUM, GROUPS), default="counting"
    )
    parser.add_argument("--quiet", action="store_true", help="only the result, not the events")
    options = parser.parse_args(arguments)
    out = sys.stdout
    job = scenario(options.seed, options.workload)
    out.write(f"{job}\n")

    def show(line: str) -> None:
        out.write(line + "\n")

    try:
        result = run_seed(options.seed, options.workload, None if options.quiet else show)
    except Violation as error:
        out.write(f"FAILED: {error}\n")
        return 1
    out.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
