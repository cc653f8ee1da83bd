"""Several blocks, one after the other, and perhaps a norm at the end, read at the last position.

Every block but the last answers at all positions, since the next one reads them all: a causal block
answers at a position from the tokens up to it, any other from all of them. `positions[p]` is added
to the token at place p (the first is 0) before the first block.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, finite_array, frozen, sequences
from keyhole.errors import InvalidArgument
from keyhole.linalg.softmax import softmax
from keyhole.models.attention import Attention
from keyhole.models.base import Shown
from keyhole.models.block import Block
from keyhole.models.norm import Norm

WAYS = {"stack.causal": True, "stack.bidirectional": False}


class Stack(Shown):
    """Blocks behind one another, read at the last position.

    Args:
        blocks: In their order.
        final_norm: Behind the last of them; None for none.
        causal: Whether a token sees only those before it.
        positions: (P, d), added to the tokens by their places; None for none.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.attention import Attention, Head
        >>> layer = Attention([Head(np.zeros((2, 2)), None, np.eye(2))], [0.0, 0.0])
        >>> block = Block(layer, None, norm="none")
        >>> Stack([block, block], causal=True)(np.array([[[1.0, 0.0], [3.0, 0.0]]]))
        array([[8.5, 0. ]])
    """

    blocks: tuple[Block, ...]
    final_norm: Norm | None
    causal: bool
    positions: Float[Array, "places d"] | None

    def __init__(
        self,
        blocks: Sequence[Block],
        final_norm: Norm | None = None,
        *,
        causal: bool = False,
        positions: Any = None,
    ) -> None:
        if not blocks:
            raise InvalidArgument("Stack needs at least one block")
        self.blocks, self.final_norm, self.causal = tuple(blocks), final_norm, bool(causal)
        widths = {block.width for block in self.blocks}
        widths |= set() if final_norm is None else {final_norm.width}
        if positions is not None:
            positions = frozen(finite_array("positions", positions, ndim=2))
            widths.add(positions.shape[1])
        self.positions = positions
        if len(widths) != 1:
            raise InvalidArgument(f"the parts of a stack have one width, got {sorted(widths)}")
        for block in self.blocks:
            position = None if block.attention is None else block.attention.position
            if position is not None and not self.causal:
                raise InvalidArgument("a stack whose attention has positions must be causal")

    @property
    def width(self) -> int:
        return self.blocks[0].width

    @property
    def outputs(self) -> int:
        return self.width

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*(block.dtype for block in self.blocks))

    def natural_length(self) -> float:
        return self.blocks[0].natural_length()

    def __call__(self, tokens: Float[Array, "batch length width"]) -> Float[Array, "batch out"]:
        stream = self.place(sequences(tokens, self.width, self.dtype))
        for block in self.blocks[:-1]:
            stream = answer_everywhere(block, stream, self.causal)
        answer = self.blocks[-1](stream)
        return answer if self.final_norm is None else self.final_norm(answer)

    def place(self, tokens: Float[Array, "batch length width"]) -> Array:
        """The tokens with the vectors of their places."""
        if self.positions is None:
            return tokens
        length, places = tokens.shape[1], len(self.positions)
        if length > places:
            raise InvalidArgument(f"there are vectors for {places} places, not for {length} tokens")
        return np.asarray(tokens + self.positions[:length].astype(tokens.dtype))

    def astype(self, dtype: Any) -> "Stack":
        """The same stack that computes in another precision."""
        norm = None if self.final_norm is None else self.final_norm.astype(dtype)
        places = None if self.positions is None else self.positions.astype(dtype)
        blocks = [block.astype(dtype) for block in self.blocks]
        return Stack(blocks, norm, causal=self.causal, positions=places)

    def replace(self, **parts: Any) -> "Stack":
        """With some of blocks, final_norm, causal and positions replaced."""
        known = {name: getattr(self, name) for name in ("final_norm", "causal", "positions")}
        return Stack(**{"blocks": self.blocks, **known, **parts})

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; an empty array's name tells whether the stack is causal.
        `from_arrays` is the inverse."""
        way = next(name for name, causal in WAYS.items() if causal is self.causal)
        arrays = {way: np.zeros(0, self.dtype)}
        for number, block in enumerate(self.blocks):
            arrays |= {f"blocks.{number}.{n}": array for n, array in block.to_arrays().items()}
        if self.final_norm is not None:
            arrays |= {
                f"final_norm.{self.final_norm.kind}.gain": self.final_norm.gain,
                f"final_norm.{self.final_norm.kind}.bias": self.final_norm.bias,
                f"final_norm.{self.final_norm.kind}.epsilon": np.array(self.final_norm.epsilon),
            }
        if self.positions is not None:
            arrays["positions"] = self.positions
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "Stack":
        ways = [name for name in arrays if name in WAYS]
        if len(ways) != 1:
            raise InvalidArgument(f"whether the stack is causal is needed once, got {ways}")
        parts: dict[int, dict[str, Array]] = {}
        last: dict[str, Array] = {}
        kinds = set()
        for name, array in arrays.items():
            group, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            if group == "blocks":
                parts.setdefault(int(number), {})[rest] = array
            elif group == "final_norm":
                kinds.add(number)
                last[rest] = array
        if sorted(parts) != list(range(len(parts))) or len(kinds) > 1:
            raise InvalidArgument("the blocks of a stack are numbered from 0, with one final norm")
        norm = None
        if last:
            norm = Norm(last["gain"], last["bias"], float(last["epsilon"]), kinds.pop())
        blocks = [Block.from_arrays(parts[number]) for number in range(len(parts))]
        return cls(blocks, norm, causal=WAYS[ways[0]], positions=arrays.get("positions"))

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({repr(block) for block in self.blocks}))
        norm = "" if self.final_norm is None else f", final norm ({self.final_norm.kind})"
        placed = "" if self.positions is None else f", {len(self.positions)} positions"
        return f"Stack({len(self.blocks)} blocks: {kinds}{placed}{norm})"


