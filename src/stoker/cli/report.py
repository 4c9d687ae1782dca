"""`stoker report` and `stoker show`: pages to look at."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional, UseAppendAction

from stoker import console
from stoker.cli.options import Flag, local, no_overrides
from stoker.cli.output import print_result
from stoker.errors import UserError

ASKED_BELOW = (
    16 << 20
)  # bytes of events, for which the doctor is asked again; of longer runs the page has what they kept


@dataclass(frozen=True)
class Report:
    """Write the page of a run, or of several beside each other: one HTML file that opens anywhere."""

    paths: Positional[tuple[str, ...]]  # folders of runs, names of runs below runs/, or URLs
    out: Path | None = None  # file to write; default: report.html in the run's folder, of several here
    open: Flag = False  # show it in the browser
    serve: Flag = False  # on this machine only, following the run while it trains
    port: int | None = None  # of --serve; default: any that is free
    text: Flag = False  # print the essentials instead
    json: Flag = False  # print where the page is as JSON, with --text its values

    def run(self, overrides: list[str]) -> int:
        no_overrides("report", overrides)
        if self.text and (self.open or self.serve or self.out is not None):
            raise UserError("--text prints, and writes no page.")
        if self.serve and (self.out is not None or self.json):
            raise UserError("--serve writes nothing: it takes neither --out nor --json.")
        if self.port is not None and not self.serve:
            raise UserError("--port is for --serve.")
        if not self.paths:
            raise UserError("Which run? `stoker report RUN`; `stoker runs` lists them.")
        runs = [_opened(path) for path in self.paths]
        if self.serve:
            return self._serve(runs)
        values = [_values(run, len(runs)) for run in runs]
        if self.text:
            from stoker.report.text import as_text

            print_result(values, as_text(values), as_json=self.json)
            return 0
        from stoker.doctor import ledger
        from stoker.report.page import page, page_data

        out = self.out or (runs[0].path / "report.html" if len(runs) == 1 else Path("report.html"))
        _write(out, page(_title(runs), page_data(values, record=ledger.score())))
        print_result({"page": str(out)}, f"page: {out}", as_json=self.json)
        if self.open:
            webbrowser.open(out.absolute().as_uri())
        return 0

    def _serve(self, runs: list[Any]) -> int:
        from stoker.report.serve import PageServer

        server = PageServer(_title(runs), lambda: [_values(run, len(runs)) for run in runs], self.port or 0)
        console.say(f"{server.address} follows {_title(runs)}. Ctrl-C ends it.")
        if self.open:
            webbrowser.open(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            console.say("ended.")
        return 0


@dataclass(frozen=True)
class Show:
    """Show an event of a data set in three dimensions, without a run."""

    path: Positional[str]  # the data set: Kaggle layout, packed, or GraphNeT's; a folder or a URL
    event: UseAppendAction[
        tuple[int, ...]
    ] = ()  # id of an event, and --event again for more; default: twelve at random
    out: Path | None = None  # file to write; default: events.html here
    open: Flag = False  # show it in the browser
    json: Flag = False  # print where the page is as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("show", overrides)
        from stoker.recipes.icecube.display import show_events
        from stoker.report.page import page, page_data

        section = show_events(self.path, self.event)
        out = self.out or Path("events.html")
        _write(out, page(f"Events of {self.path}", page_data(sections=[section], heading="Events")))
        print_result({"page": str(out)}, f"page: {out}", as_json=self.json)
        if self.open:
            webbrowser.open(out.absolute().as_uri())
        return 0


def _opened(path: str) -> Any:
    """Without torch, where it is a folder of this machine."""
    from stoker.runs.folder import open_run

    if "://" not in path:
        return open_run(Path(path))
    from stoker.launch.elsewhere import here

    return open_run(here(path))


def _title(runs: list[Any]) -> str:
    return " and ".join(run.path.resolve().name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"


def _values(run: Any, count: int) -> dict[str, Any]:
    from stoker.report.gather import run_data
    from stoker.report.series import MOST

    return run_data(run, _findings(run), max(300, MOST // max(1, count // 2)))


def _findings(run: Any) -> list[dict[str, Any]] | None:
    """The doctor's, from the events alone; None where they are too many to go through twice."""
    if not run.events.is_file() or run.events.stat().st_size > ASKED_BELOW:
        return None
    from stoker.doctor.commands import of_events

    return [one.as_json() for one in of_events(run)]


def _write(out: Path, text: str) -> None:
    """Only a page of ours is replaced."""
    from stoker.files import write_bytes

    local(out)
    if (out.exists() or out.is_symlink()) and not _is_ours(out):
        raise UserError(f"{out} exists, and is no page of Stoker's. Name another file: --out FILE.")
    if not out.absolute().parent.is_dir():
        raise UserError(f"There is no folder {out.absolute().parent} to write {out.name} to.")
    write_bytes(out, text.encode(errors="replace"))


def _is_ours(path: Path) -> bool:
    from stoker.report.page import MARK

    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)
