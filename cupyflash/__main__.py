"""`python -m cupyflash`."""

from __future__ import annotations

import sys

from cupyflash._cli import main

if __name__ == "__main__":  # and not where `check` starts a process, which imports this again
    sys.exit(main())
