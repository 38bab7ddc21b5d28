"""The config of Muon."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mplug import distinct


class MuonConfig(BaseModel):
    """Learning rates, decay, momentum, and the parameters that AdamW updates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(
        1e-3, gt=0, allow_inf_nan=False, description="peak learning rate of hidden matrices; the schedule scales it"
    )
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the momentum of hidden matrices")
    nesterov: bool = Field(
        True, description="Nesterov momentum: orthogonalise the momentum after one more decayed step"
    )
    scale: Literal["original", "match_rms_adamw", "spectral", "unit_rms_norm"] = Field(
        "match_rms_adamw",
        description="factor of a matrix's update: original: sqrt(max(1, rows / columns)); match_rms_adamw: "
        "0.2 sqrt(max(rows, columns)), which fits the learning rates and decays of AdamW; spectral: "
        "sqrt(max(rows, columns)); unit_rms_norm: sqrt(rows / columns)",
    )
    iteration: Literal["newton_schulz", "quintic", "polar_express"] = Field(
        "newton_schulz",
        description="polynomials that orthogonalise a matrix: newton_schulz: one for every iteration; quintic, "
        "polar_express (arXiv 2505.16932): another one for each, which brings singular values nearer to 1",
    )
    num_iterations: int = Field(5, ge=1, le=20, description="iterations of the polynomials")
    separate: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        (),
        description="named axes of rows whose items are matrices of their own: [heads, kv_heads] orthogonalises the "
        "queries, keys and values of each head separately",
    )
    tables: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        ("vocab", "positions", "token_types", "ranges", "conv"),
        description="named axes of look-up tables, output heads and short convolutions, whose rows are separate "
        "vectors; AdamW updates the parameters with these axes",
    )
    qk_clip: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="QK-clip (arXiv 2507.20534): bound of the largest attention logit of a head; after an update, the "
        "weights of its queries and keys shrink if the step had a larger one (the paper has 100); null: no bound",
    )
    qk_clip_alpha: float = Field(
        0.5, ge=0, le=1, description="share of the queries in the factor of QK-clip; the rest is that of the keys"
    )
    adamw_lr: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="AdamW's peak learning rate, scheduled like lr; null: lr"
    )
    adamw_beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of AdamW's first moment")
    adamw_beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of AdamW's second moment")
    adamw_eps: float = Field(
        1e-8, gt=0, allow_inf_nan=False, description="added to the square root of AdamW's second moment"
    )
