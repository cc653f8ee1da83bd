"""A Python callable on (batch, length, width) as an oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import OracleError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class FunctionOracle(Oracle):
    """Asks `function(tokens)`; whatever it raises becomes an `OracleError`."""

    function: Callable[[Array], Any]
    spec: Spec

    def ask(self, queries: QueryBatch) -> Array:
        try:
            return np.asarray(self.function(queries.tokens()))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            raise OracleError(
                f"the box raised {type(error).__name__} on {len(queries)} queries of length "
                f"{queries.length}: {str(error).strip() or 'without a word'}"
            ) from error
