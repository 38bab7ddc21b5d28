"""mplug contact-sheet: a data set of images with text as a picture."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from mplug_energon.sheet import command, lines_of

from mplug import UsageError
from mplug_testing import CommandSuite


class TestContactSheet(CommandSuite):
    plugin = "contact-sheet"
    refused = (("nowhere",), ("nowhere", "--samples", "0"))


def test_a_sheet_shows_every_image_of_the_batch(
    picture_set: Path, tmp_path: Path, paint: Callable[[int], bytes]
) -> None:
    from PIL import Image

    output = tmp_path / "batch.png"
    told = CliRunner().invoke(command, [str(picture_set), "--samples=5", "--size=40", f"--output={output}"])
    assert told.exit_code == 0, told.output
    assert "5 samples of 'train'" in told.output
    sheet = Image.open(output).convert("RGB")
    height = sheet.height // 2
    assert (sheet.width, height) in [(3 * 48, 76), (3 * 48, 88)]  # 'alpha picture 12', 40 pixels wide
    known = {Image.open(BytesIO(paint(n))).getpixel((0, 0)) for n in range(30)}
    shown = [sheet.getpixel((column * 48 + 8, row * height + 24)) for row in range(2) for column in range(3)]
    assert all(
        any(max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1 for other in known) for one in shown[:5]
    )
    assert shown[5] == (255, 255, 255)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one line", ["one line"]),
        ("a red  square\non a white background", ["a red square", "on a white", "background"]),
        ("incomprehensibilities", ["incomprehens", "ibilities"]),
        ("one two three four five six seven eight nine ten", ["one two", "three four", "five six", "seven ..."]),
    ],
)
def test_a_text_is_wrapped_between_words_and_an_omission_is_marked(text: str, lines: list[str]) -> None:
    assert lines_of(text, SimpleNamespace(textlength=len), 12) == lines  # type: ignore[arg-type]


def test_the_error_names_a_folder_that_cannot_be_written(picture_set: Path, tmp_path: Path) -> None:
    output = tmp_path / "nowhere" / "batch.png"
    with pytest.raises(UsageError, match=r"cannot write '.*batch\.png': No such file"):
        command.main([str(picture_set), f"--output={output}"], standalone_mode=False)
