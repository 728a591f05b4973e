"""``liger-tune exec``: run a command for which ``import liger_kernel`` means this package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Annotated

import typer

#: Everything behind the command's name is the command's, dashes and all.
CONTEXT = {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False}


def exec_command(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What to run, with its arguments.", show_default=False)
    ],
) -> None:
    """Run a command whose programs find this package's kernels under the name liger_kernel.

    Its children do too, through PYTHONPATH. Nothing is installed, and nothing changes outside the command; a
    liger-kernel that is installed is hidden from it. The exit code is the command's.
    """
    from liger_registry.drop_in import environment
    from liger_registry.errors import DropInError

    environ = environment(os.environ)
    program = shutil.which(command[0])
    if program is None:
        raise DropInError(
            f"there is no command {command[0]!r}",
            why="it is not on PATH, or cannot be executed",
            fix="name its path, or activate the environment that it is installed in",
        )
    if sys.platform == "win32":
        # Its exec returns to the shell at once.
        raise typer.Exit(subprocess.run([program, *command[1:]], env=environ, check=False).returncode)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, environ)
