"""A library that a killed compiler has left incomplete in inductor's cache is compiled again."""

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mplug_compile.compiler_cache import is_incomplete, repair_libraries
from mplug_testing import run_workers

LIBRARY = next(iter(sorted(Path(torch.__file__).parent.glob("lib/*.so*"), key=lambda file: file.stat().st_size)))
"""A small library that a linker has written."""


def test_a_library_that_is_cut_anywhere_is_incomplete(tmp_path: Path) -> None:
    whole = LIBRARY.read_bytes()
    assert not is_incomplete(LIBRARY)
    for length in (0, 3, 63, 64, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.so").write_bytes(whole[:length])
        assert is_incomplete(tmp_path / "cut.so"), length
    (tmp_path / "no-sections.so").write_bytes(whole[:60] + struct.pack("<HH", 0, 0) + whole[64:])
    assert is_incomplete(tmp_path / "no-sections.so")


def test_other_files_are_not_incomplete_libraries(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("GROUP ( libc.so.6 )")
    assert not is_incomplete(tmp_path / "text.so")
    assert not is_incomplete(tmp_path / "missing.so")


def compiled(folder: str, cut: bool, repair: bool) -> float:
    """Be one process: compile a function with the cache in `folder`; if `cut`, some process was killed before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        if cut:
            for file in Path(folder).rglob("*.main.so"):
                file.write_bytes(b"")
        if repair:
            repair_libraries()
        function: Any = torch.compile(lambda x: (x.sin() + x.cos()).sum(-1), fullgraph=True)
        return float(function(torch.ones(8, 64)).sum())


@pytest.mark.wide("compile")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_inductor_compiles_an_incomplete_library_again(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_workers(1, compiled, folder, False, False)
    assert list(tmp_path.rglob("*.main.so")), "inductor names the libraries of kernels in another way"
    with pytest.raises(Exception, match="file too short"):
        run_workers(1, compiled, folder, True, False)
    assert run_workers(1, compiled, folder, True, True) == expected
