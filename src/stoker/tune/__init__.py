"""Settings found by measurement: each trial in a process of its own, one decision after the other, and their proof."""
