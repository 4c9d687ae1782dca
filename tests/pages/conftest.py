"""A real browser: Debian's chromium through Playwright. Where there is none these tests are left out, in CI they fail."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

INSTALL = "pages in a browser were not tested: install one (Debian: apt-get install chromium) and run it again"


@pytest.fixture
def browser() -> Iterator[Callable[[], Any]]:
    """Started when the first page is opened, and gone with the test: what others fork must not hold its pipes open, and its
    event loop would be in the way of theirs."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        if os.environ.get("STOKER_BROWSER") == "required":
            pytest.fail(f"STOKER_BROWSER is required. {INSTALL}")
        pytest.skip(INSTALL)
    from playwright.sync_api import sync_playwright

    with ExitStack() as stack:

        @cache
        def start() -> Any:
            play = stack.enter_context(sync_playwright())
            found = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            stack.callback(found.close)
            return found.new_context(viewport={"width": 1280, "height": 900})

        yield start


@dataclass
class Seen:
    """A page as a person has it open, with all that went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def points(self) -> dict[str, int]:
        """How many points every chart of the page has drawn."""
        found = self.page.eval_on_selector_all(
            "[data-points]",
            "all => all.map((one, place) => [place + ' ' + one.getAttribute('aria-label'), +one.dataset.points])",
        )
        return dict(found)

    def chapters(self) -> list[str]:
        return [str(one) for one in self.page.eval_on_selector_all("main > section", "all => all.map(one => one.id)")]

    def is_fine(self) -> None:
        assert self.errors == []
        assert [one for one in self.requests[1:] if not one.startswith("data:")] == []
        assert all(self.points().values()), self.points()


@pytest.fixture
def look(browser: Callable[[], Any]) -> Callable[[Path | str], Seen]:
    """Opens a file or an address."""

    def open_page(place: Path | str) -> Seen:
        seen = Seen(browser().new_page())
        seen.page.on("console", lambda one: seen.errors.append(one.text) if one.type in ("error", "warning") else None)
        seen.page.on("pageerror", lambda one: seen.errors.append(str(one)))
        seen.page.on("request", lambda one: seen.requests.append(one.url))
        seen.page.goto(place.absolute().as_uri() if isinstance(place, Path) else place)
        seen.page.wait_for_selector("body[data-ready]")
        return seen

    return open_page
