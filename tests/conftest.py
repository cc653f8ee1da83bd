"""Makes the helpers beside this file importable from every test, and Hypothesis repeatable."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# the same examples on every machine; a busy one may take its time
settings.register_profile("keyhole", derandomize=True, deadline=None, database=None)
settings.load_profile("keyhole")
