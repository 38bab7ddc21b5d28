"""The models and pairs that TRL and mplug both compute: `trl_figures.py` and the test import it."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

BETA, TEMPERATURE, EOD = 0.3, 1.5, 256
PAIRS = [
    ("Two and two", " are four.", " are five, I think."),
    ("Say so", "!", "?"),
    ("The sky is", " blue in most places", " green"),
]
REWARD_MARGIN = [0.5, 0.0, 1.25]
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": "sigmoid"},
    "sigmoid_norm": {"loss": "sigmoid_norm"},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "exo_pair": {"loss": "exo_pair", "label_smoothing": 0.1},
    "nca_pair": {"loss": "nca_pair"},
    "bco_pair": {"loss": "bco_pair"},
    "sppo_hard": {"loss": "sppo_hard"},
    "apo_zero": {"loss": "apo_zero"},
    "apo_down": {"loss": "apo_down"},
    "simpo": {"loss": "simpo"},
    "orpo": {"loss": "orpo"},
}
REWARDS = [(1.0, 0.0), (0.2, 0.9), (3.0, 0.0)]
"""Those of both answers of each pair, as completions of its prompt."""
GRPO_BETA = 0.01
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "epsilon_high": 0.28},
    "dr_grpo": {"loss": "dr_grpo", "length": 30},
    "dapo": {"loss": "dapo", "epsilon_high": 0.28},
    "dual clip": {"loss": "dapo", "delta": 1.3},
    "gspo": {"loss": "gspo", "epsilon": 0.05},
    "cispo": {"loss": "cispo", "epsilon_high": 1.2},
    "corrected tokens": {"loss": "dapo", "old": "current", "correction": "token_truncate", "correction_max": 1.2},
    "corrected sequences": {"loss": "grpo", "old": "current", "correction": "sequence_mask", "correction_max": 1.5},
}
"""The losses of completions, by the fields of our config; `beta` is GRPO_BETA."""
GKD: dict[str, dict[str, Any]] = {"forward": {"beta": 0}, "reverse": {"beta": 1}, "jsd": {"beta": 0.3}}
"""Our divergences, and the beta of TRL."""


def of_texts(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """(tokens, 1 at those of the answer) of a pair's text: its bytes, and the end of text."""
    tokens = [*(prompt + answer).encode(), EOD]
    return tokens, [int(number >= len(prompt.encode())) for number in range(len(tokens))]


def shifts(number: int) -> Tensor:
    """What the sampler's log-probabilities of a completion of `number` tokens are above the model's."""
    return 0.3 * torch.cos(torch.arange(number, dtype=torch.float64) * 0.9 + number)


def way(shape: torch.Size) -> Tensor:
    """A fixed direction of this shape."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return torch.cos(torch.arange(count, dtype=torch.float64) * 0.7 + 0.1).view(shape)


def filled(model: nn.Module, seed: int) -> nn.Module:
    """The model with values that depend on the names of its parameters and the seed alone."""
    with torch.no_grad():
        for name, one in model.named_parameters():
            start = sum(map(ord, name)) % 97 + 31 * seed
            values = torch.sin((torch.arange(one.numel(), dtype=torch.float64) + start) * 1.7).view(one.shape)
            one.copy_(1 + 0.1 * values if "norm" in name else 0.25 * values)
    return model


def library_config(kind: str) -> Any:
    """A tiny Llama of the library; a reward model pads with token 0, which no text has."""
    return transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=24 if kind == "teacher" else 16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2 if kind == "teacher" else 1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOD,
        num_labels=1,
        attn_implementation="eager",
    )


def library_model(kind: str, seed: int) -> Any:
    owner = transformers.LlamaForSequenceClassification if kind == "reward" else transformers.LlamaForCausalLM
    return filled(owner(library_config(kind)).double(), seed)
