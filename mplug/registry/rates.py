"""The open list of learning rate schedules. An entry is a `mplug.RateSchedule`."""

from mplug.registry.open_lists import OpenList

RATES = OpenList(
    "learning rate schedule",
    "mplug.learning_rates",
    {
        name: f"mplug.training.rates:{name}"
        for name in ("constant", "linear", "cosine", "inverse_sqrt", "wsd", "wsd_sqrt", "wsd_cosine")
    },
)
