"""The families of boxes that Keyhole tells apart, by name."""

from enum import StrEnum


class Family(StrEnum):
    """What a box is taken for. The values are what reports and files call it."""

    SINGLE_HEAD = "single head"
    SEVERAL_HEADS = "several heads"
    LABELS = "label-only head"
    POSITIONS = "attention with positions"
    SINK = "attention with a sink"
    RELU_NETWORK = "ReLU network"
    SMOOTH_NETWORK = "network with one hidden layer"
    TRANSFORMER = "Transformer"
    PRE_NORM_NETWORK = "a pre-norm network"
    POST_NORM_NETWORK = "a post-norm network"
    PRE_NORM_ATTENTION = "pre-norm attention"
    POST_NORM_ATTENTION = "post-norm attention"
    PRE_NORM_BLOCK = "a whole pre-norm block"
    POST_NORM_BLOCK = "a whole post-norm block"
    STACK = "a stack of blocks"

    @property
    def has_norm(self) -> bool:
        """Whether this is a block or one sublayer of it, with its norm."""
        return self in NORMED

    @property
    def is_whole_block(self) -> bool:
        """Whether attention and a network are both in it."""
        return self in (Family.PRE_NORM_BLOCK, Family.POST_NORM_BLOCK)


NORMED = frozenset(
    {
        Family.PRE_NORM_NETWORK,
        Family.POST_NORM_NETWORK,
        Family.PRE_NORM_ATTENTION,
        Family.POST_NORM_ATTENTION,
        Family.PRE_NORM_BLOCK,
        Family.POST_NORM_BLOCK,
    }
)


class Kind(StrEnum):
    """What single tokens and sequences say before the family is judged: which learners come into
    question."""

    LABELS = "labels"
    ATTENTION = "attention"
    POSITIONS = "positions"
    NETWORK = "network"
    SMOOTH_NETWORK = "smooth network"
    LAYER = "layer"  # attention and then a network
    BLOCK = "block"
