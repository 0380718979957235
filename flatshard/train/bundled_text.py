"""The text for runs without --data: short stories from a small grammar, always the same."""

from __future__ import annotations

import random
from functools import cache

_LEAST = 200_000
_WOMEN = ("Mara", "Ines", "Tilda", "Rosa", "Hanna", "Wanda", "Ada", "Selma", "Lotte", "Olive", "Freya", "Nora")
_MEN = ("Anton", "Bruno", "Emil", "Jonas", "Oskar", "Peter", "Simon", "Victor", "Hugo", "Leo", "Arne", "Theo")
_TRADES = (
    "baker",
    "miller",
    "fisher",
    "weaver",
    "gardener",
    "clockmaker",
    "shepherd",
    "carpenter",
    "painter",
    "teacher",
    "sailor",
    "potter",
)
_HOMES = (
    "by the old bridge",
    "at the edge of the forest",
    "near the harbour",
    "on the hill above the village",
    "behind the mill",
    "in a narrow street",
    "beside the lake",
    "under the castle wall",
)
_PLACES = ("the market", "the river", "the forest", "the tower", "the village square", "the harbour", "the orchard")
_ANIMALS = ("a grey cat", "a small dog", "a young fox", "an old horse", "a white goose", "a lost lamb", "a black crow")
_THINGS = (
    "a silver key",
    "a wooden box",
    "a letter without a name",
    "a broken lantern",
    "a map of the valley",
    "a blue stone",
    "a bag of seeds",
    "an empty bottle",
    "a book with no cover",
)
_GOODS = ("bread", "apples", "wool", "honey", "fish", "flour", "candles", "pots", "flowers", "cheese")
_WEATHER = (
    "It had rained all night",
    "The wind came from the sea",
    "Snow lay on the roofs",
    "The sun was warm",
    "Fog covered the fields",
    "The air smelled of summer",
)
_SEASONS = ("spring", "summer", "autumn", "winter")
_MOODS = ("happy", "tired", "curious", "afraid", "proud", "hungry", "quiet")
_SIZES = ("small", "tall", "narrow", "crooked", "bright", "quiet")

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
    (name, she), (friend, his) = draw.sample([*((woman, "she") for woman in _WOMEN), *((man, "he") for man in _MEN)], 2)
    trade, trade2 = draw.sample(_TRADES, 2)
    season, season2 = draw.sample(_SEASONS, 2)
    fixed = {
        "name": name,
        "she": she,
        "She": she.capitalize(),
        "friend": friend,
        "his": {"she": "her", "he": "his"}[his],
        "trade": trade,
        "trade2": trade2,
        "season": season,
        "season2": season2,
        "home": draw.choice(_HOMES),
        "animal": draw.choice(_ANIMALS),
        "thing": draw.choice(_THINGS),
    }
    patterns = [
        draw.choice(_OPENINGS),
        draw.choice(_HABITS),
        draw.choice(_EVENTS),
        *draw.sample(_DEEDS, 2),
        draw.choice(_TALK),
        draw.choice(_ENDINGS),
    ]
    loose = {"place": _PLACES, "goods": _GOODS, "weather": _WEATHER, "mood": _MOODS, "size": _SIZES}
    sentences = (
        pattern.format(**fixed, **{word: draw.choice(choices) for word, choices in loose.items()})
        for pattern in patterns
    )
    return " ".join(sentences)


@cache
def bundled_text() -> str:
    """At least `_LEAST` characters of stories, plain ASCII, separated by empty lines."""
    draw = random.Random(1)
    told: list[str] = []
    length = 0
    while length <= _LEAST:
        told.append(_story(draw))
        length += len(told[-1]) + 2
    return "\n\n".join(told) + "\n"
