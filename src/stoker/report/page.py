"""One file with everything in it: opens by double-click, asks no network for anything, escapes all that comes from data."""

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from stoker.runs.environment import package_versions

MARK = '<meta name="generator" content="stoker">'  # by which a page of ours is known
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "display.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")


def page(title: str, data: Mapping[str, Any]) -> str:
    """`data` as `page_data` gives them."""
    version, now = package_versions().get("stoker", "of a source tree"), time.strftime("%Y-%m-%d at %H:%M")
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style="\n".join(map(_asset, STYLES)),
        script="\n".join(map(_asset, SCRIPTS)),
        data=in_script(data),
        connect="'self'" if data["live"] else "'none'",
        mark=MARK,
        footer=html.escape(f"Written by Stoker {version} on {now}. Charts by uPlot (MIT)."),
    )


def page_data(
    runs: Sequence[Mapping[str, Any]] = (),
    diagnosis: Mapping[str, Any] | None = None,
    record: Sequence[Sequence[str]] = (),
    sections: Sequence[Mapping[str, Any]] = (),
    heading: str = "",
    live_s: float = 0.0,
    version: str = "",
) -> dict[str, Any]:
    """What the scripts of the page read. `live_s`: how often they ask their server for new values; 0: there is none."""
    return {
        "runs": list(runs),
        "diagnosis": diagnosis,
        "record": [list(row) for row in record],
        "sections": list(sections),
        "heading": heading,
        "live": live_s,
        "version": version,
    }


def in_script(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever is in it."""
    text = as_json(value)  # in ASCII: nothing that a script would take for the end of a line
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_json(value: Any) -> str:
    """What is no number becomes null: JSON has no word for it, and a chart a gap."""
    return json.dumps(_known(value), allow_nan=False, separators=(",", ":"))


def _known(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _known(one) for key, one in value.items()}
    return [_known(one) for one in value] if isinstance(value, list | tuple) else value


@cache
def _asset(name: str) -> str:
    return resources.files("stoker.report").joinpath("assets", name).read_text(encoding="utf-8")
