"""`explain --schedule`: the chart of a pipeline, its figures, and its picture."""

from pathlib import Path
from xml.etree import ElementTree

from click.testing import CliRunner
from mplug_explain import command

SMALL = (
    *("--parallel", "pp2", "--set", "model.num_layers=4", "--set", "model.hidden_size=32"),
    *("--set", "model.num_attention_heads=2", "--set", "trainer.micro_batch_size=1"),
    *("--set", "trainer.global_batch_size=3", "--set", "trainer.seq_length=16", "--set", "trainer.device=cpu"),
)


def shown(*more: str) -> str:
    result = CliRunner().invoke(command, [*SMALL, "--schedule", *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_chart_is_the_table_that_is_drawn_by_hand() -> None:
    """2 ranks, 3 micro batches: 9 units of work and 3 of waiting. A rank sends 3 x 16 x 32 numbers of 4 bytes."""
    text = shown()
    assert "'1f1b': 2 ranks, 2 chunks, 3 micro batches\nbubble 25.0%" in text
    assert "rank 0   F0 F1       B0--- F2 B1---    B2---\n" in text
    assert "rank 1      F0 B0--- F1 B1--- F2 B2---\n" in text
    first, last = (line.split() for line in text.splitlines() if line.strip().startswith(("0 ", "1 ")))
    assert first == ["0", "0", "75.0%", "2", "6.00", "KiB"]
    assert last == ["1", "1", "75.0%", "1", "6.00", "KiB"]


def test_chunks_of_a_rank_have_letters_and_halves_of_backward_are_shown() -> None:
    text = shown("--set", "parallel.pp.schedule=zb-v")
    rows = [line.split()[2:] for line in text.splitlines() if line.startswith("rank ")]
    assert rows[1][:4] == ["F0a", "F0b", "F1a", "F1b"]
    for row in rows:
        assert sorted(row) == sorted(f"{kind}{n}{half}" for kind in "FIW" for n in range(3) for half in "ab")


def test_a_long_chart_goes_on_below() -> None:
    text = shown("--set", "parallel.pp.schedule=zb-h1", "--set", "trainer.global_batch_size=16")
    assert max(map(len, text.splitlines())) <= 120
    for rank in range(2):
        parts = [line.split()[2:] for line in text.splitlines() if line.startswith(f"rank {rank} ")]
        assert len(parts) > 1
        assert sorted(word for part in parts for word in part) == sorted(f"{k}{n}" for k in "FIW" for n in range(16))


def test_too_few_micro_batches_are_reported_with_the_settings_that_change_them() -> None:
    said = "a step has 1 micro batch for 2 ranks, so ranks wait: set trainer.{} to "
    text = shown("--set", "trainer.global_batch_size=1")
    assert "'1f1b': 2 ranks, 2 chunks, 1 micro batch\n" in text
    assert said.format("global_batch_size") + "2 or more" in text
    text = shown("--set", "trainer.global_batch_size=4", "--set", "trainer.micro_batch_size=4")
    assert said.format("micro_batch_size") + "less than 4, or trainer.global_batch_size to more" in text
    assert "so ranks wait" not in shown()


def test_the_picture_has_a_box_for_every_computation(tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    assert f"the chart is in {file}" in shown("--set", "parallel.pp.schedule=interleaved", "--svg", str(file))
    root = ElementTree.parse(file).getroot()
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    expected = [f"{kind}{n} of chunk {chunk}" for kind in "FB" for n in range(3) for chunk in range(4)]
    assert sorted(map(str, titles)) == sorted(expected)
