"""Read a generated config.json with mplug and with the transformers library, and compare the two models in fp64.

The folder's tensors are what transformers writes. Weights, logits, loss and all gradients are compared with those of
transformers' model, whose names are mapped to ours by hand (`library_models`), not by the conversion under test.
"""

import importlib
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from config_cases import Case
from config_values import Fields
from hybrid_models import HYBRIDS, mapped_of
from library_models import summed_loss, wide
from mplug_huggingface_format.opened import open_folder
from published import resolved
from torch import Tensor

from mplug.errors import UsageError
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.registry.entry_points import BrokenPlugin
from mplug.run.prepare import prepare
from mplug.tensors.random import sample_keys
from mplug.training.batch_parts import with_shifted
from mplug_pretrained.public_load import fill_from, weights_of

TOLERANCE = 1e-10
"""Maximum difference of fp64 values, absolute, or relative to the largest value of a tensor above 1."""
EXPERTS = {
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "kimi_linear"),
}
APART = {"gpt_oss", *HYBRIDS}
"""Kinds whose code in transformers does not tell documents apart by their positions."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: 'equal', 'refused', 'rejected' by transformers, or 'failed', and why."""

    what: str
    why: str = ""
    difference: float = 0.0


def outcome_of(case: Case, folder: Path) -> Outcome:
    """Compare one case. `folder` is emptied and used."""
    kind = case.fields["model_type"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(folder, case.fields)
    module = kind.removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config, outcome = _config_or_refusal(folder, kind)
    with wide(module):
        try:
            reference = Reference(case, folder)
        except Exception as error:
            rejected = Outcome("rejected", f"{type(error).__name__}: {' '.join(str(error).split())}")
            return outcome if outcome is not None and outcome.what == "failed" else rejected
    if config is None:
        assert outcome is not None
        return outcome
    reference.save(folder)
    write_config(folder, case.fields)
    try:
        model = read(folder, config)
    except Exception as error:  # mplug has accepted the config, so the tensors must fit
        return Outcome("failed", f"{type(error).__name__} while mplug reads the tensors: {error}")
    return _compared(reference, model)


def write_config(folder: Path, fields: Fields) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


# mplug.


def _config_or_refusal(folder: Path, kind: str) -> tuple[Any, Outcome | None]:
    """(the resolved config of a run that begins with a folder, None), or (None, the refusal or the failure)."""
    try:
        return settings_of(folder, kind), None
    except BrokenPlugin as error:
        return None, Outcome("failed", f"mplug fails to read it: {error}")
    except UsageError as refused:
        return None, Outcome("refused", reason_of(str(refused), folder))
    except Exception as error:
        return None, Outcome("failed", f"{type(error).__name__} while mplug reads it: {error}")


def settings_of(folder: Path, kind: str) -> Any:
    given: Fields = {
        "trainer.device": "cpu",
        "trainer.precision": "fp64",
        "trainer.seq_length": 8,
        "kernels.default": None,
        "checkpoint.pretrained.path": str(folder),
    }
    return resolved({**given, **({"model.aux_loss_coefficient": 0.0} if kind in EXPERTS else {})})


def read(folder: Path, config: Any) -> Model:
    """The model of a folder, with its weights, in fp64."""
    run = prepare(config)
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(folder), run, model, weights_of(model))
    model.module.eval()
    return model


def reason_of(message: str, folder: Path) -> str:
    """A refusal without the folder's name."""
    return re.sub(r"; use a checkpoint that it supports$", "", message.replace(str(folder), "FOLDER"))


# transformers.


class Reference:
    """transformers' model of a case with random weights, and what it computes from a batch."""

    def __init__(self, case: Case, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        self.kind = case.fields["model_type"]
        with quiet():
            config = AutoConfig.from_pretrained(folder)
            with no_init_weights():
                self.library = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
                )
            self.library.tie_weights()
            self.library.double().eval()
            self.batch = batch_of(case, config)
            _fill(self.library, case.seed)
            logits = self._logits()
        loss = summed_loss(logits, self.batch["labels"])
        loss.backward()
        if not all(bool(torch.isfinite(x).all()) for x in (logits, loss)):
            raise ValueError("its logits are not finite")
        self.logits, self.loss = logits.detach(), loss.detach()

    def _logits(self) -> Tensor:
        tokens, positions = self.batch["tokens"], self.batch["positions"]
        if self.kind not in APART or "document_lengths" not in self.batch:
            return self._of(tokens, positions)
        rows = []
        for row, lengths in enumerate(self.batch["document_lengths"].tolist()):
            parts = zip(tokens[row].split(lengths), positions[row].split(lengths), strict=True)
            rows.append(torch.cat([self._of(one[None], places[None]) for one, places in parts], dim=1))
        return torch.cat(rows)

    def _of(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.library(
            input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True
        ).logits
        return logits

    def save(self, folder: Path) -> None:
        """Write the tensors as transformers does."""
        with quiet():
            self.library.save_pretrained(folder)

    def weights(self) -> Tensors:
        """Parameters and states by our names."""
        buffers = {name: one for name, one in self.library.named_buffers() if name.endswith("e_score_correction_bias")}
        return self._ours({**buffers, **{name: one.detach() for name, one in self.library.named_parameters()}})

    def gradients(self) -> Tensors:
        """Gradients by our names; zeros for a parameter without one, such as an expert that no token chooses."""
        own = dict(self.library.named_parameters())
        return self._ours({n: torch.zeros_like(one) if one.grad is None else one.grad for n, one in own.items()})

    def _ours(self, tensors: Tensors) -> Tensors:
        return mapped_of(self.library.config)(tensors)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers prints neither warnings nor bars."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _fill(library: torch.nn.Module, seed: int) -> None:
    """Random values in every tensor: matrices that keep the scale of their input, norms near 1, vectors near 0."""
    generator = torch.Generator().manual_seed(seed)
    embedding = getattr(library.get_input_embeddings(), "embed_scale", None)
    if embedding is not None:  # transformers keeps the square root of hidden_size in fp32
        embedding.fill_(math.sqrt(library.config.hidden_size))
    with torch.no_grad():
        for name, parameter in sorted(library.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)
        for name, buffer in library.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))  # fp32, as mplug keeps this state


