"""Which worker group this process is in; joins the job on the first call, as ``wrap`` does."""

from __future__ import annotations

from paradis.frontend import session


def worker_group() -> str:
    """Return the name of this worker's group in ``topology.worker_groups``; empty without groups.

    Raises:
        ParadisError: the job cannot be joined.
    """
    return session.current().membership.own.name


def group_rank() -> int:
    """Return this worker's number within its group, from 0; its rank without groups.

    Raises:
        ParadisError: the job cannot be joined.
    """
    here = session.current()
    return here.membership.ranks.index(here.rank)


def group_size() -> int:
    """Return the number of workers in this worker's group at job start; of all without groups.

    Raises:
        ParadisError: the job cannot be joined.
    """
    return len(session.current().membership.ranks)
