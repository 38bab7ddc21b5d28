"""Save, verify and load checkpoints. A checkpoint becomes visible in one atomic step, and contains no code.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, the file of each box, checksums)
                                  rank00000.safetensors ... (weights and optimizer state of the boxes that a rank owns)

torch.distributed.checkpoint coordinates the ranks (`saver.py`, `boxes.py`). Rank 0 reads and validates manifests for
all ranks (`opened.py`, `index.py`). The plan of a save serves later saves of the same boxes (`plans.py`). The files are
safetensors and JSON (`storage.py`). All plans follow the placements: the first rank that holds a box writes it. A rank
reads the parts of saved boxes that overlap its own boxes. So a checkpoint of any layout loads under any other layout.
"""