def batch_of(case: Case, config: Any) -> Tensors:
    """Two samples: from position 0, from a later position (beyond original lengths), or packed with documents."""
    draw = Random(case.seed)
    vocab, longest = config.vocab_size, case.fields.get("n_positions") or 1 << 20
    rows, length = 2, draw.choice((12, 20, 33))
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:  # transformers gives the embedding of this token no gradient; texts do not contain it
        tokens[tokens == padding] = (padding + 1) % vocab
    labels, ids = tokens[:, 1:].clone(), torch.arange(rows)
    labels[0, 2] = -100
    found = {"tokens": tokens[:, :-1], "labels": labels, "sample_ids": ids, "keys": sample_keys(1, 1, ids)}
    match draw.choice(("plain", "later", "packed")):
        case "plain":
            found["positions"] = torch.arange(length)[None].expand(rows, -1)
        case "later":
            first = draw.choice((7, 1000)) if longest > 2000 else max(longest - length, 0)
            found["positions"] = torch.arange(first, first + length)[None].expand(rows, -1)
        case _:
            cuts = [sorted(draw.sample(range(1, length), 2)) for _ in range(rows)]
            lengths = [(a, b - a, length - b) for a, b in cuts]
            found["positions"] = torch.stack([torch.cat([torch.arange(n) for n in one]) for one in lengths])
            found["document_lengths"] = torch.tensor(lengths)
    return found


# The comparison.


def _compared(reference: Reference, model: Model) -> Outcome:
    own: Tensors = {**model.parameters(), **model.states()}
    weights, gradients = reference.weights(), reference.gradients()
    if set(own) != set(weights):
        return Outcome("failed", f"other parameters: {sorted(set(own) ^ set(weights))[:4]}")
    for name, weight in weights.items():
        if own[name].shape != weight.shape or not torch.equal(own[name].detach(), weight):
            return Outcome("failed", f"the weight '{name}' is another one")
    given = with_shifted(reference.batch, model.plan)
    try:
        logits = model.logits(given)
        loss = model.loss(given)[0]
        loss.backward()
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__} while mplug computes: {error}")
    found = [_difference(logits, reference.logits), _difference(loss, reference.loss)]
    if max(found) > TOLERANCE:
        return Outcome("failed", f"logits differ by {found[0]:.1e}, the loss by {found[1]:.1e}", max(found))
    for name, parameter in model.parameters().items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append(_difference(gradient, gradients[name]))
        if found[-1] > TOLERANCE:
            return Outcome("failed", f"the gradient of '{name}' differs by {found[-1]:.1e}", found[-1])
    return Outcome("equal", "", max(found))


def _difference(found: Tensor, expected: Tensor) -> float:
    """NaN counts as an infinite difference."""
    scale = max(1.0, float(expected.detach().abs().max()))
    difference = float((found.detach() - expected.detach()).abs().max()) / scale
    return difference if math.isfinite(difference) else math.inf


def smallest(case: Case, folder: Path) -> tuple[Case, Outcome]:
    """A failing case without the fields that its failure does not need."""
    outcome = outcome_of(case, folder)
    for name in sorted(set(case.fields) - {"architectures", "model_type"}):
        fewer = Case({key: value for key, value in case.fields.items() if key != name}, case.seed)
        shorter = outcome_of(fewer, folder)
        if shorter.what == "failed":
            case, outcome = fewer, shorter
    return case, outcome


def has_no_effect(case: Case, reason: str, folder: Path) -> bool:
    """Whether transformers computes the same, to the bit, without the fields that a refusal names."""
    named = {word.partition(".")[0] for word in re.findall(r"'([\w.]+)'", reason)} & set(case.fields)
    named -= {"architectures", "model_type"}
    fewer = Case({name: value for name, value in case.fields.items() if name not in named}, case.seed)
    module = case.fields["model_type"].removesuffix("_text")
    found = []
    for one in (case, fewer):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_config(folder, one.fields)
        try:
            with wide(module):
                found.append(Reference(one, folder))
        except Exception:
            return False
    (one, other), gradients = found, [dict(x.library.named_parameters()) for x in found]
    same = torch.equal(one.logits, other.logits) and gradients[0].keys() == gradients[1].keys()
    return same and all(torch.equal(_gradient(x), _gradient(gradients[1][name])) for name, x in gradients[0].items())


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
