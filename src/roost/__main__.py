"""`python -m roost` is the command line."""

from __future__ import annotations

from roost.cli.main import main

if __name__ == "__main__":
    main()
