"""The network inside a Transformer layer as an oracle: sequences of length one.

A single token attends to itself with weight one, so f([x]) is the network at x, whatever the
attention. Longer questions are refused: they would not be answered by the network alone.
"""

from dataclasses import dataclass, replace

from keyhole.arrays import Array
from keyhole.errors import DomainError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import Questions


@dataclass(frozen=True, eq=False)
class SingleToken(Oracle):
    """The box, limited to questions of length one."""

    inner: Oracle

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        return replace(spec, domain=replace(spec.domain, max_length=1))

    def ask(self, questions: Questions) -> Array:
        if questions.length != 1:
            raise DomainError(
                f"the network alone answers questions of length 1, not {questions.length}"
            )
        return self.inner.ask(questions)

    def close(self) -> None:
        self.inner.close()
