"""A whole model block by block, where the inside can be asked.

Every block of a local `transformers` folder is a box of its own: it is asked in place and recovered
with a journal of its own, several at a time where there are processes for it. A block whose run is
saved is not asked again, and one that was stopped half way continues from its journal, so that the
same command, typed again after any kind of end, pays for no query twice. At the end the
whole model answers with the found blocks in the places of its own.
"""

import html
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array, whole_number
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.models.block import Block
from keyhole.models.stack import Stack, answer_everywhere
from keyhole.oracles.hugging_face import load_folder, own_class
from keyhole.oracles.noise import DETECTION
from keyhole.processes import end_with_parent
from keyhole.recovery import Progress, recover
from keyhole.report.builder import Page, Row, Section, Table, write_page
from keyhole.results import RUN_FILE, Outcome, Recovery, load
from keyhole.targets import FOLDER

ROWS, LENGTH = 8, 12  # of token numbers at which the whole model is compared


@dataclass(frozen=True)
class Agreement:
    """How the whole model answers with the found blocks in the places of its own.

    Attributes:
        largest: Difference of any number of its answers, which are logits where it has them.
        spread: Of its own answers, root mean square.
    """

    largest: float
    spread: float

    def __str__(self) -> str:
        return (
            f"with these blocks in the model its answers move by at most {self.largest:.1e} "
            f"(their spread is {self.spread:.1e})"
        )


@dataclass(frozen=True, eq=False)
class Layers:
    """What was found in each block, in order.

    Attributes:
        names: Of the parts that were asked.
        runs: A recovery for each of them.
        agreement: Of the whole model with the blocks that were found; None for parts of blocks,
            and where a block was not found, or the model does not read token numbers.
    """

    names: tuple[str, ...]
    runs: tuple[Recovery, ...]
    agreement: Agreement | None = None

    @property
    def recovered(self) -> bool:
        return all(run.outcome is Outcome.RECOVERED for run in self.runs)

    @property
    def complete(self) -> bool:
        """Whether each part was recovered, or has a model that predicts it."""
        return all(run.outcome is Outcome.RECOVERED or predicts(run) for run in self.runs)

    @property
    def paid(self) -> int:
        return sum(run.ledger.paid for run in self.runs)

    def to_stack(self, *, causal: bool = False) -> Stack:
        """The blocks as one model; of whole blocks only."""
        return Stack(blocks_of(self.runs), causal=causal)

    def __str__(self) -> str:
        lines = [f"{name}: {run}" for name, run in zip(self.names, self.runs, strict=True)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = (
            (name, run.outcome.name, f"{run.ledger.paid:,}", repr(run.model), run.reason)
            for name, run in zip(self.names, self.runs, strict=True)
        )
        head = "".join(f"<th>{n}</th>" for n in ("part", "outcome", "queries", "model", "reason"))
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in cells
        )
        return f"<table><tr>{head}</tr>{rows}</table>"


def predicts(run: Recovery) -> bool:
    """Whether a run that recovered no parameters has a model that predicts its box."""
    return run.model is not None and "predicts" in run.details


def blocks_of(runs: Sequence[Recovery]) -> list[Block]:
    """The blocks that were found, in order; raises InvalidArgument where one was not."""
    blocks: list[Block] = []
    for model in (run.model for run in runs):
        one = isinstance(model, Stack) and model.final_norm is None and model.positions is None
        if not (one or isinstance(model, Block)):
            raise InvalidArgument("a stack needs whole blocks; not all of these were recovered")
        blocks += model.blocks if isinstance(model, Stack) else [model]
    return blocks


def recover_layers(
    target: str,
    out: str | Path,
    *,
    part: str = "",
    learner: str = "block",
    dtype: str | None = None,
    processes: int = 1,
    seed: int = 0,
    progress: Callable[[str, Recovery], None] | None = None,
    asking: Callable[[Progress], None] | None = None,
) -> Layers:
    """Recovers every block of the model in hf:FOLDER, or the same part of each.

    Args:
        target: `hf:FOLDER`, a folder that `save_pretrained` wrote.
        out: Folder for run, journal and report of each block; what is there already is not asked
            again.
        part: Part of each block, as in "attention.self"; empty for whole blocks.
        learner: Name of the learner.
        dtype: Number format to compute in, as in "float64".
        processes: Blocks that are recovered at a time.
        seed: The same seed asks the same queries.
        progress: Called with the name and the recovery of each block.
        asking: Called with a `Progress` of the block under way, where one is at a time.

    Returns:
        The recoveries by name, and what is put together from them.

    Raises:
        InvalidArgument: Not hf:FOLDER, or a model without a list of blocks.
        FileFormatError: A folder without a model.
        MissingExtra: torch or transformers is not installed.

    Example:
        >>> recover_layers("my-bert", "runs")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        keyhole.errors.InvalidArgument: blocks are those of a transformers folder, ...
    """
    if not target.startswith(FOLDER):
        raise InvalidArgument(f"blocks are those of a transformers folder, hf:FOLDER; got {target}")
    whole_number("processes", processes, 1)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    folder = target.removeprefix(FOLDER)
    names = name_parts(load_folder(folder), part)
    tasks = [_Task(f"{target}#{name}", str(out / name), learner, dtype, seed) for name in names]
    runs: dict[str, Recovery] = {}
    for task, run in _finish(tasks, processes, asking):
        runs[task.place] = run
        if progress is not None:
            progress(Path(task.place).name, run)
    found = tuple(runs[task.place] for task in tasks)
    agreement = None if part else put_back(folder, names, found, dtype, seed)
    layers = Layers(tuple(names), found, agreement)
    _write_page(layers, out)
    return layers


