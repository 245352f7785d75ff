"""Draws the figures of docs/concepts.md, one per architecture.

python docs/images/draw_figures.py

A browser that shows a file takes light or dark colours by the reader's settings; on the site the figures take those of the page.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WIDTH, SIZE, SMALL = 800, 16, 14
STYLE = """<style>
text { font-family: system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; fill: #1f2328; }
.panel { fill: #ffffff; }
.plain { fill: #f3f5f8; stroke: #6b7685; }
.trained { fill: #dbe9ff; stroke: #0b57d0; }
.generated { fill: #ffe9d1; stroke: #b35900; }
.line { stroke: #1f2328; stroke-width: 1.5; fill: none; }
.head { fill: #1f2328; }
@media (prefers-color-scheme: dark) {
  text, .head { fill: #e6e9ee; }
  .line { stroke: #e6e9ee; }
  .panel { fill: #1b2029; }
  .plain { fill: #2b313c; stroke: #98a3b3; }
  .trained { fill: #173056; stroke: #8ab4f8; }
  .generated { fill: #4a2f12; stroke: #f0a04b; }
}
</style>"""


class Figure:
    """The parts of a figure, in the order in which they are drawn; places and sizes in pixels."""

    def __init__(self, name: str, title: str, description: str, height: int):
        self.name, self.title, self.description, self.height = name, title, description, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = SIZE, anchor: str = "middle", bold: bool = False):
        """A line of text around x, with its middle at y."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y + 0.35 * size:.1f}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, lines: str, kind: str = "plain", bold: bool = True):
        """A box with lines of text, the first in bold."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7" stroke-width="1.5"/>'
        )
        rows = lines.split("\n")
        top = y + height / 2 - 10 * (len(rows) - 1)
        for number, row in enumerate(rows):
            self.text(x + width / 2, top + 20 * number, row, SMALL if number else SIZE, bold=bold and not number)

    def arrow(self, *points: tuple[float, float], dashed: bool = False, head: bool = True):
        """A line through points, with an arrowhead at its end."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path class="line" d="{path}"{dashes}/>')
        if head:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            ux, uy = (x - x0) / length, (y - y0) / length
            corners = [(x, y)] + [(x - 9 * ux + side * 5 * uy, y - 9 * uy - side * 5 * ux) for side in (1, -1)]
            self.parts.append('<path class="head" d="M' + " L".join(f"{a:.1f} {b:.1f}" for a, b in corners) + ' Z"/>')

    def legend(self, *entries: tuple[str, str]):
        """Kinds of boxes and what they mean, in the last line."""
        x, y = 24, self.height - 22
        for kind, text in entries:
            self.parts.append(
                f'<rect class="{kind}" x="{x}" y="{y - 9}" width="24" height="18" rx="4" stroke-width="1.5"/>'
            )
            self.text(x + 32, y, text, SMALL, "start")
            x += 60 + 8 * len(text)

    def save(self):
        """Writes the file."""
        name = self.name
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-labelledby="{name}-title {name}-description">\n'
            f'<title id="{name}-title">{escape(self.title)}</title>\n<desc id="{name}-description">{escape(self.description)}</desc>'
        )
        panel = '<rect class="panel" width="100%" height="100%" rx="8"/>'
        path = FOLDER / f"{name}.svg"
        path.write_text("\n".join([head, STYLE, panel, *self.parts, "</svg>", ""]), encoding="utf-8")
        print(f"wrote {path}")


def seke() -> Figure:
    """Encoder, router, experts, BiLSTM, labels, ranker."""
    f = Figure(
        "seke", "SEKE: experts and a BiLSTM on an encoder",
        "An encoder gives a state for each sub-token, to which the embedding of a style is added. A router sends each state to two "
        "of four experts and adds their outputs by weight. A bidirectional LSTM adds its states, a classifier gives the "
        "probabilities of B, I and O for each word, and a ranker makes them probabilities of phrases.", 330,
    )  # fmt: skip
    f.box(14, 120, 140, 70, "Encoder\nMiniLM, DeBERTa", "plain")
    f.text(84, 82, "text", SIZE)
    f.arrow((84, 92), (84, 120))
    f.box(14, 222, 140, 46, "Style\n“tags”", "trained")
    f.arrow((84, 222), (84, 190))
    f.box(186, 120, 92, 70, "Router\ntop 2 of 4", "trained")
    f.arrow((154, 155), (186, 155))
    for number, y in enumerate((24, 96, 168, 240)):
        used = number in (0, 2)
        f.box(336, y, 116, 46, f"Expert {number + 1}", "trained")
        f.arrow((278, 155), (336, y + 23), dashed=not used)
        f.arrow((452, y + 23), (494, 155), dashed=not used, head=False)
    f.text(306, 62, "0.7", SMALL)
    f.text(318, 158, "0.3", SMALL)
    f.parts.append('<circle class="plain" cx="508" cy="155" r="14" stroke-width="1.5"/>')
    f.text(508, 155, "+", 18)
    f.arrow((522, 155), (552, 155))
    f.box(552, 120, 96, 70, "BiLSTM\n+ its input", "trained")
    f.arrow((648, 155), (676, 155))
    f.box(676, 120, 100, 70, "B, I, O\nof each word", "trained")
    f.arrow((726, 190), (726, 222))
    f.box(648, 222, 128, 46, "Ranker\nP(keyphrase)", "trained")
    f.legend(("plain", "pretrained, fine-tuned or with LoRA"), ("trained", "trained from scratch"))
    return f


def exhird() -> Figure:
    """Encoder, phrase decoder, word decoder, copy and generate."""
    f = Figure(
        "exhird", "ExHiRD: phrases, then the words of each phrase",
        "An encoder reads the words of the document. A GRU has one step per phrase. From each of its states a second GRU writes the "
        "words of the phrase, each generated from the vocabulary or copied from the document. The first word of a phrase may not "
        "be that of a recent phrase. The state at the end of a phrase is the input of the next step of the phrase GRU.", 380,
    )  # fmt: skip
    f.box(24, 60, 140, 230, "Encoder\nBiGRU, CNN,\nTransformer\nor pretrained", "plain")
    f.text(94, 26, "words of the document", SMALL)
    f.arrow((94, 36), (94, 60))
    for column, (x, words) in enumerate(((250, ("graph", "cut")), (520, ("energy", "minimisation")))):
        f.box(x, 60, 220, 46, f"Phrase GRU, step {column + 1}", "trained")
        f.arrow((x + 110, 106), (x + 110, 144))
        f.box(x, 144, 220, 46, "Word GRU", "trained")
        for place, word in zip((x + 56, x + 164), words, strict=True):
            f.arrow((place, 190), (place, 222))
            f.text(place, 236, word, SIZE, bold=True)
        f.text(x + 110, 264, "first word excluded next time" if not column else "may not start with “graph”", SMALL)
    f.arrow((470, 167), (495, 167), (495, 83), (520, 83))
    f.arrow((164, 83), (250, 83))
    f.text(207, 70, "start", SMALL)
    f.arrow((164, 167), (250, 167))
    f.text(207, 154, "attention", SMALL)
    f.box(250, 284, 490, 52, "Each word\nis generated from the vocabulary or copied from the document", "generated")
    f.arrow((164, 274), (207, 274), (207, 310), (250, 310))
    f.legend(("plain", "reads the document"), ("trained", "hierarchical decoder"), ("generated", "pointer-generator"))
    return f


def hypernetwork() -> Figure:
    """A title that generates the weights of the LSTM that reads the text."""
    f = Figure(
        "hypernetwork", "Hypernetwork: a title generates the weights that read the text",
        "A backbone encodes title and text as a pair. An LSTM reads the states of the title into a vector z of 16 or 32 numbers. "
        "Three linear maps generate all weights of a second LSTM from z. This LSTM reads the states of the text, and a head labels "
        "its states: a CRF for keyphrases, a classifier, or answers to questions.", 340,
    )  # fmt: skip
    f.box(24, 60, 140, 200, "Encoder\nof the pair,\nfrozen by default", "plain")
    f.text(94, 26, "title or question, text", SMALL)
    f.arrow((94, 36), (94, 60))
    f.box(220, 60, 110, 56, "LSTM\nreads the title", "trained")
    f.arrow((164, 88), (220, 88))
    f.text(192, 74, "title", SMALL)
    f.box(372, 60, 110, 56, "z\n16 numbers", "generated")
    f.arrow((330, 88), (372, 88))
    f.box(524, 60, 252, 56, "Generator: all weights\nW = W_hz z,  W_xz z,  W_bz z", "trained")
    f.arrow((482, 88), (524, 88))
    f.box(372, 196, 252, 64, "LSTM with these weights\nreads the text, one LSTM per text", "generated")
    f.arrow((650, 116), (650, 156), (498, 156), (498, 196))
    f.arrow((164, 228), (372, 228))
    f.text(268, 214, "text", SMALL)
    f.box(664, 196, 112, 64, "Head\nCRF, classes,\nspans", "trained")
    f.arrow((624, 228), (664, 228))
    f.legend(("plain", "pretrained"), ("trained", "trained"), ("generated", "differs for each title"))
    return f


def moesumm() -> Figure:
    """A feed-forward layer with a main expert and deputies."""
    f = Figure(
        "moesumm", "MoeSumm: a main expert and deputies in each feed-forward layer",
        "In each layer of encoder and decoder, the output of attention goes to the main expert, which is the backbone's own "
        "feed-forward part, and to a selector. There is one selector for each data set; it sends each token to one of three small "
        "deputies. The outputs are added. Without a data set the main expert works alone.", 350,
    )  # fmt: skip
    f.box(24, 130, 120, 60, "Attention\nof the layer", "plain")
    f.box(230, 28, 300, 60, "Main expert\nthe backbone's feed-forward part", "plain")
    f.arrow((144, 160), (186, 160), (186, 58), (230, 58))
    for number, (y, name) in enumerate(((130, "news"), (178, "mail"), (226, "papers"))):
        f.box(224, y, 164, 38, f"Selector: {name}", "trained")
        f.box(440, y, 90, 38, f"Deputy {number + 1}", "trained")
    f.arrow((144, 160), (186, 160), (186, 197), (224, 197))
    f.arrow((388, 197), (440, 149))
    f.arrow((388, 197), (440, 197), dashed=True)
    f.arrow((388, 197), (440, 245), dashed=True)
    f.text(380, 284, "the text's data set chooses the selector,", SMALL)
    f.text(380, 303, "the selector one deputy for each token", SMALL)
    f.parts.append('<circle class="plain" cx="620" cy="110" r="14" stroke-width="1.5"/>')
    f.text(620, 110, "+", 18)
    f.arrow((530, 58), (620, 58), (620, 96))
    f.arrow((530, 149), (620, 149), (620, 124))
    f.arrow((634, 110), (672, 110))
    f.box(672, 80, 104, 60, "Next layer", "plain")
    f.legend(("plain", "BART, PEGASUS or mBART"), ("trained", "added; a new data set trains these only"))
    return f


def lexicon() -> Figure:
    """Dense experts that become a mixture."""
    f = Figure(
        "lexicon", "Merging: the MLPs of fine-tuned models become experts",
        "Three models of one family were fine-tuned separately. In the mixture each layer has the MLPs of all three as experts, "
        "copied byte by byte, and a router that selects some of them for each token or one for each text. Attention, norms "
        "and embeddings exist once: the mean of the models', or the base model's.", 400,
    )  # fmt: skip
    for number, (y, name) in enumerate(((24, "law"), (128, "medicine"), (232, "code"))):
        f.text(24, y + 42, name, SIZE, "start", bold=True)
        f.box(118, y, 120, 40, "MLP", "trained")
        f.box(118, y + 46, 120, 40, "Attention, …", "plain", bold=False)
        f.arrow((238, y + 20), (464, 74 + 52 * number))
        f.arrow((238, y + 66), (420, 292), dashed=True)
    f.text(178, 338, "fine-tuned models", SMALL)
    f.parts.append('<rect class="line" x="404" y="14" width="372" height="310" rx="10"/>')
    for number, name in enumerate(("law", "medicine", "code")):
        f.box(464, 54 + 52 * number, 158, 40, f"MLP: {name}", "trained")
        f.arrow((690, 126), (622, 74 + 52 * number), dashed=number == 1)
    f.box(672, 100, 92, 52, "Router\ntop 2", "generated")
    f.text(590, 34, "each layer of the mixture", SMALL)
    f.box(420, 262, 340, 48, "Attention, norms, embeddings\nthe mean, or the base model's", "plain")
    f.text(590, 338, "a stock Mixtral, Qwen2-MoE, ... or a Lexicon model", SMALL)
    f.legend(
        ("trained", "copied byte by byte"),
        ("plain", "shared by all experts"),
        ("generated", "new: by prompts, samples or training"),
    )
    return f


if __name__ == "__main__":
    for draw in (seke, exhird, hypernetwork, moesumm, lexicon):
        draw().save()
