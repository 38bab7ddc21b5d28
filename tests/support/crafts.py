"""Checkpoints that nobody has saved: ways to craft one from a valid checkpoint, and the reason why each is refused.

No craft may make a reader look outside the checkpoint's folder, wait for a pipe, allocate by what a manifest says, or
leave a weight uninitialised.
"""

import json
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mplug_saving.manifest import DEEPEST

WEIGHT, MOMENT = "blocks.0.mlp.up.weight/weight", "blocks.0.mlp.up.weight/exp_avg"
FILE, MANIFEST = "rank00000.safetensors", "checkpoint.json"
KEY = f"{WEIGHT}@0,0"
GONE = object()
Plain = dict[str, Any]
Craft = Callable[[Path], Any]


def change(path: Path, edit: Callable[[Plain], Any]) -> None:
    """Edit a manifest, whose checksum is right afterwards."""
    plain = json.loads((path / MANIFEST).read_text())
    del plain["crc32"]
    edit(plain)
    write({**plain, "crc32": zlib.crc32(json.dumps(plain, sort_keys=True).encode())}, path)


def write(content: Any, path: Path) -> None:
    """Write a manifest: plain data, or a text or bytes as they are."""
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    (path / MANIFEST).write_bytes(content.encode() if isinstance(content, str) else content)


def at(*keys: Any, to: Any = GONE) -> Craft:
    """Set or remove one value of a manifest."""

    def edit(plain: Any) -> None:
        for key in keys[:-1]:
            plain = plain[key]
        if to is GONE:
            del plain[keys[-1]]
        else:
            plain[keys[-1]] = to

    return partial(change, edit=edit)


def chunks(*boxes: Any, of: str = WEIGHT) -> Craft:
    """Say that a tensor lies in these (start, shape) of the file."""
    return at("tensors", of, "chunks", to=[[FILE, *box] for box in boxes])


def described(shape: list[int], name: str = MOMENT) -> Craft:
    """Say that a tensor is one chunk of this shape."""
    to = {"shape": shape, "dtype": "float32", "chunks": [[FILE, [0] * len(shape), shape]]}
    return at("tensors", name, to=to)


def text(old: str, new: str) -> Craft:
    """Replace a part of the manifest's text, and leave the checksum as it was."""
    return lambda path: write((path / MANIFEST).read_text().replace(old, new), path)


def renamed(name: str) -> Craft:
    """Call the file of the checkpoint by another name, beside a secret that this name would reach."""

    def edit(plain: Plain) -> None:
        plain["files"] = {name: plain["files"][FILE]}
        for tensor in plain["tensors"].values():
            tensor["chunks"] = [[name, start, shape] for _, start, shape in tensor["chunks"]]

    return lambda path: (shutil.copy(path / FILE, path.parent / "secret.safetensors"), change(path, edit))


def replaced(make: Callable[[Path], Any], name: str = FILE) -> Craft:
    """Put something else in the place of a file."""
    return lambda path: ((path / name).rename(path.parent / "outside"), make(path / name))


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside")


def device(path: Path) -> None:
    """Make a device from which reading never ends."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device can be made here")


def store(path: Path, data: bytes) -> None:
    """Write the safetensors file, and its size and checksum into the manifest."""
    (path / FILE).write_bytes(data)
    change(path, lambda plain: plain["files"][FILE].update(bytes=len(data), crc32=zlib.crc32(data)))


def header(edit: Callable[[Plain], Any]) -> Craft:
    """Edit the header of the safetensors file; its size and checksum in the manifest are right afterwards."""

    def craft(path: Path) -> None:
        data = (path / FILE).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        plain = json.loads(data[8:end])
        found = edit(plain)
        new = found if isinstance(found, bytes) else json.dumps(plain).encode()
        store(path, struct.pack("<Q", len(new)) + new + data[end:])

    return craft


def added(**entry: Any) -> Craft:
    return header(lambda found: found.update(a={"dtype": "F32", "data_offsets": [0, 0], **entry}))


def without_a_tensor(path: Path) -> None:
    """Rename a tensor of the safetensors file."""
    tensors = load_file(path / FILE)
    tensors["other"] = tensors.pop(KEY)
    save_file(tensors, path / FILE)
    store(path, (path / FILE).read_bytes())


def nested(levels: int) -> Any:
    """A list in a list, and so on."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


NO_NAME, NO_NUMBER, NO_SHAPE = r"files.*should match pattern", r"'step'.*integer", r"not match its number of bytes"
DTYPE, CHANGED = r"' is not a dtype", r"has changed since it was saved"

