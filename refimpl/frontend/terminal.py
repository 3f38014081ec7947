"""Names of files and texts out of files, as they are shown on a terminal."""


def visible(text: str) -> str:
    """A text in one line, with what is not printed written as in Python: a name may hold line breaks, and
    bytes that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
