"""Learning rates as a picture: how far the loss falls at each of them, with its error; an SVG that any browser shows."""

import math
from collections.abc import Callable, Iterator
from html import escape

from stoker.doctor.learning.facts import Arm, Learning

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 80, 20, 40, 60
Place = Callable[[float], float]
INK, GREY, GOOD, OWN, BAD = "#222222", "#bbbbbb", "#1b7f3b", "#1f5fa8", "#b3261e"


def draw_rates(found: Learning, name: str) -> str:
    """Needs arms. A rate that is not finite stands at the lower edge."""
    arms = [one for one in (*found.arms, found.present) if one is not None and one.rate > 0]
    fit = [arm for arm in arms if not arm.is_bad and math.isfinite(arm.gain)]
    # What explodes would squeeze all others into a line.
    top = max((arm.gain + _error(arm) for arm in fit), default=1.0) or 1.0
    low = max(min((arm.gain - _error(arm) for arm in fit), default=0.0), -2 * abs(top))
    rates = [math.log10(arm.rate) for arm in arms]
    first, last = math.floor(min(rates)), math.ceil(max(rates))

    def x(rate: float) -> float:
        return LEFT + (math.log10(rate) - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def y(gain: float) -> float:
        share = (min(max(gain, low), top) - low) / max(top - low, 1e-12)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(first, last, x, y, low, top), *(line for arm in arms for line in _arm(arm, found, x, y, low))]
    title = f"{name}: how far the loss falls, by learning rate" + ("" if found.best else " (no decision)")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 24, title, anchor="start"),
            *parts,
            "</svg>\n",
        ]
    )


def _axes(first: int, last: int, x: Place, y: Place, low: float, top: float) -> Iterator[str]:
    edge = HEIGHT - BOTTOM
    yield f'<path d="M{LEFT} {TOP} V{edge} H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>'
    for power in range(first, last + 1):
        place = x(10.0**power)
        yield f'<path d="M{place:.1f} {edge} v6" stroke="{INK}"/>'
        yield _text(place, edge + 22, f"1e{power}")
    for value in sorted({low, 0.0, top}):
        if low <= value <= top:
            yield f'<path d="M{LEFT} {y(value):.1f} H{WIDTH - RIGHT}" stroke="{GREY}" stroke-dasharray="3 4"/>'
            yield _text(LEFT - 8, y(value) + 4, f"{value:.3g}", anchor="end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "learning rate")


def _arm(arm: Arm, found: Learning, x: Place, y: Place, low: float) -> Iterator[str]:
    place = x(arm.rate)
    if arm.is_bad or not math.isfinite(arm.gain):
        yield _text(place, y(low) - 6, "x", colour=BAD)
        return
    colour = GOOD if arm is found.best else OWN if arm is found.present else INK
    up, down = y(arm.gain + _error(arm)), y(arm.gain - _error(arm))
    yield f'<path d="M{place:.1f} {up:.1f} V{down:.1f}" stroke="{colour}"/>'
    yield f'<circle cx="{place:.1f}" cy="{y(arm.gain):.1f}" r="4" fill="{colour}"/>'
    word = "best" if arm is found.best else "as it is" if arm is found.present else ""
    if word:
        yield _text(place, up - 8, word, colour=colour)


def _error(arm: Arm) -> float:
    return arm.error if math.isfinite(arm.error) else 0.0


def _text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
