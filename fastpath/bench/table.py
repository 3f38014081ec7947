"""Tables as Markdown, which is readable as it is."""


def markdown(cells: list[list[str]]) -> str:
    """The first line is the head; the first column is text, the others are numbers."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))]
        lines.append("| " + " | ".join(padded) + " |")
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
