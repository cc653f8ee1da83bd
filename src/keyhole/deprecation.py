"""The one way in which a former name warns before it goes."""

import warnings


def warn_of_former_name(former: str, current: str, *, removed_in: str) -> None:
    """Warns whoever uses a former name, at the line that uses it.

    Args:
        former: The name that was used, as a user writes it.
        current: What to write instead.
        removed_in: The version that will not know the former name any more.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     warn_of_former_name("keyhole.Old", "keyhole.New", removed_in="0.3")
        >>> print(told[0].message)
        keyhole.Old is now called keyhole.New; the former name goes with version 0.3
    """
    warnings.warn(
        f"{former} is now called {current}; the former name goes with version {removed_in}",
        DeprecationWarning,
        stacklevel=3,
    )
