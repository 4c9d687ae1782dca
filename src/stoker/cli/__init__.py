"""The command line: words to one function call each. No logic here, and no import of torch until a command needs it.

Words like `--train.lr 1e-4` are taken out first and handed to the command as overrides.
"""

import atexit
import errno
import io
import os
import signal
import sys

import tyro

from stoker import __version__, console
from stoker.cli.commands import COMMANDS, Command, Config, check_bare_keys, keys_are_asked, pack_command
from stoker.errors import MachineError, Stopped, UserError

SUMMARY = "Trains PyTorch models on sharded data at the speed of the hardware, and says why when it does not."


def main() -> None:
    _mend_streams()
    if under_launcher := "STOKER_OUTCOME" in os.environ:
        _end_with_parent()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if "stoker.data.storage.requests" in sys.modules:
        # Threads of its client library end with the process, and not before.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if under_launcher or "TORCHELASTIC_RUN_ID" in os.environ:
        # Taking gloo's connections down at exit now and then aborts a rank whose work is done (seen with torch 2.15).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _mend_streams() -> None:
    """Streams that were closed go nowhere, and letters that a terminal does not have are spelt out."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_with_parent() -> None:
    """Asked to stop when the launcher dies, whatever it dies of: nobody trains as an orphan."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run(words: list[str]) -> int:
    """Exit code 0: fine; 1: findings, or the work failed; 2: the user's mistake."""
    words, overrides = _split_overrides(words or ["--help"])
    if words[0] == "--version":
        print(f"stoker {__version__}")
        return 0
    try:
        check_bare_keys(words)
        if keys_are_asked(words):
            return Config(words[1]).run(overrides)
        commands = COMMANDS | ({"pack": pack_command(words)} if words[0] == "pack" else {})
        command: Command = tyro.extras.subcommand_cli_from_dict(
            commands, prog="stoker", description=SUMMARY, args=words
        )
        return command.run(overrides)
    except (UserError, MachineError) as error:
        return _ended(error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _ended(error, "interrupted.", 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _ended(error, f"the disk is full ({error}). Make room and run it again.", 1)
        if error.filename is None:
            raise
        # The machine said no: a place that is read only, a folder where a file should be, a disk that is gone.
        return _ended(error, f"{error.filename}: {error.strerror}.", 1)


def _ended(error: BaseException, text: str, code: int) -> int:
    """Says why, once: of several processes the first that ends speaks, and the others only lost it."""
    ranked = "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    if not ranked:
        console.say(f"stoker: {text}")
        return code
    from stoker.train.launcher import OUTCOME, say_outcome
    from stoker.train.parallel import LostRank

    lost = isinstance(error, LostRank)
    if not lost and say_outcome(code):
        console.say(f"stoker: {text}")
    if not isinstance(error, Stopped):
        return code
    # An exit code of 1 would make torchrun start all of them again, as long as it may.
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return 0 if OUTCOME in os.environ or left > 0 else code


def _split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Takes `--group.key VALUE` and `--group.key=VALUE` out of the words; a dot in the name tells them apart."""
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        overrides.append(word)
        if not equals:
            overrides += [value] if (value := next(rest, None)) is not None else []
    return own, overrides
