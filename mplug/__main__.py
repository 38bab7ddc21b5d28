"""`python -m mplug` is `mplug`."""

from mplug.cli import main

if __name__ == "__main__":
    main(prog_name="mplug")
