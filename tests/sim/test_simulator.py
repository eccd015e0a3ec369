"""The simulator itself: its memory, its network, its command."""

from __future__ import annotations

import random

import pytest
import torch

from paradis.ids import NodeId
from paradis.sim.checkers import Violation
from paradis.sim.driver import Simulation
from paradis.sim.job import Job, Model, Weather
from paradis.sim.memory import Memory
from paradis.sim.network import Network
from paradis.sim.scenario import main, run_seed, scenario
from paradis.sim.workloads import same_bits


def job(**changes: object) -> Job:
    """Return the smallest job, with changes."""
    plain: dict[str, object] = {
        "seed": 1, "workload": "counting", "workers": 2, "servers": 1, "steps": 2,
        "models": (Model(parts=((3, 20, 8),)),), "racks": (0, 0), "dispatchers": 1,
    }  # fmt: skip
    return Job(**{**plain, **changes})  # type: ignore[arg-type]


def test_counting_arrives_at_the_closed_form() -> None:
    sim = Simulation(job())
    sim.run()
    server = sim.nodes["server-0"]
    values = server.values  # type: ignore[attr-defined]
    for shard, (_, plan) in sim.reference.shards.items():
        for s in plan.segments:
            digits = [(t * 3 + s.parameter) % 9 + 1 for t in range(2)]
            expected = s.parameter + 1 - 0.5 * sum(11 * d for d in digits) / 2
            assert values[shard][s.start : s.start + s.length].tolist() == [expected] * s.length


def test_memory_refuses_a_second_release_and_tells_what_is_held() -> None:
    memory = Memory()
    memory.open(7, torch.zeros(2))
    first = memory.place(torch.ones(2), {0: (0, 0)}, accumulator_of=7)
    second = memory.place(torch.ones(2), {1: (0, 0)}, accumulator_of=7)
    assert memory.store_bytes == 8
    memory.retain(second)
    memory.release(second)
    assert sorted(memory.leases) == [first, second]
    memory.release(second)
    assert memory.store_bytes == 0
    with pytest.raises(AssertionError, match="released twice"):
        memory.release(second)


def test_a_sum_does_not_overwrite_what_another_payload_holds() -> None:
    memory = Memory()
    memory.open(7, torch.zeros(2))
    held = memory.place(torch.ones(2), {0: (0, 0)}, accumulator_of=7)
    other = memory.place(torch.ones(2), {1: (0, 0)})
    memory.sum_target(7, [other], 2).data.fill_(5.0)
    assert memory.leases[held].data.tolist() == [1.0, 1.0]


def test_control_messages_keep_their_order_in_any_weather() -> None:
    weather = Weather(loss=0.5, repeat=0.5, reorder=True)
    network = Network(job(weather=weather), random.Random(3))
    a, b = NodeId("worker-0"), NodeId("dispatcher-0")
    times = [network.arrivals(a, b, 0, data=False) for _ in range(50)]
    flat = [t for each in times for t in each]
    assert len(flat) == 50 and flat == sorted(set(flat))
    data = [network.arrivals(a, b, 0, data=True) for _ in range(200)]
    assert {len(each) for each in data} == {0, 2}
    assert network.lost + network.repeated == 200


def test_same_bits_tells_zeros_apart() -> None:
    assert same_bits(torch.tensor([0.0]), torch.tensor([0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_scenarios_cover_what_they_should() -> None:
    jobs = [scenario(seed, "floats") for seed in range(200)]
    assert {j.workers for j in jobs} >= {1, 2, 3, 4}
    assert any(j.leaves for j in jobs) and any(j.tree for j in jobs)
    assert any(len(m.parts) > 1 for j in jobs for m in j.models)
    assert {f.kind for j in jobs for f in j.faults} == {"pause", "cut", "crash", "sever"}
    assert sum(j.clean for j in jobs) > 20
    assert 20 < sum(j.early for j in jobs) < 100
    assert not any(j.early and j.dispatchers > 1 for j in jobs)
    assert sum(bool(j.hosts) for j in jobs) > 50 and any(len(set(j.hosts)) > 1 for j in jobs)
    storms = [j.weather for j in jobs if not j.weather.fair]
    assert any(w.loss for w in storms) and any(w.repeat for w in storms)
    assert any(w.reorder for w in storms) and not all(w.reorder for w in storms)
    assert any(w.no_memory for w in storms)


def overtaken(sim: Simulation) -> int:
    """Run it; return how many frames arrived before one that was sent earlier on their link."""
    last: dict[tuple[NodeId, NodeId], int] = {}
    early = []
    real = sim.network.arrivals

    def arrivals(source: NodeId, target: NodeId, now_ns: int, *, data: bool) -> list[int]:
        times = real(source, target, now_ns, data=data)
        for at in times if data else ():
            early.append(at < last.get((source, target), 0))
            last[source, target] = max(at, last.get((source, target), 0))
        return times

    sim.network.arrivals = arrivals  # type: ignore[method-assign]
    sim.run()
    return sum(early)


def test_bad_weather_happens_in_the_runs() -> None:
    """That it is configured does not mean that it occurs."""
    jobs = [scenario(seed, "counting") for seed in range(100)]
    wet = [j for j in jobs if j.weather.loss and j.weather.repeat and j.weather.reorder]
    sims = [Simulation(j) for j in wet[:6]]
    assert sum(overtaken(sim) for sim in sims)
    assert sum(sim.network.lost for sim in sims) and sum(sim.network.repeated for sim in sims)


def test_groups_change_how_they_travel_in_the_runs() -> None:
    """As the leader says, or measures: to codes, back and on again."""
    jobs = [job for seed in range(100) if (job := scenario(seed, "floats")).coded]
    sims = [Simulation(job) for job in jobs]
    for sim in sims:
        sim.run()
    counts = [sim.checkers.codes.changes() for sim in sims]
    assert sum(bool(n) for n in counts) > 5 and max(counts) > 1
    assert decisions(3) == ["off"] and decisions(180) == ["on"]


def test_rack_agents_make_codes_that_count_in_the_runs() -> None:
    jobs = [job for seed in range(300) if (job := scenario(seed, "floats")).recompress]
    sims = [Simulation(job) for job in jobs]
    for sim in sims:
        sim.run()
    assert sum(sim.checkers.codes.settled > 0 for sim in sims) > 3


def decisions(seed: int) -> list[str]:
    """Return what the leader finds in a job in which it measures."""
    sim = Simulation(scenario(seed, "floats"))
    assert sim.job.measured
    sim.run()
    trials = sim.nodes["leader"].role._trials  # type: ignore[attr-defined]
    return [trial.decision for trial in trials.values()]


def test_command_shows_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "4", "--workload", "floats"]) == 0
    out = capsys.readouterr().out
    assert "StepClosed" in out and "Result(trace=" in out


def test_failure_names_the_seed_and_how_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paradis.sim.driver.EVENTS_MAX", 10)
    with pytest.raises(Violation, match="--seed 4 --workload counting"):
        run_seed(4, "counting")
