"""Writes tests/data/trl_figures.json: losses, gradients and logged figures that TRL computes for tiny models in fp64.

    pip install trl==1.16.0
    python tests/support/trl_figures.py

TRL itself is no dependency of the tests: `tests/test_objectives_beside_trl.py` compares mplug with the figures. They
come from the methods of TRL's trainers that compute the loss of a batch; a namespace stands for the trainer.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from trl_models import (
    BETA,
    DPO,
    GKD,
    GRPO,
    GRPO_BETA,
    PAIRS,
    REWARD_MARGIN,
    REWARDS,
    TEMPERATURE,
    library_model,
    of_texts,
    shifts,
    way,
)


def padded(rows: list[list[int]], filler: int = 0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def pair_inputs() -> dict[str, Tensor]:
    """The batch of TRL: the chosen answers, then the rejected ones."""
    encoded = [of_texts(pair[0], pair[which]) for which in (1, 2) for pair in PAIRS]
    tokens, masks = padded([one[0] for one in encoded]), padded([one[1] for one in encoded])
    attention = padded([[1] * len(one[0]) for one in encoded])
    return {"input_ids": tokens, "attention_mask": attention, "completion_mask": masks}


class WithLogProbabilities(nn.Module):
    """A model of the library whose outputs have what TRL's own head returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
        logits = self.model(**{**inputs, "use_cache": False}).logits[:, :-1]
        shifted, each = labels[:, 1:], torch.log_softmax(logits, dim=-1)
        own = each.gather(-1, shifted.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=torch.where(shifted == -100, 0.0, own),
            entropy=-(each.exp() * each).sum(-1),
            mean_logits=logits.mean(-1),
            is_top1=logits.argmax(-1) == shifted,
        )


