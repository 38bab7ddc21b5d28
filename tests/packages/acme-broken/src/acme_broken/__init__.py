"""A plugin that was written for another time."""


def _dig() -> None:
    raise RuntimeError("the fossil bed is closed")


_dig()
