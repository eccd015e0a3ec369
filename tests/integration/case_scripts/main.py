"""Runs all cases through the system; writes this rank's results into the directory given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases_gradients  # noqa: F401
import cases_optimizer  # noqa: F401
import cases_tensors  # noqa: F401
from place import CASES, WrappedPlace, as_numbers


def main() -> None:
    """Run the cases, all or those named."""
    directory, *names = sys.argv[1:]
    torch.set_num_threads(1)
    place = WrappedPlace()
    results = {}
    for name, function in CASES.items():
        if not names or name in names:
            results[name] = as_numbers(function(place))
            print(name, flush=True)
    Path(directory, f"{place.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
