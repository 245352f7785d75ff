"""Tables of text with aligned columns."""


def align_columns(lines: list[list[str]], right: bool = False) -> str:
    """Lines of cells, padded to the width of their column; with `right` all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    padded = ([pad(cell, width) for pad, cell, width in zip(align, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
