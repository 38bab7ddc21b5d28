"""Folders that the transformers library writes: what is read computes the same, and what is exported equals them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli

transformers = pytest.importorskip("transformers")

from beside_library import library_config  # noqa: E402
from encoder_models import CONFIGS, MASKED, TOKENS  # noqa: E402
from exported_folders import ONE_STEP, assert_exported_as_it_was  # noqa: E402
from folder_claims import assert_each_rank_reads_its_boxes, exported_by_settings  # noqa: E402
from published import loaded, logits, rewritten, save  # noqa: E402

SETTINGS = {**MASKED, **ONE_STEP}
WIDE = pytest.mark.wide("families")
OTHERS = [pytest.param(kind, marks=WIDE) for kind in CONFIGS if kind != "bert"]


GIVEN = {key.replace(".", "__"): value for key, value in MASKED.items()}


class Folders(dict[str, tuple[Path, Any]]):
    """By `model_type`, a folder in three files and the library's model that wrote it."""

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, kind: str) -> tuple[Path, Any]:
        folder = self.parent / kind
        folder.mkdir()
        model = transformers.AutoModelForMaskedLM.from_config(library_config(CONFIGS[kind]))
        self[kind] = folder, save(model, folder)
        return self[kind]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("encoders"))


@pytest.mark.wide("families", quick=["roberta"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_gives_the_librarys_logits_and_each_rank_reads_its_boxes(kind: str, made: Folders) -> None:
    folder, library = made[kind]
    _, model = loaded(folder, **GIVEN)
    with torch.no_grad():
        expected = library(TOKENS).logits
    assert expected.abs().max() > 0.5
    assert (logits(model, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert_each_rank_reads_its_boxes(folder, model, GIVEN)


def test_norms_of_older_folders_are_read_by_their_older_names(made: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made["bert"][0], tmp_path / "older"))
    older = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}

    def rename(found: dict[str, torch.Tensor]) -> None:
        for name in [*found]:
            end = next((one for one in older if name.endswith(one)), None)
            if end is not None:
                found[name.removesuffix(end) + older[end]] = found.pop(name)

    rewritten(folder, rename)
    pairs = zip(
        loaded(folder, **GIVEN)[1].parameters().values(),
        loaded(made["bert"][0], **GIVEN)[1].parameters().values(),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", ["bert", *OTHERS])
def test_a_run_of_a_folder_is_exported_as_that_folder(kind: str, made: Folders, tmp_path: Path, cli_here: Cli) -> None:
    assert_exported_as_it_was(made[kind][0], SETTINGS, tmp_path, cli_here)


@pytest.mark.parametrize("kind", [pytest.param("bert", marks=WIDE), pytest.param("roberta", marks=WIDE), "modernbert"])
def test_a_config_of_its_own_describes_the_model_to_the_library(
    kind: str, made: Folders, tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by the family, not kept: the settings alone describe the model."""
    folder, library = made[kind]
    exported = exported_by_settings(folder, SETTINGS, tmp_path, cli_here)
    again = transformers.AutoModelForMaskedLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, library(TOKENS).logits)


# Heads for classes.

NAMES = {"0": "no", "1": "perhaps", "2": "yes"}
CLASSES: dict[str, Any] = {
    "data.name": "mock",
    "data.vocab_size": 3,
    "data.documents": 2,
    "trainer.seq_length": 12,
}
HEADS = [
    ("bert", "BertForSequenceClassification", {}),
    ("roberta", "RobertaForSequenceClassification", {"hidden_act": "gelu_new"}),
    ("modernbert", "ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    ("bert", "BertForTokenClassification", {"classifier_dropout": 0.2}),
    ("roberta", "RobertaForTokenClassification", {}),
    ("modernbert", "ModernBertForTokenClassification", {}),
]


@pytest.mark.parametrize(
    ("kind", "architecture", "fields"),
    [HEADS[2], *(pytest.param(*one, marks=WIDE) for one in HEADS if one != HEADS[2])],
)
def test_a_folder_with_classes_gives_the_librarys_logits_and_is_exported_as_it_was(
    kind: str, architecture: str, fields: dict[str, Any], tmp_path: Path, cli_here: Cli
) -> None:
    names = {"id2label": NAMES, "label2id": {name: int(number) for number, name in NAMES.items()}}
    library = getattr(transformers, architecture)(library_config({**CONFIGS[kind], **names, **fields}))
    folder = tmp_path / "folder"
    save(library, folder, 1)
    run, model = loaded(folder, **{key.replace(".", "__"): value for key, value in CLASSES.items()})
    assert run.config.model.labels == ("no", "perhaps", "yes")
    with torch.no_grad():
        expected = library(TOKENS).logits
    found = logits(model, TOKENS)
    assert (found[:, 0] if expected.dim() == 2 else found).sub(expected).abs().max() < 1e-5 * expected.abs().max()
    assert_exported_as_it_was(folder, {**CLASSES, **ONE_STEP}, tmp_path, cli_here)
    shutil.rmtree(tmp_path / "runs" / "tuned" / "published")
    result = cli_here("checkpoint", "export", "--to", "huggingface", "own")
    assert result.returncode == 0, result.stderr
    again = getattr(transformers, architecture).from_pretrained(tmp_path / "own", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, expected)
    assert {str(number): name for number, name in again.config.id2label.items()} == NAMES


@pytest.mark.wide("families")
def test_a_folder_with_masked_tokens_begins_a_model_with_classes(made: Folders) -> None:
    """Only the new head is left out."""
    classes = {"model__head": "sequences", "model__labels": ["a", "b", "c"]}
    for kind, new in (("bert", "head"), ("roberta", "head"), ("modernbert", "head.project")):
        settings = {key.replace(".", "__"): value for key, value in CLASSES.items()}
        _, model = loaded(made[kind][0], **settings, **classes, checkpoint__pretrained__except=[new])
        _, whole = loaded(made[kind][0], **GIVEN)
        own, others = model.parameters(), whole.parameters()
        kept = [name for name in own if not name.startswith(new)]
        assert all(torch.equal(own[name], others[name]) for name in kept)
        assert len(kept) > 20
