"""A command of mplug in a process that ends with its parent: `python -m mplug_rollouts.exporting PARENT COMMAND ...`.

`PARENT` is the id of the process that starts it: a run, whose checkpoint it exports.
"""

import sys

from mplug_rollouts.parent import end_with_parent


def main() -> None:
    """Run the command of the arguments."""
    end_with_parent(int(sys.argv.pop(1)))
    from mplug.cli import main as command

    sys.argv[0] = "mplug"
    command()


if __name__ == "__main__":
    main()
