"""What a person might tune of the search for a network with smooth neurons."""

from dataclasses import dataclass, field

from keyhole.learners.mlp.scale import ScaleOptions


@dataclass(frozen=True)
class MlpOptions:
    """expected: neurons per entry of the input, before any was counted. floors: queries after which
    a search ends, in unknowns per number in an answer of a network of so many neurons, or of as
    many as were promised, if these are more. paths: far away that are tried. near:
    answers for the refinement, relative to the number of unknowns in them. further:
    how far out they are asked where inputs are free, relative to the Hessians. redundant: neurons
    of the random networks that are tried, one after the other, relative to half as many again as
    are expected; plenty: numbers in answers for each of their unknowns; averaged: for each
    of those of the network, where rounding averages out. small: unknowns of the rows of the usual
    one, beyond which none is tried. roundings: of the terms of an answer, that the finished fit may
    leave; cancelled: how much larger than the answers these terms are believed to
    be. bent: argument beyond which φ is a line, to rounding; seen: answers that must lie where a
    neuron bends. idle: part of a neuron in the answers, relative to the others, that is none.
    scale: how the size of inputs is looked for. half: of the digits that answers have, with which a
    finished network must also explain answers that were not fitted. known: standard error of the
    neurons, relative to them, below which they are. certain: distance from a whole number below
    which the side of a neuron is decided."""

    expected: int = 4
    floors: float = 40.0
    paths: int = 2
    near: float = 1.2
    further: float = 3.0
    redundant: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5)
    plenty: float = 2.0
    averaged: float = 5.0
    small: int = 2000
    roundings: float = 300.0
    cancelled: float = 30.0
    bent: float = 8.0
    seen: int = 3
    idle: float = 1e-7
    certain: float = 0.05
    scale: ScaleOptions = field(default=ScaleOptions())
    half: float = 0.5
    known: float = 0.1


# for a box that does not bend at the sizes that are looked at first
THOROUGH = MlpOptions(scale=ScaleOptions(looks=12, patient=True))
