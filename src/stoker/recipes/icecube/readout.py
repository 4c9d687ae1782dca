"""From photons at DOMs to what the detector writes: noise, pulses, local coincidence, trigger, readout window.

Everything is batched over events and works on flat arrays sorted by one integer key (event, DOM, time), so that
neighbours, launches and coincidences are found by searching in it.
"""

# H hits (photons or noise), P pulses
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.recipes.icecube.geometry import DOMS_PER_STRING, NUM_SENSORS
from stoker.recipes.icecube.light import Light

# Times inside a chunk are integer ns after BEFORE_NS before the event's reference time, and fit 18 bits.
TIME_BITS = 18
BEFORE_NS, AFTER_NS = 10_000, 22_000
BIN_BITS = 3  # photons of one DOM within a bin of 8 ns become one pulse

# Together about 650 Hz a DOM: 33 pulses in a readout, the floor of the real event sizes.
NOISE_HZ = 480.0  # radioactive decays and thermal noise, one hit each
BURST_HZ = 50.0  # scintillation in the glass: bursts of 3.5 hits on average
BURST_EXTRA_HITS = 2.5
BURST_LOG10_S = (-6.0, 0.85)  # log10 of the gap in seconds: mean, sigma
AFTERPULSE_SHARE = 0.03
AFTERPULSE_NS = (6_000.0, 2_000.0)
JITTER_NS = 2.0
PHOTONS_PER_DOM = 250  # photons beyond this share their arrival times: charge grows, the number of pulses does not

COINCIDENCE_NS = 1_000
LAUNCH_NS = 6_400
TRIGGER_HITS, TRIGGER_NS = 8, 5_000
TRIGGER_AT_NS, READ_BEFORE_NS, READ_AFTER_NS = 10_000, 4_100, 6_100
MAX_TRIGGER_NS = 12_000

CHARGE_FIRST, CHARGE_STEP = 0.025, 0.05  # charges in the data are 0.025 + 0.05 k
LOW_CHARGE_SHARE = 0.22  # of single photons are poorly multiplied: an exponential below the peak
THRESHOLD = 0.25
SATURATION = 2_700  # photo-electrons in one pulse


@dataclass(frozen=True)
class Hits:
    event: Tensor  # (H,)
    dom: Tensor  # (H,)
    time: Tensor  # (H,) float ns
    photons: Tensor  # (H,) int64


@dataclass(frozen=True)
class Pulses:
    """Sorted by event and time."""

    event: Tensor  # (P,) int64
    sensor: Tensor  # (P,) int64
    time: Tensor  # (P,) int64 ns
    charge: Tensor  # (P,) float64
    auxiliary: Tensor  # (P,) bool


def photon_hits(light: Light, generator: torch.Generator) -> Hits:
    """Poisson photons with scattering delays, and the after-pulses they cause."""
    count = torch.poisson(light.mean, generator=generator).long()
    drawn = count.clamp_max(PHOTONS_PER_DOM)
    pair = torch.repeat_interleave(torch.arange(len(count), device=count.device), drawn)
    # The photons that are not drawn are shared out among those that are, the remainder to the first ones.
    first = torch.cumsum(drawn, 0) - drawn
    within = torch.arange(len(pair), device=pair.device) - first[pair]
    share = count // drawn.clamp_min(1)
    photons = share[pair] + (within < (count - share * drawn)[pair])
    delay = torch._standard_gamma(light.shape[pair], generator=generator) * light.scale[pair]
    jitter = torch.empty_like(delay).normal_(0, JITTER_NS, generator=generator)
    hits = Hits(light.event[pair], light.dom[pair], light.time[pair] + delay + jitter, photons)
    return join_hits(hits, _afterpulses(hits, generator))


def noise_hits(num_events: int, generator: torch.Generator, device: torch.device) -> Hits:
    """Dark noise of the whole detector over the time that a readout could cover."""
    window_ns = float(BEFORE_NS + AFTER_NS)
    mean = NUM_SENSORS * (NOISE_HZ + BURST_HZ) * window_ns * 1e-9
    count = torch.poisson(torch.full((num_events,), mean, device=device), generator=generator).long()
    event = torch.repeat_interleave(torch.arange(num_events, device=device), count)
    dom = torch.randint(NUM_SENSORS, event.shape, generator=generator, device=device)
    time = torch.rand(event.shape, generator=generator, device=device) * window_ns - BEFORE_NS
    bursts = torch.rand(event.shape, generator=generator, device=device) < BURST_HZ / (NOISE_HZ + BURST_HZ)
    extra = torch.poisson(bursts * BURST_EXTRA_HITS, generator=generator).long()
    parent = torch.repeat_interleave(torch.arange(len(event), device=device), extra)
    gap = torch.empty(parent.shape, device=device).normal_(*BURST_LOG10_S, generator=generator)
    late = time[parent] + 1e9 * torch.pow(10.0, gap)
    time = torch.cat([time, late])
    dom = torch.cat([dom, dom[parent]])
    return Hits(torch.cat([event, event[parent]]), dom, time, torch.ones_like(dom))


def join_hits(*parts: Hits) -> Hits:
    return Hits(
        event=torch.cat([part.event for part in parts]),
        dom=torch.cat([part.dom for part in parts]),
        time=torch.cat([part.time for part in parts]),
        photons=torch.cat([part.photons for part in parts]),
    )


