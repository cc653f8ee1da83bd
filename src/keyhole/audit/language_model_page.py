"""The audit of a language model as a table for the terminal and as one HTML file."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keyhole.audit.language_model import Exposure, LanguageModelAudit, Level
from keyhole.report import builder
from keyhole.results import Outcome

LEVELS = ("width", "space", "geometry")
READ = {  # how an interface is read, in words
    "whole": "as it is",
    "reference": "a reference token beside others, all with the same bias",
    "forced": "each token forced by a bias",
    "race": "tokens raced with biases",
    "closed": "not at all",
}


def state_level(exposure: Exposure, name: str, price: float) -> str:
    """Questions, money and error of one level."""
    level: Level = getattr(exposure, name)
    if not level.reachable:
        return "no number of questions" if exposure.holds else "not known"
    text = f"{'' if level.measured else '≈ '}{level.questions:,.0f}"
    if price > 0:
        text += f" · {state_money(level.money)}"
    return text + (f" · error {level.error:.0e}" if level.error is not None else "")


def state_money(money: float) -> str:
    return f"${money:,.2f}" if money >= 0.01 else f"${money:.1g}"


def state_outcome(exposure: Exposure) -> str:
    """What came of it, in words."""
    outcome = exposure.outcome.lower().replace("_", " ")
    if exposure.found is None:
        return outcome
    return f"width {exposure.found}" + (" found" if outcome == "recovered" else f", {outcome}")


def judge(exposure: Exposure) -> str:
    """The colour of a row: bad where the attack was carried out, good where nothing is told."""
    if exposure.holds:
        return "good"
    return "bad" if exposure.outcome == Outcome.RECOVERED.name else "fair"


def show(audit: LanguageModelAudit) -> RenderableType:
    """One row per interface."""
    table = Table(
        title=f"{audit.box}: {audit.vocabulary:,} tokens, {audit.readings[0]}",
        title_justify="left",
        header_style="bold",
    )
    for name in ("interface", "result", *LEVELS):
        table.add_column(name)
    colours = {"good": "green", "fair": "yellow", "bad": "red"}
    for exposure in audit.exposures:
        levels = [state_level(exposure, name, audit.price) for name in LEVELS]
        result = Text(state_outcome(exposure), style=colours[judge(exposure)])
        table.add_row(exposure.title, result, *levels)
    notes = [
        "Questions (≈: computed, not asked). width: of the hidden state; space: the output matrix "
        "up to a linear map; geometry: up to a rotation.",
        *audit.interface,
    ]
    alarms = [f"Alarm on: {alarm}" for alarm in audit.alarms]
    return Group(
        table,
        *(Text(note, style="dim") for note in notes),
        *(Text(line) for line in alarms),
        *(Text(line, style="bold") for line in audit.advice),
    )


def render(audit: LanguageModelAudit) -> str:
    """The page; whatever the box named is escaped."""
    rows = [
        {
            "title": exposure.title,
            "reading": READ[exposure.reading],
            "result": state_outcome(exposure),
            "kind": judge(exposure),
            "reason": exposure.reason,
            "levels": {name: state_level(exposure, name, audit.price) for name in LEVELS},
        }
        for exposure in audit.exposures
    ]
    open_ = [exposure for exposure in audit.exposures if judge(exposure) == "bad"]
    lead = [f"{audit.vocabulary:,} tokens."]
    if len(audit.readings) > 1:
        lead.append(f"The same functions: {', or '.join(audit.readings)}.")
    if audit.price:
        lead.append(f"Money at {audit.price:g} dollars per million tokens.")
    lead.append(f"The audit took {audit.seconds:.0f} seconds.")
    values = {
        "audit": audit,
        "rows": rows,
        "kind": "audit of a language model",
        "tone": "bad" if open_ else "good",
        "badge": f"{len(open_)} of {len(rows)} interfaces give the width away",
        "title": f"What {audit.box} gives away",
        "headline": f"{audit.box}: {audit.readings[0]}",
        "lead": [" ".join(lead)],
        "facts": [],
    }
    return builder.render("language_model_audit.html", values, script=False)


def write_page(audit: LanguageModelAudit, path: str | Path) -> Path:
    """Writes the page; the file appears whole or not at all."""
    return builder.write(render(audit), path)
