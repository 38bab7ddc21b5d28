"""What plugins and the host hand to each other. Torch-free: tensors appear in annotations only.

Shapes: `B` samples of a micro batch, `S` sequence length. A micro batch is a mapping from the entries that the plan's
`context` names to tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from mplug.plan import Parameter, Placement

MicroBatch = Mapping[str, "Tensor"]
Record = dict[str, Any]
"""A line of metrics.jsonl: step, loss, grad_norm, lr, tokens, tokens_per_s, tflops, mfu, memory_gib, data_wait_s,
skipped; in fp16 loss_scale and overflows, the steps that it has cost so far; statistics, where the model has some, by
their names; val_loss where the run was evaluated after the step."""


@dataclass(frozen=True)
class Mark:
    """What a field of a plugin's Config says to the host, in its annotation: `Annotated[int, MAY_CHANGE]`."""

    words: str


MAY_CHANGE = Mark("may change")
"""The field may be another one when a run resumes: no loss, gradient or sample depends on it beyond rounding."""
MAY_MOVE = Mark("may change while the data stays the same")
"""The field of a data plugin may be another one when a run resumes if the loader's `fingerprint` is the same."""


@dataclass(frozen=True)
class Variance:
    """In what a run with a plugin differs from the run of one process by more than rounding, and by how much at most.

    `reason` is a clause for `mplug explain`: 'gradients are rounded to bf16 before they are summed'. `tolerance` bounds
    the relative error of losses, gradients and norms in the tiny run of `mplug.testing`, in fp64: its suites hold runs
    with the plugin to it instead of to 1e-10.

    `sums` are the mesh axes over which the plugin sums gradients in this way, by listening to sinks: the host refuses
    a run in which anything else sums gradients over one of them. It is empty where the variance is not in such a sum.
    """

    reason: str
    tolerance: float
    sums: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a variance needs a reason")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"the tolerance of a variance is between 0 and 1, not {self.tolerance}")


class Stateful(Protocol):
    """Anything whose state a checkpoint holds: tensors and plain data only."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in tensors, numbers, strings, lists and mappings."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken."""


