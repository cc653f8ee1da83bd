"""A Python callable on (batch, length, width) as an oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import OracleError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import Questions


@dataclass(frozen=True, eq=False)
class FunctionOracle(Oracle):
    """Asks `function(tokens)`; whatever it raises becomes an `OracleError`."""

    function: Callable[[Array], Any]
    spec: Spec

    def ask(self, questions: Questions) -> Array:
        try:
            return np.asarray(self.function(questions.tokens()))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            raise OracleError(
                f"the box raised {type(error).__name__} on {len(questions)} questions of length "
                f"{questions.length}: {str(error).strip() or 'without a word'}"
            ) from error
