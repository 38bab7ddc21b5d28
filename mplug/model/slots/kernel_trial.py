"""Whether the kernels of a config can serve its model.

`python -m mplug.model.slots.kernel_trial` reads the config from its standard input.
`mplug.model.slots.alternatives` starts it in a process of its own for each kernel plugin that it considers.
"""

import json
import sys

from mplug.model.build import can_be_built
from mplug.model.slots.alternatives import YES


def main() -> None:
    """Print `YES` as the last line if the kernels of the config on standard input can serve its model."""
    print(YES if can_be_built(json.load(sys.stdin)) else "no")


if __name__ == "__main__":
    main()
