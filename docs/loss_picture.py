"""Draw the loss of a run as an SVG. The extension `losspicture` draws the same picture in the folder of a run.

    python docs/loss_picture.py runs/first/metrics.jsonl loss.svg    every step of a run
    python docs/loss_picture.py README.md docs/first_session.svg     the step lines that a page or a log shows
    python docs/loss_picture.py --rewards runs/right/metrics.jsonl docs/two_digits.svg

A file whose name ends in `.jsonl` is read as the metrics of a run. Any other file is read as text, and its lines
`step N/M  loss X ...` are drawn. With `--rewards`, the mean rewards of a run of `--objective grpo` are drawn.
"""

import re
import sys
from pathlib import Path

from mplug_losspicture.drawing import Curve, Figure, svg

from mplug import read_records

REWARDS = Figure("Rewards over steps", "mean reward", "sampled completions", "held-out prompts", False)
STEP_LINE = re.compile(r"^\s*step +(\d+)/\d+ +loss (\S+)(?:.* val loss (\S+))?", re.MULTILINE)


def read(path: Path) -> tuple[Curve, Curve]:
    """The training losses and the validation losses of a file."""
    training, validation = Curve(), Curve()
    if path.suffix == ".jsonl":
        rows = [(record["step"], record.get("loss"), record.get("val_loss")) for record in read_records(path)]
    else:
        found = STEP_LINE.findall(path.read_text(encoding="utf-8"))
        rows = [(int(step), float(loss), float(val) if val else None) for step, loss, val in found]
    for step, loss, val_loss in rows:
        training.add(step, loss)
        validation.add(step, val_loss)
    return training, validation


def read_rewards(path: Path) -> tuple[Curve, Curve]:
    """The mean rewards of rollouts, and of held-out prompts, whose loss is minus their mean reward."""
    sampled, held_out = Curve(), Curve()
    for record in read_records(path):
        sampled.add(record["step"], record.get("reward"))
        if (loss := record.get("val_loss")) is not None:
            held_out.add(record["step"], -loss)
    return sampled, held_out


def main(source: str, target: str, rewards: bool = False) -> None:
    """Draw the losses or the rewards of the file `source` into the file `target`."""
    picture = svg(*read_rewards(Path(source)), REWARDS) if rewards else svg(*read(Path(source)))
    if picture is None:
        sys.exit(f"'{source}' has no step with a loss; give the metrics.jsonl of a run, or a text with its step lines")
    Path(target).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--rewards"]
    if len(given) != 2:
        sys.exit(__doc__)
    main(*given, rewards="--rewards" in sys.argv)
