"""How much rounding would protect a model? Attacks one that we own, behind several roundings."""

import numpy as np

from keyhole.audit.cells import Plan
from keyhole.audit.summary import advice, rows
from keyhole.audit.sweep import run_audit
from keyhole.models.random import attention


def main() -> None:
    model = attention(np.random.default_rng(0), 12)
    plan = Plan(protections=("float32", "decimals:3", "decimals:1"), multiples=(1, 4))
    found = run_audit(model, plan)
    for row in rows(found):
        tokens = "bounded tokens" if row.bounded else "tokens of any size"
        copy = "none" if row.function_error is None else f"off by {row.function_error:.0e}"
        print(f"{tokens:<18} {row.title:<11} {row.queries:>4} queries: copy {copy}")
    print(advice(rows(found), found.max_norm))


if __name__ == "__main__":
    main()
