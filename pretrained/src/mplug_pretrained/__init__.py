"""Models that begin with weights: those of another run, of a folder of other software (a `Format`), or adapters.

`Beginnings` is what the host asks for a run with `checkpoint.pretrained` or adapters. A command that runs a saved model
forward finds its weights by `SavedModel`; `settle_forward` makes its run, and `run_forward` starts its processes. This
module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_pretrained.adapter_files import adapter_conversion as adapter_conversion
    from mplug_pretrained.adapter_files import adapters_of as adapters_of
    from mplug_pretrained.adapter_files import unpublished as unpublished
    from mplug_pretrained.adapters import Adapters as Adapters
    from mplug_pretrained.adapters import Merge as Merge
    from mplug_pretrained.adapters import RowNorms as RowNorms
    from mplug_pretrained.adapters import row_norms as row_norms
    from mplug_pretrained.beginnings import Beginnings as Beginnings
    from mplug_pretrained.described import DescribedModel as DescribedModel
    from mplug_pretrained.described import PublicSettings as PublicSettings
    from mplug_pretrained.expansion import Conversion as Conversion
    from mplug_pretrained.expansion import conversion_of as conversion_of
    from mplug_pretrained.external import ExternalMap as ExternalMap
    from mplug_pretrained.external import ExternalNames as ExternalNames
    from mplug_pretrained.external import Factor as Factor
    from mplug_pretrained.external import Fused as Fused
    from mplug_pretrained.external import Interleaved as Interleaved
    from mplug_pretrained.external import Link as Link
    from mplug_pretrained.external import Part as Part
    from mplug_pretrained.external import ScoreHead as ScoreHead
    from mplug_pretrained.external import Transposed as Transposed
    from mplug_pretrained.external_form import conversion as conversion
    from mplug_pretrained.folder_settings import longest_sequence as longest_sequence
    from mplug_pretrained.foreign import ForeignCheckpoint as ForeignCheckpoint
    from mplug_pretrained.foreign import ForeignTensor as ForeignTensor
    from mplug_pretrained.format import Format as Format
    from mplug_pretrained.formats import format_named as format_named
    from mplug_pretrained.formats import format_of as format_of
    from mplug_pretrained.forward import SavedModel as SavedModel
    from mplug_pretrained.forward import folder_length as folder_length
    from mplug_pretrained.forward import run_forward as run_forward
    from mplug_pretrained.forward import settle_forward as settle_forward
    from mplug_pretrained.inference import load_for_inference as load_for_inference
    from mplug_pretrained.public_load import load_public_for_inference as load_public_for_inference
    from mplug_pretrained.published import Export as Export
    from mplug_pretrained.published import ExportOptions as ExportOptions
    from mplug_pretrained.published import ExportValues as ExportValues
    from mplug_pretrained.published import FolderWeights as FolderWeights
    from mplug_pretrained.published import PublishedFolder as PublishedFolder
    from mplug_pretrained.safetensors_file import write_safetensors as write_safetensors
    from mplug_pretrained.wanted import Wanted as Wanted

publish(__name__)
