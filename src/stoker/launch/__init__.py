"""From words to a run: targets resolve the words, build puts the parts together, commands use them, checks refuse."""
