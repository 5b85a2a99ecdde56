"""The `ropeway` command as a process."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("ropeway")


def ropeway(*arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run `ropeway ARGUMENTS` with `text` on standard input."""
    return subprocess.run(
        [str(PROGRAM), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
