"""Losses, gradients and figures of the objectives, beside those that TRL computed for the same models and texts.

`tests/support/trl_figures.py` wrote the figures. Both sides read the same folders and the same bytes. TRL pads rows;
mplug packs all answers into one sample.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from published import resolved  # noqa: E402
from trl_models import (  # noqa: E402
    BETA,
    DPO,
    EOD,
    GKD,
    GRPO,
    GRPO_BETA,
    PAIRS,
    REWARD_MARGIN,
    REWARDS,
    TEMPERATURE,
    filled,
    library_model,
    of_texts,
    way,
)

from mplug.model.build import build_model  # noqa: E402
from mplug.model.pieces import write_weights  # noqa: E402
from mplug.run.prepare import prepare  # noqa: E402
from mplug.run.run import Run  # noqa: E402
from mplug.training.assembly import Parts, build  # noqa: E402
from mplug_pretrained.public_load import load_public  # noqa: E402
from mplug_pretrained.weights import newest_pretrained, refuse_another_model  # noqa: E402

FIGURES = json.loads((Path(__file__).parent / "data/trl_figures.json").read_text())
NAMES = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "blocks.0.norm1.weight": "model.layers.0.input_layernorm.weight",
    "blocks.1.norm2.weight": "model.layers.1.post_attention_layernorm.weight",
    "blocks.1.attn.out.weight": "model.layers.1.self_attn.o_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.project.weight": "lm_head.weight",
    "head.loss.score.weight": "score.weight",
}
BOUND = 1e-5
LENGTH = 160


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("folders")
    for kind, seed in (("causal", 0), ("causal", 1), ("teacher", 2)):
        library_model(kind, seed).save_pretrained(parent / f"{kind}{seed}")
    lines = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}
        for (prompt, chosen, rejected), margin in zip(PAIRS, REWARD_MARGIN, strict=True)
    ]
    (parent / "pairs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return parent


def parts_of(folders: Path, first: str, **settings: Any) -> tuple[Run, Parts]:
    """A run in fp64 that begins with the folder `first`."""
    of_pairs = {"name": "preferences", "path": str(folders / "pairs.jsonl"), "max_pairs": len(PAIRS)}
    fixed: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.precision": "fp64",
        "trainer.seq_length": LENGTH,
        "trainer.global_batch_size": 1,
        "trainer.micro_batch_size": 1,
        "trainer.eval_every": 0,
        "kernels.default": None,
        "checkpoint.pretrained.path": str(folders / first),
        "data": of_pairs,
    }
    run = prepare(resolved({**fixed, **settings}))
    path = newest_pretrained(run)
    assert path is not None
    refuse_another_model(path, build_model(run), run.config.checkpoint.pretrained)
    parts = build(run)
    load_public(run, parts.model, parts.pieces, path)
    return run, parts


def compare(parts: Parts, batches: list[Any], expected: dict[str, Any]) -> int:
    """Compare a step of these micro batches; returns the number of figures that both report."""
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 2)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    result = parts.stepper.update(0.0, 0.0)
    assert float(result.loss) == pytest.approx(expected["loss"], rel=BOUND)
    norms = torch.tensor([norm for norm, _ in expected["gradients"].values()], dtype=torch.float64)
    assert float(result.grad_norm) == pytest.approx(float(norms.norm()), rel=BOUND)
    compared = 0
    for ours, theirs in NAMES.items():
        if ours in found and theirs in expected["gradients"]:
            gradient, (norm, along) = found[ours] / result.tokens, expected["gradients"][theirs]
            assert float(gradient.norm()) == pytest.approx(norm, rel=BOUND), ours
            assert float((gradient * way(gradient.shape)).sum()) == pytest.approx(along, abs=BOUND * norm), ours
            compared += 1
    assert compared >= 6
    shared = result.statistics.keys() & expected["figures"].keys()
    for name in shared:
        assert float(result.statistics[name]) == pytest.approx(expected["figures"][name], rel=BOUND), name
    return len(shared)


@pytest.mark.parametrize("name", DPO)
def test_losses_of_pairs_are_those_of_trl(name: str, folders: Path) -> None:
    """The reference is the first folder, and the model has the weights of the second one."""
    settings = {f"objectives.dpo.{field}": value for field, value in {"beta": BETA, **DPO[name]}.items()}
    run, parts = parts_of(folders, "causal0", **settings)
    batches = [*parts.train_loader.loader.take(1)]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    parts.stepper.update(0.0, 0.0)
    load_public(run, parts.model, parts.pieces, folders / "causal1")
    assert compare(parts, batches, FIGURES["dpo"][name]) == (8 if name == "orpo" else 6)


@pytest.mark.parametrize("name", GRPO)
def test_losses_of_completions_are_those_of_trl(name: str, folders: Path, tmp_path: Path) -> None:
    """The reference is the first folder, and the model has the weights of the second one.

    Figures are means as the loss is one: over tokens, as TRL's, only if the loss is.
    """
    expected, lines = FIGURES["grpo"][name], []
    for number, (prompt, *answers) in enumerate(PAIRS):
        of_prompt = [
            {
                "tokens": [*answer.encode(), EOD],
                "log_probabilities": expected["sampled"][2 * number + which],
                "reward": REWARDS[number][which],
            }
            for which, answer in enumerate(answers)
        ]
        lines.append({"prompt": prompt, "completions": of_prompt})
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = {"name": "rollouts", "path": str(path), "completions": "given", "num_generations": 2, "max_tokens": 22}
    settings = {f"objectives.grpo.{field}": value for field, value in {"beta": GRPO_BETA, **GRPO[name]}.items()}
    whole = {**data, "scale": "none", "per_sample": 2 * len(PAIRS)}
    run, parts = parts_of(folders, "causal0", **settings, data=whole, **{"trainer.seq_length": 252})
    batches = [*parts.train_loader.loader.take(1)]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    parts.stepper.update(0.0, 0.0)
    load_public(run, parts.model, parts.pieces, folders / "causal1")
    by_tokens = GRPO[name]["loss"] in ("dapo", "cispo")
    figures = expected["figures"] if by_tokens else {}
    compared = compare(parts, batches, {**expected, "figures": figures})
    assert compared == (0 if not by_tokens else 2 if name == "cispo" else 4)


@pytest.mark.parametrize("form", FIGURES["reward"])
def test_rewards_are_those_of_trl(form: str, folders: Path) -> None:
    more: dict[str, Any] = {"centred": {"objectives.reward.center_coefficient": 0.05}, "margin": {"data.margin": True}}
    settings = {"objectives.reward": {}, "data.keep_end": True, **more.get(form, {})}
    _, parts = parts_of(folders, "causal1", **settings)
    (score,) = (piece for piece in parts.pieces if piece.name == "head.loss.score.weight")
    library = library_model("reward", 1)
    score.master.copy_(library.score.weight.detach())
    write_weights(parts.pieces)
    assert compare(parts, [*parts.train_loader.loader.take(1)], FIGURES["reward"][form]) == 3


def packed() -> dict[str, Tensor]:
    """All answers as documents of one sample."""
    rows = [of_texts(pair[0], pair[which]) for which in (1, 2) for pair in PAIRS]
    tokens = [token for row, _ in rows for token in row[:-1]]
    labels = [
        token if is_answer else -100 for row, mask in rows for token, is_answer in zip(row[1:], mask[1:], strict=True)
    ]
    lengths = [len(row) - 1 for row, _ in rows]
    rest = LENGTH - len(tokens)
    return {
        "tokens": torch.tensor([tokens + [0] * rest]),
        "labels": torch.tensor([labels + [-100] * rest]),
        "positions": torch.tensor([[place for length in (*lengths, rest) for place in range(length)]]),
        "document_lengths": torch.tensor([[*lengths, rest]]),
        "sample_ids": torch.tensor([0]),
    }


@pytest.mark.parametrize("name", GKD)
def test_divergences_are_those_of_trl(name: str, folders: Path) -> None:
    """The teacher is wider, and begins with a folder of its own, which describes it."""
    beta = {"objectives.distill.beta": GKD[name]["beta"]} if name == "jsd" else {}
    settings = {
        "data": {"name": "mock", "documents": 7},
        "checkpoint.pretrained.parts.teacher": str(folders / "teacher2"),
        "objectives.distill.divergence": name,
        "objectives.distill.temperature": TEMPERATURE,
        "objectives.distill.chunk": 50,
        **beta,
    }
    run, parts = parts_of(folders, "causal1", **settings)
    assert run.config.settings["objectives", "distill", "teacher", "hidden_size"].value == 24
    compare(parts, [packed()], FIGURES["distill"][name])


def test_the_values_depend_on_names_and_seeds_alone() -> None:
    one, other = (dict(library_model("causal", 1).named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], filled(library_model("causal", 1), 2).lm_head.weight)  # type: ignore[union-attr]
