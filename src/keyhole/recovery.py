"""Where all stages meet. recover(): wrap the oracle, learn, verify, return a Recovery.
learn(): labelled examples in, a Recovery out; nothing can be asked, so rows kept aside verify."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole import __version__
from keyhole.arrays import TINY, Array, random_stream, whole_number
from keyhole.errors import (
    BudgetExhausted,
    DomainError,
    IllConditioned,
    ImpossibleModel,
    Inconsistent,
    Interrupted,
    InvalidArgument,
    JournalMismatch,
    KeyholeError,
    NotFinite,
    NotIdentifiable,
    OracleError,
    Unsupported,
    WrongFamily,
)
from keyhole.learners.base import USELESS, Hypothesis, Learner
from keyhole.learners.names import make_learner
from keyhole.linalg.decisions import Tally, record_decisions
from keyhole.measurement.limits import Within, tell_limits
from keyhole.measurement.noise import LOOKS, decimal_step, noise_of_type, recognise_format
from keyhole.models.attention import Attention
from keyhole.models.base import (
    multiply_out_scores,
    natural_length,
    replace_parameters,
    takes_numbers,
)
from keyhole.models.canonical import distance, product_norm
from keyhole.models.language_model import OutputLayer
from keyhole.oracles.base import Oracle
from keyhole.oracles.language_model.restricted import Reader, choose_for_check, refuse_closed
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import opened
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.oracles.wrappers.count import Forecast, QueryCounter, senders
from keyhole.oracles.wrappers.drift import CHANGED, FIRST, KEPT, REASON, DriftWatch
from keyhole.oracles.wrappers.journal import Journal
from keyhole.oracles.wrappers.record import AnswerRecord
from keyhole.oracles.wrappers.validate import Validator
from keyhole.results import Ledger, Outcome, Recovery, RunDiagnostics, Verdict
from keyhole.verification.held_out import HeldOutAnswers, held_out_verdict
from keyhole.verification.residuals import traced
from keyhole.verification.tolerance import OLD
from keyhole.verification.verify import FRESH
from keyhole.verification.verify import verify as verify_model

if TYPE_CHECKING:  # loaded where it is used: a run needs one learner, not all of them
    from keyhole.learners.examples import ExamplesDiagnostics, Fitted, FromExamples
    from keyhole.learners.examples import Progress as SearchProgress

TELLING_STARTS = 10  # starts below which a search without success says nothing about the labels

OUTCOMES: dict[type[KeyholeError], Outcome] = {
    WrongFamily: Outcome.REJECTED,
    Inconsistent: Outcome.REJECTED,
    NotIdentifiable: Outcome.NOT_IDENTIFIABLE,
    BudgetExhausted: Outcome.BUDGET_EXHAUSTED,
    IllConditioned: Outcome.ILL_CONDITIONED,
    Unsupported: Outcome.UNSUPPORTED,
    OracleError: Outcome.ORACLE_FAILED,
    Interrupted: Outcome.INTERRUPTED,
}
# how a search of a second model may end that says nothing about the first
SEARCHING = (NotIdentifiable, BudgetExhausted, IllConditioned, Unsupported)
# what a drifting box is also taken for
BLAMED = (WrongFamily, NotIdentifiable, IllConditioned, Unsupported)
CONTINUE = {  # how a stopped run goes on, with a journal and without
    True: "run again with the same journal to continue",
    False: "with journal= a stopped run can be continued",
}


@dataclass(frozen=True)
class Progress:
    """What a progress callback is told before and after every chunk of queries, and while a
    learner computes for long between them.

    Attributes:
        stage: The purpose of the queries being asked.
        asked: Queries so far.
        expected: Queries of the whole run, where they can be foreseen.
        seconds: Since the start.
        under_way: Queries sent and not answered yet; none after a chunk.
        at_most: An upper bound where `expected` is not known yet.
        note: What a learner has reached that computes between queries.
    """

    stage: str
    asked: int
    expected: int | None
    seconds: float
    under_way: int = 0
    at_most: int | None = None
    note: str = ""


def recover(
    box: Any,
    learner: Learner | str | None = None,
    *,
    budget: int | None = None,
    journal: str | Path | None = None,
    seed: int = 0,
    verify: bool = True,
    fresh: int = FRESH,
    progress: Callable[[Progress], None] | None = None,
    throw: bool = True,
) -> Recovery:
    """Recovers the model behind a box and says whether it *is* the box.

    Args:
        box: Anything that `open_oracle` takes: a callable, a torch module, a file, an address.
        learner: What to assume of the box, as in `MultiHead()` or "multi-head"; None finds out
            (`Auto`).
        budget: Queries that may be asked, at most, those of the verification included.
        journal: A file that keeps every answer; the same call with it continues a run that was
            stopped, and pays for nothing twice.
        seed: The same seed asks the same queries.
        verify: Whether the model is compared with all answers and with fresh ones at the end.
        fresh: Fresh queries of the verification: 59 that agree leave, with 95% confidence, at most
            5% of ordinary queries that are answered differently, 299 leave 1%.
        progress: Called with a `Progress` before and after every chunk of queries.
        throw: Whether every outcome but RECOVERED (and UNVERIFIED) raises the error that says why;
            the error carries the unfinished `recovery`. If not, look at `recovery.outcome`.

    Returns:
        The outcome, the model, its standard errors, the verdict and the ledger of all queries.

    Raises:
        InvalidArgument: An argument that cannot be right; nothing was asked.
        WrongFamily: REJECTED, with a counterexample: the box is something else.
        Unsupported: UNSUPPORTED: the box was recognised, and there is no learner for it.
        NotIdentifiable: NOT_IDENTIFIABLE: no number of queries determines the parameters.
        IllConditioned: ILL_CONDITIONED: the answers determine them too weakly.
        BudgetExhausted: BUDGET_EXHAUSTED.
        Inconsistent: REJECTED: the box changed on the way.
        OracleError: ORACLE_FAILED: the box did not answer.
        Interrupted: INTERRUPTED: Ctrl-C.

    Example:
        >>> import numpy as np, keyhole
        >>> from keyhole.models.random import attention
        >>> secret = attention(np.random.default_rng(0), 6)
        >>> found = recover(secret, keyhole.SingleHead())
        >>> found.outcome, keyhole.distance(found.model, secret) < 1e-13
        (Outcome.RECOVERED, True)
    """
    learner = "auto" if learner is None else learner
    if isinstance(learner, str):
        learner = make_learner(learner)
    if isinstance(learner, type) or not isinstance(learner, Learner):
        raise InvalidArgument(f"learner must be a learner such as SingleHead(), got {learner!r}")
    if budget is not None:
        budget = whole_number("budget", budget, 1)
    seed, fresh = whole_number("seed", seed, 0), whole_number("fresh", fresh, 1)
    with opened(box) as oracle:
        run = _Run(oracle, learner, budget, journal, seed, progress, fresh if verify else None)
        try:
            recovery, error = run.finish()
        finally:
            run.close()
    if error is not None:
        error.recovery = recovery
        if throw:
            raise error
    return recovery


class _Run:
    """The wrapped box and what is known of the run when it stops."""

    def __init__(
        self,
        box: Oracle,
        learner: Learner,
        budget: int | None,
        journal: str | Path | None,
        seed: int,
        progress: Callable[[Progress], None] | None,
        fresh: int | None,
    ) -> None:
        if box.spec.domain.bias is not None:
            refuse_closed(box)
        # of a restricted interface the questions are checked, recorded and counted
        reader = box if isinstance(box, Reader) else None
        self.learner, self.seed, self.spec = learner, seed, box.spec
        self.check, self.fresh = fresh is not None, fresh or 0
        self.box = Validator(box if reader is None else reader.inner)
        self.budget = budget
        self.start = time.monotonic()
        inner: Oracle = self.box
        self.journal: Journal | None = None
        if journal is not None:
            header = {
                "box": box.spec.identity,
                "width": box.spec.width,
                "learner": repr(learner),
                "seed": seed,
            }
            self.journal = Journal(inner, journal, header)
            inner = self.journal

        self.counting = QueryCounter(inner, budget)
        if progress is not None:
            self._report(progress)
        self.watch = DriftWatch(self.counting, first=FIRST, roundoff=roundoff_seen)
        self.oracle = AnswerRecord(Batcher(self.watch))
        self.reader = None if reader is None else reader.over(self.oracle)
        self.within = Within(self.oracle)
        self.exchanges = self._count_exchanges()
        self.learned: Hypothesis | None = None
        self.verdict: Verdict | None = None
        self.decisions = Tally()

    def _report(self, progress: Callable[[Progress], None]) -> None:
        """Lets the counter tell how far the run has come."""

        def tell(stage: str, asked: int, under_way: int = 0, note: str = "") -> None:
            seconds, ends = time.monotonic() - self.start, self._forecast()
            progress(Progress(stage, asked, ends.expected, seconds, under_way, ends.at_most, note))

        def opening(stage: str, count: int) -> None:
            tell(stage, self.counting.paid, count)

        def noting(words: str) -> None:
            tell("fit", self.counting.paid, note=words)

        self.counting.listener, self.counting.opening = tell, opening
        self.counting.noting = noting

    def _forecast(self) -> Forecast:
        """What the learner expects, corrected on the way, and the queries of the verification."""
        seen = replace(self.spec, outputs=self.counting.outputs)
        told = self.counting.forecast or Forecast(self.learner.expected_queries(seen))

        def add_verification(learning: int) -> int:  # and one old query again
            return learning + self._count_fresh() + 1 if self.check else learning

        least = add_verification(self.counting.paid)
        expected, most = (
            None if n is None else add_verification(n) for n in (told.expected, told.at_most)
        )
        if expected is None and most is not None and most <= 1.6 * least:
            expected = min((least + most) // 2, int(1.25 * least))  # within 25% wherever it ends
        return Forecast(expected, most)

    @property
    def asked(self) -> Oracle:
        """What the learner asks, within the limits that were found."""
        return self.reader or self.within

    def _count_exchanges(self) -> int:
        """Requests to endpoints so far."""
        traffic = [getattr(sender, "traffic", None) for sender in senders(self.box)]
        return sum(one.exchanges for one in traffic if one is not None)

    def close(self) -> None:
        """Frees the journal; the box itself belongs to whoever opened it."""
        self.counting.release()
        if self.journal is not None:
            self.journal.release()

    def finish(self) -> tuple[Recovery, KeyholeError | None]:
        with record_decisions() as self.decisions:
            return self._finish()

    def _finish(self) -> tuple[Recovery, KeyholeError | None]:
        error: KeyholeError | None = None
        outcome, reason = Outcome.UNVERIFIED, ""
        try:
            self.learned = self._search()
            self.counting.expect(0)
            if self.learned.shortfall:
                error = IllConditioned(self.learned.shortfall)
            elif self.check:
                outcome, reason, error = self._compare(self.learned)
            self._same_box()
        except KeyboardInterrupt:
            error = Interrupted(
                f"stopped after {self.counting.paid} queries; {CONTINUE[self.journal is not None]}"
            )
        except (ArithmeticError, np.linalg.LinAlgError, NotFinite, ImpossibleModel) as broken:
            error = IllConditioned.after(broken)
        except KeyholeError as raised:
            if not any(isinstance(raised, kind) for kind in OUTCOMES):
                raise
            error = raised
        if error is not None:
            error = self._drift(error) or self._excuse(error) or error
            outcome = next(o for kind, o in OUTCOMES.items() if isinstance(error, kind))
            reason = str(error)
            self._explain(error)
        return self._recovery(outcome, reason, error), error

    def _compare(self, learned: Hypothesis) -> tuple[Outcome, str, KeyholeError | None]:
        """What the verification came to, and the error that this is, if it is one."""
        outcome, reason = self._judge(learned)
        if outcome is Outcome.REJECTED and not is_by_algebra(learned.model):
            outcome, reason = self._reconsider(learned, reason)
        if outcome is Outcome.REJECTED:
            return outcome, reason, self._disagreement(reason)
        if outcome is Outcome.ILL_CONDITIONED:
            return outcome, reason, IllConditioned(reason)
        return outcome, reason, None

    def _search(self) -> Hypothesis:
        """The learner's hypothesis. A search that came to none but models which answers contradict
        refutes the box only if a second one, with queries of its own, does so too."""
        try:
            return self._learn()
        except WrongFamily as refuted:
            if not refuted.searched or self._few_digits():
                raise
            try:
                return self._learn("second search")
            except WrongFamily as again:
                raise (again if again.counterexample is None else refuted) from None

    def _learn(self, stream: str = "learning") -> Hypothesis:
        """The learner's hypothesis; where the box refuses a query for its length or the size of its
        tokens, the learner starts again within these limits."""
        while True:
            try:
                learned = self.learner.learn(self.asked, random_stream(self.seed, stream))
                break
            except OracleError:
                narrower = self.within.narrow(random_stream(self.seed, "limits"))
                if narrower is None:
                    raise
                self.within = narrower
            except DomainError as beyond:
                raise Unsupported(
                    f"the learner needs queries beyond the declared domain: {beyond}. Declare a "
                    "wider one, if the box takes it"
                ) from beyond
        told = tell_limits(self.spec.domain, self.asked.spec.domain)
        return replace(learned, notes=(*learned.notes, *told))

    def _judge(self, learned: Hypothesis) -> tuple[Outcome, str]:
        verdict = self._verify(learned)
        if verdict is None:
            return Outcome.UNVERIFIED, "the budget left too few queries for verification"
        self.verdict, example = verdict, verdict.counterexample
        if not is_by_algebra(learned.model) and explains_little(verdict):
            return Outcome.ILL_CONDITIONED, (
                f"the model that was fitted contradicts {verdict.contradicted:,} of "
                f"{verdict.replayed:,} answers that it was made from: the search ended in a "
                "wrong place, or the box is something else. Another seed, a learner that is told "
                "the family, or more digits may help"
            )
        if example is not None and not learned.refutes and example.reason != REASON:
            return Outcome.ILL_CONDITIONED, (
                f"the model explains the answers that it was fitted to; others differ by up to "
                f"{verdict.difference:.1e} of their size ({example.reason}). The model is "
                "there, and predicts that well. More seconds, starts or another seed may help"
            )
        if example is not None:
            return Outcome.REJECTED, f"box and model differ on {example.reason}"
        loose = loosest(learned)
        if loose > USELESS:
            return Outcome.ILL_CONDITIONED, (
                f"the standard error of some parameter block is {loose:.0%} of the block itself"
            )
        if not verdict.agrees:
            return Outcome.UNVERIFIED, verdict.bound
        if verdict.tolerance >= 1.0:
            return Outcome.ILL_CONDITIONED, (
                "noise and the standard errors of the parameters let ordinary answers differ by "
                f"{verdict.tolerance:.2g} times their size: agreement within that says nothing"
            )
        return Outcome.RECOVERED, ""

    def _verify(self, learned: Hypothesis) -> Verdict | None:
        """The model against past answers and as many fresh ones as the budget leaves; None where
        these are too few."""
        left = self.asked.remaining
        known = learned.noise or self.box.spec.precision
        spare = 1 if known else 1 + LOOKS  # an old query again, and the noise where it is not known
        wanted = self._count_fresh()
        count = wanted if left is None else min(wanted, left - spare)
        least_queries = min(4, wanted)  # below which a model counts as not verified
        if count < least_queries:
            return None
        try:
            if self.reader is not None:  # past answers are no log-probabilities: look here
                self.watch.look()
            asked, model, errors = self._spare_questions(learned)
            past = self.oracle.past if self.reader is None else []
            self.oracle.stop()
            return verify_model(
                asked,
                model,
                errors=errors,
                queries=count,
                seed=self.seed,
                past=past,
                precision=learned.noise,
            )
        except BudgetExhausted:  # the precision of the box was not known, and had to be measured
            return None

    def _reconsider(self, learned: Hypothesis, reason: str) -> tuple[Outcome, str]:
        """A search may end in a wrong place. A model that was searched for refutes the box only if
        a second search, with queries of its own, ends in the same one; a box that contradicts
        itself needs none."""
        assert self.verdict is not None
        example = self.verdict.counterexample
        if example is None or example.reason == REASON or self._few_digits():
            return Outcome.REJECTED, reason
        same_place = 0.01  # relative distance of two models; searches that part end far apart
        try:
            again = self._learn("second search")
        except (WrongFamily, *SEARCHING) as failed:
            ended = f"a second search came to none ({failed})"
        else:
            apart = find_distance(learned.model, again.model)
            if apart <= same_place:
                return Outcome.REJECTED, reason
            ended = f"a second search came to another, {apart:.1g} apart"
        return Outcome.ILL_CONDITIONED, (
            f"{reason}; but {ended}: the box is something else, or a search ended in a wrong "
            "place. Another seed, or a learner that is told more, may help"
        )

    def _spare_questions(self, learned: Hypothesis) -> tuple[Oracle, Any, Any]:
        """What is asked and compared for a verdict. An answer that takes several questions is read
        for fewer tokens, more than the hidden state has numbers."""
        if self.reader is None or not isinstance(learned.model, OutputLayer):
            return self.asked, learned.model, learned.errors
        rng = random_stream(self.seed, "chosen tokens")
        reader = choose_for_check(self.reader, learned.model.matrix, rng)
        if reader.chosen is None or self.reader.chosen is not None:
            return self.asked, learned.model, learned.errors
        errors: Any = learned.errors
        if isinstance(errors, OutputLayer):
            rows = np.asarray(reader.chosen)
            errors = OutputLayer(errors.matrix[rows], errors.offset[rows], level=errors.level)
        return reader, learned.model.choose(reader.chosen), errors

    def _count_fresh(self) -> int:
        """Fresh queries that verify. Through a restricted interface, where each takes many
        questions, six at most."""
        questions = 6
        return self.fresh if self.reader is None else min(self.fresh, questions)

    def _disagreement(self, reason: str) -> KeyholeError:
        example = self.verdict.counterexample if self.verdict else None
        if example is not None and example.reason == REASON:
            return Inconsistent(CHANGED, example)
        return WrongFamily(reason, example)

    def _drift(self, error: KeyholeError) -> Inconsistent | None:
        """A box that changed on the way looks like one of another family: before that is said,
        old queries of every kind are asked again. (Not after a failure that a journal can
        continue from: the run that continues would not ask them here.)"""
        if not isinstance(error, BLAMED) or (self.verdict is not None and self.verdict.agrees):
            return None
        left = self.counting.remaining
        count = KEPT if left is None else min(KEPT, left)
        try:
            self.watch.look(count, self._precision)
        except Inconsistent as found:
            found.__cause__ = error
            return found
        except (OracleError, BudgetExhausted, KeyboardInterrupt):
            return None  # what was found out already stands
        return None

    def _excuse(self, error: KeyholeError) -> IllConditioned | None:
        """A box is refused for an answer that no member of the family gives. A stage that found
        less than it hoped for shows none; and a hypothesis from answers with few digits may be far
        off: it is refuted only if the answers contradict each other."""
        if not isinstance(error, WrongFamily) or error.certain or error.stated:
            return None
        if error.counterexample is None:
            excuse = (
                "But no single answer contradicts the family: the box is something else, or a "
                "member whose answers show too little of it. Another seed may help"
            )
        elif self._few_digits():
            excuse = (
                "But the answers are too coarse to refuse the box for that: one of the family may "
                "look like this when it answers with few digits or noise. Ask for more digits, or "
                "average answers"
            )
        else:
            return None
        excused = IllConditioned(f"{error}. {excuse}")
        excused.findings, excused.family = error.findings, error.family
        excused.__cause__ = error
        return excused

    def _few_digits(self) -> bool:
        """Whether answers are noisy, rounded, or shorter than single precision (labels apart)."""
        past = [np.ravel(answers) for _, answers in self.oracle.past]
        if self.watch.labels or self.reader is not None or not past:
            return False
        if self.box.spec.precision is not None:  # stated by whoever opened the box
            return self.box.spec.precision.low_precision
        if self._precision is not None and self._precision.low_precision:
            return True
        numbers = np.concatenate(past)
        known = recognise_format(noise_of_type(None, past[0]), numbers)
        # large numbers have few decimals anyway
        plain = numbers[(numbers != 0) & (np.abs(numbers) < 1e3)]
        return self.watch.noisy or known.low_precision or bool(len(plain) and decimal_step(plain))

    def _explain(self, error: KeyholeError) -> None:
        """The verdict of a run that was rejected before it came to one, or for another reason."""
        if isinstance(error, Inconsistent):
            bound = "The box changed on the way: it answers an old query differently."
        elif isinstance(error, WrongFamily) and self.verdict is None:
            bound = "The learner met an answer that no model of its family can give."
        else:
            return
        known = self.verdict or Verdict(False, 0, 0, float("inf"), 0.0, bound)
        self.verdict = replace(
            known,
            agrees=False,
            worst=float("inf"),
            bound=bound,
            counterexample=error.counterexample,
        )

    def _same_box(self) -> None:
        """A run that was answered by the journal alone asks the box one of its queries; where
        answers are labels, of which one tells nothing, a few."""
        if self.journal is None or self.journal.asked:
            return
        self.journal.live = True
        try:
            self.watch.look(KEPT if self.watch.labels else 1, self._precision, fresh=True)
        except BudgetExhausted:
            return  # what is on file stands
        except Inconsistent as found:
            raise JournalMismatch(
                f"{self.journal.path} holds the answers of another box: asked again, this box "
                "answers differently. Name another journal"
            ) from found
        finally:
            self.journal.live = False

    def _recovery(self, outcome: Outcome, reason: str, error: KeyholeError | None) -> Recovery:
        learned, diagnostics = self.learned, RunDiagnostics.of(self.decisions)
        ledger = Ledger(
            self.counting.by_purpose,
            None if learned is None else learned.floor,
            self.box.opening_replayed + (0 if self.journal is None else self.journal.replayed),
            self.counting.repeats.spent,
            self._count_exchanges() - self.exchanges,
            self.counting.prompt_tokens,
        )
        if learned is None:
            notes = () if error is None else error.findings
            family = None if error is None else error.family
            details = {} if family is None else {"family": family}
            return Recovery(
                outcome, None, None, self.verdict, ledger, reason, notes, details, self._how(),
                diagnostics=diagnostics,
            )  # fmt: skip
        return Recovery(
            outcome,
            learned.model,
            learned.errors,
            self.verdict,
            ledger,
            reason,
            learned.report_notes(),
            learned.report_details(),
            self._how(),
            None
            if self.reader is not None
            else traced(learned.model, self.oracle.kept, self.oracle.total),
            diagnostics,
        )

    @property
    def _precision(self) -> NoiseModel | None:
        """Of the box, as far as it was measured or stated."""
        return (self.learned and self.learned.noise) or self.box.spec.precision

    def _how(self) -> dict[str, Any]:
        """What was run, and what was stated or measured about the box."""
        spec, precision = self.asked.spec, self._precision
        domain = {name: part for name, part in vars(spec.domain).items() if np.isscalar(part)}
        return {
            "version": __version__,
            "box": spec.identity,
            "width": spec.width,
            "domain": domain,
            "learner": repr(self.learner),
            "seed": self.seed,
            "budget": self.budget,
            "journal": None if self.journal is None else str(self.journal.path),
            "seconds": round(time.monotonic() - self.start, 3),
            "precision": None if precision is None else vars(precision),
        }


def find_distance(first: Any, second: Any) -> float:
    """Between two models, beyond all bounds where they are built differently."""
    try:
        return distance(first, second)
    except KeyholeError:
        return float("inf")


def is_by_algebra(model: Any) -> bool:
    """Whether the answers of a box of the family leave no choice: one head, or the space that
    logits lie in. All else is searched for, and a search may end in a wrong place."""
    one_head = isinstance(model, Attention) and len(model.heads) == 1
    return one_head or hasattr(model, "nearest")


def explains_little(verdict: Verdict) -> bool:
    """Whether the model does not even explain what it was made from, although the box stands by its
    answers: then it says nothing about the box."""
    example, many = verdict.counterexample, 0.05  # share of the answers
    old = example is not None and example.reason == OLD
    return old and verdict.contradicted > many * verdict.replayed


def roundoff_seen(answers: Array) -> float:
    """Unit roundoff of the number format that the answers belong to."""
    return recognise_format(noise_of_type(None, answers), answers).relative


ADDED = ("bias", "offset", "skip", "linear")  # ends of the names of blocks that may well be zero


def loosest(learned: Hypothesis) -> float:
    """Largest standard error of a parameter block relative to the block (Frobenius norms). What is
    added to something else may be zero, and any error is large beside that: such a block is judged
    by what its errors do to ordinary answers, relative to these."""
    if learned.errors is None:
        return 0.0
    errors, worst = learned.errors.to_arrays(), 0.0
    parameters = multiply_out_scores(learned.model.to_arrays(), errors)
    for name, array in parameters.items():
        if name.endswith("score_right") or name not in errors:
            continue
        if name.endswith("score_left"):  # a product in factors: compare the products
            other = name.removesuffix("left") + "right"
            size = product_norm(array, parameters[other])
            error = product_norm(errors[name], errors[other])
        else:
            size, error = float(np.linalg.norm(array)), float(np.linalg.norm(errors[name]))
        if size > 0 and error > worst * size:
            doubt = error / size
            if name.endswith(ADDED) and not takes_numbers(learned.model):
                doubt = min(doubt, move_answers(learned.model, name, errors[name]))
            worst = max(worst, doubt)
    return worst


def move_answers(model: Any, name: str, errors: Array) -> float:
    """How far answers to ordinary queries move with one block by its standard errors, relative to
    their scatter."""
    rng = np.random.default_rng(0)
    natural = natural_length(model, model.width)
    tokens = natural / np.sqrt(model.width) * rng.standard_normal((8, 3, model.width))
    moved = model.to_arrays()[name] + errors * rng.choice([-1.0, 1.0], np.shape(errors))
    answers = np.asarray(model(tokens))
    change = np.asarray(replace_parameters(model, {name: moved})(tokens)) - answers
    scatter = float(np.linalg.norm(answers - answers.mean(axis=0)))
    return float(np.linalg.norm(change)) / max(scatter, TINY)


# -- Labelled examples ---------------------------------------------------------------------------


def learn(
    X: Any,
    Y: Any,
    learner: "FromExamples | None" = None,
    *,
    seed: int = 0,
    throw: bool = True,
    mask: Any = None,
    progress: "Callable[[SearchProgress], None] | None" = None,
) -> Recovery:
    """Learns the layer behind labelled examples and says whether it explains them.

    Args:
        X: Inputs (n, k, d), or a list of (length, d), or padded with a `mask`.
        Y: Labels: of every position (n, k, D) or a list of (length, D); of the last position
            (n, D); or one number each (n,).
        learner: How they are fitted; None for `FromExamples()`.
        seed: The same seed starts the same searches.
        throw: Whether every outcome but RECOVERED raises the error that says why; the error
            carries the `recovery`. If not, look at `recovery.outcome`.
        mask: (n, k), true at real tokens, where X is padded.
        progress: Called with what the search has reached.

    Returns:
        The layer, its standard errors, and a verdict from rows that were kept aside.

    Raises:
        InvalidArgument: Examples whose shapes do not fit.
        WrongFamily: The labels do not come from such a layer.
        NotIdentifiable: The examples allow several layers.
        IllConditioned: The examples determine the layer too weakly.
        BudgetExhausted: No fit was settled in the time or restarts allowed.
        Interrupted: Ctrl-C.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((40, 3, 4))
        >>> scores = X @ rng.standard_normal((4, 4)) @ X.transpose(0, 2, 1)
        >>> P = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
        >>> found = learn(X, P @ X @ rng.standard_normal((4, 4)))
        >>> found.outcome, len(found.model.heads)
        (Outcome.RECOVERED, 1)
    """
    from keyhole.learners.examples import FromExamples

    learner = FromExamples() if learner is None else learner
    if not isinstance(learner, FromExamples):
        raise InvalidArgument(f"learner must be FromExamples(...), got {type(learner).__name__}")
    fitted: "Fitted | None" = None
    verdict: Verdict | None = None
    error: KeyholeError | None
    try:
        rng = random_stream(whole_number("seed", seed, 0), "examples")
        fitted = learner.fit(X, Y, rng, mask=mask, progress=progress)
        verdict = judge_fit(fitted)
        error = find_fault(fitted, verdict)
    except KeyboardInterrupt:
        error = Interrupted("stopped before a fit was settled; run again, or allow fewer seconds")
    except (ArithmeticError, np.linalg.LinAlgError, NotFinite) as broken:
        error = IllConditioned.after(broken)
    except tuple(OUTCOMES) as raised:
        error = raised
    recovery = _build_recovery(fitted, verdict, error)
    if error is not None:
        error.recovery = recovery
        if throw:
            raise error
    return recovery


def judge_fit(fitted: "Fitted") -> Verdict:
    """The rows kept aside against the fit to the others."""
    held = fitted.held_out
    places = zip(held.example, held.position, strict=True)
    return held_out_verdict(
        HeldOutAnswers(
            inputs=[_build_query(fitted, int(i), int(j)) for i, j in places],
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


def _build_query(fitted: "Fitted", example: int, position: int) -> Array:
    """The example's tokens with the row's anchor last, where an `Attention` reads it."""
    rows = fitted.data.rows
    tokens = rows.tokens[example, : rows.lengths[example]]
    if fitted.data.form != "every":
        return tokens
    order = [i for i in range(len(tokens)) if i != position]
    return tokens[[*order, position]]


def find_fault(fitted: "Fitted", verdict: Verdict) -> KeyholeError | None:
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
    # a block is not known if its error is a third of it, or if rounding alone decides about it
    if weak > 0.3 or found.amplification > 1e6:
        return IllConditioned(
            f"some block of parameters has a standard error of {weak:.1e} of itself (relative "
            f"errors of the labels are amplified {found.amplification:.1e} times)"
        )
    return None


def _explain_misfit(found: "ExamplesDiagnostics", verdict: Verdict) -> KeyholeError:
    """The labels are not reproduced: another family, or a search that was stuck."""
    if found.ending != "spent":
        return WrongFamily(verdict.bound, verdict.counterexample)
    # near the floor most searches fail, and a search of a few starts says little
    if found.ratio_least < 1.5 or found.restarts < TELLING_STARTS:
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


def _build_recovery(
    fitted: "Fitted | None", verdict: Verdict | None, error: KeyholeError | None
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
