"""Save, verify and load checkpoints. A checkpoint becomes visible in one atomic step, and contains no code.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, the file of each box, checksums)
                                  rank00000.safetensors ... (weights and optimizer state of the boxes that a rank owns)

torch.distributed.checkpoint coordinates the ranks (`saver.py`, `boxes.py`). Rank 0 reads and validates manifests for
all ranks (`opened.py`, `index.py`). The plan of a save serves later saves of the same boxes (`plans.py`). The files are
safetensors and JSON (`storage.py`). All plans follow the placements: the first rank that holds a box writes it. A rank
reads the parts of saved boxes that overlap its own boxes. So a checkpoint of any layout loads under any other layout.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_saving.folder import at_step as at_step
    from mplug_saving.folder import newest_saved as newest_saved
    from mplug_saving.reading import read_whole_header as read_whole_header
    from mplug_saving.starting import Saving as Saving
    from mplug_saving.summary import RunSummary as RunSummary
    from mplug_saving.summary import summary_of as summary_of

publish(__name__)
