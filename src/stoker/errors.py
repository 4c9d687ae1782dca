"""The two errors a user may see: their own mistake (exit code 2) and a machine that failed (exit code 1).

Both are shown as one paragraph without a traceback, so the text must stand alone: what is wrong, the value
seen, where, and what to do. Everything else that is raised is a defect of Stoker and keeps its traceback.
"""


class UserError(Exception):
    """The input is wrong: a missing file, an unknown key, an impossible value."""

    exit_code = 2


class MachineError(Exception):
    """The input is right and the work still failed: a full disk, a read that never returned."""

    exit_code = 1


class Stopped(MachineError):
    """A run that was asked to stop, and saved itself first."""
