"""Shapes and types at run time, while testing: every function's first calls in every test.

jaxtyping decorates every function and dataclass of the package (`--jaxtyping-packages` of make test)
and hands them to beartype. Checking every call takes three times as long as the calls themselves;
a function that got the right shapes a few times in a test gets them in the rest of its loop, too.
"""

import dataclasses
import functools
import inspect
import os

import jaxtyping
from beartype import BeartypeConf, beartype

# of one function in one test that are checked; a large number checks them all
CALLS = int(os.environ.get("KEYHOLE_CHECKED_CALLS", "4"))

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # for which an int is a float (PEP 484)


class Clock:
    """The number of the test that runs."""

    test = 0


def check_first_calls(plain, make_strict):
    """The function, checked in its first calls of every test. Most functions of the package are not
    called by most tests: the check is made when it is needed."""
    strict, test, left = None, -1, 0

    @functools.wraps(plain)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal strict, test, left
        if test != Clock.test:
            test, left = Clock.test, CALLS
        if left <= 0:
            return plain(*args, **kwargs)
        left -= 1
        strict = strict or make_strict(plain)
        return strict(*args, **kwargs)

    return call


def install():
    """Must come before the package is imported: its decorators look the name up in jaxtyping."""
    everything = jaxtyping.jaxtyped

    def jaxtyped(decorated=None, *, typechecker):
        if decorated is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        make_strict = functools.partial(everything, typechecker=typechecker)
        if not inspect.isclass(decorated):
            return check_first_calls(decorated, make_strict)
        if dataclasses.is_dataclass(decorated):
            decorated.__init__ = check_first_calls(decorated.__init__, make_strict)
        return decorated

    jaxtyping.jaxtyped = jaxtyped