CRAFTS: dict[str, tuple[Craft, str]] = {
    "a name above the folder": (renamed("../secret.safetensors"), NO_NAME),
    "an absolute name": (renamed("/etc/passwd"), NO_NAME),
    "a name with a zero byte": (renamed("a\0.safetensors"), NO_NAME),
    "a link": (replaced(link), r"is a link"),
    "a link as manifest": (replaced(link, MANIFEST), r"'checkpoint.json' is a link"),
    "a device": (replaced(device), r"is not a regular file"),
    "a pipe": (replaced(os.mkfifo), r"is not a regular file"),
    "a pipe as manifest": (replaced(os.mkfifo, MANIFEST), r"is not a regular file"),
    "a folder as file": (replaced(Path.mkdir), r"is not a regular file"),
    "a folder that is a link": (lambda path: path.symlink_to(path.rename(path.parent / "elsewhere")), r"it is a link"),
    "half of a file": (lambda path: os.truncate(path / FILE, 5000), CHANGED),
    "a file that is not there": (lambda path: (path / FILE).unlink(), r"missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), r"'checkpoint.json' is missing"),
    "no files": (at("files", to={}), r"'files'.*at least 1 item"),
    "no tensors": (at("tensors", to={}), r"'tensors'.*at least 1 item"),
    "a file that is not listed": (
        at("tensors", WEIGHT, "chunks", to=[["b.safetensors", [0, 0], [128, 32]]]),
        r"not a file of the checkpoint",
    ),
    "no chunk": (chunks(), r"chunks.*at least 1 item"),
    "a gap": (chunks(([0, 0], [1, 32])), r"do not cover its shape"),
    "an overlap": (chunks(([0, 0], [128, 32]), ([0, 0], [1, 1])), r"its chunks overlap"),
    "a gap as large as an overlap": (
        chunks(([0, 0], [64, 32]), ([32, 0], [64, 32]), of=MOMENT),
        r"its chunks overlap and leave gaps",
    ),
    "a chunk beyond the shape": (chunks(([1, 0], [128, 32])), r"exceeds its shape"),
    "a negative start": (chunks(([-1, 0], [128, 32])), r"greater than or equal to 0"),
    "another number of dimensions": (chunks(([0], [4096])), r"another number of dimensions"),
    "a huge shape": (described([10**9, 10**9], WEIGHT), r"bytes, but its chunks need"),
    "a shape beyond 64 bits": (at("tensors", WEIGHT, "shape", to=[2**70, 32]), r"less than or equal to"),
    "a dtype that torch does not know": (at("tensors", WEIGHT, "dtype", to="float31"), f"'float31{DTYPE}"),
    "a dtype that is an attribute of torch": (at("tensors", WEIGHT, "dtype", to="nn"), f"'nn{DTYPE}"),
    "another dtype than the file's": (at("tensors", WEIGHT, "dtype", to="int32"), r"but the manifest states I32"),
    "another shape than the file's": (described([32, 128]), r"but the manifest states F32 of shape \(32, 128\)"),
    "a tensor that the file lacks": (without_a_tensor, r"has no tensor"),
    "another step than the folder's": (at("step", to=7), r"has the name of step 2, but its manifest states step 7"),
    "a step that is not a number": (at("step", to=float("nan")), NO_NUMBER),
    "a step in words": (at("step", to="2"), NO_NUMBER),
    "a learning rate that is not a number": (at("config", "optimizer", "lr", to=float("nan")), r"'config.*nan"),
    "a config without a learning rate": (at("config", "optimizer", "lr"), r"lacks 'config.optimizer.lr'"),
    "a section that is a word": (at("config", "model", to="gpt"), r"'config.model'"),
    "no provenance": (at("provenance"), r"lacks 'provenance'"),
    "no position of the loader": (at("loader"), r"lacks 'loader'"),
    "a change without a field": (at("changes", to=[{"step": 1}]), r"must have 'version', or"),
    "no format": (text('"format": 2, ', ""), r"lacks 'format'"),
    "a format that is no number": (text('"format": 2', '"format": "2"'), r"is not an integer"),
    "no checksum": (text('"crc32": ', '"crc": '), r"'crc"),
    "a number that has changed": (text('"tokens": ', '"tokens": 1'), f"'checkpoint.json' {CHANGED}"),
    "a key twice": (text('"step": 2', '"step": 3, "step": 2'), r"'step' twice"),
    "a number of 5000 digits": (text('"step": 2', f'"step": {"9" * 5000}'), "JSON"),
    "no mapping": (partial(write, []), r"is not a mapping"),
    "no JSON": (partial(write, "{"), r"is not valid JSON"),
    "no text": (partial(write, b"\xff"), r"is not valid JSON"),
    "lists without end": (partial(write, "[" * 100_000), r"nested too deeply"),
    "state in lists without end": (at("states", to={"a": nested(DEEPEST + 1)}), r"levels deep"),
    "half a character": (at("states", to={"a": "\ud800"}), r"surrogates"),
    "half a character in a name": (at("tensors", "a\ud800\n/weight", to={}), r"'tensors.a.*\\n/weight"),
    "a time in half a character": (at("saved", to="\ud800"), r"'saved'.*valid string"),
    "a layout that clears the terminal": (at("layout", to="\x1b[2J"), r"'layout'.*terminal cannot show"),
    "a version of two lines": (at("provenance", "torch", to="2\n3"), r"'provenance.torch'.*terminal cannot show"),
    "a plugin without end": (
        at("provenance", "plugins", 0, "version", to="1" * 10_001),
        r"'provenance.plugins.0.version'.*at most 10000",
    ),
    "a change of two lines": (at("changes", to=[{"step": 1, "version": "a\nb"}]), r"'changes.*cannot show"),
    "a reason that clears the terminal": (at("varies", to={"parallel/dp": "\x1b[2J"}), r"'varies.*cannot show"),
    "a header longer than the file": (lambda path: store(path, struct.pack("<Q", 1 << 60) + b"{}"), r"does not|need"),
    "a header that is no mapping": (header(lambda _: b"[]"), r"is not a mapping"),
    "a header with a key twice": (header(lambda _: b'{"a": 1, "a": 2}'), r"'a' twice"),
    "a header without an offset": (header(lambda found: found[KEY].pop("data_offsets")), r"does not describe"),
    "a header with an unknown dtype": (header(lambda found: found[KEY].update(dtype="F31")), r"does not describe"),
    "a header with a negative shape": (header(lambda found: found[KEY].update(shape=[-1, -4096])), NO_SHAPE),
    "a header with 65 dimensions": (added(shape=[0] * 65), NO_SHAPE),
    "a header with a dimension beyond 64 bits": (added(shape=[10**19, 0]), NO_SHAPE),
    "a header with two tensors in one place": (
        header(lambda found: found[KEY].update(data_offsets=found[f"{MOMENT}@0,0"]["data_offsets"])),
        r"overlap, leave gaps",
    ),
}
