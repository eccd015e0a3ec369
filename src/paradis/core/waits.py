"""Whether anybody waits for himself: a cycle in a wait-for graph.

Invariant: the answer depends on the graph alone: nodes and edges are visited in sorted order.

Source: Holt, "Some Deadlock Properties of Computer Systems", ACM Computing Surveys 4(3), 1972:
with resources that one holder must give back, a cycle of waits is a deadlock.

    >>> find_cycle({"worker-0": ["server-0"], "server-0": ["worker-1"], "worker-1": ["server-0"]})
    ['server-0', 'worker-1']
    >>> find_cycle({"worker-0": ["server-0"]}) is None
    True
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping


def find_cycle(edges: Mapping[str, Collection[str]]) -> list[str] | None:
    """Return the nodes of one cycle, each waiting for the next and the last for the first.

    Args:
        edges: node -> nodes it waits for; a node without an entry waits for nobody.

    Returns:
        The cycle, its smallest name first, or None if there is none. One visit per edge.
    """
    done: set[str] = set()
    for root in sorted(edges):
        if root not in done:
            cycle = _search(root, edges, done)
            if cycle:
                first = cycle.index(min(cycle))
                return cycle[first:] + cycle[:first]
    return None


def _search(root: str, edges: Mapping[str, Collection[str]], done: set[str]) -> list[str] | None:
    """Walk depth first without recursion; ``done`` collects nodes that are on no cycle."""
    path: dict[str, Iterator[str]] = {root: iter(sorted(edges.get(root, ())))}
    while path:
        node = next(reversed(path))
        target = next(path[node], None)
        if target is None:
            del path[node]
            done.add(node)
        elif target in path:
            nodes = list(path)
            return nodes[nodes.index(target) :]
        elif target not in done:
            path[target] = iter(sorted(edges.get(target, ())))
    return None
