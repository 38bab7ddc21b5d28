"""The config of Qwen: the fields of every decoder, some with other defaults."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mplug_nn import GeneralDecoderConfig
from mplug_pretrained import ExternalNames
from mplug_qwen.names import names_of


class QwenConfig(GeneralDecoderConfig):
    """The shape of the decoder; the defaults are those of Qwen3. Qwen2.5 has `qkv_bias` and no `qk_norm`."""

    vocab_size: PositiveInt = Field(151936, description="tokens that the model knows")
    rope_theta: PositiveFloat = Field(1e6, description="base of the rotary frequencies")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
    qk_norm: bool = Field(True, description="RMSNorm on the queries and keys of each head")
    aux_loss_coefficient: float = Field(0.001, ge=0, description="weight of the balancing loss")
    published_scans: Literal["by_head", "apart"] = Field(
        "by_head",
        description="published projections of gated delta nets: by key head (Qwen3-Next), or apart (Qwen3.5)",
    )

    def has_experts(self, number: int) -> bool:
        """Whether block `number` has experts; that of multi-token prediction has some if the model has."""
        return super().has_experts(number) if number < self.num_layers else self.num_experts > 0

    def external_names(self) -> ExternalNames | None:
        """The published names."""
        return names_of(self, apart=self.published_scans == "apart")
