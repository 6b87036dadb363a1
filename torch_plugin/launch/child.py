"""The first code in a started process: it ties itself to its parent, may change its network
namespace, and then becomes the real program.

    child.py PARENT - PROGRAM ARGUMENT...          run PROGRAM
    child.py PARENT enter:PID PROGRAM ARGUMENT...  run PROGRAM in the namespaces of process PID
    child.py PARENT hold:NAME                      hold new namespaces with this host name

The kernel kills the process as soon as PARENT is gone. This file is run by a bare interpreter
before every rank, so it imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
#: Flags of unshare and setns, by the name of the namespace in /proc/PID/ns.
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000}
_libc = ctypes.CDLL(None, use_errno=True)


def command_of_child(command: Sequence[str], namespace: int | None = None) -> list[str]:
    """The command that runs ``command`` tied to this process, if given in a holder's namespaces."""
    enter = "-" if namespace is None else f"enter:{namespace}"
    return [*_this_file(), enter, *command]


def command_of_holder(name: str) -> list[str]:
    """The command of a process that holds new namespaces, and prints a line when it does."""
    return [*_this_file(), f"hold:{name}"]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _this_file() -> list[str]:
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def _main(parent: str, namespace: str, *command: str) -> None:
    die_with_parent()
    if os.getppid() != int(parent):  # it ended before the line above took hold
        sys.exit(1)
    action, _, argument = namespace.partition(":")
    if action == "hold":
        _hold(argument)
    if action == "enter":
        _enter(argument)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _hold(name: str) -> None:
    for flag in _NAMESPACES.values():
        _call("unshare", flag)
    _call("sethostname", name.encode(), len(name.encode()))
    print("ready", flush=True)
    while True:
        signal.pause()


def _enter(pid: str) -> None:
    for kind, flag in _NAMESPACES.items():
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            _call("setns", namespace.fileno(), flag)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except OSError as error:
        sys.exit(error.strerror)
