"""Texts that the app shows at first."""

SAMPLES = {
    "Tidal power": (
        "Twice a day the sea offers a supply of energy that can be predicted decades ahead. A tidal power station of the classic "
        "type closes a bay with a tidal barrage. At high water the sluice gates are shut, and once the tide outside has fallen far "
        "enough, the stored water leaves through bulb turbines, a mode called ebb generation. The usable energy grows with the "
        "square of the tidal range, so only a few estuaries with a strong resonance are worth the civil works. Silting, changed "
        "salinity and the loss of intertidal mudflats count against such schemes."
    ),
    "Bread": (
        "A sourdough starter is a culture of wild yeast and lactic acid bacteria in flour and water. The yeast leavens the dough, "
        "while the bacteria produce the acids that give the bread its taste and slow its staling. Long fermentation at a low "
        "temperature favours acetic acid; a warm and wet dough favours lactic acid. Bakers judge the gluten network by stretching "
        "a piece of dough until light shines through it, which is called the windowpane test."
    ),
}
TERM, CONTEXT = "current", "The current in the wire is measured in amperes."
QUESTION = {
    "title": "How can I rotate a log file every night?",
    "text": "A service writes to one file, which has grown to 4 GB. It must not be restarted, and the old files should be compressed.",
}
ROUTED = "The court finds that the patient presents with a fever."
