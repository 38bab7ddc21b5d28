"""Energon: real data sets, of text and of images with text, through the loader."""

import io
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mplug import Loader, MicroBatch, RunError, UsageError
from mplug.model.build import build_model
from mplug.run.prepare import check_data
from mplug.training.assembly import build_loader
from mplug.training.feed import Feed
from mplug.training.source import Source
from mplug_testing import DataSuite
from mplug_testing.harness import tiny_run
from mplug_testing.resume import require_exact_resume
from mplug_testing.samples import malformed

S = 32
END = 256
IGNORED = -100
TINY: dict[str, Any] = {
    "data.name": "energon",
    "data.streams": 4,
    "data.shuffle_buffer_size": 8,
    "trainer.seq_length": S,
}
IMAGES = {"data.task_encoder": "image-text"}


class TestEnergon(DataSuite):
    plugin = "energon"
    settings = TINY
    examples = {
        "train_part": ["no-such-part"],
        "validation_part": ["no-such-part"],
        "task_encoder": ["no_such_module:Encoder"],
        "task_encoder_options": [{"no_such_option": 1}],
        "entries": [["no_such_entry"]],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "max_samples_per_sequence": [1, 5],
        "packing_buffer_size": [2],  # which this encoder, without packing, refuses
        "template_variables": [{"bos_token": "<s>"}],  # only for conversations, as those below
        "special_tokens": [["<|end|>"]],
        "picture_mark": ["<picture>"],
        "max_pixels": [9],
        "video_fps": [2],
        "sample_weights": [True],
        "max_rows": [9],
        "too_long": ["refuse"],
        "max_documents": [9],
    }
    without_effect = {
        "num_workers": "workers read the samples that the main process would read (tests below resume with some)",
        "template": "it is for conversations, and may come from the folder of a published checkpoint",
        "on_error": "every sample of this set can be read (tests below have a broken one)",
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def of_text(cls, text_set: Path) -> None:
        cls.settings = {**TINY, "data.path": str(text_set)}


def loader(path: Path, split: str = "train", **changes: Any) -> Loader:
    run = tiny_run({**TINY, "data.path": str(path), **changes})
    run.device = "cpu"
    return build_loader(run, split)


def rows(found: Loader, count: int, entry: str = "tokens") -> list[list[Any]]:
    return [row for batch in found.take(count) for row in batch[entry].tolist()]


def said(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


# Text.


def test_a_text_is_read_in_windows_and_the_last_one_is_padded(tmp_path: Path, prepare: Callable[..., Path]) -> None:
    text = "".join(map(chr, range(65, 65 + 40)))
    path = prepare(tmp_path / "one", {"train": [{"only": {"txt": text.encode()}}]}, "TextSample", text="txt")
    first, second = rows(found := loader(path, **{"data.streams": 1}), 2)
    whole = [*text.encode(), END]
    assert first == whole[:S]
    assert second == [*whole[S:], *[END] * (2 * S - len(whole))]
    targets = rows(found, 2, "labels")  # the next epoch: the same windows
    assert targets == [whole[1 : S + 1], [*whole[S + 1 :], *[IGNORED] * (2 * S - len(whole) + 1)]]


def test_an_epoch_of_the_streams_has_every_sample_once(text_set: Path) -> None:
    for split, names in (("train", "alpha beta"), ("validation", "gamma")):
        count = 40 * len(names.split())
        found = rows(loader(text_set, split, **{"trainer.seq_length": 64, "data.shuffle_buffer_size": None}), count)
        assert {said(row).partition(":")[0] for row in found} == {f"{p} {n}" for p in names.split() for n in range(40)}


def test_the_names_of_files_decide_the_type_of_a_data_set_without_one(
    tmp_path: Path, prepare: Callable[..., Path]
) -> None:
    sets = {"train": [{"a": {"txt": b"plain"}, "b": {"json": b'{"text": "inside", "other": 1}'}}]}
    path = prepare(tmp_path / "crude", sets, "CrudeWebdataset")
    found = rows(loader(path, **{"data.streams": 1}), 2)
    assert {said(row) for row in found} == {"plain", "inside"}


def blend(path: Path, *sets: tuple[Path, int]) -> Path:
    parts = [{"path": str(one), "weight": weight} for one, weight in sets]
    named = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path.write_text(yaml.safe_dump({**named, "splits": {"train": {"blend": parts}}}))
    return path


def require_resumed(path: Path, found: Loader, count: int, **changes: Any) -> None:
    """Fail unless a new loader continues as this one does."""
    state, expected = found.state_dict(), rows(found, count)
    again = loader(path, **changes)
    again.load_state_dict(state)
    assert rows(again, count) == expected


def test_a_blend_follows_the_weights_of_its_data_sets_and_resumes_exactly(
    tmp_path: Path, text_set: Path, prepare: Callable[..., Path], write_texts: Any
) -> None:
    other = prepare(tmp_path / "other", {"train": [write_texts("delta", 30, "and away")]}, "TextSample", text="txt")
    mixed = blend(tmp_path / "blend.yaml", (text_set, 3), (other, 1))
    found = loader(mixed)
    drawn = [said(row).split()[0] for row in rows(found, 240)]
    assert 35 <= drawn.count("delta") <= 85  # a quarter of 240, within four standard deviations
    require_resumed(mixed, found, 20)


ALIKE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
LAYOUTS = st.sampled_from(["", "dp2", "dp4", "tp2", "dp2tp2"])
PORTIONS = st.lists(st.integers(1, 4).map(lambda number: 4 * number), max_size=3)


@given(LAYOUTS, PORTIONS, LAYOUTS)
@settings(max_examples=10, suppress_health_check=ALIKE)
def test_streams_resume_exactly_after_a_kill_under_any_layout_whose_ranks_divide_them(
    text_set: Path, before: str, portions: list[int], after: str
) -> None:
    require_exact_resume({**TINY, "data.path": str(text_set)}, before, portions, after, count=24)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # Energon forks, which Python 3.12 tells of
@pytest.mark.wide("kills")
def test_worker_processes_resume_exactly_after_a_kill(text_set: Path) -> None:
    workers = {"data.path": str(text_set), "data.streams": 2, "data.num_workers": 1}
    require_exact_resume({**TINY, **workers}, "dp2", [8], "", count=8)


# Images.


def decoded(png: bytes, size: int) -> torch.Tensor:
    """By the imaging library alone: a picture, scaled."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(png)).resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def first_images(path: Path, count: int, **changes: Any) -> MicroBatch:
    own = {"data.entries": ["images"], "trainer.micro_batch_size": count, "data.streams": 2}
    return next(loader(path, **IMAGES, **own, **changes).take(count))


def test_a_micro_batch_has_images_and_the_tokens_of_their_captions(
    picture_set: Path, paint: Callable[[int], bytes]
) -> None:
    batch = first_images(picture_set, 4, **{"data.task_encoder_options": {"image_size": 20}})
    assert batch["images"].shape == (4, 3, 20, 20)
    for image, tokens, labels in zip(batch["images"], batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        caption = said(tokens)
        assert (image - decoded(paint(int(caption.split()[-1])), 20)).abs().max() <= 2 / 255
        assert tokens[0] == END
        assert labels[: len(caption) + 1] == [*caption.encode(), END]
        assert set(labels[len(caption) + 1 :]) == {IGNORED}


def test_an_image_can_be_grey_tokens_before_its_caption(picture_set: Path, paint: Callable[[int], bytes]) -> None:
    found = loader(picture_set, **IMAGES, **{"data.task_encoder_options": {"pixels": 3}, "model.vocab_size": 513})
    assert found.vocab_size == 257 + 256
    batch = next(found.take(2))
    for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        caption = said(tokens[9:])
        grey = decoded(paint(int(caption.split()[-1])), 3).mean(0).flatten()
        assert (torch.tensor(tokens[:9]) - 257 - grey * 255).abs().max() <= 2
        assert labels[:8] == [IGNORED] * 8
        assert labels[8 : 9 + len(caption)] == [*caption.encode(), END]


def test_a_model_that_takes_no_images_is_refused(picture_set: Path) -> None:
    run = tiny_run({**TINY, **IMAGES, "data.path": str(picture_set), "data.entries": ["images"]})
    with pytest.raises(UsageError, match="micro batches of data/energon have 'images', which no unit of models/gpt"):
        build_model(run)


# What is refused, in a sentence each.

WEIGHTS = ("0", ".nan", ".inf", "much")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.path": "nowhere"}, r"data\.path 'nowhere' does not exist"),
        ({"data.path": "bare"}, r"data\.path 'bare' contains no tar files; pack its samples into tar files, then run"),
        ({"data.path": "raw"}, r"data\.path 'raw' is not prepared; run 'energon prepare raw'"),
        ({"data.path": "note.txt"}, r"data\.path 'note\.txt' is not a YAML file; set it to a prepared folder"),
        ({"data.path": "broken.yaml"}, r"data\.path 'broken\.yaml' is not valid YAML: .*; correct it"),
        ({"data.path": "other.yaml"}, r"data\.path 'other\.yaml' is not a metadataset: it has no 'splits'"),
        *(
            ({"data.path": f"weight{weight}.yaml"}, r"has the weight .*; use a weight above 0, or")
            for weight in WEIGHTS
        ),
        ({"data.task_encoder": "Encoder"}, r"data\.task_encoder"),
        ({"data.task_encoder": "no_such_package.x:Encoder"}, r"there is no module 'no_such_package'"),
        ({"data.tokenizer": "bites"}, r"did you mean 'bytes'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_launch(
    text_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "raw").mkdir()
    tarfile.open(tmp_path / "raw" / "0.tar", "w").close()
    (tmp_path / "note.txt").touch()
    (tmp_path / "broken.yaml").write_text("{{")
    (tmp_path / "other.yaml").write_text("data: {}")
    for weight in WEIGHTS:
        blend = f"splits: {{train: {{blend: [{{path: {text_set}, weight: {weight}}}]}}}}"
        (tmp_path / f"weight{weight}.yaml").write_text(blend)
    with pytest.raises(UsageError, match=what):
        check_data(tiny_run({**TINY, "data.path": str(text_set), **changes}))


@pytest.mark.parametrize(
    ("encoder", "what"),
    [
        ("Short", r"returns 'tokens' of shape \(31,\); return shape \(32,\), which is trainer\.seq_length"),
        ("Counting", r"data\.task_encoder_options does not match the arguments of '.*Counting'.*first"),
        ("Silent", r"returns no tensor 'labels' \(it returns tokens\)"),
        ("Other", r"is not a subclass of megatron\.energon\.TaskEncoder"),
        ("Nobody", r"Nobody' cannot be imported"),
    ],
)
def test_the_error_names_an_encoder_that_breaks_the_contract(
    text_set: Path, encoders: str, encoder: str, what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        list(loader(text_set, **{"data.task_encoder": f"{encoders}:{encoder}"}).take(4))


def test_a_custom_encoder_supplies_tokens_labels_positions_and_entries(text_set: Path, encoders: str) -> None:
    own = {"data.task_encoder": f"{encoders}:Counting", "data.task_encoder_options": {"first": 0}}
    found = loader(text_set, **own, **{"data.entries": ["extra"]})
    assert found.vocab_size == 33
    batch = next(found.take(2))
    assert batch["tokens"].tolist() == batch["positions"].tolist() == [list(range(32))] * 2
    assert batch["labels"].tolist() == [list(range(1, 33))] * 2
    assert batch["extra"].tolist() == [[0, 1]] * 2


def test_an_encoder_may_pack_documents_and_resumes_exactly(text_set: Path, encoders: str) -> None:
    own = {
        "data.task_encoder": f"{encoders}:Packing",
        "data.packing_buffer_size": 12,
        "data.entries": ["document_lengths"],
        "kernels.default": None,
        "data.streams": 2,
    }
    found = loader(text_set, **own)
    for batch in found.take(6):
        assert malformed(batch, S) == ""
        for tokens, lengths in zip(batch["tokens"], batch["document_lengths"].tolist(), strict=True):
            for document in tokens.split([length for length in lengths if length]):
                assert len(set(document.tolist())) == 1
    require_resumed(text_set, found, 6, **own)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {**IMAGES, "data.task_encoder_options": {"pixels": 6}},
            r"6 x 6 tokens leaves no room .* trainer\.seq_length=32",
        ),
        ({"data.train_part": "dev"}, r"data\.path '.*text': Energon cannot read part 'dev'"),
        (
            {"parallel.layout": "dp2", "data.streams": 3},
            r"data\.streams=3 is not a multiple of the 2 data-parallel ranks",
        ),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(text_set: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        loader(text_set, **changes)


@pytest.mark.parametrize("damage", ["emptied", "other bytes", "gone"])
def test_a_tar_file_that_is_damaged_is_refused(text_set: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(text_set, tmp_path / "set")
    for path in folder.glob("*.tar"):
        size = path.stat().st_size
        path.unlink()
        if damage != "gone":
            path.write_bytes({"emptied": b"", "other bytes": b"\xaa" * size}[damage])
    with pytest.raises(UsageError, match=r"data\.path '.*set'.* cannot (be )?read.*: tar '.*set/train-\d\.tar'"):
        list(loader(folder).take(4))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.wide("data", quick=["0"])
def test_the_error_for_a_bad_sample_names_its_tar_and_its_file(
    text_set: Path, tmp_path: Path, encoders: str, workers: int
) -> None:
    """A worker process's traceback stays out of the sentence, and in the log."""
    for path in shutil.copytree(text_set, tmp_path / "set").glob("train-*.tar"):
        content = bytearray(path.read_bytes())
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                content[member.offset + 148 : member.offset + 156] = b"\xff" * 8  # its checksum
        path.write_bytes(content)
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "a damaged tar": ({"data.path": str(tmp_path / "set")}, r"^data.path .*: tar '.*/train-\d.tar' at byte \d+: "),
        "an encoder": (
            {"data.task_encoder": f"{encoders}:Broken"},
            r"^a sample .* \('.*/train-\d\.tar', '(alpha|beta)\d+\.txt'\): ZeroDivisionError: [^\n]*on_error=skip$",
        ),
        "a refusal": (
            IMAGES,
            r"^'.*/train-\d\.tar', '(alpha|beta)\d+\.txt': .*has no image; set data\.task_encoder to an encoder",
        ),
    }
    for what, (changed, sentence) in changes.items():
        run = tiny_run({**TINY, "data.path": str(text_set), "data.streams": 1, "data.num_workers": workers, **changed})
        run.device = "cpu"
        feed = Feed(build_loader(run, "train"), "cpu", Source.of(run, "train"))
        with pytest.raises((UsageError, RunError)) as caught:
            list(feed.take(2))
        assert re.search(sentence, str(caught.value)), (what, str(caught.value))


def test_the_error_names_an_empty_text(tmp_path: Path, prepare: Callable[..., Path]) -> None:
    samples = {f"{n}": {"txt": b""} for n in range(4)}
    folder = prepare(tmp_path / "empty", {"train": [samples]}, "TextSample", text="txt")
    with pytest.raises(UsageError, match=r"sample '.*' has an empty text; remove it, or set data\.on_error=skip"):
        list(loader(folder, **{"data.streams": 1}).take(1))


def test_more_streams_than_samples_are_refused(tmp_path: Path, prepare: Callable[..., Path], write_texts: Any) -> None:
    path = prepare(tmp_path / "few", {"train": [write_texts("alpha", 2, "few")]}, "TextSample", text="txt")
    assert len(rows(loader(path, **{"data.streams": 2}), 6)) == 6
    with pytest.raises(UsageError, match=r"stream \d of data\.streams=4 has no sample .* set a smaller data\.streams"):
        list(loader(path).take(4))


def test_a_state_of_other_streams_or_of_another_data_set_is_refused_without_a_change(
    text_set: Path, tmp_path: Path
) -> None:
    found, expected = loader(text_set), rows(loader(text_set), 8)
    other = loader(text_set, **{"data.streams": 2})
    rows(other, 4)
    mixed = loader(blend(tmp_path / "blend.yaml", (text_set, 1), (text_set, 2)))
    rows(mixed, 4)
    for state, what in (
        (
            other.state_dict(),
            r"with data\.streams=2, and this run has data\.streams=4, .*; resume with data\.streams=2",
        ),
        ({"samples": 3}, "is not from data/energon"),
        (mixed.state_dict(), "Energon cannot continue from this checkpoint"),
    ):
        with pytest.raises(UsageError, match=what):
            found.load_state_dict(state)
    assert rows(found, 8) == expected