def answer_everywhere(
    block: Block, tokens: Float[Array, "batch length width"], causal: bool
) -> Float[Array, "batch length width"]:
    """The block's answers with each position as the last."""
    layer = block.attention
    if layer is not None and (layer.position is not None or layer.skip is not None):
        return answer_one_by_one(block, tokens, causal)
    stream = tokens
    for part, read, write in block.sublayers:
        if isinstance(part, Attention):
            added = attend_everywhere(part, read(tokens), causal)
        else:
            seen = read(tokens if block.parallel else stream)
            added = part(seen.reshape(-1, block.width)).reshape(stream.shape)
        stream = write(stream + added)
    return np.asarray(stream)


def attend_everywhere(
    layer: Attention, tokens: Float[Array, "batch length width"], causal: bool
) -> Float[Array, "batch length width"]:
    """What a layer without positions answers with each position as the last."""
    length = tokens.shape[1]
    answer = np.broadcast_to(layer.offset, tokens.shape).astype(tokens.dtype)
    later = np.arange(length)[None, :] > np.arange(length)[:, None]
    for head in layer.heads:
        keys = head.keys(tokens.reshape(-1, layer.width)).reshape(tokens.shape)
        scores = keys @ tokens.swapaxes(1, 2)
        if causal:
            scores = np.where(later, scores.dtype.type(-np.inf), scores)
        answer += softmax(scores) @ tokens @ head.value
    return np.asarray(answer)


def answer_one_by_one(
    block: Block, tokens: Float[Array, "batch length width"], causal: bool
) -> Float[Array, "batch length width"]:
    answers = np.empty_like(tokens)
    for place in range(tokens.shape[1]):
        if causal:
            seen = tokens[:, : place + 1]
        else:  # as a set, with the token at this place as the anchor
            order = [*range(place), *range(place + 1, tokens.shape[1]), place]
            seen = tokens[:, order]
        answers[:, place] = block(seen)
    return answers
