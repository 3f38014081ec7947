"""Compositions of ops: one forward call over whichever op table it is given."""
