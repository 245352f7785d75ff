"""The routing of a merged mixture on a text, as an HTML table: one row per router, one column per token."""

from html import escape
from pathlib import Path

import numpy as np

from merge_tools.routing import Routing, open_mixture, printable, route_text
from run_tools.errors import UserError

from .marks import KINDS, section

MAX_CHARACTERS = 2_000  # of a text whose routing is drawn


class Mixture:
    """A mixture that stays open.

    Args:
        folder: as `lexperts merge compose` writes it.

    Raises:
        UserError: if the folder is not a mixture.
    """

    def __init__(self, folder: str | Path):
        self._opened = open_mixture(folder)

    def route(self, text: str) -> Routing:
        """The experts that the mixture selects for a text. Raises a `UserError` if the text is empty or too long."""
        if not text.strip():
            raise UserError("The text is empty. Type a few words.")
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"The text has {len(text):,} characters; this drawing shows up to {MAX_CHARACTERS:,}. Shorten it."
            )
        return route_text(*self._opened, text)


def routing_html(routing: Routing) -> str:
    """The legend with each expert's share, and the table. A cell's number is the expert; its colour is paler for smaller weights."""
    shares = routing.load().mean(0)
    legend = "".join(
        f'<li><span class="lx-expert lx-expert-{e % KINDS}">{e + 1}</span> {escape(name)} <strong>{shares[e]:.0%}</strong></li>'
        for e, name in enumerate(routing.names)
    )
    head = "".join(f'<th scope="col"><span>{escape(printable(token))}</span></th>' for token in routing.tokens)
    rows = "".join(
        row_html(router, *of_router)
        for router, *of_router in zip(routing.routers, routing.experts, routing.weights, strict=True)
    )
    table = (
        '<div class="lx-scroll" tabindex="0" role="region" aria-label="Experts by router and token"><table class="lx-routing">'
        f'<thead><tr><th scope="col">router</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    note = "Each cell is the expert with the largest weight on a token. Shares are of the weight of all experts that are selected."
    return section("Routing", f'<ul class="lx-legend">{legend}</ul>{table}', note)


def row_html(router: str, experts: np.ndarray, weights: np.ndarray) -> str:
    """A row of the table; `experts` and `weights` `(T, k)` of a router."""
    cells = "".join(
        f'<td class="lx-cell lx-expert-{e % KINDS}" style="--strength:{w:.2f}" title="weight {w:.2f}">{e + 1}</td>'
        for e, w in zip(experts[:, 0].tolist(), weights[:, 0].tolist(), strict=True)
    )
    return f'<tr><th scope="row">{escape(router)}</th>{cells}</tr>'
