"""Runs that begin with a published folder and have other rotary positions, beside the transformers library in fp64."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Cli

pytest.importorskip("transformers")

from config_fields import described
from library_models import wide
from mplug_huggingface_format.config_file import read_json
from mplug_huggingface_format.model_config import extended_config
from published import FAMILIES, loaded, logits, run_of, save
from torch import Tensor

from mplug import UsageError
from mplug.training.loop import train
from mplug_nn.rotary import Rotary

TOLERANCE = 1e-10
LENGTH, ORIGINAL = 128, 16
STRETCH = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
DIVISORS = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 3.0},
    "llama3": {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCH},
    "yarn": {"type": "yarn", "beta_fast": 4.0, **STRETCH},
    "yarn, mscale": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, **STRETCH},
    "longrope": {"type": "longrope", "long_factor": DIVISORS, **STRETCH},
    "longrope, factor of cosines": {"type": "longrope", "long_factor": DIVISORS, "attention_factor": 1.1, **STRETCH},
}
TINY = {"trainer.seq_length": LENGTH, "trainer.precision": "fp64"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Published folders with a scaling of their own (llama), and with plain rotary positions (qwen3)."""
    found = {family: tmp_path_factory.mktemp(family) for family in ("llama", "qwen3")}
    for family, folder in found.items():
        save(FAMILIES[family](), folder, 1, torch.float64)
    return found


def of_library(family: str, folder: Path, fields: dict[str, Any], tokens: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields)
    with wide(family), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64).eval()
        found: Tensor = model(tokens, use_cache=False).logits
    return found


