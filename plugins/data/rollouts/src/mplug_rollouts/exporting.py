"""A command of mplug in a process that ends with its parent: `python -m mplug_rollouts.exporting PARENT COMMAND ...`.

`PARENT` is the id of the process that starts it: a run, whose checkpoint it exports.
"""

import sys
from runpy import run_module

from mplug_rollouts.parent import end_with_parent


def main() -> None:
    """Run the command of the arguments."""
    end_with_parent(int(sys.argv.pop(1)))
    run_module("mplug", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
