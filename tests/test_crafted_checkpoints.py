"""A checkpoint from anywhere is refused in one sentence unless it is whole: by verify, show, generate and resume.

No case reads outside the checkpoint's folder, waits for a pipe, allocates by what a manifest says, or leaves a weight
uninitialised.
"""

import json
import os
import random
import shutil
import stat
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mplug.checkpoint.coverage import uncovered
from mplug.checkpoint.folder import read_described, read_manifest, read_valid
from mplug.checkpoint.manifest import DEEPEST, TensorTable, decode, encode
from mplug.checkpoint.names import path_of
from mplug.checkpoint.newest_valid import choose
from mplug.checkpoint.pretrained import pretrained_of, refuse_another_model
from mplug.checkpoint.reading import CODES, _unique
from mplug.checkpoint.states import load_for_inference
from mplug.checkpoint.verified import Verified
from mplug.cli import main
from mplug.errors import UsageError
from mplug.precisions.dtypes import FORMATS
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing.harness import tiny_config

SETTINGS = {"model.num_layers": 1, "trainer.steps": 2, "trainer.eval_every": 0, "checkpoint.every": 1}
WEIGHT, MOMENT = "blocks.0.mlp.up.weight/weight", "blocks.0.mlp.up.weight/exp_avg"
FILE = "rank00000.safetensors"
Cli = Callable[..., subprocess.CompletedProcess[str]]
Plain = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of each of its two steps."""
    folder = tmp_path_factory.mktemp("runs") / "runs" / "one"
    train(prepare(tiny_config({**SETTINGS, "checkpoint.keep": 2}), directory=folder))
    return folder


@pytest.fixture
def crafted(saved: Path, tmp_path: Path) -> Path:
    """A copy of the newest checkpoint, to craft something of."""
    shutil.copytree(saved, tmp_path / "runs" / "one")
    return path_of(tmp_path / "runs" / "one" / "checkpoints", 2)


def change(path: Path, edit: Callable[[Plain], Any]) -> None:
    """Edit a manifest, whose checksum is right afterwards."""
    plain = json.loads((path / "checkpoint.json").read_text())
    del plain["crc32"]
    edit(plain)
    write(path, json.dumps({**plain, "crc32": zlib.crc32(json.dumps(plain, sort_keys=True).encode())}))


def write(path: Path, text: str) -> None:
    (path / "checkpoint.json").write_text(text)


def set_at(*keys: Any, to: Any) -> Callable[[Path], None]:
    """Set one value of a manifest."""

    def craft(path: Path) -> None:
        def edit(plain: Plain) -> None:
            inner: Any = plain
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = to

        change(path, edit)

    return craft


def without(*keys: Any) -> Callable[[Path], None]:
    """Remove one value of a manifest."""

    def craft(path: Path) -> None:
        def edit(plain: Plain) -> None:
            inner: Any = plain
            for key in keys[:-1]:
                inner = inner[key]
            del inner[keys[-1]]

        change(path, edit)

    return craft


def renamed(name: str) -> Callable[[Path], None]:
    """Call the file of the checkpoint by another name, beside a secret that this name would reach."""

    def craft(path: Path) -> None:
        shutil.copy(path / FILE, path.parent / "secret.safetensors")

        def edit(plain: Plain) -> None:
            plain["files"] = {name: plain["files"][FILE]}
            for tensor in plain["tensors"].values():
                tensor["chunks"] = [[name, start, shape] for _, start, shape in tensor["chunks"]]

        change(path, edit)

    return craft


def replaced_by(make: Callable[[Path], Any], name: str = FILE) -> Callable[[Path], None]:
    """Put something else in the place of a file."""

    def craft(path: Path) -> None:
        (path / name).rename(path.parent / "outside")
        make(path / name)

    return craft


def device(path: Path) -> None:
    """Make a device from which reading never ends."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device can be made here")


def link_to_itself_elsewhere(path: Path) -> None:
    """Put a link in the place of the checkpoint's folder."""
    path.symlink_to(path.rename(path.parent / "elsewhere"))


def header(edit: Callable[[Plain], Any]) -> Callable[[Path], None]:
    """Edit the header of the safetensors file; its size and checksum in the manifest are right afterwards."""

    def craft(path: Path) -> None:
        data = (path / FILE).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        plain = json.loads(data[8:end])
        found = edit(plain)
        text = found if isinstance(found, bytes) else json.dumps(plain).encode()
        store(path, struct.pack("<Q", len(text)) + text + data[end:])

    return craft