class Loader(Stateful, Protocol):
    """One split of a data set, in one global order of samples whatever the layout.

    The state is of the global order, not of a rank: a checkpoint holds rank 0's, and any number of ranks loads it.
    Where ranks know what others do not (buffers, worker processes), a loader has `merge_states(states)`: of the states
    of all parts of the batch, in their order, it makes the one that a checkpoint holds. Such a loader loads either, the
    merged state or its own, and raises UsageError for one that it cannot go on from, before anything is read or lost.

    A loader of a finite set may state `samples_per_epoch`: from the first sample on, so many in a row are the whole
    set; and `tokenizer`, the record of what made the data (`TokenizerRecord.as_mapping`), which the run's record keeps.

    A loader may state `fingerprint`: a short text that is the same for the same samples, wherever their files are, and
    another for others. Checkpoints hold it, and a run whose data has another fingerprint does not resume.
    """

    vocab_size: int
    """Every token is below it."""

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches; each sample is whole.

        Entries: `tokens` [B, S], `labels` [B, S] (already shifted; -100 where there is no target), `positions`
        [1 or B, S] and `sample_ids` [B] (a sample's number in the global order). They are tensors on the CPU: the host
        moves them to the device. They stay as they are when the next micro batch is read, for the host holds several.

        A loader that packs documents into samples says so by the hook `batch_entries`, and adds `document_lengths`
        [B, M], int64, in their order in the sample: they add up to S, and zeros fill up to an M that is the same in
        every micro batch. Whether positions begin anew with each document is the loader's choice.
        """


class Tokenizer(Protocol):
    """Text to tokens and back.

    One that states its `vocab_size` is never asked for the text of a token that is not below it, however many a model
    has.
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, no special one added. What looks like a special token in a text is text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens: special ones are left out, and bytes that are not UTF-8 become U+FFFD."""


class CorpusTokenizer(Tokenizer, Protocol):
    """What a plugin of the kind `tokenizers` builds: whole corpora go through it.

    It is built once in every process that encodes, and used by one thread at a time. One that has special tokens may
    state `special_tokens`, a mapping from their texts to their numbers: whoever writes such a text on purpose, as chat
    templates do, cuts it out and puts in the number.
    """

    vocab_size: int
    """Every token is below it, `eod` too."""
    eod: int | None
    """The token that ends a document, which no text has; None where the vocabulary has none."""

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[Sequence[int] | NDArray[Any]]":
        """Each text's tokens, as `encode` gives them: lists or one-dimensional integer arrays, as is fastest.

        It stays on the processor that called it: whoever encodes a corpus starts as many processes as are wanted.
        """


@dataclass
class Piece:
    """What an optimizer updates: one parameter, or the part of it that this rank owns.

    `master` (fp32) is updated in place from `gradient` (same shape), which the host has reduced but not scaled. It is
    fp32; in the weight's own precision only where the optimizer says that it takes that (`low_precision_gradients`).
    `weight` is the low-precision copy that is written afterwards, by the host or in an optimizer's one pass; None where
    the master is the weight itself.
    """

    name: str
    master: "Tensor"
    gradient: "Tensor"
    weight: "Tensor | None"
    parameter: "Parameter"
    placement: "Placement"


@dataclass(frozen=True)
class StepScalars:
    """What changes from step to step, as fp32 scalars on the device, so that no step waits for the host.

    Gradients must be multiplied by `scale` (clipping and the token count). Where `skip` is 1, no bit of masters, state
    or weights may change, whatever the gradients and the other scalars are.
    """

    lr: "Tensor"
    scale: "Tensor"
    skip: "Tensor"
    weight_decay: float


class Optimizer(Protocol):
    """Updates pieces.

    After a step the host rounds masters into weights: one more pass over memory. An optimizer may state `one_pass`
    True, and do it in `step`: afterwards every piece's `weight`, if it has one, is its master rounded to nearest; where
    `skip` is 1, no weight is written. Without the attribute, or where it is False, `step` leaves weights alone.
    Gradients are the optimizer's to use up: the next step overwrites them.

    An optimizer may state `low_precision_gradients` True: where a gradient is one product's, never added to, it then
    comes as that product rounded to the weight's precision, which is half of the memory.
    """

    needs: Literal["elements", "matrices"]
    """Whether any range of a piece may be updated alone, or whole matrices (segment by segment) only.

    A layout that cuts a matrix of an optimizer that needs whole ones is refused before any process starts. To learn
    it, and to count bytes, the host builds the optimizer of tensors without memory: building reads no values.
    """

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once, without waiting for the device."""

    def state(self, piece: Piece) -> "dict[str, Tensor]":
        """The live state tensors of a piece by name, of the piece's shape or scalars; loading copies into them."""


@dataclass
class StepResult:
    """The figures of a step, on the device: reading them waits for it."""

    loss: "Tensor"
    grad_norm: "Tensor"
    tokens: "Tensor"
    skipped: "Tensor"
    stop: "Tensor"
    """Above 0 where any rank has been asked to stop: all ranks then stop after the same step."""
    statistics: "Mapping[str, Tensor]" = field(default_factory=dict)
    """What the model's modules have counted, by the names of their buffers, of all ranks and micro batches."""
    failed: "Tensor | None" = None
    """Above 0 where `trainer.nonfinite` decides what follows; None: wherever the step was skipped."""
    figures: "Mapping[str, Tensor]" = field(default_factory=dict)
    """Further scalars that metrics.jsonl gets, by name."""


class Stepper(Protocol):
    """Owns the step: how micro batches become gradients, and gradients an update."""

    def forward_backward(self, micro_batches: Iterable[MicroBatch], step: int) -> None:
        """Sum the gradients of a step's micro batches into the sinks, and losses and token counts beside them."""

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Finish gradients, clip, check that they are finite, and let the optimizer update its pieces."""

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> "Tensor":
        """The mean loss over all tokens of the micro batches, without gradients or dropout.

        Take a micro batch when it is computed next, and on every rank as many: the host ends the sequence early, on all
        ranks after the same micro batch, if the run is asked to stop. The result is not used then.
        """
