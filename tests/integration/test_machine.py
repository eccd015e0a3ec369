"""The machine around a job: data loaders, ports, descriptors, other jobs beside it."""

from __future__ import annotations

import signal
from typing import Any

LOADERS = """
from torch.utils.data import DataLoader, Dataset

def sockets():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found

before = sockets()
ours = set()

class Data(Dataset):
    def __init__(self, dies=False): self.dies = dies
    def __len__(self): return 6
    def __getitem__(self, index):
        if self.dies and index == 4: os.kill(os.getpid(), signal.SIGKILL)
        try:
            paradis.wrap(*build())
        except paradis.errors.StateError:
            refused = 1
        return [float(index)] * 8, len(sockets() & ours), refused

def batches(**options):
    loader = DataLoader(Data(**options), batch_size=None, num_workers=2, persistent_workers=True,
                        multiprocessing_context="fork", timeout=60)
    for _ in range(2):
        yield from loader

def before_step(step, model, optimizer):
    if step != 2: return
    ours.update(sockets() - before)
    assert len(ours) > 1
    held = [int(open_sockets) for _, open_sockets, _ in batches()]
    tell("held", rank, *held)

def train_on():
    for x, _, _ in batches(dies=True):
        model(torch.tensor(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_forking_data_loaders_hold_nothing_of_ours_and_show_their_own_error(cluster: Any) -> None:
    script = cluster.write(LOADERS)
    script.write_text(script.read_text() + "if rank == 1: train_on()\n")
    job = cluster.start("run", "--workers", "2", "train.py")
    held = cluster.told("held", 2)
    code, err = job.end()
    assert [words[2:] for words in held] == [["0"] * 12] * 2
    assert code == 1
    assert "[worker 1] RuntimeError: DataLoader worker (pid" in err, err
    assert "[worker 0]" not in err and err.count("error: ") == 1, err
    assert "excepthook" not in err, err
    cluster.assert_clean()


BESIDE = """
import torch.distributed as distributed
distributed.init_process_group("gloo")
value = torch.ones(1)
distributed.all_reduce(value)
tell("sum", int(value.item()))
print("a bar \\r", end="", file=sys.stderr, flush=True)

def before_step(step, model, optimizer):
    if step == 2:
        tell("at", rank, os.environ["PARADIS_DISPATCHERS"])
        pass_gate()
"""


def test_two_jobs_at_once_with_default_options(cluster: Any) -> None:
    """Both are in the middle of training when one is stopped; the other goes on to its end."""
    cluster.write(BESIDE)
    with cluster.gate() as gate:
        jobs = [
            cluster.start("run", "--workers", "2", "train.py", env={"GATE": gate.path})
            for _ in range(2)
        ]
        told = cluster.told("at", 4)
        assert len({words[2] for words in told}) == 2
        jobs[0].signal(signal.SIGTERM)
        code, err = jobs[0].end()
        assert code == 128 + signal.SIGTERM, err
        gate.open()
        code, err = jobs[1].end()
    assert code == 0, err
    assert "a bar" in err
    assert len(set(cluster.digests(2))) == 1
    assert cluster.told("sum", 4) == [["sum", "2"]] * 4
    cluster.assert_clean()


COUNTS = """
def before_step(step, model, optimizer):
    if step in (5, 199):
        tell("open", step, f"worker-{rank}", len(os.listdir("/proc/self/fd")))
        os.environ["GATE"] = os.environ[f"GATE{step}"]
        pass_gate()
"""


def test_256_descriptors_are_enough_and_their_number_does_not_grow(cluster: Any) -> None:
    """4 workers; the case asks for 8, which takes a minute to start and holds no more per node."""
    cluster.write(COUNTS)
    counts = ("--workers", "4", "--servers", "3", "--dispatchers", "2", "--racks", "2")
    limit = ("bash", "-c", 'ulimit -n 256; exec "$@"', "bash")
    others = ["server-0", "server-1", "server-2", "dispatcher-0", "dispatcher-1"]
    found: list[dict[str, int]] = []
    with cluster.gate() as early, cluster.gate() as late:
        env = {"STEPS": "200", "GATE5": early.path, "GATE199": late.path}
        job = cluster.start("run", *counts, "train.py", prefix=limit, env=env)
        for number, gate in enumerate((early, late), 1):
            told = cluster.told("open", 4 * number)[-4:]  # all four wait: nothing is under way
            held = {name: cluster.node(name).num_fds() for name in others}
            found.append({**held, **{words[2]: int(words[3]) for words in told}})
            gate.open()
        code, err = job.end()
    assert code == 0, err
    assert len(found[0]) == 9 and found[0] == found[1]
    assert len(set(cluster.digests(4))) == 1
    cluster.assert_clean()
