"""Damaged files: models, examples, vocabularies, journals, saved runs and stores of audits.

A good file of every kind is damaged (bits, bytes, lengths, numbers in JSON and SQL) and given to
what reads it: it is read, or refused in a sentence. Whatever else is raised is a finding.
"""

import base64
import contextlib
import copy
import io
import json
import sqlite3
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console

import keyhole
from keyhole.audit.cells import Plan
from keyhole.audit.summary import to_json
from keyhole.audit.sweep import run_audit
from keyhole.cli.target import read_vocabulary
from keyhole.learners.examples import read_examples
from keyhole.models.random import attention
from keyhole.report.html import render
from keyhole.report.terminal import show

WIDTH = 3
KINDS = ("model", "examples", "vocabulary", "journal", "run", "store")
JUNK = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\x1b[31m",
    [],
    {},
    [[1]],
)
PLAN = Plan(protections=("float64",), multiples=(1,), unbounded=False)


def secret():
    return attention(np.random.default_rng(0), WIDTH)


@cache
def good(kind):
    """The bytes of an undamaged file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "vocabulary":
            np.save(folder / "f", np.eye(WIDTH))
            return (folder / "f.npy").read_bytes()
        if kind == "examples":
            rng = np.random.default_rng(0)
            X = rng.standard_normal((20, 2, WIDTH))
            packed = np.savez_compressed if rng.random() < 0.5 else np.savez
            packed(folder / "f", inputs=X, outputs=secret()(X), mask=np.ones((20, 2)))
            return (folder / "f.npz").read_bytes()
        if kind == "store":
            run_audit(secret(), PLAN, store=folder / "f")
            return (folder / "f").read_bytes()
        run = keyhole.recover(secret(), keyhole.SingleHead(), journal=folder / "journal")
        run.save(folder)
        place = {"journal": "journal", "run": "recovery.json", "model": "model.safetensors"}[kind]
        return (folder / place).read_bytes()


def draw(rng):
    kind = KINDS[rng.integers(len(KINDS))]
    ways = [damage_bytes]
    ways += {"run": [damage_json], "store": [damage_lines], "journal": [damage_rows]}.get(kind, [])
    ways += {"examples": [damage_members], "model": [damage_head]}.get(kind, [])
    content = ways[rng.integers(len(ways))](good(kind), rng)
    return {"kind": kind, "content": base64.b64encode(zlib.compress(content)).decode()}


def damage_bytes(content, rng):
    """Bits flipped, bytes overwritten, cut out or doubled, the end cut off."""
    data = bytearray(content)
    for _ in range(int(rng.choice([1, 1, 1, 2, 5]))):
        place = (
            int(rng.integers(len(data)))
            if rng.random() < 0.6
            else int(rng.integers(min(256, len(data))))
        )
        match rng.integers(5):
            case 0:
                data[place] ^= 1 << int(rng.integers(8))
            case 1:
                data[place : place + 4] = rng.bytes(4)
            case 2:
                del data[place : place + int(rng.integers(1, 64))]
            case 3:
                data[place:place] = data[place : place + int(rng.integers(1, 64))]
            case 4:
                del data[max(1, place) :]
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def damage_value(value, rng):
    """One value of a JSON document replaced, renamed or removed."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[rng.integers(len(keys))]
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = damage_value(value[key], rng)
        return value
    return copy.deepcopy(JUNK[rng.integers(len(JUNK))])  # it may be damaged in its turn


def damage_json(content, rng):
    record = json.loads(content)
    for _ in range(int(rng.integers(1, 4))):
        record = damage_value(record, rng)
    return json.dumps(record).encode()


def damage_lines(content, rng):
    lines = content.splitlines(keepends=True)
    place = int(rng.integers(len(lines)))
    lines[place] = damage_json(lines[place], rng) + b"\n"
    return b"".join(lines)


