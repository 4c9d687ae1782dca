"""How often the doctor is right: planted faults and healthy controls, each diagnosed, then cured and measured again.

    python benchmarks/doctor.py [--only NAME ...] [--seconds 2] [--gpu]
    python benchmarks/doctor.py --only learning,data  # what keeps a loss from falling; nothing is cured

One JSON line a case, a table for people on standard error, and the score as the last line. Every case runs in a process of
its own, forked from one that has imported everything, with one thread for torch, so that its step does not take the core
that its loader needs.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import emit, line

from stoker.doctor.legs import rate_of

PLANTED = Path(__file__).parents[1] / "tests" / "faults"
RIGHT = 0.2
ROUNDS = 2
SHOWN = (
    "case",
    "expected",
    "found",
    "tuned",
    "predicted",
    "measured",
    "diagnosis_s",
    "tried",
    "troubles",
)  # in the score


def one(name: str, seconds: float, *, cure: bool = True) -> dict[str, Any]:
    """Diagnoses a case, then runs it with and without its fault in turns."""
    sys.path.insert(0, str(PLANTED))
    import torch
    from planted.table import CASES, LESSONS

    from stoker.doctor.measure import measure
    from stoker.doctor.rules import diagnose
    from stoker.doctor.rules.step import better_times
    from stoker.doctor.waterfall import waterfall

    torch.set_num_threads(1)
    case = next(case for case in (*CASES, *LESSONS) if case.name == name)
    found = measure(case.make(True), seconds, "learning" if case.learning else "speed")
    findings = diagnose(found)
    first = findings[0] if findings else None
    result: dict[str, Any] = {
        "case": name,
        "expected": case.rule,
        "found": [[finding.rule, round(finding.share, 3)] for finding in findings],
        "tuned": case.tuned,
        "predicted": first.factor if first else None,
        "first_look_s": round(found.first_s, 1),
        "diagnosis_s": round(found.seconds, 1),
        "waterfall": {bar.name: round(1e3 * bar.seconds, 3) for bar in waterfall(found)},
        "tried": {rule: round(found.run_s / after, 3) for rule, after in found.tried.items()},
        "operations": found.operations.top if found.operations else None,
        "troubles": found.troubles,
    }
    if first is not None:
        result["evidence"] = [first.sentence, *first.evidence, first.change]
    if cure and case.rule is not None and first is not None and first.factor is not None:
        times = better_times(found) if first.rule == "batch" else 1
        result["measured"] = cured(case.make, seconds, times)
    return result


def cured(make: Callable[[bool], Any], seconds: float, times: int) -> float:
    """Rate without the fault over that with it, in turns, each with a loader of its own that is gone before the next.

    `times`: the batch is the fault, and is to become so many times as large.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for wrong in (True, False):
            probe = make(wrong) if times == 1 or wrong else with_larger_batches(make(True), times)
            rates[wrong].append(rate_of(probe, seconds))
            del probe
            gc.collect()
    return max(rates[False]) / max(rates[True])


def with_larger_batches(probe: Any, times: int) -> Any:
    """What the doctor asked for: as many batches of the loader as it said, put together beforehand."""
    from torch.utils.data import default_collate

    batches = list(probe.loader)
    parts = [batches[first : first + times] for first in range(0, len(batches) - times + 1, times)]
    whole = [[field.flatten(0, 1) for field in default_collate(part)] for part in parts]
    return replace(probe, loader=whole)


def is_right(result: dict[str, Any]) -> bool:
    above = [rule for rule, share in result["found"] if share >= 0.1]
    if result["expected"] is None:
        return not above
    return bool(result["found"]) and result["found"][0][0] == result["expected"]


def in_a_child(name: str, seconds: float) -> dict[str, Any] | None:
    """None: it failed, and has said why."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(one(name, seconds))
        except BaseException:
            traceback.print_exc()
            raise

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        print(f"{name}: failed", file=sys.stderr)
        return None
    finally:
        child.join(30)
        child.kill()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--gpu", action="store_true", help="the cases for a GPU, and only those")
    parser.add_argument("--one", help="a single case, in this process")
    parser.add_argument("--no-cure", action="store_true", help="of --one: only the diagnosis")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # libraries ask for it when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    if options.one:
        print(json.dumps(one(options.one, options.seconds, cure=not options.no_cure)))
        return
    sys.path.insert(0, str(PLANTED))
    from planted.table import CASES, LESSONS

    import stoker.doctor.measure  # noqa: F401  once for all of them

    names = set(",".join(options.only or ()).split(",")) - {""}
    lessons = bool(names & {"learning", "data"})
    unknown = names - ({"learning", "data"} if lessons else {case.name for case in CASES})
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    results = []
    for case in LESSONS if lessons else CASES:
        if not lessons and (case.gpu != options.gpu or (names and case.name not in names)):
            continue
        result = in_a_child(case.name, options.seconds)
        if result is None:
            continue
        results.append(result)
        print(json.dumps(result), flush=True)
        show(result)
    score(results, "learning" if lessons else "speed")


def show(result: dict[str, Any]) -> None:
    said = ", ".join(f"{rule} {share:.0%}" for rule, share in result["found"][:3]) or "healthy"
    factors = f"{result['predicted']:.2f} / {result['measured']:.2f}" if "measured" in result else ""
    mark = "" if is_right(result) else "  WRONG"
    print(f"{result['case']:28} {result['expected'] or 'healthy':16} {said:55} {factors}{mark}", file=sys.stderr)


def score(results: list[dict[str, Any]], of: str) -> None:
    faults = [one for one in results if one["expected"] is not None]
    controls = [one for one in results if one["expected"] is None]
    tried = [one for one in faults if "measured" in one and is_right(one)]
    close = [one for one in tried if abs(one["predicted"] / one["measured"] - 1) <= RIGHT]
    later = [one for one in faults if not one["tuned"]]
    values = {
        "faults": len(faults),
        "right": sum(map(is_right, faults)),
        "later": len(later),
        "later_right": sum(map(is_right, later)),
        "controls": len(controls),
        "controls_right": sum(map(is_right, controls)),
        "tried": len(tried),
        "within_20_percent": len(close),
    }
    share = [is_right(one) / 1.0 for one in faults] or [0.0]
    seconds = [one["diagnosis_s"] for one in results] or [0.0]
    cases = [{key: one[key] for key in SHOWN if key in one} for one in results]
    emit(line(f"doctor of {of}: right rule first", [sum(share) / len(share)], "share", **values, cases=cases))
    emit(line(f"doctor of {of}: a diagnosis", seconds, "s"))


if __name__ == "__main__":
    main()
