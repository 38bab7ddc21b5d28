"""How messages write durations, and what they advise about long ones."""

LONG_RUN = 3600.0
"""Seconds from which on an estimate for a CPU comes with advice."""
TRIAL = "fewer tokens per step (--batch-size, --seq-length) or fewer --steps make a trial"


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 1:05, 2:03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
