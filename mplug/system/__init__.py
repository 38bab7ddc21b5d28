"""What mplug needs of Python and the operating system: durable files, names imported on first use, its version."""
