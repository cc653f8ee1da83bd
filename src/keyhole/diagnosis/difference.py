"""keyhole.diff: two sets of weights, part by part, after removing what does not matter.

Statement: two models of one architecture may have different weights and be the same function: heads
and neurons have no order, and inside a head queries and keys (values and outputs) may be turned
against each other. What is left after that is a change, which has a place, a size and a rank.
Algebra: heads and neurons of each layer are matched (assignment) where they differ as they stand;
without rotary positions a head is compared by its score map Wq' Wk and its value map Wo Wv. The
residual stream may stand in another order, and under RMS norms with other signs: the columns of
the embedding say which, and everything that reads or writes the stream is put back. The rank of a
change is the number of singular values that the rounding of the weights cannot make.
When it fails: a stream whose embedding was replaced as well as reordered, and parts that no pattern
of anatomy names as readers or writers: such models are said to differ there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array
from keyhole.diagnosis.anatomy import Anatomy, Layer, describe
from keyhole.errors import InvalidArgument
from keyhole.linalg.rank import count_above, noise_edge
from keyhole.models.canonical import distance
from keyhole.oracles.torch import is_module
from keyhole.results import load
from keyhole.targets import FOLDER, check_target
from keyhole.text import clean

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Part:
    """A weight, head or set of neurons that moved.

    Attributes:
        name: the dotted name of the weight; heads and neurons of it are numbered in `where`.
        size: of the change, relative to the weight.
        rank: of the change; None where it is a vector.
        where: heads or neurons that moved, where these are not all.
    """

    name: str
    size: float
    rank: int | None
    where: str = ""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        place = f" ({self.where})" if self.where else ""
        return f"{self.name}{place} by {self.size:.1e}{rank}"


@dataclass(frozen=True)
class Difference:
    """What differs between two sets of weights.

    Attributes:
        same: whether they are the same function, up to the rounding of the weights.
        parts: what moved, the largest change first.
        symmetries: what differs in the files and does not matter, in sentences.
        distance: the largest relative change of a part.
    """

    same: bool
    parts: tuple[Part, ...]
    symmetries: tuple[str, ...]
    distance: float

    def __str__(self) -> str:
        apart = f" ({'; '.join(self.symmetries)})" if self.symmetries else ""
        if self.same:
            return f"The same function{apart}, to {self.distance:.0e}."
        shown = "; ".join(str(part) for part in self.parts[:3])
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"They differ: {shown}{more}{apart}."

    def to_record(self) -> dict[str, Any]:
        """Everything as plain numbers, words and lists."""
        return {
            "same": self.same,
            "sentence": clean(str(self)),
            "distance": self.distance,
            "parts": [vars(part) for part in self.parts],
            "symmetries": list(self.symmetries),
        }


def diff(a: Any, b: Any) -> Difference:
    """Compares two sets of weights in canonical form, part by part.

    Args:
        a: a keyhole model or saved run, a torch module, or `hf:FOLDER`.
        b: another one of the same kind and shape.

    Returns:
        Whether they are the same function after removing symmetries, and which parts moved, by how
        much and with which rank.

    Raises:
        InvalidArgument: they are not of one kind, or not of one shape.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> print(keyhole.diff(layer, layer))  # doctest: +SKIP
        The same function, to 0e+00.
    """
    one, other = _opened(a), _opened(b)
    if is_module(one) and is_module(other):
        return _diff_modules(one, other)
    if is_module(one) or is_module(other):
        raise InvalidArgument(
            "one is a torch module and the other a keyhole model: export one of them first "
            "(keyhole.to_torch, keyhole.from_torch)"
        )
    return _diff_models(one, other)


def _opened(given: Any) -> Any:
    if isinstance(given, (str, Path)):
        text = str(given)
        if text.startswith(FOLDER) or (Path(text) / "config.json").is_file():
            from keyhole.oracles.hugging_face import load_folder

            return load_folder(text.removeprefix(FOLDER))
        check_target(text)
        found = load(text) if Path(text).exists() else _named(text)
        return getattr(found, "model", None) or found
    return getattr(given, "model", given) if hasattr(given, "ledger") else given


def _named(text: str) -> Any:
    from keyhole.oracles.open import load_named

    return load_named(text)


# -- keyhole models ----------------------------------------------------------------------------


def _diff_models(a: Any, b: Any) -> Difference:
    """Models of keyhole: the canonical distance decides, arrays by name say where."""
    if not hasattr(a, "to_arrays") or not hasattr(b, "to_arrays"):
        raise InvalidArgument("diff compares keyhole models, torch modules or hf:FOLDER")
    total = distance(a, b)
    here, there = a.to_arrays(), b.to_arrays()
    kinds = [np.asarray(x).dtype.name for x in (*here.values(), *there.values())]
    unit = max((ROUNDOFF.get(kind, 0.0) for kind in kinds), default=0.0)
    width = max((max(np.shape(x), default=1) for x in here.values()), default=1)
    same = bool(total <= 8 * unit * np.sqrt(width))
    parts = [
        _part(name, np.asarray(here[name], float), np.asarray(there[name], float), unit)
        for name in here
        if name in there and np.shape(here[name]) == np.shape(there[name])
        and np.asarray(here[name]).dtype.kind == "f"
    ]  # fmt: skip
    moved = sorted((p for p in parts if p is not None), key=lambda p: -p.size)
    if same:
        notes = ("the parameters are written differently",) if moved else ()
        return Difference(True, (), notes, total)
    strange = {*here} ^ {*there}
    notes = (f"only one of them has {', '.join(sorted(strange)[:4])}",) if strange else ()
    return Difference(False, tuple(moved), notes, total)


# -- torch modules -----------------------------------------------------------------------------


def _diff_modules(a: Any, b: Any) -> Difference:
    here, there = dict(a.state_dict()), dict(b.state_dict())
    if {k: tuple(v.shape) for k, v in here.items()} != {
        k: tuple(v.shape) for k, v in there.items()
    }:
        strange = sorted({*here} ^ {*there}) or [k for k in here if here[k].shape != there[k].shape]
        raise InvalidArgument(
            f"the modules are not of one shape: they differ in {', '.join(strange[:4])}"
        )
    one, other = describe(a), describe(b)
    unit = max(_unit(here), _unit(there))
    mine = {k: _numbers(v) for k, v in here.items()}
    theirs = {k: _numbers(v) for k, v in there.items()}
    notes, parts = _match_stream(one, mine, theirs, unit)
    free: set[str] = set()
    for layer, partner in zip(one.layers, other.layers, strict=True):
        notes += _match_neurons(layer, partner, theirs, mine, unit)
        notes += _match_heads(one, layer, theirs, mine, unit)
        turned, names = _turned_heads(one, layer, mine, theirs, unit)
        notes += turned
        free |= names
    for name, w in mine.items():
        part = None if name in free else _part(name, w, theirs[name], unit, _heads_in(one, name))
        if part is not None:
            parts.append(part)
    parts.sort(key=lambda p: -p.size)
    sizes = [_size(w, theirs[name]) for name, w in mine.items() if name not in free]
    return Difference(not parts, tuple(parts), tuple(notes), max(sizes, default=0.0))


def _unit(state: dict[str, Any]) -> float:
    kinds = {str(v.dtype).removeprefix("torch.") for v in state.values() if v.is_floating_point()}
    return max((ROUNDOFF.get(kind, 0.0) for kind in kinds), default=0.0)


def _numbers(tensor: Any) -> Array:
    return tensor.detach().cpu().double().numpy()


def _size(a: Array, b: Array) -> float:
    norm = float(np.linalg.norm(a))
    gap = float(np.linalg.norm(b - a))
    return gap / norm if norm > 0 else gap


def _part(name: str, a: Array, b: Array, unit: float, heads: int = 0) -> Part | None:
    """The change of an array; None where it is within rounding."""
    size = _size(a, b)
    if size <= ROUNDED * unit:
        return None
    if a.ndim != 2:
        return Part(name, size, None)
    change = b - a
    values = np.linalg.svd(change, compute_uv=False)
    # singular values that rounding each number to the format can make
    edge = noise_edge(2 * unit * float(np.sqrt(np.mean(a**2))), a.shape)
    rank = count_above(values, max(edge, 1e-9 * values[0]))
    return Part(name, size, rank, _moved_heads(change, a, heads, unit))


def _moved_heads(change: Array, a: Array, heads: int, unit: float) -> str:
    if heads < 2 or a.shape[0] % heads:
        return ""
    rows = np.linalg.norm(change.reshape(heads, -1), axis=1)
    scale = np.linalg.norm(a.reshape(heads, -1), axis=1)
    moved = np.flatnonzero(rows > ROUNDED * unit * scale)
    return "" if len(moved) in (0, heads) else "heads " + ", ".join(map(str, moved))


def _heads_in(anatomy: Anatomy, name: str) -> int:
    for p in anatomy.projections:
        whole = p.start == 0 and p.stop == p.matrix.shape[0] and not p.transposed
        if whole and name == f"{p.name}.weight" and p.role in ("query", "key", "value"):
            return anatomy.heads if p.role == "query" else anatomy.key_heads
    return 0


def _plain(layer: Layer, roles: Sequence[str]) -> bool:
    """Whether projections are weights of their own, stored as (outputs, inputs)."""
    found = [layer.projections.get(role) for role in roles]
    return all(p is not None and p.start == 0 and not p.transposed for p in found) and all(
        p.stop == p.module.weight.shape[0] for p in found if p is not None
    )


def _match_neurons(
    layer: Layer, partner: Layer, theirs: dict[str, Array], mine: dict[str, Array], unit: float
) -> list[str]:
    """Puts the other's neurons into this one's order, where that brings them together."""
    readers = [r for r in ("gate", "up") if r in layer.projections]
    if not readers or not _plain(layer, [*readers, "down"]):
        return []
    rows = [f"{layer.projections[r].name}" for r in readers]
    down = layer.projections["down"].name
    a = np.hstack([*(mine[f"{n}.weight"] for n in rows), mine[f"{down}.weight"].T])
    b = np.hstack([*(theirs[f"{n}.weight"] for n in rows), theirs[f"{down}.weight"].T])
    order = _assign(a, b, unit)
    if order is None:
        return []
    for n in rows:
        for end in ("weight", "bias"):
            if f"{n}.{end}" in theirs:
                theirs[f"{n}.{end}"] = theirs[f"{n}.{end}"][order]
    theirs[f"{down}.weight"] = theirs[f"{down}.weight"][:, order]
    return [f"neurons of layer {layer.index} stand in another order"]


def _match_stream(
    anatomy: Anatomy, mine: dict[str, Array], theirs: dict[str, Array], unit: float
) -> tuple[list[str], list[Part]]:
    """Puts the other's residual stream into this one's order and signs, where that brings the
    embeddings together. Answers that are the stream itself then differ by the same turn."""
    found = anatomy.embedding("embed_tokens", "word_embeddings", "wte", "tok_embeddings")
    if found is None:
        return [], []
    (table,) = [f"{name}.weight" for name, module in anatomy.embeddings if module is found]
    a, b = mine[table], theirs[table]
    if _size(a, b) <= ROUNDED * unit:
        return [], []
    signed = all(type(module).__name__.endswith("RMSNorm") for _, module in anatomy.norms)
    likeness = (a / np.linalg.norm(a, axis=0)).T @ (b / np.linalg.norm(b, axis=0))
    order = linear_sum_assignment(-np.abs(likeness) if signed else -likeness)[1]
    signs = np.sign(likeness[np.arange(len(order)), order]) if signed else np.ones(len(order))
    if np.linalg.norm(a - b[:, order] * signs) >= 0.5 * np.linalg.norm(a - b):
        return [], []
    for name, axis in _stream_axes(anatomy, mine, len(order)):
        turn = signs if mine[name].ndim == 2 or name.endswith("bias") else np.ones(len(order))
        moved = np.take(theirs[name], order, axis=axis)
        theirs[name] = moved * (turn[:, None] if axis == 0 and moved.ndim == 2 else turn)
    flipped = int(np.sum(signs < 0))
    how = f"in another order, {flipped} signs flipped" if flipped else "in another order"
    head = _output_embedding(anatomy)
    turned = Part("the answers", 1.0, None, f"their numbers stand {how}")
    return [f"the residual stream stands {how}"], [] if head else [turned]


def _stream_axes(anatomy: Anatomy, state: dict[str, Array], width: int) -> list[tuple[str, int]]:
    """Weights that read or write the residual stream, with the axis along it."""
    axes: dict[str, int] = {}
    for name, _ in anatomy.embeddings:
        axes[f"{name}.weight"] = 1
    for p in anatomy.projections:
        writes = p.role in ("output", "down")
        axes[f"{p.name}.weight"] = int(writes == p.transposed)
        if writes:
            axes[f"{p.name}.bias"] = 0
    inside = tuple(f"{layer.name}." for layer in anatomy.layers)
    for name, _ in anatomy.norms:
        of_heads = name.startswith(inside) and name.endswith(("q_norm", "k_norm"))
        if not of_heads:
            axes[f"{name}.weight"] = axes[f"{name}.bias"] = 0
    if head := _output_embedding(anatomy):
        axes[f"{head}.weight"] = 1
    return [(n, axis) for n, axis in axes.items() if n in state and state[n].shape[axis] == width]


def _output_embedding(anatomy: Anatomy) -> str:
    """The name of what turns the stream into log-probabilities; empty where there is none."""
    find = getattr(anatomy.model, "get_output_embeddings", None)
    head = find() if find is not None else None
    names = [name for name, module in anatomy.model.named_modules() if module is head]
    return names[0] if head is not None and names else ""


def _match_heads(
    anatomy: Anatomy, layer: Layer, theirs: dict[str, Array], mine: dict[str, Array], unit: float
) -> list[str]:
    """The same for heads; heads that share keys stay together."""
    roles = ("query", "key", "value", "output")
    count = anatomy.key_heads
    if count < 2 or not _plain(layer, roles):
        return []
    names = [layer.projections[role].name for role in roles]

    def blocks(state: dict[str, Array]) -> Array:
        cut = [state[f"{n}.weight"] for n in names[:3]] + [state[f"{names[3]}.weight"].T]
        return np.hstack([w.reshape(count, -1) for w in cut])

    order = _assign(blocks(mine), blocks(theirs), unit)
    if order is None:
        return []
    for n in names[:3]:
        for end in ("weight", "bias"):
            if f"{n}.{end}" in theirs:
                w = theirs[f"{n}.{end}"]
                theirs[f"{n}.{end}"] = w.reshape(count, -1, *w.shape[1:])[order].reshape(w.shape)
    w = theirs[f"{names[3]}.weight"].T
    theirs[f"{names[3]}.weight"] = w.reshape(count, -1, w.shape[1])[order].reshape(w.shape).T
    return [f"heads of layer {layer.index} stand in the order {order.tolist()}"]


def _assign(a: Array, b: Array, unit: float) -> Array | None:
    """The order of b's rows that is nearest to a's; None where they stand right already."""
    if np.linalg.norm(a - b) <= ROUNDED * unit * np.linalg.norm(a):
        return None
    cost = np.sum(a**2, 1)[:, None] + np.sum(b**2, 1)[None, :] - 2 * a @ b.T
    order = linear_sum_assignment(cost)[1]
    if np.array_equal(order, np.arange(len(order))):
        return None
    better = np.linalg.norm(a - b[order]) < 0.5 * np.linalg.norm(a - b)
    return order if better else None


# Roundoffs of their format by which the same weights may differ, relative to their norm.
ROUNDED = 4.0
# Pairs of projections between which a head may be turned; with rotary positions not the first.
HEAD_MAPS = (("query", "key", "scores"), ("value", "output", "values"))


def _head_map(
    state: dict[str, Array], names: dict[str, str], roles: tuple[str, str], rows: slice
) -> Array:
    """The product of two projections of a head, which no turn between them changes."""
    first, second = roles
    left = _framed(state, names[first], rows)
    if second == "output":
        return np.asarray(left.T @ state[f"{names[second]}.weight"][:, rows].T)
    return np.asarray(left.T @ _framed(state, names[second], rows))


def _turned_heads(
    anatomy: Anatomy, layer: Layer, mine: dict[str, Array], theirs: dict[str, Array], unit: float
) -> tuple[list[str], set[str]]:
    """Heads whose queries and keys, or values and outputs, were turned against each other."""
    heads, notes, free = anatomy.heads, [], set()
    own_keys = heads == anatomy.key_heads >= 1
    if not (own_keys and _plain(layer, ("query", "key", "value", "output"))):
        return [], set()
    width = anatomy.head_width
    names = {role: layer.projections[role].name for role in ("query", "key", "value", "output")}
    for first, second, what in HEAD_MAPS[int(bool(anatomy.rotary)) :]:
        touched = [f"{names[r]}.{end}" for r in (first, second) for end in ("weight", "bias")]
        touched = [n for n in touched if n in mine and n != f"{names['output']}.bias"]
        moved = max((_size(mine[n], theirs[n]) for n in touched), default=0.0)
        gaps = [
            _size(*(_head_map(state, names, (first, second), rows) for state in (mine, theirs)))
            for rows in (slice(h * width, (h + 1) * width) for h in range(heads))
        ]
        if moved > ROUNDED * unit and max(gaps) <= 16 * unit * np.sqrt(width):
            notes.append(f"{what} of layer {layer.index} are the same, written in another basis")
            free |= set(touched)
    return notes, free


def _framed(state: dict[str, Array], name: str, rows: slice) -> Array:
    """Rows of a weight with their bias as one more column."""
    w = state[f"{name}.weight"][rows]
    bias = state.get(f"{name}.bias")
    return w if bias is None else np.column_stack([w, bias[rows]])
