"""Runs a kernel's supplier on a case, and compares its results with exact ones.

The exact results are those of the `mplug_nn` composition in fp64 on the same inputs. The allowed error is a multiple of
the composition's own error in the dtype of the trial, plus that multiple of one rounding of the largest number.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn

from mplug.model.slots.slot_buffer import SlotBuffer
from mplug_compile.tracer import prepare_compiler
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing.harness import EXACT
from mplug_testing.kernel_cases import BUFFERS, SINK, Case, Suppliers, Tensors

Outcome = Mapping[str, Tensor | None]
"""The results of a call by name: outputs, gradients of inputs (None: no gradient) and the gradient sink."""


@dataclass(frozen=True)
class Trial:
    """A case that a supplier supports, in one dtype; `where` describes it in words.

    `declared` are the buffers that the supplier keeps, by slot; every call begins with their initial values.

    Each method `..._fault` runs one check. It returns the fault as a sentence, or the empty string.
    """

    case: Case
    suppliers: Suppliers
    dtype: torch.dtype
    device: str
    where: str
    declared: Mapping[str, Mapping[str, SlotBuffer]] = field(default_factory=dict)

    def values_fault(self, factor: float) -> str:
        """Wrong shapes or dtypes of outputs and gradients, or errors of more than `factor` times plain torch's."""
        return self._off(self._given(copied), factor)

    def strided_fault(self, factor: float) -> str:
        """The same with inputs and upstream gradients that are not contiguous."""
        return self._off(self._given(strided), factor)

    def in_place_fault(self) -> str:
        """A change of an input, or of the state of torch's generator."""
        leaves = self.leaves()
        given, before = copied(leaves), _generator_states(self.device)
        outcome(self._bind(given)(), leaves, given)
        changed = [name for name, x in given.items() if name != SINK and not torch.equal(x, leaves[name])]
        if changed:
            return f"{self.where}: it changes its input '{changed[0]}' in place"
        if all(map(torch.equal, before, _generator_states(self.device))):
            return ""
        return (
            f"{self.where}: it draws from torch's generator, so ranks that hold copies would draw different numbers; "
            f"only attention with dropout may do this, and `varies` must report it"
        )

    def repeated_fault(self) -> str:
        """Bits that differ in a second call."""
        one, other = self._given(copied), self._given(copied)
        changed = [name for name, x in one.items() if not _same_bits(x, other[name])]
        return (
            f"{self.where}: {changed[0]} has other bits in the second call; set deterministic = False if this is meant"
            if changed
            else ""
        )

    def compiled_fault(self, factor: float) -> str:
        """A call whose forward and backward do not trace into one graph, or whose compiled results are wrong."""
        prepare_compiler()
        torch.compiler.reset()
        compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
        try:
            with catch_warnings(action="ignore"):  # warnings of torch's tracer do not concern the supplier
                return self._off(self._given(dict, compiled), factor, ", compiled")
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return f"{self.where}: it does not trace into one graph: {reason}"
        finally:
            torch.compiler.reset()

    def acausal_fault(self) -> str:
        """A query that sees a later key, forward or backward, without a tolerance; empty if the case is not causal."""
        if not self.case.causal:
            return ""
        leaves = self.leaves()
        length = leaves["q"].shape[1]
        for seen in range(1, length, max(1, length // 8)):
            whole = self._core(leaves)
            later = {n: torch.cat((x[:, :seen], x[:, seen:] + 1), dim=1) if n in "kv" else x for n, x in leaves.items()}
            if not torch.equal(whole[:, :seen], self._core(later)[:, :seen]):
                return f"{self.where}: it is not causal: outputs before position {seen} depend on later keys or values"
            gradients = torch.autograd.grad(whole[:, :seen].sum(), (leaves["k"], leaves["v"]))
            for name, gradient in zip("kv", gradients, strict=True):
                if gradient[:, seen:].any():
                    return f"{self.where}: backward is not causal: outputs before {seen} give later {name} a gradient"
        return ""

    def reference_fault(self) -> str:
        """A fault of the core that the suite compares the supplier with, in fp64."""
        where = f"the reference of {self.where}"
        plain = replace(self, suppliers=self.case.plain, dtype=torch.float64, where=where)
        leaves = plain.leaves()
        q, k, v = (leaves[name] for name in "qkv")
        output, shape = plain._core(leaves), (*q.shape[:3], v.shape[3])
        if output.shape != shape or output.dtype != q.dtype:
            return f"{where} returns {tuple(output.shape)} in {output.dtype}; it must return {shape} in {q.dtype}"
        needs_gradient = [output.sum()] if output.requires_grad else []
        gradients = torch.autograd.grad(needs_gradient, (q, k, v), allow_unused=True) if needs_gradient else [None] * 3
        for name, gradient in zip("qkv", gradients, strict=True):
            if gradient is None:
                return f"{where} gives {name} no gradient; compute it by differentiable operations on its arguments"
        if not all(bool(x.isfinite().all()) for x in (output, *gradients) if x is not None):
            return f"{where} is not finite, or its gradient is not"
        return plain.acausal_fault()

    def _bind(self, given: Tensors) -> Callable[[], dict[str, Tensor]]:
        """The call of the case with inputs, and with buffers that have their initial values."""
        kept = {slot: initial(declared, self.dtype, self.device) for slot, declared in self.declared.items()}
        return self.case.bind({**self.suppliers, BUFFERS: kept} if kept else self.suppliers, given)

    def _core(self, leaves: Tensors) -> Tensor:
        return self._bind(leaves)()["output"]

    def leaves(self) -> dict[str, Tensor]:
        """The inputs in the dtype of the trial; all floating ones except the sink require a gradient."""
        sink = torch.promote_types(self.dtype, torch.float32)
        return {
            name: x.to(self.device, sink if name == SINK else self.dtype, copy=True).requires_grad_(name != SINK)
            if x.is_floating_point()
            else x.to(self.device, copy=True)
            for name, x in self.case.inputs.items()
        }

    def _given(
        self, arranged: Callable[[Tensors], dict[str, Tensor]], compiled: Callable[[Any], Any] = lambda call: call
    ) -> Outcome:
        leaves = self.leaves()
        given = arranged(leaves)
        call = compiled(self._bind(given))
        return outcome(call(), leaves, given, arranged)

    def _off(self, ours: Outcome, factor: float, how: str = "") -> str:
        plain = replace(self, suppliers=self.case.plain)
        usual, exact = plain._given(copied), plain._exact()
        size = max((float(x.abs().max()) for x in exact.values() if x is not None and x.is_floating_point()), default=0)
        for name in exact:
            found = _fault_of(ours.get(name), usual[name], exact[name], factor, size, SINK in self.case.inputs)
            if found:
                return f"{self.where}{how}: {name} {found}"
        return ""

    def _exact(self) -> Outcome:
        leaves = {
            name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for name, x in self.leaves().items()
        }
        given = copied(leaves)
        return outcome(self._bind(given)(), leaves, given)


def initial(declared: Mapping[str, SlotBuffer], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Declared buffers with their initial values, for a run in `dtype`."""
    kept = torch.promote_types(dtype, torch.float32)
    return {name: torch.full(one.shape, one.value, dtype=kept, device=device) for name, one in declared.items()}


def copied(tensors: Tensors) -> dict[str, Tensor]:
    """Copies that are no leaves (like activations), so that in-place writes to them raise no error."""
    return {name: x.clone() for name, x in tensors.items()}


def strided(tensors: Tensors) -> dict[str, Tensor]:
    """Copies that are views of wider tensors, like the parts of a split projection."""
    return {
        name: torch.cat((x, x), dim=-1)[..., : x.shape[-1]] if x.dim() else x.clone() for name, x in tensors.items()
    }


def outcome(
    outputs: Tensors,
    leaves: Tensors,
    given: Tensors,
    arranged: Callable[[Tensors], dict[str, Tensor]] = copied,
) -> Outcome:
    """Outputs, and the gradients of backward; the upstream gradients are the same in every dtype."""
    found: dict[str, Tensor | None] = {f"the {name}": y.detach() for name, y in outputs.items()}
    roots = {name: y for name, y in outputs.items() if y.requires_grad}
    differentiable = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients: tuple[Tensor | None, ...] = (None,) * len(differentiable)
    if roots:
        upstream = arranged({name: _drawn_like(y) for name, y in roots.items()})
        gradients = torch.autograd.grad(
            list(roots.values()), list(differentiable.values()), list(upstream.values()), allow_unused=True
        )
    found |= {f"the gradient of {name}": gradient for name, gradient in zip(differentiable, gradients, strict=True)}
    return {**found, "the gradient sink": given[SINK]} if SINK in given else found


def _drawn_like(y: Tensor) -> Tensor:
    """Random numbers that bf16 represents exactly."""
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.numel()))
    return drawn.to(torch.bfloat16).to(y.device, y.dtype)


def _fault_of(
    ours: Tensor | None, plain: Tensor | None, exact: Tensor | None, factor: float, size: float, has_sink: bool
) -> str:
    """A fault of one result.

    `size` is the largest value of the trial: results that cancel have rounding errors of its size.
    """
    if plain is None or exact is None:
        why = "the gradient sink holds it, so it would count twice" if has_sink else "the reference has none"
        return "" if ours is None else f"is returned, although {why}"
    if ours is None:
        return "is missing"
    if ours.shape != plain.shape:
        return f"has shape {tuple(ours.shape)} instead of {tuple(plain.shape)}"
    if ours.dtype != plain.dtype:
        return f"is {ours.dtype} instead of {plain.dtype}"
    if not ours.is_floating_point():
        return "" if torch.equal(ours, plain) else "is wrong"
    error, usual = _error(ours, exact), _error(plain, exact)
    if not math.isfinite(usual):
        return f"cannot be checked: in {plain.dtype} the reference has an error of {usual}"
    in_fp64 = plain.dtype is torch.float64  # the dtype of `exact`, which is then no more precise than `ours`
    allowed = EXACT * size if in_fp64 else factor * (usual + torch.finfo(plain.dtype).eps * size)
    if error <= allowed:  # NaN is not
        return ""
    return f"has an error of {error:.3g} (allowed: {allowed:.3g}; plain torch: {usual:.3g})"


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max())


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def own_dropout_fault(
    core: Callable[..., Tensor], probability: float, device: str, dtype: torch.dtype = torch.float32
) -> str:
    """A fault of attention that draws its own dropout mask, judged by how often it drops in a dtype."""
    b, s, h = 64, 16, 4
    q, k = torch.randn(2, b, s, h, s, generator=torch.Generator().manual_seed(0)).to(device, dtype).unbind()
    v = torch.eye(s, device=device, dtype=dtype)[None, :, None].expand(b, s, h, s).contiguous()
    inputs = AttentionInputs(torch.arange(b, device=device), num_heads=h)
    spec = AttentionSpec(s**-0.5, s, s)
    whole = core(q, k, v, spec, inputs).float()  # outputs are weights [b, s, h, s]
    dropped = core(q, k, v, replace(spec, dropout=probability), inputs).float()
    past = torch.ones(s, s, dtype=torch.bool, device=device).tril()[None, :, None].expand_as(whole)
    ratio = (dropped / whole)[past]
    kept = ratio.abs() > 0.5
    rounding = max(1e-2, 2 * torch.finfo(dtype).eps)
    if not torch.allclose(ratio[kept], torch.full_like(ratio[kept], 1 / (1 - probability)), rtol=rounding):
        return f"with dropout {probability}, the kept weights are not scaled by 1/(1 - {probability})"
    share, spread = float(kept.double().mean()), (probability * (1 - probability) / ratio.numel()) ** 0.5
    if abs(share - (1 - probability)) > 6 * spread:
        return f"with dropout {probability}, it keeps {share:.1%} of the weights"

    def drop(values: Tensor) -> Tensor:
        return core(q, k, values, replace(spec, dropout=probability), inputs)

    found = _drawn_fault(drop, v)
    return f"with dropout {probability}, {found}" if found else ""


def _drawn_fault(drop: Callable[[Tensor], Tensor], v: Tensor) -> str:
    """A fault in the source of a mask. `v` holds unit vectors, so that outputs are weights [b, s, h, t]."""

    def drawn(seed: int, values: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return drop(values)

    leaf, upstream = v.clone().requires_grad_(), _drawn_like(v)
    with torch.random.fork_rng():
        weights, same, other = drawn(1, v), drawn(1, v), drawn(2, v)
        (gradient,) = torch.autograd.grad(drawn(1, leaf), leaf, upstream)
    if not torch.equal(weights != 0, same != 0):
        return "equal seeds of torch.manual_seed give different masks; draw from torch's default generators"
    if torch.equal(weights != 0, other != 0):
        return "different seeds of torch.manual_seed give the same mask, so every layer and step would drop the same"
    expected = torch.einsum("bsht,bshk->bthk", weights.float(), upstream.float())
    if not torch.allclose(gradient.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        return "backward drops other weights than forward"
    return ""


def _generator_states(device: str) -> list[Tensor]:
    """The states of the generators from which a supplier may draw by mistake."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.startswith("cuda") else [])]


def owned_by(supplier: Any) -> str:
    """A description of a parameter or module that a callable holds; empty if it holds none."""
    seen: set[int] = set()

    def search(value: Any) -> Iterator[str]:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield f"a module, {type(value).__name__}"
        elif isinstance(value, Tensor):
            if value.requires_grad:
                yield f"a parameter of shape {tuple(value.shape)}"
        else:
            for held in _held_by(value):
                yield from search(held)

    return next(search(supplier), "")


def _held_by(value: Any) -> list[Any]:
    """The objects that a function, a bound method, a partial, a container or an object holds."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if inspect.ismodule(value) or isinstance(value, type):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the function has not bound this name yet
        return False