def name_parts(model: Any, part: str) -> list[str]:
    """The dotted names of all blocks, or of one part of each: the entries of the longest list."""
    lists: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "ModuleList" and len(module):
            lists[name] = [f"{name}.{number}" for number in range(len(module))]
    blocks = max(lists.values(), key=len, default=[])
    if not blocks:
        raise InvalidArgument(f"{type(model).__name__} has no list of blocks")
    return [f"{block}.{part}" if part else block for block in blocks]


def put_back(
    folder: str, names: Sequence[str], runs: Sequence[Recovery], dtype: str | None, seed: int
) -> Agreement | None:
    """The whole model's answers to random rows of token numbers, with its own blocks and with those
    that were found; None where there is nothing to put back, or to ask."""
    try:
        blocks = blocks_of(runs)
    except InvalidArgument:
        return None
    model = load_folder(folder, own_class(folder))
    words = getattr(model.config, "vocab_size", None)
    if len(blocks) != len(names) or words is None or model.main_input_name != "input_ids":
        return None
    import torch

    if dtype is not None:
        model.to(getattr(torch, dtype))
    rows = np.random.default_rng(seed).integers(words, size=(ROWS, LENGTH))

    def answer(rows: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model(input_ids=torch.as_tensor(rows))[0].double().numpy())

    own, later = answer(rows), rows.copy()
    later[:, -1] = (later[:, -1] + 1) % words
    # a causal model's answers at a place do not depend on what comes later
    rounding = float(torch.finfo(model.dtype).eps) * np.abs(own).max()
    causal = bool(np.abs(answer(later) - own)[:, :-1].max() <= DETECTION * rounding)

    def in_place(block: Block) -> Callable[..., Any]:
        def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any], answer: Any) -> Any:
            tokens = given[0] if given else named["hidden_states"]
            found = answer_everywhere(block, tokens.double().numpy(), causal)
            stream = torch.as_tensor(found).to(tokens)
            return (stream, *answer[1:]) if isinstance(answer, tuple) else stream

        return hook

    for name, block in zip(names, blocks, strict=True):
        part = model.base_model.get_submodule(name)
        part.register_forward_hook(in_place(block), with_kwargs=True)
    spread = own - own.mean(axis=(0, 1))
    return Agreement(float(np.abs(answer(rows) - own).max()), float(np.sqrt(np.mean(spread**2))))


@dataclass(frozen=True)
class _Task:
    """One part: what is asked, where its run is kept, and how it is learned."""

    target: str
    place: str
    learner: str
    dtype: str | None
    seed: int


def _finish(
    tasks: list[_Task], processes: int, asking: Callable[[Progress], None] | None
) -> Iterator[tuple[_Task, Recovery]]:
    """The runs as they end; those that are saved come first."""
    waiting = []
    for task in tasks:
        saved = _saved(task)
        if saved is None:
            waiting.append(task)
        else:
            yield task, saved
    if processes == 1 or len(waiting) < 2:
        for task in waiting:
            yield task, _recover_part(task, asking)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
        futures = {pool.submit(_recover_part, task): task for task in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _saved(task: _Task) -> Recovery | None:
    """The run of an earlier call that ended well."""
    if not (Path(task.place) / RUN_FILE).is_file():
        return None
    try:
        run: Recovery = load(task.place)
    except FileFormatError:
        return None  # its journal is still there
    same = run.run.get("seed") == task.seed and run.run.get("part") == task.target
    return run if same and (run.outcome is Outcome.RECOVERED or predicts(run)) else None


def _recover_part(task: _Task, asking: Callable[[Progress], None] | None = None) -> Recovery:
    from dataclasses import replace

    from keyhole.oracles.open import open_oracle
    from keyhole.report.html import write_report

    options: dict[str, Any] = {} if task.dtype is None else {"dtype": task.dtype}
    with open_oracle(task.target, **options) as box:
        run = recover(
            box,
            task.learner,
            journal=f"{task.place}.journal",
            seed=task.seed,
            progress=asking,
            throw=False,
        )
    run = replace(run, run={**run.run, "part": task.target})
    run.save(task.place)
    write_report(run, Path(task.place) / "report.html", task.place)
    return run


def build_page(layers: Layers) -> Page:
    """All parts on one page, each with a link to its own report."""
    good = sum(run.outcome is Outcome.RECOVERED for run in layers.runs)
    fair = sum(predicts(run) for run in layers.runs)
    total = len(layers.runs)
    rows = [
        Row(
            (
                name,
                "predicts" if predicts(run) else run.outcome.name.replace("_", " ").lower(),
                f"{run.ledger.paid:,}",
                "none" if run.model is None else str(run.model),
                run.reason,
            ),
            "good" if run.outcome is Outcome.RECOVERED else "fair" if predicts(run) else "bad",
            f"{name}/report.html",
        )
        for name, run in zip(layers.names, layers.runs, strict=True)
    ]
    table = Table(("part", "outcome", "queries", "model", "reason"), tuple(rows))
    facts = [("Parts", f"{total:,}", ""), ("Queries", f"{layers.paid:,}", "for all of them")]
    if layers.agreement is not None:
        moved = f"{layers.agreement.largest:.1e}"
        facts.append(("Answers move by", moved, "at most, with these blocks in the model"))
    more = f"; {fair} more have a model that predicts" if fair else ""
    return Page(
        f"{good} of {total} parts of the model were recovered{more}.",
        "layers",
        "good" if good == total else "fair" if good + fair else "bad",
        "recovered" if good == total else f"{total - good} not recovered",
        facts=tuple(facts),
        sections=(Section("Parts", table=table),),
    )


def _write_page(layers: Layers, out: Path) -> None:
    write_page(build_page(layers), out / "index.html")
