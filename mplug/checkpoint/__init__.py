"""Checkpoints: written aside, made visible by one atomic step, read without running any code from them.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, where each box is, checksums)
                                  rank00000.safetensors ... (weights and optimizer state of the boxes that a rank owns)

torch.distributed.checkpoint coordinates (`saver.py`, `boxes.py`). Rank 0 reads and validates manifests for all ranks
(`opened.py`, `index.py`), and the plan of a save serves later saves of the same boxes (`plans.py`). The files on the
disk are safetensors and JSON (`storage.py`). Everything goes by placements: each rank writes the boxes of which it is
the first holder, and reads the parts of saved boxes that lie in its own. A checkpoint of any layout therefore loads
under any other.
"""
