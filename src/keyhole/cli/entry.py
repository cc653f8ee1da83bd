"""What the command `keyhole` starts: Ctrl-C while the program is still being loaded is no fault."""

import sys


def main() -> None:
    """Loads the command line and runs it."""
    try:
        from keyhole.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("keyhole: stopped\n")
        raise SystemExit(130) from None
    run()
