"""Broken input for every reader of mplug: mutations that know what they mutate, drawn from one source of randomness.

`random` is a `random.Random`; where hypothesis draws it, a case that fails is shrunk and repeated.
"""

import json
import math
import struct
from pathlib import Path
from random import Random
from typing import Any

import yaml

NUMBERS = [0, -1, 1, 2, 3, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**20, 10**30, 10**400, 0.5]
FLOATS = [math.inf, -math.inf, math.nan, 1e300, -1e300, 1e-300, 5e-324, -0.0, 1e15, 3.4e38, 1.5]
TEXTS = ["", " ", "x", "null", "1e30", "9" * 5000, "a" * 100_000, "\0", "é", "\u2028", "🙂"]
TEXTS += ["../x", "/etc/passwd", ".inf"]
PATHS = ["../../etc/passwd", "/dev/zero", "/dev/null", "..", ".", "", "a\0b", "x/../../y", "rank00000.safetensors/x"]
WORDS = ["{n}", "<<", "[key]", "name", "step", "int", "literal['run','epoch']", "__class__"]


def junk(random: Random, depth: int = 0) -> Any:
    """A value of any type: nested, too large, too deep."""
    kind = random.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind == 1:
        return random.choice(FLOATS)
    if kind == 2:
        return random.choice([*TEXTS, *PATHS])
    if kind == 3:
        return random.choice([None, True, False])
    if kind == 4:
        return random.choice([{}, [], [[]], {"": {}}, {"x": None}])
    if kind == 5:
        return deep(random.choice([5, 50, 200]), random.random() < 0.5)
    if kind == 6:
        return {random.choice([*WORDS, *TEXTS[:6]]): junk(random, depth + 1) for _ in range(random.randrange(4))}
    return [junk(random, depth + 1) for _ in range(random.randrange(4))]