@pytest.mark.wide("families", quick=["llama-yarn", "qwen3-longrope"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_with_another_scaling_computes_what_the_library_computes_from_its_export(
    family: str, scaling: str, folders: dict[str, Path]
) -> None:
    folder = folders[family]
    run, model = loaded(folder, **{"model.rope_scaling": SCALINGS[scaling], **TINY})
    original = read_json(folder / "config.json")
    fields = extended_config(run.config, original, folder / "config.json")
    rotary = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    assert {name: value for name, value in original.items() if name not in rotary}.items() <= fields.items()
    assert fields["max_position_embeddings"] == LENGTH
    for length in (ORIGINAL // 2, 3 * ORIGINAL):
        tokens = torch.randint(300, (2, length), generator=torch.Generator().manual_seed(5))
        ours, theirs = logits(model, tokens), of_library(family, folder, fields, tokens)
        assert float((ours - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())
    plain = of_library(family, folder, original, tokens)
    assert float((plain - theirs).abs().max()) > 1e-3, "the scaling changes nothing"


def frequencies_of_library(kind: str, length: int | None = None, **options: Any) -> tuple[Tensor, float]:
    """Frequencies and factor for heads of 128 by the library's function, in fp64."""
    from transformers import modeling_rope_utils

    parameters = {"rope_type": kind, "rope_theta": 5e5, **options}
    config = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=128,
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=8192,
        standardize_rope_params=lambda: None,
    )
    with wide():
        found, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return found, float(factor)


AT_8B: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 8192},
    "longrope": {
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "long_factor": tuple(1 + 0.25 * pair for pair in range(64)),
    },
}


@pytest.mark.parametrize("kind", AT_8B)
def test_the_frequencies_at_the_size_of_llama_8b_are_those_of_the_library(kind: str) -> None:
    options = AT_8B[kind]
    turns = Rotary(5e5, kind, tuple(options.items())).turns(128)
    assert not isinstance(turns, float)
    more = {"short_factor": options["long_factor"]} if kind == "longrope" else {}
    found, factor = frequencies_of_library(kind, **options, **more)
    assert found.dtype == torch.float64
    ours = torch.tensor(turns.frequencies, dtype=torch.float64)
    assert float((ours / found - 1).abs().max()) < 1e-12
    assert turns.factor == pytest.approx(factor, rel=1e-14)


def test_the_base_by_which_the_page_says_how_to_scale_as_ntk_is_that_of_the_library() -> None:
    length, factor = 131072, 4.0
    found, _ = frequencies_of_library("dynamic", length, factor=factor)
    stretch = factor * length / 8192 - (factor - 1)
    base = 5e5 * stretch ** (128 / 126)  # docs/long-sequences.md
    ours = torch.tensor([base ** (-pair / 64) for pair in range(64)], dtype=torch.float64)
    assert float((ours / found - 1).abs().max()) < 1e-12


@pytest.mark.wide("families")
def test_the_export_of_a_run_with_another_scaling_is_read_as_its_model(
    folders: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    folder, scaling = folders["llama"], SCALINGS["yarn"]
    own = {"trainer.steps": 1, "trainer.global_batch_size": 2, "trainer.eval_every": 0, "optimizer.lr": 1e-30}
    run = run_of(folder, {**TINY, **own, "optimizer.weight_decay": 0.0, "model.rope_scaling": scaling})
    run.directory = tmp_path / "runs" / "longer"
    train(run)
    result = cli("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    fields = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert fields["rope_parameters"]["rope_type"] == "yarn"
    assert fields["max_position_embeddings"] == LENGTH
    assert described(fields).rope_scaling == scaling
    tokens = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(5))
    again = loaded(tmp_path / "exported", **TINY)[1]
    before = loaded(folder, **{"model.rope_scaling": scaling, **TINY})[1]
    assert torch.equal(logits(again, tokens), logits(before, tokens))


def test_a_folder_without_a_length_gets_that_of_the_run(folders: dict[str, Path], tmp_path: Path) -> None:
    original = {n: v for n, v in read_json(folders["llama"] / "config.json").items() if n != "max_position_embeddings"}
    run = run_of(folders["llama"], {**TINY, "model.rope_scaling": SCALINGS["yarn"]})
    fields = extended_config(run.config, original, tmp_path / "config.json")
    assert fields["max_position_embeddings"] == LENGTH


def test_a_folder_whose_own_scaling_changes_with_the_length_of_a_batch_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    fields = read_json(folders["llama"] / "config.json")
    theta = fields["rope_parameters"]["rope_theta"]
    two = {"short_factor": [1.0] * 8, "long_factor": DIVISORS, **STRETCH}
    for rotary, words in (
        ({"rope_type": "longrope", **two}, "one list of divisors for short batches and another for long ones"),
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "longrope", **two, "short_factor": [1.0, 0.0]}, "must be a list of numbers above 0"),
    ):
        given = {**fields, "rope_scaling": None, "rope_parameters": {**rotary, "rope_theta": theta}}
        (tmp_path / "config.json").write_text(json.dumps(given))
        with pytest.raises(UsageError, match=words):
            run_of(tmp_path)
    equal = {"rope_type": "longrope", **two, "short_factor": DIVISORS, "rope_theta": theta}
    config = described({**fields, "rope_scaling": None, "rope_parameters": equal})
    assert config.rotary().turns(16).factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"long_factor": DIVISORS, "short_factor": [1.0] * 8}, "uses long_factor at every length"),
        ({"long_factor": DIVISORS[:3]}, "a divisor for each of the 8 pairs of a head, and long_factor has 3"),
        ({"long_factor": [0.0] * 8}, "a number above 0 as 'long_factor'"),
        ({}, "needs the option 'long_factor'"),
    ],
)
def test_divisors_that_do_not_fit_are_refused(options: dict[str, Any], words: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=words):
        run_of(folders["llama"], {"model.rope_scaling": {"type": "longrope", **STRETCH, **options}})


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope"])
def test_a_factor_that_would_shorten_sequences_is_refused(scaling: str, folders: dict[str, Path]) -> None:
    own = {"linear": {}, "yarn": STRETCH, "longrope": {**STRETCH, "long_factor": DIVISORS}}[scaling]
    with pytest.raises(
        UsageError, match=f"'{scaling}' divides positions by 'factor' .* not 0.5; for the factor 1/n, set n"
    ):
        run_of(folders["llama"], {"model.rope_scaling": {**own, "type": scaling, "factor": 0.5}})
