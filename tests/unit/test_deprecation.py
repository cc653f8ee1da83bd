import warnings

import pytest

from keyhole.deprecation import warn_of_former_name


def old_function() -> None:
    warn_of_former_name("keyhole.old", "keyhole.new", removed_in="9.0")


def test_the_warning_names_both_and_points_at_the_line_that_uses_the_former_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"keyhole\.old is now called keyhole\.new") as told:
        old_function()
    # checks of types at run time put a call of their own between the two
    assert told[0].filename == __file__ or "jaxtyping" in told[0].filename
    assert "version 9.0" in str(told[0].message)


def test_nothing_is_said_where_warnings_are_ignored() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore", DeprecationWarning)
        old_function()
    assert not told
