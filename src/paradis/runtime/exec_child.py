"""Runs between fork and the node's program: ``python exec_child.py PARENT_PID PROGRAM ARGS...``.

Asks the kernel to kill this process when the launcher dies, however it dies, then becomes the
program, with the same pid and unchanged arguments. It is started by path in an isolated
interpreter and imports nothing of Paradis, so it costs 20 ms. (Python code between fork and exec,
``preexec_fn``, can deadlock in a launcher that has threads.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program of ``sys.argv[2:]``; exit 127 when there is no such program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the launcher died before the call above
        sys.exit(1)
    program = sys.argv[2:]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"paradis: error: cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
