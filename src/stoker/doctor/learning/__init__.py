"""Why a loss does not fall: looks at inputs, labels, layers and rates that take seconds, before a run takes days."""
