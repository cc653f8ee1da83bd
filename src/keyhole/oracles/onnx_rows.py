"""An ONNX file that takes token numbers, as a box of rows: what embedding models are exported to.

Inputs are known by their names: `input_ids`, and where the file has them `attention_mask`,
`token_type_ids` and `position_ids`. An output of one vector a row is the answer; of an output at
every position, the answer is made as the reference's folder says.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.onnx import open_session
from keyhole.oracles.rows import NUMBERS, Row, RowBox, RowSpec, check_row_answers, pad_rows

KNOWN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


class OnnxRows(RowBox):
    """Asks a session rows of token numbers, padded at the end."""

    def __init__(self, session: Any, spec: RowSpec, output: str, reading: Any) -> None:
        self.session, self.spec, self.output = session, spec, output
        self.reading_of_states = reading
        self.inputs = {given.name: given.type for given in session.get_inputs()}

    def ask(self, rows: Sequence[Row]) -> Array:
        tokens, mask = pad_rows(rows)
        every = {
            "input_ids": tokens,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(tokens),
            "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
        }
        fed = {
            name: every[name].astype(np.int32 if "int32" in kind else np.int64)
            for name, kind in self.inputs.items()
        }
        try:
            (answers,) = self.session.run([self.output], fed)
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise OracleError(
                f"{self.spec.identity} failed on token numbers of shape {tokens.shape}: "
                f"{str(error)[:500]}"
            ) from error
        if answers.ndim == 3:
            answers = self._read(answers, mask)
        return check_row_answers(answers, len(rows), self.spec.identity)

    def _read(self, states: Array, mask: Array) -> Array:
        if self.reading_of_states is None:
            raise OracleError(
                f"{self.spec.identity} answers at every position: export it with its pooling, or "
                "compare it with a folder that says how one vector is made of them"
            )
        import torch

        with torch.inference_mode():
            read = self.reading_of_states.read(torch.from_numpy(states), torch.from_numpy(mask))
            return np.asarray(read)


def open_onnx_rows(
    path: str | Path,
    *,
    tokens: int | None = None,
    max_length: int | None = None,
    reading: Any = None,
) -> OnnxRows:
    """The embedding model in a `.onnx` file.

    Args:
        path: The file.
        tokens: Size of its vocabulary, which the file does not say.
        max_length: Tokens of its longest row.
        reading: How one vector is made of states, where the file answers at every position.

    Raises:
        InvalidArgument: The file takes something else than token numbers.
    """
    path = Path(path).resolve()
    session = open_session(path)
    names = [given.name for given in session.get_inputs()]
    strange = [name for name in names if name not in KNOWN]
    if strange or KNOWN[0] not in names:
        raise InvalidArgument(
            f"{path} takes {', '.join(names)}; a file on token numbers takes {KNOWN[0]} and of "
            f"{', '.join(KNOWN[1:])} what it needs"
        )
    outputs = session.get_outputs()
    # the vector of a row, where the file has one beside its states
    vectors = [found for found in outputs if len(found.shape) == 2]
    chosen = next((v for v in vectors if v.name != "pooler_output"), outputs[0]).name
    name = f"{path.name}:{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}"
    return OnnxRows(session, RowSpec((NUMBERS,), name, tokens, max_length), chosen, reading)
