"""How a person calls this program, for the commands that messages suggest."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def suggest(*arguments: object) -> str:
    """A command line that runs `ropeway ARGUMENTS` from here, quoted for a shell.

    It names the program by its path where `ropeway` alone wouldn't find it: in an environment that
    wasn't activated.
    """
    return shlex.join([_program(), *map(str, arguments)])


def _program() -> str:
    called = Path(sys.argv[0])
    found = shutil.which("ropeway")
    if called.name != "ropeway" or not called.is_file():
        return "ropeway"  # run as a module or from another program
    if found is not None and os.path.samefile(found, called):
        return "ropeway"
    return str(called)
