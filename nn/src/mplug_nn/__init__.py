"""Building blocks for model authors, in plain torch without anything distributed.

Each module has *slots*: callable attributes that plugins can replace. `SLOTS` lists the names by which plugins know
them. A slot holds a composition in plain torch until the host puts a plugin's supplier there. Strategies read the plan,
never the module.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug.layout.inits import Entries as Entries
    from mplug.layout.inits import Inits as Inits
    from mplug.model.plans.description import describe as describe
    from mplug.model.slots.declaration import Fusible as Fusible
    from mplug.model.slots.declaration import states as states
    from mplug.tensors.gathered_form import GatheredForm as GatheredForm
    from mplug.tensors.operator import fake as fake
    from mplug.tensors.operator import operator as operator
    from mplug.tensors.sink import Operand as Operand
    from mplug.tensors.sink import Sink as Sink
    from mplug.tensors.sink import Weights as Weights
    from mplug.tensors.sink import add_product as add_product
    from mplug.tensors.sink import add_rows as add_rows
    from mplug.tensors.sink import aligned as aligned
    from mplug.tensors.sink import zero_if_stale as zero_if_stale
    from mplug.tensors.statistics import add_auxiliary as add_auxiliary
    from mplug.tensors.statistics import count as count
    from mplug.tensors.statistics import count_in_backward as count_in_backward
    from mplug.tensors.statistics import in_backward as in_backward
    from mplug.tensors.statistics import keep_max as keep_max
    from mplug.tensors.statistics import keep_max_in_backward as keep_max_in_backward
    from mplug.tensors.weight_product import ProductModule as ProductModule
    from mplug.tensors.weight_product import WeightProduct as WeightProduct
    from mplug_nn.activations import ActivationFunction as ActivationFunction
    from mplug_nn.attention import Attention as Attention
    from mplug_nn.attention import DotProductAttention as DotProductAttention
    from mplug_nn.attention import scaled_dot_product as scaled_dot_product
    from mplug_nn.branch import Branch as Branch
    from mplug_nn.branch import ExpertsBranch as ExpertsBranch
    from mplug_nn.branch import MixerBranch as MixerBranch
    from mplug_nn.branch import MLPBranch as MLPBranch
    from mplug_nn.cache import Cache as Cache
    from mplug_nn.cache import CacheSize as CacheSize
    from mplug_nn.chunked_collectives import Arrival as Arrival
    from mplug_nn.chunked_collectives import ChunkedCollectives as ChunkedCollectives
    from mplug_nn.chunked_collectives import Produce as Produce
    from mplug_nn.chunked_collectives import Rows as Rows
    from mplug_nn.chunked_collectives import collectives_named as collectives_named
    from mplug_nn.core import AttentionCore as AttentionCore
    from mplug_nn.core import packed_heads_of as packed_heads_of
    from mplug_nn.core import parts_of as parts_of
    from mplug_nn.cross import CrossAttention as CrossAttention
    from mplug_nn.cross import CrossKeys as CrossKeys
    from mplug_nn.decoder import Block as Block
    from mplug_nn.decoder import Decoder as Decoder
    from mplug_nn.decoder import DenseBlock as DenseBlock
    from mplug_nn.decoder import SparseBlock as SparseBlock
    from mplug_nn.decoder import TokenEmbedding as TokenEmbedding
    from mplug_nn.decoder import decoder_plan as decoder_plan
    from mplug_nn.decoders.build import build_decoder as build_decoder
    from mplug_nn.decoders.config import DecoderConfig as DecoderConfig
    from mplug_nn.decoders.family import DecoderFamily as DecoderFamily
    from mplug_nn.decoders.general import GeneralDecoderConfig as GeneralDecoderConfig
    from mplug_nn.decoders.general import RopeScaling as RopeScaling
    from mplug_nn.decoders.hybrid import HybridDecoderConfig as HybridDecoderConfig
    from mplug_nn.decoders.hybrid import MixerType as MixerType
    from mplug_nn.decoders.latent import LatentDecoderConfig as LatentDecoderConfig
    from mplug_nn.decoders.parts import ActivationName as ActivationName
    from mplug_nn.decoders.parts import AttentionConfig as AttentionConfig
    from mplug_nn.decoders.parts import BlockConfig as BlockConfig
    from mplug_nn.decoders.parts import BranchConfig as BranchConfig
    from mplug_nn.decoders.parts import DivisionName as DivisionName
    from mplug_nn.decoders.parts import EmbeddingConfig as EmbeddingConfig
    from mplug_nn.decoders.parts import ExpertsConfig as ExpertsConfig
    from mplug_nn.decoders.parts import LatentAttentionConfig as LatentAttentionConfig
    from mplug_nn.decoders.parts import MLPConfig as MLPConfig
    from mplug_nn.decoders.parts import NormConfig as NormConfig
    from mplug_nn.decoders.parts import NormName as NormName
    from mplug_nn.decoders.parts import PartConfig as PartConfig
    from mplug_nn.decoders.parts import ScanConfig as ScanConfig
    from mplug_nn.decoders.parts import ScoreName as ScoreName
    from mplug_nn.decoders.parts import tower_block as tower_block
    from mplug_nn.decoders.public_fields import EXPERTS_ALTERING as EXPERTS_ALTERING
    from mplug_nn.decoders.public_fields import EXPERTS_TRAINING as EXPERTS_TRAINING
    from mplug_nn.decoders.public_fields import LAYER_TYPES_FIELDS as LAYER_TYPES_FIELDS
    from mplug_nn.decoders.public_fields import ROUTER_LOSS_FIELDS as ROUTER_LOSS_FIELDS
    from mplug_nn.decoders.public_fields import SLICES_FIELDS as SLICES_FIELDS
    from mplug_nn.decoders.public_fields import UNTIED_FIELDS as UNTIED_FIELDS
    from mplug_nn.decoders.public_fields import activation_field as activation_field
    from mplug_nn.decoders.public_fields import attention_types as attention_types
    from mplug_nn.decoders.public_fields import decoder_fields as decoder_fields
    from mplug_nn.decoders.public_fields import heads_fields as heads_fields
    from mplug_nn.decoders.public_fields import layer_types as layer_types
    from mplug_nn.decoders.public_fields import read_rotary as read_rotary
    from mplug_nn.decoders.public_fields import rotary_fields as rotary_fields
    from mplug_nn.decoders.public_fields import rotary_settings as rotary_settings
    from mplug_nn.decoders.public_fields import shortest as shortest
    from mplug_nn.decoders.public_fields import tied_fields as tied_fields
    from mplug_nn.decoders.public_fields import written_heads as written_heads
    from mplug_nn.decoders.public_fields import written_rotary as written_rotary
    from mplug_nn.decoders.published import published_names as published_names
    from mplug_nn.decoders.published_mixers import convolution_map as convolution_map
    from mplug_nn.decoders.published_mixers import mamba_names as mamba_names
    from mplug_nn.decoders.sparse import SparseDecoderConfig as SparseDecoderConfig
    from mplug_nn.delayed_scaling import DelayedScaling as DelayedScaling
    from mplug_nn.dropout import Dropout as Dropout
    from mplug_nn.dropout import Jitter as Jitter
    from mplug_nn.embedding import Embedding as Embedding
    from mplug_nn.experts import Experts as Experts
    from mplug_nn.family_forms import family_field as family_field
    from mplug_nn.fusible import fusible_norm as fusible_norm
    from mplug_nn.fusible import normed as normed
    from mplug_nn.gemm import Gemm as Gemm
    from mplug_nn.gemm import weight_gradient as weight_gradient
    from mplug_nn.grouped import GroupedProduct as GroupedProduct
    from mplug_nn.grouped import grouped_linear as grouped_linear
    from mplug_nn.head import Head as Head
    from mplug_nn.latent import LatentAttention as LatentAttention
    from mplug_nn.linear import ADAPTERS as ADAPTERS
    from mplug_nn.linear import Linear as Linear
    from mplug_nn.linear import LinearAdapter as LinearAdapter
    from mplug_nn.linear import boundary_of as boundary_of
    from mplug_nn.loss import Loss as Loss
    from mplug_nn.mixers.chunked import chunked_scan as chunked_scan
    from mplug_nn.mixers.convolution import Convolution as Convolution
    from mplug_nn.mixers.convolution import end_rows as end_rows
    from mplug_nn.mixers.convolution import short_convolution as short_convolution
    from mplug_nn.mixers.gated_delta import GatedDeltaNet as GatedDeltaNet
    from mplug_nn.mixers.gated_linear import GatedLinearAttention as GatedLinearAttention
    from mplug_nn.mixers.kimi_delta import KimiDeltaAttention as KimiDeltaAttention
    from mplug_nn.mixers.mamba import Mamba2 as Mamba2
    from mplug_nn.mixers.mixer import Mixer as Mixer
    from mplug_nn.mixers.recurrence import recurrent_scan as recurrent_scan
    from mplug_nn.mixers.scan import Scan as Scan
    from mplug_nn.mixers.specification import ConvolutionSpec as ConvolutionSpec
    from mplug_nn.mixers.specification import MixerInputs as MixerInputs
    from mplug_nn.mixers.specification import ScanSpec as ScanSpec
    from mplug_nn.mlp import MLP as MLP
    from mplug_nn.mlp import Activation as Activation
    from mplug_nn.moe import MixtureOfExperts as MixtureOfExperts
    from mplug_nn.multi_token_prediction import DepthAhead as DepthAhead
    from mplug_nn.multi_token_prediction import TokensAhead as TokensAhead
    from mplug_nn.norm import Norm as Norm
    from mplug_nn.norm_functions import NormFunction as NormFunction
    from mplug_nn.normal_tail import NORMAL_TAIL as NORMAL_TAIL
    from mplug_nn.normal_tail import NORMAL_TAIL_END as NORMAL_TAIL_END
    from mplug_nn.normal_tail import NORMAL_TAIL_SLOPE as NORMAL_TAIL_SLOPE
    from mplug_nn.packed_heads import PackedHeads as PackedHeads
    from mplug_nn.packed_heads import Preparation as Preparation
    from mplug_nn.parts import AttentionParts as AttentionParts
    from mplug_nn.parts import Part as Part
    from mplug_nn.product import Boundary as Boundary
    from mplug_nn.product import Collective as Collective
    from mplug_nn.product import Narrow as Narrow
    from mplug_nn.product import Product as Product
    from mplug_nn.prologue import FusedProduct as FusedProduct
    from mplug_nn.prologue import Inputs as Inputs
    from mplug_nn.prologue import Projected as Projected
    from mplug_nn.prologue import Prologue as Prologue
    from mplug_nn.prologue import Upstream as Upstream
    from mplug_nn.public_config import differences as differences
    from mplug_nn.public_config import forms_of as forms_of
    from mplug_nn.public_config import part_forms_of as part_forms_of
    from mplug_nn.public_config import written_config as written_config
    from mplug_nn.public_form import FamilyField as FamilyField
    from mplug_nn.public_form import FixedField as FixedField
    from mplug_nn.public_form import FormField as FormField
    from mplug_nn.public_form import FoundFamily as FoundFamily
    from mplug_nn.public_form import PublicField as PublicField
    from mplug_nn.public_form import PublicForm as PublicForm
    from mplug_nn.public_form import ReadField as ReadField
    from mplug_nn.public_form import SumField as SumField
    from mplug_nn.public_form import UnusedField as UnusedField
    from mplug_nn.public_form import form_of as form_of
    from mplug_nn.public_values import Values as Values
    from mplug_nn.relative import RelativeBias as RelativeBias
    from mplug_nn.rotary import Rotary as Rotary
    from mplug_nn.router import Choice as Choice
    from mplug_nn.router import Router as Router
    from mplug_nn.scores import RouterScore as RouterScore
    from mplug_nn.shared_fields import SHARED_FIELDS as SHARED_FIELDS
    from mplug_nn.shared_fields import unused as unused
    from mplug_nn.slots import SLOTS as SLOTS
    from mplug_nn.specification import AttentionInputs as AttentionInputs
    from mplug_nn.specification import AttentionSpec as AttentionSpec
    from mplug_nn.specification import StaticKeys as StaticKeys
    from mplug_nn.static_cache import static_keys as static_keys
    from mplug_nn.vision.join import StreamJoin as StreamJoin
    from mplug_nn.vision.merger import PatchMerger as PatchMerger
    from mplug_nn.vision.patches import PatchEmbedding as PatchEmbedding
    from mplug_nn.vision.tower import TowerConfig as TowerConfig

publish(
    __name__,
    {
        "mplug.layout.inits": ("Entries", "Inits"),
        "mplug.model.plans.description": ("describe",),
        "mplug.model.slots.declaration": ("Fusible", "states"),
        "mplug.tensors.gathered_form": ("GatheredForm",),
        "mplug.tensors.operator": ("fake", "operator"),
        "mplug.tensors.sink": ("Operand", "Sink", "Weights", "add_product", "add_rows", "aligned", "zero_if_stale"),
        "mplug.tensors.statistics": (
            "add_auxiliary",
            "count",
            "count_in_backward",
            "in_backward",
            "keep_max",
            "keep_max_in_backward",
        ),
        "mplug.tensors.weight_product": ("ProductModule", "WeightProduct"),
        "mplug_nn.activations": ("ActivationFunction",),
        "mplug_nn.multi_token_prediction": ("DepthAhead", "TokensAhead"),
        "mplug_nn.attention": ("Attention", "DotProductAttention", "scaled_dot_product"),
        "mplug_nn.branch": ("Branch", "ExpertsBranch", "MLPBranch", "MixerBranch"),
        "mplug_nn.cache": ("Cache", "CacheSize"),
        "mplug_nn.chunked_collectives": ("Arrival", "ChunkedCollectives", "Produce", "Rows", "collectives_named"),
        "mplug_nn.core": ("AttentionCore", "packed_heads_of", "parts_of"),
        "mplug_nn.cross": ("CrossAttention", "CrossKeys"),
        "mplug_nn.decoder": ("Block", "Decoder", "DenseBlock", "SparseBlock", "TokenEmbedding", "decoder_plan"),
        "mplug_nn.decoders.build": ("build_decoder",),
        "mplug_nn.decoders.config": ("DecoderConfig",),
        "mplug_nn.decoders.family": ("DecoderFamily",),
        "mplug_nn.decoders.general": ("GeneralDecoderConfig", "RopeScaling"),
        "mplug_nn.decoders.hybrid": ("HybridDecoderConfig", "MixerType"),
        "mplug_nn.decoders.latent": ("LatentDecoderConfig",),
        "mplug_nn.decoders.parts": (
            "ActivationName",
            "AttentionConfig",
            "BlockConfig",
            "BranchConfig",
            "DivisionName",
            "EmbeddingConfig",
            "ExpertsConfig",
            "LatentAttentionConfig",
            "MLPConfig",
            "NormConfig",
            "NormName",
            "PartConfig",
            "ScanConfig",
            "ScoreName",
            "tower_block",
        ),
        "mplug_nn.decoders.public_fields": (
            "EXPERTS_ALTERING",
            "EXPERTS_TRAINING",
            "LAYER_TYPES_FIELDS",
            "ROUTER_LOSS_FIELDS",
            "SLICES_FIELDS",
            "UNTIED_FIELDS",
            "activation_field",
            "attention_types",
            "decoder_fields",
            "heads_fields",
            "layer_types",
            "read_rotary",
            "rotary_fields",
            "rotary_settings",
            "shortest",
            "tied_fields",
            "written_heads",
            "written_rotary",
        ),
        "mplug_nn.decoders.published": ("published_names",),
        "mplug_nn.decoders.published_mixers": ("convolution_map", "mamba_names"),
        "mplug_nn.decoders.sparse": ("SparseDecoderConfig",),
        "mplug_nn.delayed_scaling": ("DelayedScaling",),
        "mplug_nn.dropout": ("Dropout", "Jitter"),
        "mplug_nn.embedding": ("Embedding",),
        "mplug_nn.experts": ("Experts",),
        "mplug_nn.family_forms": ("family_field",),
        "mplug_nn.fusible": ("fusible_norm", "normed"),
        "mplug_nn.gemm": ("Gemm", "weight_gradient"),
        "mplug_nn.grouped": ("GroupedProduct", "grouped_linear"),
        "mplug_nn.head": ("Head",),
        "mplug_nn.latent": ("LatentAttention",),
        "mplug_nn.linear": ("ADAPTERS", "Linear", "LinearAdapter", "boundary_of"),
        "mplug_nn.loss": ("Loss",),
        "mplug_nn.mixers.chunked": ("chunked_scan",),
        "mplug_nn.mixers.convolution": ("Convolution", "end_rows", "short_convolution"),
        "mplug_nn.mixers.gated_delta": ("GatedDeltaNet",),
        "mplug_nn.mixers.gated_linear": ("GatedLinearAttention",),
        "mplug_nn.mixers.kimi_delta": ("KimiDeltaAttention",),
        "mplug_nn.mixers.mamba": ("Mamba2",),
        "mplug_nn.mixers.mixer": ("Mixer",),
        "mplug_nn.mixers.recurrence": ("recurrent_scan",),
        "mplug_nn.mixers.scan": ("Scan",),
        "mplug_nn.mixers.specification": ("ConvolutionSpec", "MixerInputs", "ScanSpec"),
        "mplug_nn.mlp": ("Activation", "MLP"),
        "mplug_nn.moe": ("MixtureOfExperts",),
        "mplug_nn.norm": ("Norm",),
        "mplug_nn.normal_tail": ("NORMAL_TAIL", "NORMAL_TAIL_END", "NORMAL_TAIL_SLOPE"),
        "mplug_nn.norm_functions": ("NormFunction",),
        "mplug_nn.packed_heads": ("PackedHeads", "Preparation"),
        "mplug_nn.parts": ("AttentionParts", "Part"),
        "mplug_nn.product": ("Boundary", "Collective", "Narrow", "Product"),
        "mplug_nn.prologue": ("FusedProduct", "Inputs", "Projected", "Prologue", "Upstream"),
        "mplug_nn.public_config": ("differences", "forms_of", "part_forms_of", "written_config"),
        "mplug_nn.public_form": (
            "FixedField",
            "FamilyField",
            "FormField",
            "FoundFamily",
            "PublicField",
            "PublicForm",
            "ReadField",
            "SumField",
            "UnusedField",
            "form_of",
        ),
        "mplug_nn.public_values": ("Values",),
        "mplug_nn.relative": ("RelativeBias",),
        "mplug_nn.rotary": ("Rotary",),
        "mplug_nn.router": ("Choice", "Router"),
        "mplug_nn.scores": ("RouterScore",),
        "mplug_nn.shared_fields": ("SHARED_FIELDS", "unused"),
        "mplug_nn.slots": ("SLOTS",),
        "mplug_nn.specification": ("AttentionInputs", "AttentionSpec", "StaticKeys"),
        "mplug_nn.static_cache": ("static_keys",),
        "mplug_nn.vision.join": ("StreamJoin",),
        "mplug_nn.vision.merger": ("PatchMerger",),
        "mplug_nn.vision.patches": ("PatchEmbedding",),
        "mplug_nn.vision.tower": ("TowerConfig",),
    },
)
