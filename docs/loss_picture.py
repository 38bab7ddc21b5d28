"""Draw the loss of a run as an SVG. The extension `losspicture` draws the same picture in the folder of a run.

    python docs/loss_picture.py runs/first/metrics.jsonl loss.svg    every step of a run
    python docs/loss_picture.py README.md docs/first_session.svg     the step lines that a page or a log shows

A file whose name ends in `.jsonl` is read as the metrics of a run. Any other file is read as text, and its lines
`step N/M  loss X ...` are drawn.
"""

import re
import sys
from pathlib import Path

from mplug_losspicture.drawing import Curve, svg

from mplug import read_records

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


def main(source: str, target: str) -> None:
    """Draw the losses of the file `source` into the file `target`."""
    picture = svg(*read(Path(source)))
    if picture is None:
        sys.exit(f"'{source}' has no step with a loss; give the metrics.jsonl of a run, or a text with its step lines")
    Path(target).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
