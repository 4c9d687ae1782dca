"""How many events a second does the simulator make? In memory, and written to disk in the Kaggle layout."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from measure import emit, line

from stoker.recipes.icecube.geometry import standard_geometry
from stoker.recipes.icecube.light import Detector
from stoker.recipes.icecube.simulate import simulate, simulate_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, help="default: 20,000 on a CPU, 1,000,000 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    events = options.events or (1_000_000 if options.device == "cuda" else 20_000)
    detector = Detector(standard_geometry(), torch.device(options.device))
    simulate_events(detector, 1000, (0,))  # warm-up
    details = {"events": events, "device": options.device, "bar": 50_000 if options.device == "cuda" else 1_000}
    rates = []
    for repeat in range(options.repeats):
        begin = time.perf_counter()
        simulate_events(detector, events, (1, repeat))
        rates.append(events / (time.perf_counter() - begin))
    emit(line("simulate, in memory", rates, "events/s", **details))
    rates = []
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            simulate(Path(folder) / "set", num_events=events, num_files=10, seed=repeat, device=options.device)
            rates.append(events / (time.perf_counter() - begin))
    emit(line("simulate, written as Parquet", rates, "events/s", **details))


if __name__ == "__main__":
    main()
