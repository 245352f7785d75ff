"""Tables of text with aligned columns."""


def align_columns(lines: list[list[str]]) -> str:
    """Lines of cells, padded to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
