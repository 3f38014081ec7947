"""Compositions of ops: the text model (text.py) and one layer of it (block.py)."""
