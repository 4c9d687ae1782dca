"""Why a run is slow: measured legs of a step, rules that name the cause and predict the gain, trials that prove it."""
