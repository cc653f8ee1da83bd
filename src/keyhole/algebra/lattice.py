"""Subset sums in several dimensions by lattice reduction."""

from keyhole.arrays import Array


def subset_by_reduction(columns: Array, target: Array, allowed: float) -> Array | None:
    return None
