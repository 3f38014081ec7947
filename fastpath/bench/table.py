"""Tables as Markdown, which is readable as it is."""


def markdown(cells: list[list[str]], n_texts: int = 1) -> str:
    """The first line is the head; the first columns are texts, the others numbers."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [c.ljust(w) if i < n_texts else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))]
        lines.append("| " + " | ".join(padded) + " |")
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i < n_texts else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
