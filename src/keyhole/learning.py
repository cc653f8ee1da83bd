"""learn(): labelled examples in, a Recovery out. Like recover(), but nothing can be asked."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.arrays import Array, whole_number
from keyhole.errors import (
    BudgetExhausted,
    IllConditioned,
    Interrupted,
    InvalidArgument,
    KeyholeError,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.examples.head_count import Progress
from keyhole.learners.examples.hypothesis import ExamplesDiagnostics, Fitted
from keyhole.learners.examples.learner import FromExamples
from keyhole.results import Ledger, Outcome, Recovery, Verdict
from keyhole.verification.held_out import Evidence, held_out_verdict

WEAK = 0.3  # a block whose standard error is this share of itself is not known
SCARCE = 1.5  # times the floor below which a search is expected to fail
TRIED = 10  # starts below which a search without success says nothing about the labels
AMPLIFIED = 1e6  # relative error of a block per relative error of the labels: rounding decides

OUTCOMES: dict[type[KeyholeError], Outcome] = {
    WrongFamily: Outcome.REJECTED,
    NotIdentifiable: Outcome.NOT_IDENTIFIABLE,
    IllConditioned: Outcome.ILL_CONDITIONED,
    BudgetExhausted: Outcome.BUDGET_EXHAUSTED,
    Interrupted: Outcome.INTERRUPTED,
}


def learn(
    X: Any,
    Y: Any,
    learner: FromExamples | None = None,
    *,
    seed: int = 0,
    throw: bool = True,
    mask: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Recovery:
    """Learns the layer behind labelled examples and says whether it explains them.

    X: (n, k, d), a list of (length, d), or padded with `mask` (n, k), true at real tokens.
    Y: every position (n, k, D) or a list of (length, D); the last position (n, D); a scalar (n,).
    With `throw`, every outcome but RECOVERED raises the error that tells why; the error carries
    the `recovery`. Without, look at `recovery.outcome`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((40, 3, 4))
    >>> scores = X @ rng.standard_normal((4, 4)) @ X.transpose(0, 2, 1)
    >>> P = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    >>> found = learn(X, P @ X @ rng.standard_normal((4, 4)))
    >>> found.outcome, len(found.model.heads)
    (Outcome.RECOVERED, 1)
    """
    learner = FromExamples() if learner is None else learner
    if not isinstance(learner, FromExamples):
        raise InvalidArgument(f"learner must be FromExamples(...), got {type(learner).__name__}")
    fitted: Fitted | None = None
    verdict: Verdict | None = None
    error: KeyholeError | None
    try:
        rng = np.random.default_rng(whole_number("seed", seed, 0))
        fitted = learner.fit(X, Y, rng, mask=mask, progress=progress)
        verdict = judge(fitted)
        error = complaint(fitted, verdict)
    except KeyboardInterrupt:
        error = Interrupted("stopped before a fit was settled; run again, or allow fewer seconds")
    except (ArithmeticError, np.linalg.LinAlgError) as broken:
        error = IllConditioned.after(broken)
    except tuple(OUTCOMES) as raised:
        error = raised
    recovery = _recovery(fitted, verdict, error)
    if error is not None:
        error.recovery = recovery
        if throw:
            raise error
    return recovery


def judge(fitted: Fitted) -> Verdict:
    """The rows kept aside against the fit to the others."""
    held = fitted.held_out
    places = zip(held.example, held.position, strict=True)
    return held_out_verdict(
        Evidence(
            inputs=[_query(fitted, int(i), int(j)) for i, j in places],
            answers=held.answers,
            predictions=held.predictions,
            refitted=fitted.refitted,
            residuals=fitted.residuals,
            fitted=fitted.predictions,
            anchors=fitted.anchors,
            costs=fitted.costs,
            noise=fitted.noise,
            power=fitted.power,
            freedom=fitted.freedom,
            roundoff=fitted.data.roundoff,
        )
    )


def _query(fitted: Fitted, example: int, position: int) -> Array:
    """The example's tokens with the row's query last, where an `Attention` reads it."""
    rows = fitted.data.rows
    tokens = rows.tokens[example, : rows.lengths[example]]
    if fitted.data.form != "every":
        return tokens
    order = [i for i in range(len(tokens)) if i != position]
    return tokens[[*order, position]]


def complaint(fitted: Fitted, verdict: Verdict) -> KeyholeError | None:
    """What keeps the fit from being a recovery, the most fundamental reason first."""
    found = fitted.diagnostics
    if found.ending == "interrupted":
        return Interrupted(
            f"stopped after {found.restarts} restarts; the best fit so far leaves "
            f"{found.residual:.1e} of the labels' size"
        )
    if not verdict.agrees and found.ending != "exact":
        return _explain_misfit(found, verdict)
    if found.ending == "spent":
        return BudgetExhausted(
            f"after {found.restarts} restarts and {found.seconds:.0f} s the best fit "
            f"leaves {found.residual:.1e} of the labels' size and was reached once only: it "
            "may be a local minimum. Allow more seconds or restarts"
        )
    if found.deficient:
        return NotIdentifiable(
            f"at the fit some change of the scores leaves no trace in the labels (relative "
            f"singular value {found.conditioning:.1e}): these examples do not determine the "
            f"parameters. They are {found.ratio:.2g} times the floor; more examples, or fewer "
            "heads, are needed"
        )
    if not verdict.agrees:
        return NotIdentifiable(
            "the fit reproduces the rows it was made from exactly, and not the rows kept aside: "
            "these examples allow several layers. They are "
            f"{found.ratio:.2g} times the floor; more are needed"
        )
    weak = found.amplification * found.noise
    if weak > WEAK or found.amplification > AMPLIFIED:
        return IllConditioned(
            f"some block of parameters has a standard error of {weak:.1e} of itself (relative "
            f"errors of the labels are amplified {found.amplification:.1e} times)"
        )
    return None


def _explain_misfit(found: ExamplesDiagnostics, verdict: Verdict) -> KeyholeError:
    """The labels are not reproduced: another family, or a search that was stuck."""
    if found.ending != "spent":
        return WrongFamily(verdict.bound, verdict.counterexample)
    if found.ratio_least < SCARCE or found.restarts < TRIED:
        return BudgetExhausted(
            f"no fit was settled before the budget was spent ({found.restarts} starts). The "
            f"examples are {found.ratio_least:.2g} times the floor; more of them make the "
            "search easier, more seconds or restarts longer. Or the labels do not come from one "
            f"layer of this kind: {verdict.bound}"
        )
    return WrongFamily(
        f"{verdict.bound} If the labels do come from such a layer, the search was stuck: allow "
        "more seconds, or bring more examples. Key biases and an offset are fitted with bias=True "
        "(--bias)",
        verdict.counterexample,
    )


def _recovery(
    fitted: Fitted | None, verdict: Verdict | None, error: KeyholeError | None
) -> Recovery:
    outcome, reason = Outcome.RECOVERED, ""
    if error is not None:
        outcome = next(o for kind, o in OUTCOMES.items() if isinstance(error, kind))
        reason = str(error)
    if fitted is None:
        return Recovery(outcome, None, None, verdict, Ledger(), reason)
    learned = fitted.learned
    return Recovery(
        outcome,
        learned.model,
        learned.errors,
        verdict,
        Ledger({}, learned.floor),
        reason,
        learned.report_notes(),
        learned.report_details(),
    )
