"""The suite of models judges FLOPs of a model whose attention fills no slot, where no stand-in can tell it apart."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from mplug_testing import Fault, ModelSuite

SIZES = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SIZES |= {"ffn_hidden_size": 24, "vocab_size": 259, "tie_embeddings": False}


class OwnAttention(ModelSuite):
    plugin = "peregrine"
    settings = {f"model.{name}": value for name, value in SIZES.items()}


ATTEND = "        mixed = self.attn.attend(q, k, v, positions, keys, document_lengths).flatten(-2)  # [B, S, HK]\n"
GROUPS = "        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))\n"
DENSE = f"""{GROUPS}
        scores = torch.einsum("bshk,bthk->bhst", q, k).tril() - torch.full((k.shape[1],) * 2, torch.inf).triu(1)
        mixed = torch.einsum("bhst,bthk->bshk", scores.softmax(dim=-1), v).flatten(-2)
"""
FUSED = f"""{GROUPS}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
"""
ROW_BY_ROW = f"""{GROUPS}
        rows = [
            torch.einsum("bht,bthk->bhk", torch.einsum("bhk,bthk->bht", q[:, n - 1], k[:, :n]).softmax(-1), v[:, :n])
            for n in range(1, q.shape[1] + 1)
        ]
        mixed = torch.stack(rows, dim=1).flatten(-2)
"""
LINEAR = f"""{GROUPS}
        mixed = torch.einsum("bshk,bhkj->bshj", q, torch.einsum("bthk,bthj->bhkj", k, v)).flatten(-2)
"""
STATED = "Flops(per_token, 6 * config.num_layers * queries)"
TRUE = ("", "")
NO_ATTENTION = (STATED, "Flops(per_token, 0)")
NO_READOUT = ("(config.num_layers * (enter + leave) + config.vocab_size)", "config.num_layers * (enter + leave)")
MIXES_LINEARLY = (STATED, "Flops(per_token + 12 * config.num_layers * queries * config.head_dim, 0)")
WIDE = pytest.mark.wide("suites")


@pytest.mark.parametrize(
    ("attention", "stated", "words"),
    [
        pytest.param(DENSE, TRUE, "", id="dense"),
        pytest.param(FUSED, TRUE, "", id="fused", marks=WIDE),
        pytest.param(ROW_BY_ROW, TRUE, "", id="row by row", marks=WIDE),
        pytest.param(LINEAR, MIXES_LINEARLY, "", id="linear", marks=WIDE),
        (DENSE, NO_ATTENTION, "states 0 FLOPs per squared length; in forward passes of 8 and 16"),
        (DENSE, NO_READOUT, "states 96,768 FLOPs per token; in forward passes of 8 and 16"),
        pytest.param(FUSED, NO_ATTENTION, "torch counts 1,152 with backward", marks=WIDE),
        pytest.param(ROW_BY_ROW, NO_ATTENTION, "states 0 FLOPs per squared length", marks=WIDE),
        pytest.param(LINEAR, NO_ATTENTION, "FLOPs per token; in forward passes of", marks=WIDE),
    ],
)
def test_flops_of_attention_without_the_slot_must_be_true(
    attention: str, stated: tuple[str, str], words: str, plant: Callable[..., None]
) -> None:
    plant("nova-peregrine", ATTEND, attention, *stated)
    with pytest.raises(Fault, match=re.escape(words)) if words else nullcontext():
        OwnAttention().test_its_flops_are_those_of_its_matrix_products()


def test_modules_that_state_more_than_the_plan_fail(plant: Callable[..., None]) -> None:
    forward = "    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths"
    plant("nova-peregrine", forward, f"    plan_work = lambda self: ('enter', 'enter', 'leave')\n\n{forward}")
    with pytest.raises(Fault, match=r"the modules state [\d,]+ FLOPs per token \(plan_work\), and the plan "):
        OwnAttention().test_its_flops_are_those_of_its_matrix_products()