def read_out(hits: Hits, num_events: int, generator: torch.Generator) -> Pulses:
    """Pulses of the events that trigger; `event` keeps the number it had, the others are absent."""
    key, photons = _merge(hits)
    charge = _measure(photons, generator)
    seen = charge >= THRESHOLD
    key, charge = key[seen], charge[seen]
    opens = _launch_begins(key)
    coincident = _launch_coincidence(key, opens)
    begin, end = _trigger(key[opens & coincident], num_events)
    event, time = key // (NUM_SENSORS << TIME_BITS), key & ((1 << TIME_BITS) - 1)
    jitter = torch.empty(num_events, device=key.device).uniform_(-150, 150, generator=generator).long()
    inside = (time >= (begin - READ_BEFORE_NS + jitter)[event]) & (time <= (end + READ_AFTER_NS)[event])
    key, charge, auxiliary = key[inside], charge[inside], ~coincident[inside]
    event, time = event[inside], time[inside] - begin[event[inside]] + TRIGGER_AT_NS
    sensor = (key >> TIME_BITS) % NUM_SENSORS
    order = torch.sort((event << TIME_BITS) + time, stable=True).indices
    return Pulses(event[order], sensor[order], time[order], charge[order], auxiliary[order])


def _afterpulses(hits: Hits, generator: torch.Generator) -> Hits:
    chance = AFTERPULSE_SHARE * hits.photons
    chosen = torch.rand(hits.time.shape, generator=generator, device=hits.time.device) < chance
    time = hits.time[chosen]
    delay = torch.empty_like(time).normal_(*AFTERPULSE_NS, generator=generator).clamp_min_(300.0)
    return Hits(hits.event[chosen], hits.dom[chosen], time + delay, torch.ones_like(hits.photons[chosen]))


def _merge(hits: Hits) -> tuple[Tensor, Tensor]:
    """Photons of one DOM in one time bin become one pulse at the time of the first of them."""
    kept = (hits.time > -BEFORE_NS) & (hits.time < (1 << TIME_BITS) - BEFORE_NS - 1)
    time = (hits.time[kept] + BEFORE_NS).long()
    key, order = torch.sort(((hits.event[kept] * NUM_SENSORS + hits.dom[kept]) << TIME_BITS) + time)
    photons = hits.photons[kept][order]
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = (key[1:] >> BIN_BITS) != (key[:-1] >> BIN_BITS)
    pulse = torch.cumsum(first, 0) - 1
    total = torch.zeros(int(first.sum()), dtype=torch.int64, device=key.device)
    return key[first], total.index_add_(0, pulse, photons)


def _measure(photons: Tensor, generator: torch.Generator) -> Tensor:
    """Charge in photo-electrons: about Gaussian, single photons with a low tail; quantised like the data."""
    amount = photons.clamp_max(SATURATION).double()
    draw = torch.empty_like(amount).normal_(generator=generator)
    charge = 1.02 * amount + 0.31 * amount.sqrt() * draw
    low = torch.rand(amount.shape, generator=generator, device=amount.device) < LOW_CHARGE_SHARE
    tail = torch.empty_like(amount).exponential_(1 / 0.45, generator=generator) + 0.1
    charge = torch.where(low & (photons == 1), tail, charge)
    step = torch.floor((charge - CHARGE_FIRST) / CHARGE_STEP + 0.5).clamp_min_(0)
    return torch.round((CHARGE_FIRST + CHARGE_STEP * step) * 1000) / 1000


def _launch_begins(key: Tensor) -> Tensor:
    """Marks the pulses that open a launch: a DOM records 6.4 us from its first pulse, then launches anew."""
    index = key >> TIME_BITS
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = index[1:] != index[:-1]
    turn = (key - key[first][torch.cumsum(first, 0) - 1]) // LAUNCH_NS
    first[1:] |= turn[1:] != turn[:-1]
    return first


def _launch_coincidence(key: Tensor, opens: Tensor) -> Tensor:
    """For each pulse: did its launch see a neighbour (one or two DOMs away) within a microsecond?"""
    dom = (key >> TIME_BITS) % DOMS_PER_STRING
    found = torch.zeros_like(key, dtype=torch.bool)
    for step in (-2, -1, 1, 2):
        neighbour = key + (step << TIME_BITS)
        at = torch.searchsorted(key, neighbour - COINCIDENCE_NS).clamp_max_(max(len(key) - 1, 0))
        near = (key[at] - neighbour).abs() <= COINCIDENCE_NS
        found |= near & (dom + step >= 0) & (dom + step < DOMS_PER_STRING)
    launch = torch.cumsum(opens, 0) - 1
    num_found = torch.zeros(len(key), dtype=torch.int64, device=key.device)
    num_found.index_add_(0, launch, found.long())
    return num_found[launch] > 0


def _trigger(hit: Tensor, num_events: int) -> tuple[Tensor, Tensor]:
    """Begin and end of the eight-hit coincidences of each event; an empty window where there is none."""
    device = hit.device
    event, time = hit // (NUM_SENSORS << TIME_BITS), hit & ((1 << TIME_BITS) - 1)
    # Events lie 2^18 ns apart in this key, so a coincidence never spans two of them.
    at = torch.sort((event << TIME_BITS) + time).values
    far = 1 << (TIME_BITS + 1)
    begin = torch.full((num_events,), far, dtype=torch.int64, device=device)
    end = torch.full((num_events,), -far, dtype=torch.int64, device=device)
    if len(at) < TRIGGER_HITS:
        return begin, end
    opening, closing = at[: 1 - TRIGGER_HITS], at[TRIGGER_HITS - 1 :]
    fires = closing - opening <= TRIGGER_NS
    opening, closing = opening[fires], closing[fires]
    fired = opening >> TIME_BITS
    mask = (1 << TIME_BITS) - 1
    begin.scatter_reduce_(0, fired, opening & mask, "amin")
    end.scatter_reduce_(0, fired, closing & mask, "amax")
    return begin, torch.minimum(end, begin + MAX_TRIGGER_NS)
