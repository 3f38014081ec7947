"""The packages that an oracle program needs: one line if they are not there, in place of a traceback."""

from __future__ import annotations

import importlib.util


def need(*packages: str) -> None:
    """Ends the program with one line on stderr unless all packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"not installed, but needed here: {', '.join(missing)}. "
            'In the folder of the project: .venv/bin/python -m pip install -e ".[oracles]"'
        )