def deep(levels: int, mapping: bool) -> Any:
    """A value inside so many mappings or lists."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if mapping else [value]
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value of a tree of mappings and lists."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for name, value in inner for place in places(value, (*path, name)))]


def mutated(random: Random, tree: Any, times: int) -> Any:
    """A copy of a tree of JSON with some values deleted, renamed, repeated or replaced by others."""
    tree = json.loads(json.dumps(tree))
    for _ in range(times):
        found = [place for place in places(tree) if place]
        if not found:
            return tree
        *outer, last = random.choice(found)
        owner = tree
        for name in outer:
            owner = owner[name]
        _mutate(random, owner, last)
    return tree


def _mutate(random: Random, owner: Any, name: Any) -> None:
    value, kind = owner[name], random.randrange(8)
    if kind == 0:
        del owner[name]
    elif kind == 1 and isinstance(owner, dict):
        owner[random.choice([*WORDS, *PATHS])] = owner.pop(name)
    elif kind == 2 and isinstance(owner, list):
        owner.append(value)
    elif kind == 3 and isinstance(value, int) and not isinstance(value, bool):
        others = [-value - 1, value + 1, value * 2, value - 1, value * 10**20, float(value), str(value)]
        owner[name] = random.choice(others)
    elif kind == 4 and isinstance(value, str):
        owner[name] = random.choice([value[:-1], value + "x", *PATHS, *TEXTS])
    elif kind == 5 and isinstance(value, list | dict):
        owner[name] = type(value)()
    else:
        owner[name] = junk(random)


def damaged(random: Random, held: bytes) -> bytes:
    """Bytes with some flipped, cut off, repeated, or others in their place."""
    data = bytearray(held)
    for _ in range(random.randrange(1, 4)):
        place, kind = random.randrange(len(data) + 1), random.randrange(5)
        if kind == 0:
            del data[place:]
        elif kind == 1 and place < len(data):
            data[place] ^= 1 << random.randrange(8)
        elif kind == 2:
            data[place:place] = data[place : place + random.randrange(1, 20)]
        elif kind == 3:
            del data[place : place + random.randrange(1, 20)]
        else:
            others = [b"\xff" * 8, b"\0" * 8, struct.pack("<q", -1), b"\xef\xbb\xbf", b"[" * 5000]
            data[place : place + 8] = random.choice(others)
    return bytes(data)


# Configs.

LAYOUTS = ["", "dp2", "tp2", "pp2", "cp2dp2", "tp2pp2", "fsdp2", "zero2", "ep2"]
LAYOUTS += ["dp0", "tp99999999999999999999", "x2", "2"]
LAUGHS = "a: &a [x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
TEXTS_OF_CONFIGS = [
    LAUGHS,
    "trainer: &t\n  steps: *t\n",
    "trainer: " + "{a: " * 3000 + "1" + "}" * 3000,
    "data:\n  path: " + "[" * 3000 + "]" * 3000,
    "trainer:\n  ? [a, b]\n  : 3\n",
    "trainer:\n  ? {a: b}\n  : 3\n",
    "trainer:\n  steps: !!python/object/apply:os.system [ls]\n",
    "trainer:\n  steps: !!bool perhaps\n",
    "trainer:\n  steps: !!int ''\n",
    "trainer:\n  steps: !!timestamp now\n",
    "trainer:\n  seed: 0x" + "f" * 10_000 + "\n",
    "data:\n  path: !!set {a, b}\n",
    "data:\n  path: !!binary gIGCgw==\n",
    "trainer:\n  <<: {steps: 3}\n",
    "\ufeffmodel: {}\n",
    "%YAML 9.9\n---\nmodel: {}\n",
    "--- a\n...\n--- b\n",
    "trainer: {steps: 2001-01-01}\n",
]


def config_text(random: Random, tree: dict[str, Any]) -> str:
    """A config file: the resolved config with junk in it, or text that is broken."""
    kind = random.randrange(10)
    if kind == 0:
        return random.choice(TEXTS_OF_CONFIGS)
    fields = [place for place in places(tree) if place and not isinstance(_at(tree, place), dict)]
    said: dict[str, Any] = {}
    for place in random.sample(fields, random.randrange(1, 5)):
        _put(said, place, junk(random))
    if random.random() < 0.3:
        _put(said, ("parallel", "layout"), random.choice(LAYOUTS))
    if random.random() < 0.2:
        _put(said, (random.choice([*tree]), random.choice(["name", *WORDS, "x"])), junk(random))
    text: str = yaml.safe_dump(said, sort_keys=False)
    if kind == 1:
        return damaged(random, text.encode()).decode("utf-8", errors="replace")
    return text


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        tree = tree[name]
    return tree


def _put(tree: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    *outer, last = place
    for name in outer:
        inner = tree.get(name)
        tree[name] = inner if isinstance(inner, dict) else {}
        tree = tree[name]
    tree[last] = value


# Index files.


def index_of(random: Random, held: bytes) -> bytes:
    """An `.idx` with one of its numbers replaced, or its bytes damaged."""
    if random.random() < 0.3:
        return damaged(random, held)
    sequences, bounds = struct.unpack_from("<QQ", held, 18)
    data, lengths, pointers = bytearray(held), 34, 34 + 4 * sequences
    for _ in range(random.randrange(1, 3)):
        kind = random.randrange(5)
        value = random.choice([0, 1, -1, 2, 6, 100, 2**31 - 1, 2**62, -(2**63), 2**63 - 1])
        if kind == 0:
            data[17] = value & 0xFF
        elif kind == 1:
            struct.pack_into("<q", data, random.choice([18, 26]), value)
        elif kind == 2:
            small = max(min(value, 2**31 - 1), -(2**31))
            struct.pack_into("<i", data, lengths + 4 * random.randrange(sequences), small)
        elif kind == 3:
            place = pointers + 8 * random.randrange(sequences)
            other = struct.unpack_from("<q", data, pointers + 8 * random.randrange(sequences))[0]
            struct.pack_into("<q", data, place, random.choice([value, other, other + 2, other - 2]))
        else:
            struct.pack_into("<q", data, pointers + 8 * sequences + 8 * random.randrange(bounds), value)
    return bytes(data)


# Checkpoints.


def damage_checkpoint(random: Random, path: Path, checksum: Any) -> None:
    """Damage one checkpoint: mostly its manifest, whose checksum is made right again."""
    kind, manifest = random.randrange(12), path / "checkpoint.json"
    if kind == 0:
        manifest.write_bytes(damaged(random, manifest.read_bytes()))
        return
    tree = json.loads(manifest.read_text())
    if kind == 1:
        file = random.choice(sorted(path.glob("*.safetensors")))
        file.write_bytes(damaged(random, file.read_bytes()))
        return
    tree.pop("crc32")
    tree = mutated(random, tree, random.randrange(1, 4))
    if isinstance(tree, dict):
        tree["crc32"] = checksum(tree)
    manifest.write_text(json.dumps(tree))