def damage_rows(content, rng):
    """A row of the journal, by SQL: a valid database that says something else."""
    values = (
        "NULL",
        "-1",
        "0",
        "7",
        "1e300",
        "'text'",
        "x'00ff'",
        "''",
        "'[-3]'",
        "'[]'",
        "'O'",
        "'<f4'",
    )
    columns = ("position", "start", "purpose", "queries", "dtype", "shape", "data", "checksum")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "j"
        path.write_bytes(content)
        with contextlib.closing(sqlite3.connect(path)) as file:
            for _ in range(int(rng.integers(1, 4))):
                value = values[rng.integers(len(values))]
                where = f"WHERE rowid = {int(rng.integers(1, 6))}"
                order = (
                    f"UPDATE answers SET {columns[rng.integers(len(columns))]} = {value} {where}"
                )
                if rng.random() < 0.2:
                    order = f"UPDATE header SET value = {value}"
                with contextlib.suppress(sqlite3.Error):
                    file.execute(order)
            file.commit()
        return path.read_bytes()


def damage_members(content, rng):
    """Members of the archive: other heads, claims of shapes, types and sizes."""
    shapes = ((-1,), (2**40,), (0, 2**50), (20, 2, WIDTH), (7, 7), (), (2**62, 4))
    types = ("<f8", "<f4", "|O", "<U9", "<c16", "<i8", "V8", "<f2", "nonsense", "[('a', '<f8')]")
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as other:
        for member in archive.namelist():
            data = archive.read(member)
            if rng.random() < 0.5:
                shape, kind = shapes[rng.integers(len(shapes))], types[rng.integers(len(types))]
                kind = kind if kind.startswith("[") else repr(kind)
                head = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
                data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data[128:]
            if rng.random() < 0.2:
                data = bytes(int(rng.integers(2**22)))
            method = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[rng.integers(2)]
            other.writestr(member, data, method)
    return out.getvalue()


def damage_head(content, rng):
    """The JSON in front of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    head = damage_json(content[8 : 8 + size], rng)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def run(spec, folder):
    """Reads the file as the commands do, and says what went wrong beyond a refusal."""
    content = zlib.decompress(base64.b64decode(spec["content"]))
    try:
        READERS[spec["kind"]](content, folder)
    except (keyhole.KeyholeError, OSError):
        return {"refused": 1}, []
    except Exception as error:
        return {}, [("traceback", f"{spec['kind']}: {type(error).__name__}: {error}")]
    return {"read": 1}, []


def read_model(content, folder):
    (folder / "m.safetensors").write_bytes(content)
    keyhole.load(folder / "m.safetensors")


def read_npz(content, folder):
    (folder / "e.npz").write_bytes(content)
    found = read_examples(folder / "e.npz")
    if found.inputs.size < 10_000:  # whatever could be read is then looked at
        learner = keyhole.FromExamples(heads=1, restarts=1, seconds=0.2)
        keyhole.learn(found.inputs, found.outputs, learner, mask=found.mask, throw=False)


def read_npy(content, folder):
    (folder / "v.npy").write_bytes(content)
    keyhole.open_oracle(secret(), vocabulary=read_vocabulary(folder / "v.npy"))


def read_journal(content, folder):
    (folder / "j").write_bytes(content)
    found = keyhole.recover(secret(), keyhole.SingleHead(), journal=folder / "j")
    if keyhole.distance(found.model, secret()) > 1e-9:
        raise AssertionError("a damaged journal gave another model")


def read_run(content, folder):
    keyhole.recover(secret(), keyhole.SingleHead()).save(folder)
    (folder / "recovery.json").write_bytes(content)
    found = keyhole.load(folder)
    render(found, folder)
    Console(file=io.StringIO(), width=100).print(show(found))
    json.dumps(found.to_json())


def read_store(content, folder):
    (folder / "s").write_bytes(content)
    json.dumps(to_json(run_audit(secret(), PLAN, store=folder / "s")))


READERS = {
    "model": read_model,
    "examples": read_npz,
    "vocabulary": read_npy,
    "journal": read_journal,
    "run": read_run,
    "store": read_store,
}
