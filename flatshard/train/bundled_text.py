"""The text for runs without --data: short stories from a small grammar, always the same."""

from __future__ import annotations

import random
from functools import cache

_LEAST = 200_000


def _listed(words: str) -> list[str]:
    return " ".join(words.split()).split(", ")


_WOMEN = _listed("Mara, Ines, Tilda, Rosa, Hanna, Wanda, Ada, Selma, Lotte, Olive, Freya, Nora")
_MEN = _listed("Anton, Bruno, Emil, Jonas, Oskar, Peter, Simon, Victor, Hugo, Leo, Arne, Theo")
_TRADES = _listed("""
    baker, miller, fisher, weaver, gardener, clockmaker, shepherd, carpenter, painter, teacher, sailor, potter
""")
_HOMES = _listed("""
    by the old bridge, at the edge of the forest, near the harbour, on the hill above the village, behind the mill,
    in a narrow street, beside the lake, under the castle wall
""")
_ANIMALS = _listed("a grey cat, a small dog, a young fox, an old horse, a white goose, a lost lamb, a black crow")
_THINGS = _listed("""
    a silver key, a wooden box, a letter without a name, a broken lantern, a map of the valley, a blue stone,
    a bag of seeds, an empty bottle, a book with no cover
""")
_SEASONS = _listed("spring, summer, autumn, winter")
_LOOSE = {  # words that every sentence draws anew
    "place": _listed("the market, the river, the forest, the tower, the village square, the harbour, the orchard"),
    "goods": _listed("bread, apples, wool, honey, fish, flour, candles, pots, flowers, cheese"),
    "weather": _listed("""
        It had rained all night, The wind came from the sea, Snow lay on the roofs, The sun was warm,
        Fog covered the fields, The air smelled of summer
    """),
    "mood": _listed("happy, tired, curious, afraid, proud, hungry, quiet"),
    "size": _listed("small, tall, narrow, crooked, bright, quiet"),
}

_OPENINGS = (
    "Once there was a {trade} called {name}, who lived in a {size} house {home}.",
    "{name} was a {trade} and lived {home}.",
    "In the {size} house {home} lived {name} the {trade}.",
)
_HABITS = (
    "Every morning {she} took {goods} to {place}.",
    "In {season} {she} sold {goods}, and in {season2} {she} slept late.",
    "{She} had {animal}, and the two went everywhere together.",
    "Nobody in the village knew more about {goods} than {she} did.",
)
_EVENTS = (
    "{weather}, and on the way to {place} {name} found {thing}.",
    "One evening {animal} came to the door with {thing}.",
    "{weather}. {name} was {mood}, walked to {place} and came back with {thing}.",
    "One day {friend} the {trade2} came to {name} with {thing} and asked for help.",
)
_TALK = (
    '"Where did you find it?" asked {friend}. "Near {place}," said {name}.',
    '"I am {mood}," said {name}. "Then sit down and eat," said {friend}.',
    '"Is this yours?" {name} asked. {friend} shook {his} head and laughed.',
    '"We should go to {place} before night," said {friend}, and {name} agreed.',
)
_DEEDS = (
    "{She} carried it home and put it under the bed.",
    "So they went to {place} and waited until the moon was up.",
    "{friend} brought {goods}, and they shared it with {animal}.",
    "They looked for the owner at {place}, but no one had lost a thing.",
    "{She} thought about it for three days and told only {friend}.",
    "At {place} they met {animal} and followed it into the dark.",
)
_ENDINGS = (
    "From that day on {name} and {friend} were friends.",
    "In the end {she} gave it back, and everyone in the village was {mood}.",
    "That night {name} slept well, and in the morning {she} went back to work.",
    "And if you walk to {place} in {season}, you can still see it there.",
)


def _story(draw: random.Random) -> str:
    people = [*((name, "she", "her") for name in _WOMEN), *((name, "he", "his") for name in _MEN)]
    (name, she, _), (friend, _, his) = draw.sample(people, 2)
    trade, trade2 = draw.sample(_TRADES, 2)
    season, season2 = draw.sample(_SEASONS, 2)
    fixed = {"name": name, "she": she, "She": she.capitalize(), "friend": friend, "his": his}
    fixed |= {"trade": trade, "trade2": trade2, "season": season, "season2": season2}
    fixed |= {"home": draw.choice(_HOMES), "animal": draw.choice(_ANIMALS), "thing": draw.choice(_THINGS)}
    patterns = [draw.choice(choices) for choices in (_OPENINGS, _HABITS, _EVENTS)]
    patterns += [*draw.sample(_DEEDS, 2), draw.choice(_TALK), draw.choice(_ENDINGS)]
    return " ".join(
        pattern.format(**fixed, **{word: draw.choice(choices) for word, choices in _LOOSE.items()})
        for pattern in patterns
    )


@cache
def bundled_text() -> str:
    """At least `_LEAST` characters of stories, plain ASCII, separated by empty lines."""
    draw = random.Random(1)
    text = ""
    while len(text) <= _LEAST:
        text += _story(draw) + "\n\n"
    return text.removesuffix("\n")
