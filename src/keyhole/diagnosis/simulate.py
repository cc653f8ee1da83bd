"""The reference with a hypothesis applied: what a suspect with that fault would answer.

Statement: a hypothesis is a tuple of variants (a fault of the catalogue, its value, its place). The
bench applies them to its own copy of the model, runs the rows and puts everything back.
Queries: none. Simulated answers depend on the rows alone, so they are kept: hidden states for each
set of faults of the model, from which every readout follows at no cost.
When it fails: a hypothesis that leaves no answer (0/0) gives rows of NaN, which no suspect sends.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.attention import AttentionChange, attending
from keyhole.diagnosis.readout import Readout
from keyhole.diagnosis.reference import Reference, counts_from_padding
from keyhole.oracles.torch import default_adapter, first_tensor

if TYPE_CHECKING:
    from keyhole.diagnosis.catalogue import Variant

Row = Array  # (length,) token numbers, or (length, width) vectors
Hypothesis = tuple["Variant", ...]
PACKED_TOKENS = 64  # padded tokens in one pass of rows that do not depend on their company


@dataclass
class Inputs:
    """What goes into the model for the rows of one call; faults of the input edit it."""

    rows: list[Row]
    multiple: int = 1  # the padded length is one of these
    left: bool = False  # padding stands in front
    counted: bool = False  # padding in front counts as positions
    unmasked: bool = False  # attention sees padding
    pooled: bool = False  # the readout takes padding for tokens, too
    shift: int = 0  # of positions
    token_type: int | None = None
    together: int = 1  # rows that came in this call
    attention: list[AttentionChange] = field(default_factory=list)  # changed for this call alone


@dataclass(frozen=True)
class States:
    """Last hidden states of some rows, and which of them are tokens."""

    hidden: Any  # (rows, length, width), or (rows, outputs) for a module on vectors
    mask: Any  # (rows, length)


@dataclass
class Bench:
    """The reference, changed while one looks and put back afterwards."""

    reference: Reference
    dtype: str = "float32"
    readout: Readout = field(init=False)
    exact: dict[int, Any] = field(default_factory=dict)  # weights before a format rounded them
    format: str = ""  # that weights are rounded to
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _inputs: list[Callable[[Inputs], None]] = field(default_factory=list)
    _attention: list[AttentionChange] = field(default_factory=list)
    _inside: frozenset[int] | None = None  # ids of the modules of the one layer that is changed

    def __post_init__(self) -> None:
        self.readout = self.reference.readout
        self.model = self.reference.model
        self.anatomy = self.reference.anatomy

    # -- what faults do ------------------------------------------------------------------------

    def edit(self, tensor: Any) -> Any:
        """The tensor's numbers to write into; they are put back afterwards."""
        kept = tensor.data.clone()
        self._undo.append(lambda: tensor.data.copy_(kept))
        return tensor.data

    def edit_projection(self, projection: Any) -> Any:
        """A projection's matrix to write into."""
        self.edit(projection.module.weight)
        return projection.matrix

    def round_by(self, tensor: Any, rounding: Callable[[Any], Any], view: Any = None) -> None:
        """Rounds a weight, or the part of it that `view` cuts out: the exact one, and then to the
        format that is served, in the order in which a server does it."""
        import torch

        whole = self.edit(tensor)
        source = self.exact.get(id(tensor), whole)
        part, given = (whole, source) if view is None else (view(whole), view(source))
        rounded = rounding(given)
        if self.format:
            rounded = rounded.to(getattr(torch, self.format)).to(part.dtype)
        part.copy_(rounded)

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Sets an attribute; it is put back afterwards."""
        modules = getattr(holder, "_modules", {})
        if name in modules:
            kept = modules[name]
            modules[name] = value
            self._undo.append(lambda: modules.__setitem__(name, kept))
            return
        former = holder.__dict__[name]
        holder.__dict__[name] = value  # a function may give way to a module, and back
        self._undo.append(lambda: holder.__dict__.__setitem__(name, former))

    def replace_forward(self, module: Any, forward: Callable[..., Any]) -> None:
        """Lets `forward` answer in the module's place."""
        kept = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

        def undo() -> None:
            if kept is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = kept

        self._undo.append(undo)

    def hook(self, module: Any, change: Callable[[Any], Any]) -> None:
        """Lets `change` have the module's answer before the rest of the model sees it."""

        def altered(_: Any, __: Any, answer: Any) -> Any:
            if isinstance(answer, tuple):
                return (change(answer[0]), *answer[1:])
            return change(answer)

        handle = module.register_forward_hook(altered)
        self._undo.append(handle.remove)

    def hook_input(self, module: Any, change: Callable[[Any], Any]) -> None:
        """Lets `change` have what the module is given before the module sees it."""
        handle = module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
        self._undo.append(handle.remove)

    def attend(self, **changes: Any) -> None:
        """Changes attention; see `Attention` for what can be changed."""
        self._attention.append(AttentionChange(inside=self._inside, **changes))

    def feed(self, change: Callable[[Inputs], None]) -> None:
        """Changes what goes into the model: rows, padding, masks, positions."""
        self._inputs.append(change)

    def read(self, **changes: Any) -> None:
        """Changes how answers are read; see `Readout`."""
        self.readout = replace(self.readout, **changes)

    # -- running -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def applied(self, hypothesis: Hypothesis) -> Iterator["Bench"]:
        """While this lasts, the model has these faults."""
        try:
            for variant in hypothesis:
                with self.narrowed(variant.layer):
                    variant.fault.apply(self, variant.value)
            yield self
        finally:
            while self._undo:
                self._undo.pop()()
            self._inputs.clear()
            self._attention.clear()
            self.readout = self.reference.readout

    @contextlib.contextmanager
    def narrowed(self, layer: int | None) -> Iterator[None]:
        """While this lasts, what is changed is changed in one layer alone, where one is given."""
        if layer is None:
            yield
            return
        self.anatomy = self.reference.anatomy.of_layer(layer)
        self._inside = frozenset(id(m) for m in self.anatomy.layers[0].module.modules())
        try:
            yield
        finally:
            self.anatomy, self._inside = self.reference.anatomy, None

    def run_and_keep(self, rows: Sequence[Row]) -> tuple[States, list[Any]]:
        """The states of rows, and what each layer answered on the way."""
        kept: list[Any] = []
        handles = [
            layer.module.register_forward_hook(lambda _, __, answer: kept.append(answer))
            for layer in self.anatomy.layers
        ]
        try:
            return self.run(rows), kept
        finally:
            for handle in handles:
                handle.remove()

    def run_from(self, first: int, kept: list[Any], rows: Sequence[Row]) -> States:
        """The states of rows where layers before `first` answer as they did."""
        before = len(self._undo)
        for layer, answer in zip(self.anatomy.layers[:first], kept, strict=False):
            self.replace_forward(layer.module, lambda *_, answer=answer, **__: answer)
        try:
            return self.run(rows)
        finally:
            while len(self._undo) > before:
                self._undo.pop()()

    def run(self, rows: Sequence[Row]) -> States:
        """The states of rows that come in one call, with what is applied."""
        import torch

        inputs = Inputs(list(rows), together=len(rows))
        for change in self._inputs:
            change(inputs)
        if not self.reference.tokens:
            return self._run_vectors(inputs)
        ids, mask = pad(inputs, self.reference.pad)
        given = torch.ones_like(mask) if inputs.unmasked else mask
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": given.long()}
        if inputs.left or inputs.shift:
            arguments["position_ids"] = self._positions(inputs, mask)
        if inputs.token_type is not None:
            arguments["token_type_ids"] = torch.full_like(ids, inputs.token_type)
        if hasattr(self.model.config, "use_cache"):
            arguments["use_cache"] = False
        with torch.no_grad(), attending((*self._attention, *inputs.attention), given):
            hidden = first_tensor(self.model(**arguments))
        return States(hidden, given if inputs.pooled else mask)

    def _run_vectors(self, inputs: Inputs) -> States:
        import torch

        batch = torch.from_numpy(np.stack(inputs.rows)).to(next_dtype(self.model))
        with torch.no_grad():
            answer = first_tensor(default_adapter(self.model)(self.model, batch))
        if answer.ndim == 3 and answer.shape[0] == len(inputs.rows):
            answer = answer[:, -1, :]
        return States(answer.reshape(len(inputs.rows), -1), None)

    def _positions(self, inputs: Inputs, mask: Any) -> Any:
        import torch

        config = self.model.config
        offset = self.reference.pad + 1 if counts_from_padding(config) else 0
        place = torch.arange(mask.shape[1])[None, :].expand(mask.shape)
        if inputs.left and not inputs.counted:
            place = (mask.long().cumsum(1) - 1).clamp(min=0)
        limit = getattr(config, "max_position_embeddings", None)
        place = place + offset + inputs.shift
        learned = self.anatomy.embedding("position_embeddings", "wpe") is not None
        return place.clamp(0, limit - 1) if learned and limit else place


def next_dtype(model: Any) -> Any:
    """The number format of a module's parameters."""
    import torch

    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def pad(inputs: Inputs, filler: int) -> tuple[Any, Any]:
    """Token numbers and mask (rows, length) of rows of several lengths."""
    import torch

    lengths = [len(row) for row in inputs.rows]
    longest = -(-max(lengths) // inputs.multiple) * inputs.multiple
    ids = torch.full((len(lengths), longest), filler)
    mask = torch.zeros((len(lengths), longest), dtype=torch.bool)
    for k, row in enumerate(inputs.rows):
        place = slice(longest - len(row), longest) if inputs.left else slice(0, len(row))
        ids[k, place] = torch.from_numpy(np.asarray(row, dtype=np.int64))
        mask[k, place] = True
    return ids, mask


def read_states(states: States, readout: Readout) -> Array:
    """Answers as float64, one row each."""
    import torch

    with torch.no_grad():
        answers: Array = readout(states.hidden, states.mask).double().numpy()
    return answers
