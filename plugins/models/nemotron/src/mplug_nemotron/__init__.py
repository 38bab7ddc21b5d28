"""Nemotron-H and Nemotron 3: decoders whose blocks have one part each, of 8 to 56 billion parameters."""

from mplug_nemotron.config import NemotronConfig
from mplug_nemotron.presets import PRESETS
from mplug_nemotron.published import FORMS
from mplug_nn import DecoderFamily


class Nemotron(DecoderFamily):
    """Blocks of Mamba-2, attention without positions, an MLP or experts with squared ReLU (arXiv 2504.03624)."""

    Config, presets, public_forms = NemotronConfig, PRESETS, FORMS