def store(path: Path, data: bytes) -> None:
    """Write the safetensors file, and its size and checksum into the manifest."""
    (path / FILE).write_bytes(data)
    change(path, lambda plain: plain["files"][FILE].update(bytes=len(data), crc32=zlib.crc32(data)))


def resaved(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change tensors of the safetensors file; its size and checksum in the manifest are right afterwards."""

    def craft(path: Path) -> None:
        tensors = load_file(path / FILE)
        edit(tensors)
        save_file(tensors, path / FILE)
        store(path, (path / FILE).read_bytes())

    return craft


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def text_of(edit: Callable[[str], str]) -> Callable[[Path], None]:
    """Edit the text of a manifest as it stands."""
    return lambda path: write(path, edit((path / "checkpoint.json").read_text()))


def tensor(name: str, field: str, value: Any) -> Callable[[Path], None]:
    return set_at("tensors", name, field, to=value)


KEY = f"{WEIGHT}@0,0"
CRAFTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a name above the folder": (renamed("../secret.safetensors"), r"files.*should match pattern"),
    "an absolute name": (renamed("/etc/passwd"), r"files.*should match pattern"),
    "a name with a zero byte": (renamed("a\0.safetensors"), r"files.*should match pattern"),
    "a link": (replaced_by(lambda path: path.symlink_to(path.parent.parent / "outside")), r"is a link"),
    "a link as manifest": (
        replaced_by(lambda path: path.symlink_to(path.parent.parent / "outside"), "checkpoint.json"),
        r"'checkpoint.json' is a link",
    ),
    "a device": (replaced_by(device), r"is not a regular file"),
    "a pipe": (replaced_by(os.mkfifo), r"is not a regular file"),
    "a pipe as manifest": (replaced_by(os.mkfifo, "checkpoint.json"), r"is not a regular file"),
    "a folder as file": (replaced_by(Path.mkdir), r"is not a regular file"),
    "a folder that is a link": (link_to_itself_elsewhere, r"it is a link"),
    "half of a file": (lambda path: os.truncate(path / FILE, 5000), r"has changed since it was saved|bytes"),
    "a file that is not there": (lambda path: (path / FILE).unlink(), r"missing"),
    "no manifest": (lambda path: (path / "checkpoint.json").unlink(), r"'checkpoint.json' is missing"),
    "no files": (set_at("files", to={}), r"'files'.*at least 1 item"),
    "no tensors": (set_at("tensors", to={}), r"'tensors'.*at least 1 item"),
    "a file that is not listed": (
        tensor(WEIGHT, "chunks", [["b.safetensors", [0, 0], [128, 32]]]),
        r"not a file of the checkpoint",
    ),
    "no chunk": (tensor(WEIGHT, "chunks", []), r"chunks.*at least 1 item"),
    "a gap": (tensor(WEIGHT, "chunks", [[FILE, [0, 0], [1, 32]]]), r"do not cover its shape"),
    "an overlap": (
        tensor(WEIGHT, "chunks", [[FILE, [0, 0], [128, 32]], [FILE, [0, 0], [1, 1]]]),
        r"its chunks overlap",
    ),
    "a gap as large as an overlap": (
        tensor(MOMENT, "chunks", [[FILE, [0, 0], [64, 32]], [FILE, [32, 0], [64, 32]]]),
        r"its chunks overlap and leave gaps",
    ),
    "a chunk beyond the shape": (tensor(WEIGHT, "chunks", [[FILE, [1, 0], [128, 32]]]), r"exceeds its shape"),
    "a negative start": (tensor(WEIGHT, "chunks", [[FILE, [-1, 0], [128, 32]]]), r"greater than or equal to 0"),
    "another number of dimensions": (tensor(WEIGHT, "chunks", [[FILE, [0], [4096]]]), r"another number of dimensions"),
    "a huge shape": (
        set_at(
            "tensors", WEIGHT, to={"shape": [10**9, 10**9], "dtype": "float32", "chunks": [[FILE, [0, 0], [10**9] * 2]]}
        ),
        r"bytes, but its chunks need",
    ),
    "a shape beyond 64 bits": (tensor(WEIGHT, "shape", [2**70, 32]), r"less than or equal to"),
    "a dtype that torch does not know": (tensor(WEIGHT, "dtype", "float31"), r"'float31' is not a dtype"),
    "a dtype that is an attribute of torch": (tensor(WEIGHT, "dtype", "nn"), r"'nn' is not a dtype"),
    "another dtype than the file's": (tensor(WEIGHT, "dtype", "int32"), r"but the manifest states I32"),
    "another shape than the file's": (
        set_at("tensors", MOMENT, to={"shape": [32, 128], "dtype": "float32", "chunks": [[FILE, [0, 0], [32, 128]]]}),
        r"but the manifest states F32 of shape \(32, 128\)",
    ),
    "a tensor that the file lacks": (resaved(lambda found: found.update(other=found.pop(KEY))), r"has no tensor"),
    "another step than the folder's": (set_at("step", to=7), r"has the name of step 2, but its manifest states step 7"),
    "a step that is not a number": (set_at("step", to=float("nan")), r"'step'.*integer"),
    "a step in words": (set_at("step", to="2"), r"'step'.*integer"),
    "a learning rate that is not a number": (set_at("config", "optimizer", "lr", to=float("nan")), r"'config.*nan"),
    "a config without a learning rate": (without("config", "optimizer", "lr"), r"lacks 'config.optimizer.lr'"),
    "a section that is a word": (set_at("config", "model", to="gpt"), r"'config.model'"),
    "no provenance": (without("provenance"), r"lacks 'provenance'"),
    "no position of the loader": (without("loader"), r"lacks 'loader'"),
    "a change without a field": (set_at("changes", to=[{"step": 1}]), r"must have 'version', or"),
    "no format": (text_of(lambda text: text.replace('"format": 2, ', "")), r"lacks 'format'"),
    "no checksum": (text_of(lambda text: text.replace('"crc32": ', '"crc": ')), r"'crc"),
    "a number that has changed": (
        text_of(lambda text: text.replace('"tokens": ', '"tokens": 1')),
        r"'checkpoint.json' has changed since it was saved",
    ),
    "a key twice": (text_of(lambda text: text.replace('"step": 2', '"step": 3, "step": 2')), r"'step' twice"),
    "no mapping": (lambda path: write(path, "[]"), r"is not a mapping"),
    "no JSON": (lambda path: write(path, "{"), r"is not valid JSON"),
    "no text": (lambda path: (path / "checkpoint.json").write_bytes(b"\xff"), r"is not valid JSON"),
    "a number of 5000 digits": (text_of(lambda text: text.replace('"step": 2', f'"step": {"9" * 5000}')), "JSON"),
    "lists without end": (lambda path: write(path, "[" * 100_000), r"nested too deeply"),
    "state in lists without end": (set_at("states", to={"a": nested(DEEPEST + 1)}), r"levels deep"),
    "half a character": (set_at("states", to={"a": "\ud800"}), r"surrogates"),
    "half a character in a name": (set_at("tensors", "a\ud800\n/weight", to={}), r"'tensors.a.*\\n/weight"),
    "a header longer than the file": (lambda path: store(path, struct.pack("<Q", 1 << 60) + b"{}"), r"does not|need"),
    "a header that is no mapping": (header(lambda _: b"[]"), r"is not a mapping"),
    "a header with a key twice": (header(lambda _: b'{"a": 1, "a": 2}'), r"'a' twice"),
    "a header without an offset": (header(lambda found: found[KEY].pop("data_offsets")), r"does not describe"),
    "a header with a negative shape": (
        header(lambda found: found[KEY].update(shape=[-1, -4096])),
        r"does not match its number of bytes",
    ),
    "a header with 65 dimensions": (
        header(lambda found: found.update(a={"dtype": "F32", "shape": [0] * 65, "data_offsets": [0, 0]})),
        r"does not match its number of bytes",
    ),
    "a header with a dimension beyond 64 bits": (
        header(lambda found: found.update(a={"dtype": "F32", "shape": [10**19, 0], "data_offsets": [0, 0]})),
        r"does not match its number of bytes",
    ),
    "a time in half a character": (set_at("saved", to="\ud800"), r"'saved'.*valid string"),
    "a layout that clears the terminal": (set_at("layout", to="\x1b[2J"), r"'layout'.*terminal cannot show"),
    "a version of two lines": (set_at("provenance", "torch", to="2\n3"), r"'provenance.torch'.*terminal cannot show"),
    "a plugin without end": (
        set_at("provenance", "plugins", 0, "version", to="1" * 10_001),
        r"'provenance.plugins.0.version'.*at most 10000",
    ),
    "a change of two lines": (set_at("changes", to=[{"step": 1, "version": "a\nb"}]), r"'changes.*cannot show"),
    "a reason that clears the terminal": (set_at("varies", to={"parallel/dp": "\x1b[2J"}), r"'varies.*cannot show"),
    "a format that is no number": (
        text_of(lambda text: text.replace('"format": 2', '"format": "2"')),
        r"is not an integer",
    ),
    "a header with an unknown dtype": (header(lambda found: found[KEY].update(dtype="F31")), r"does not describe"),
    "a header with two tensors in one place": (
        header(lambda found: found[KEY].update(data_offsets=found[KEY.replace("/weight", "/exp_avg")]["data_offsets"])),
        r"overlap, leave gaps",
    ),
}


@pytest.mark.parametrize("craft", list(CRAFTS))
def test_a_crafted_checkpoint_is_refused_in_one_sentence_wherever_it_is_read(crafted: Path, craft: str) -> None:
    make, reason = CRAFTS[craft]
    make(crafted)
    run = prepare(tiny_config(SETTINGS))

    def refused(read: Callable[[], Any]) -> None:
        with pytest.raises(UsageError, match=reason) as raised:
            read()
        assert len(str(raised.value).splitlines()) == 1
        assert str(crafted) in str(raised.value)

    refused(lambda: read_valid(crafted))  # verify
    refused(lambda: read_described(crafted))  # show and list
    refused(lambda: load_for_inference(run, crafted))  # generate
    choice = choose(run, crafted, Verified())  # resume
    assert choice.path == path_of(crafted.parent, 1)
    (skipped,) = choice.skipped
    assert str(crafted) in skipped


def test_the_untouched_checkpoint_is_accepted(crafted: Path) -> None:
    change(crafted, lambda _: None)
    assert read_valid(crafted)["step"] == 2
    assert choose(prepare(tiny_config(SETTINGS)), crafted, Verified()).skipped == ()


@pytest.mark.parametrize("craft", ["a gap", "a pipe as manifest", "a name above the folder", "lists without end"])
def test_a_crafted_checkpoint_to_begin_with_is_refused(crafted: Path, craft: str) -> None:
    make, reason = CRAFTS[craft]
    make(crafted)
    run = prepare(tiny_config({**SETTINGS, "checkpoint.pretrained": str(crafted)}))
    path = pretrained_of(run)
    assert path == crafted
    with pytest.raises(UsageError, match=reason):
        refuse_another_model(path, None)  # type: ignore[arg-type]  # the manifest comes first


def test_equal_keys_are_found_in_linear_time() -> None:
    """The reference counts comparisons, not seconds: each key is hashed once and compared with its equal alone."""
    compared = [0]

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

    pairs = [(Key(number), None) for number in [*range(2000), 1999]]
    with pytest.raises(ValueError, match="'1999' twice"):
        _unique(pairs)
    assert compared[0] < 100


def test_show_escapes_values_and_names_of_a_checkpoint(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(plain: Plain) -> None:
        plain["changes"] = [{"step": 1, "field": "data.path", "old": "a\x1b[2J", "new": "b\nc"}]
        plain["tensors"]["\x1b[2J/weight"] = plain["tensors"].pop(WEIGHT)

    change(crafted, edit)
    monkeypatch.chdir(crafted.parents[3])
    monkeypatch.setattr(
        "mplug.checkpoint.folder.read_described", read_manifest
    )  # the file has the old name of the tensor
    result = CliRunner().invoke(main, ["checkpoint", "show", "--tensors"])
    assert result.exit_code == 0, result.output
    assert "data.path: a\\x1b[2J -> b\\nc, from step 2 on" in result.output
    assert "\\x1b[2J/weight" in result.output
    assert "\x1b" not in result.output


WORDS = [
    ("checkpoint", "verify"),
    ("checkpoint", "show", "--step", "2"),
    ("generate", "--tokens", "1", "--prompt", "a", "--step", "2"),
]
BY_COMMAND = [
    *[("a gap", words) for words in WORDS],
    ("a pipe as manifest", ("checkpoint", "list")),
    ("half a character in a name", ("checkpoint", "list")),
]


@pytest.mark.parametrize(
    ("craft", "words"),
    [
        *BY_COMMAND,
        *(
            pytest.param(craft, words, marks=pytest.mark.wide("kills"))
            for craft, words in product(CRAFTS, [*WORDS, ("checkpoint", "list"), ("train", "--resume")])
            if (craft, words) not in BY_COMMAND
        ),
    ],
)
def test_no_command_shows_a_traceback_or_hangs(cli: Cli, crafted: Path, craft: str, words: tuple[str, ...]) -> None:
    CRAFTS[craft][0](crafted)
    steps = ("--set", "trainer.steps=3") if words[0] == "train" else ()
    result = cli(*words, *steps, timeout=60)
    assert "Traceback" not in result.stdout + result.stderr
    if words[0] == "train":
        is_another_models = "but the model has" in result.stderr  # refused by the manifest, before any file is read
        assert result.returncode == (2 if is_another_models else 0)
        assert is_another_models or "skipped: checkpoint" in result.stderr
    elif words[-1] == "list":
        assert "is damaged" in result.stdout
    else:
        assert result.returncode == 2, result.stdout


# Coverage.


def random_cuts(draw: random.Random, start: list[int], size: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """A box cut into boxes, in any way."""
    axis = draw.randrange(len(size))
    if draw.random() < 0.3 or size[axis] < 2:
        yield start, size
        return
    cut = draw.randrange(1, size[axis])
    yield from random_cuts(draw, start, [*size[:axis], cut, *size[axis + 1 :]])
    beyond = [*start[:axis], start[axis] + cut, *start[axis + 1 :]]
    yield from random_cuts(draw, beyond, [*size[:axis], size[axis] - cut, *size[axis + 1 :]])


def test_coverage_is_what_counting_every_element_says() -> None:
    draw, found = random.Random(19), set()
    for _ in range(400):
        shape = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))]
        boxes = list(random_cuts(draw, [0] * len(shape), shape))
        if draw.random() < 0.6:  # move one box
            start, size = boxes.pop()
            boxes.append(([draw.randrange(whole - n + 1) for whole, n in zip(shape, size, strict=True)], size))
            del start
        counted = torch.zeros(shape, dtype=torch.int64)
        for start, size in boxes:
            counted[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))] += 1
        said = uncovered(shape, boxes)
        assert (said == "") == bool((counted == 1).all()), (shape, boxes)
        found.add(said)
    assert found == {"", "its chunks overlap and leave gaps"}


# Formats.


def test_every_dtype_of_the_table_is_one_of_torch_and_of_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, dtype=getattr(torch, name)) for name in FORMATS}
    save_file(tensors, tmp_path / FILE)
    data = (tmp_path / FILE).read_bytes()
    saved = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {name: entry["dtype"] for name, entry in saved.items()} == {n: f.code for n, f in FORMATS.items()}
    assert {name: tensor.element_size() for name, tensor in tensors.items()} == {n: f.bytes for n, f in FORMATS.items()}
    assert len(CODES) == len(FORMATS)


def test_state_of_a_plugin_may_be_infinite(crafted: Path) -> None:
    change(crafted, lambda plain: plain["states"].update(best={"loss": float("inf")}))
    assert read_manifest(crafted)["states"]["best"]["loss"] == float("inf")


def test_a_manifest_that_could_not_be_read_is_not_written(crafted: Path) -> None:
    manifest = read_manifest(crafted)
    head = {name: value for name, value in manifest.items() if name != "tensors"}
    table = TensorTable.of(manifest["tensors"])
    assert decode(encode(head, table).encode()) == manifest
    with pytest.raises(ValueError, match="levels deep"):
        encode({**head, "states": {"a": nested(DEEPEST + 1)}}, table)
    with pytest.raises(ValueError, match="which is not a file of the checkpoint"):
        encode({**head, "files": {"x.safetensors": {"bytes": 1, "crc32": 1}}}, table)
    (name, saved), *_ = manifest["tensors"].items()
    with pytest.raises(ValueError, match="its chunks overlap"):
        TensorTable.of({name: {**saved, "chunks": [*saved["chunks"], *saved["chunks"]]}})