def trainer_of(**fields: Any) -> SimpleNamespace:
    same = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
    )
    common = {"accelerator": same, "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}}
    return SimpleNamespace(**common, _total_train_tokens=0, _tp_size=1, **fields)


def gradients(model: nn.Module) -> dict[str, list[float]]:
    """The norm of each gradient, and its product with a fixed direction."""
    return {
        name: [float(one.grad.norm()), float((one.grad * way(one.grad.shape)).sum())]
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def figures_of(loss: Tensor, model: nn.Module, metrics: dict[str, list[float]]) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    return {
        "loss": float(loss),
        "gradients": gradients(model),
        "figures": {name: values[0] for name, values in metrics.items()},
    }


def of_dpo(fields: dict[str, Any]) -> dict[str, Any]:
    """The second weights beside the first ones as the reference."""
    from trl.trainer.dpo_trainer import DPOTrainer

    model, reference = (library_model("causal", seed) for seed in (1, 0))
    trainer = trainer_of(
        model=model,
        ref_model=WithLogProbabilities(reference),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        f_divergence_type="reverse_kl",
        loss_types=[fields["loss"]],
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=fields.get("label_smoothing", 0.0),
        use_weighting=False,
    )
    loss = DPOTrainer._compute_loss(trainer, WithLogProbabilities(model), pair_inputs(), False)
    return figures_of(loss, model, trainer._metrics["train"])


def of_means(fields: dict[str, Any]) -> dict[str, Any]:
    """SimPO and the odds ratio of ORPO: losses of mean log-probabilities. ORPO's cross-entropy is that of each pair."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    model, inputs = library_model("causal", 1), pair_inputs()
    mask = inputs.pop("completion_mask")
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    logits = model(**inputs).logits
    owner = CPOTrainer if fields["loss"] == "simpo" else ORPOTrainer
    chosen, rejected = owner.get_batch_logps(logits, labels, average_log_prob=True).chunk(2)
    trainer = trainer_of(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=BETA, label_smoothing=0.0)
    if owner is CPOTrainer:
        losses, *rewards = CPOTrainer.cpo_loss(trainer, chosen, rejected)
        loss, more = losses.mean(), {}
    else:
        losses, *rewards, ratio, odds = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
        loss = (-chosen - losses).mean()
        more = {"log_odds_ratio": [float(ratio)], "log_odds_chosen": [float(odds)]}
    found = {
        "rewards/chosen": [float(rewards[0].mean())],
        "rewards/rejected": [float(rewards[1].mean())],
        "rewards/accuracies": [float((rewards[0] > rewards[1]).double().mean())],
        "rewards/margins": [float((rewards[0] - rewards[1]).mean())],
        "logps/chosen": [float(chosen.mean())],
        "logps/rejected": [float(rejected.mean())],
    }
    return figures_of(loss, model, {**found, **more})


def of_reward(fields: dict[str, Any]) -> dict[str, Any]:
    from trl.trainer.reward_trainer import RewardTrainer

    model, inputs = library_model("reward", 1), pair_inputs()
    del inputs["completion_mask"]
    trainer = trainer_of(model=model, args=SimpleNamespace(center_rewards_coefficient=fields.get("center_coefficient")))
    if fields.get("margin"):
        margin = torch.tensor(REWARD_MARGIN, dtype=torch.float64)
        inputs["margin"], forward = margin, model.forward
        model.forward = lambda **given: forward(**{name: one for name, one in given.items() if name != "margin"})
    loss = RewardTrainer.compute_loss(trainer, model, inputs)
    return figures_of(loss, model, trainer._metrics["train"])


def of_gkd(fields: dict[str, Any]) -> dict[str, Any]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher, inputs = library_model("causal", 1), library_model("teacher", 2), pair_inputs()
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)[:, 1:]
    with torch.no_grad():
        taught = teacher(**inputs).logits[:, :-1]
    loss = GKDTrainer.generalized_jsd_loss(
        student(**inputs).logits[:, :-1], taught, labels, beta=fields["beta"], temperature=TEMPERATURE
    )
    return figures_of(loss, student, {})


def completions() -> dict[str, Tensor]:
    """The batch of TRL's GRPO: prompts padded in front, completions behind; two of each prompt."""
    rows = [of_texts(pair[0], pair[which]) for pair in PAIRS for which in (1, 2)]
    prompts = [[token for token, is_answer in zip(*row, strict=True) if not is_answer] for row in rows]
    answers = [[token for token, is_answer in zip(*row, strict=True) if is_answer] for row in rows]
    width = max(map(len, prompts))
    in_front = [[0] * (width - len(row)) for row in prompts]
    return {
        "prompt_ids": torch.tensor([pad + row for pad, row in zip(in_front, prompts, strict=True)]),
        "prompt_mask": torch.tensor([pad + [1] * len(row) for pad, row in zip(in_front, prompts, strict=True)]),
        "completion_ids": padded(answers),
        "completion_mask": padded([[1] * len(row) for row in answers]),
    }


def scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, number: int) -> Tensor:
    """The log-probabilities of the last `number` tokens, each row computed without its padding; 0 for padding."""
    found = torch.zeros(len(input_ids), number, dtype=torch.float64)
    rows = []
    for row, mask, own in zip(input_ids, attention_mask.bool(), found, strict=True):
        answer = mask[-number:]
        tokens, length = row[mask], int(answer.sum())
        logits = model(tokens[None], use_cache=False).logits[0]
        each = torch.log_softmax(logits[-length - 1 : -1], dim=-1).gather(-1, tokens[-length:, None])[:, 0]
        rows.append(torch.cat((each, own[length:])))
    return torch.stack(rows)


def of_grpo(fields: dict[str, Any]) -> dict[str, Any]:
    """The second weights beside the first ones as the reference; the sampler is at a fixed distance from the second."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, reference = (library_model("causal", seed) for seed in (1, 0))
    inputs = completions()
    mask = inputs["completion_mask"]
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
    with torch.no_grad():
        own, first = (scores(one, tokens, attention, mask.shape[1]) for one in (model, reference))
    sampled = own.clone()
    for row, length in zip(sampled, mask.sum(1).tolist(), strict=True):
        row[:length] += shifts(length)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    inputs["advantages"] = (rewards - rewards.mean(1, keepdim=True)).flatten()
    inputs["ref_per_token_logps"], inputs["num_items_in_batch"] = first, mask.sum()
    correction, _, what = fields.get("correction", "none").partition("_")
    if correction == "none":
        inputs["old_per_token_logps"] = sampled
    else:
        ratio = (own - sampled) * mask
        ratio = (ratio.sum(-1, keepdim=True) if correction == "sequence" else ratio).exp()
        most = fields["correction_max"]
        ratio = ratio.clamp(max=most) if what == "truncate" else ratio.masked_fill(ratio > most, 0.0)
        inputs["importance_sampling_ratio"] = ratio

    def log_probabilities(model: nn.Module, ids: Tensor, attention: Tensor, number: int, **more: Any) -> Any:
        each = scores(model, ids, attention, number)
        return each, torch.zeros_like(each), None

    low = fields.get("epsilon", 0.2)
    loss = "grpo" if fields["loss"] == "gspo" else fields["loss"]
    trainer = trainer_of(
        model=model,
        _get_per_token_logps_and_entropies=log_probabilities,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if fields["loss"] == "gspo" else "token",
        beta=GRPO_BETA,
        loss_type=loss,
        epsilon_low=low,
        epsilon_high=fields.get("epsilon_high", low),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=fields.get("delta"), steps_per_generation=1),
        use_vllm=correction != "none",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=fields.get("length"),
        _entropy_bonus_enabled=False,
    )
    trainer.accelerator.num_processes, trainer.accelerator.reduce = 1, lambda x, **_: x
    model.train()
    found = figures_of(GRPOTrainer._compute_loss(trainer, model, inputs), model, trainer._metrics["train"])
    lengths = mask.sum(1).tolist()
    found["sampled"] = [row[:length].tolist() for row, length in zip(sampled, lengths, strict=True)]
    return found


def main() -> None:
    import trl

    torch.set_default_dtype(torch.float64)
    found = {"trl": trl.__version__, "transformers": transformers.__version__}
    found["dpo"] = {name: (of_means if name in ("simpo", "orpo") else of_dpo)(fields) for name, fields in DPO.items()}
    found["reward"] = {
        "plain": of_reward({}),
        "centred": of_reward({"center_coefficient": 0.05}),
        "margin": of_reward({"margin": True}),
    }
    found["distill"] = {name: of_gkd(fields) for name, fields in GKD.items()}
    found["grpo"] = {name: of_grpo(fields) for name, fields in GRPO.items()}
    (Path(__file__).parents[1] / "data/trl_figures.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
