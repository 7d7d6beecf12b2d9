"""`python -m cupyflash`."""

from __future__ import annotations

import sys

from cupyflash._cli import main

sys.exit(main())
