"""Repairs the libraries in inductor's cache that a killed process has left incomplete.

On a CPU, inductor lets the C++ compiler write a library to its final place in a cache that all processes of the user
share. If the compiler is killed meanwhile (a run that fails kills the process groups of its ranks), the incomplete file
remains. Torch compiles a library only if its file is missing, so every later run would fail when it loads the file. On
GPUs, Triton writes its files to another place first.
"""

import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

ELF = b"\x7fELF"
HEADER = 64
"""Bytes of the header of a 64-bit ELF file. Its end says where the section headers are, which a linker writes last."""


@cache
def repair_libraries() -> None:
    """From now on, compile a library of inductor's cache again if its file is incomplete."""
    from torch._inductor import codecache
    from torch.utils._filelock import FileLock

    loader: Any = codecache.CppCodeCache
    if not hasattr(loader, "_load_library"):
        return  # this version of torch loads libraries in another way, and they are not repaired
    load, removed = loader._load_library.__func__, set[str]()

    def load_complete(cls: Any, path: str, key: str) -> Any:
        if key in removed or not is_incomplete(Path(path)):  # loading it could end in SIGBUS
            return load(cls, path, key)
        removed.add(key)
        with FileLock(os.path.join(codecache.get_lock_dir(), f"{key}.lock"), timeout=codecache.LOCK_TIMEOUT):
            if is_incomplete(Path(path)):  # another process may have compiled it again
                Path(path).unlink()
        return cls.cache[key]()  # compiles it, if the file is missing, and loads it

    loader._load_library = classmethod(load_complete)


def is_incomplete(file: Path) -> bool:
    """Whether a library ends before its section headers do; False for a file that is missing, or not an ELF file."""
    if not file.is_file():
        return False
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = opened.read(HEADER)
    if header[:4] not in (ELF, ELF[: len(header)]):
        return False
    if len(header) < HEADER:
        return True
    begin, entry, number = *struct.unpack_from("<Q", header, 40), *struct.unpack_from("<HH", header, 58)
    return bool(size < begin + entry * number or number == 0)
