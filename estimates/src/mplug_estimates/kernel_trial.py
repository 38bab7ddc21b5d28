"""Whether the kernels of a config can serve its model.

`python -m mplug_estimates.kernel_trial` reads the config from its standard input.
`mplug_estimates.alternatives` starts it in a process of its own for each kernel plugin that it considers.
"""

import json
import sys

from mplug_estimates.alternatives import YES, can_be_built


def main() -> None:
    """Print `YES` as the last line if the kernels of the config on standard input can serve its model."""
    print(YES if can_be_built(json.load(sys.stdin)) else "no")


if __name__ == "__main__":
    main()
