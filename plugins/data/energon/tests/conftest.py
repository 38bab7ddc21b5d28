"""Small data sets, made where a test wants them and prepared by Energon's own tool."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from picture_talks import pictured

Samples = Mapping[str, Mapping[str, bytes]]
"""Key -> extension -> content."""


def write_tar(path: Path, samples: Samples) -> None:
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for extension, content in files.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def prepared(folder: Path, parts: Mapping[str, list[Samples]], sample_type: str, **fields: str) -> Path:
    """A data set of parts, a tar for each mapping of samples, as `energon prepare` leaves it."""
    from megatron.energon.tools.prepare import command

    folder.mkdir(parents=True)
    for part, tars in parts.items():
        for number, samples in enumerate(tars):
            write_tar(folder / f"{part}-{number}.tar", samples)
    told = [f"--split-parts={part}:{part}-.*" for part in parts]
    named = [f"--sample-type={sample_type}", *([f"--field-map={json.dumps(fields)}"] if fields else [])]
    command.main(
        [str(folder), "--non-interactive", "--no-progress", "--num-workers=1", *told, *named], standalone_mode=False
    )
    return folder


def texts(part: str, count: int, words: str) -> Samples:
    return {f"{part}{n:03}": {"txt": f"{part} {n}: {words} {n * n}".encode()} for n in range(count)}


def picture(number: int) -> bytes:
    """A PNG of one colour on the left, its complement on the right."""
    from PIL import Image

    colour = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
    image = Image.new("RGB", (12, 8), colour)
    image.paste(tuple(255 - channel for channel in colour), (6, 0, 12, 8))
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def pictures(part: str, count: int) -> Samples:
    return {f"{part}{n:03}": {"png": picture(n), "txt": f"{part} picture {n}".encode()} for n in range(count)}


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_worker_processes() -> None:
    """Energon's worker processes ignore the request to stop. torch waits 5 s for each, at the end of pytest too."""
    pytest.MonkeyPatch().setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)


@pytest.fixture(scope="session")
def text_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "text"
    parts = {
        "train": [texts("alpha", 40, "over the hills"), texts("beta", 40, "and far away")],
        "val": [texts("gamma", 40, "another tune")],
    }
    return prepared(folder, parts, "TextSample", text="txt")


@pytest.fixture(scope="session")
def picture_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "pictures"
    parts = {"train": [pictures("alpha", 30), pictures("beta", 30)], "val": [pictures("gamma", 20)]}
    return prepared(folder, parts, "CaptioningSample", image="png", caption="txt")


@pytest.fixture(scope="session")
def prepare() -> Callable[..., Path]:
    return prepared


@pytest.fixture
def write_texts() -> Callable[[str, int, str], Samples]:
    return texts


@pytest.fixture
def paint() -> Callable[[int], bytes]:
    return picture


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return "own_encoders"


@pytest.fixture
def made(tmp_path: Path, prepare: Callable[..., Path]) -> Callable[..., Path]:
    """A data set of these samples; a stream of it repeats them."""

    def make(*samples: dict[str, bytes], folder: str = "set") -> Path:
        named = {f"k{number}": files for number, files in enumerate(samples)}
        return prepare(tmp_path / folder, {"train": [named]}, "CrudeWebdataset")

    return make


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory, prepare: Callable[..., Path]) -> Path:
    parts = {
        "train": [{f"a{n:02}": pictured(n) for n in range(20)}, {f"b{n:02}": pictured(20 + n) for n in range(20)}],
        "val": [{f"c{n:02}": pictured(40 + n) for n in range(20)}],
    }
    return prepare(tmp_path_factory.mktemp("sets") / "conversations", parts, "CrudeWebdataset")
