"""`python -m keyhole`."""

from keyhole.cli.main import main

if __name__ == "__main__":
    main()
