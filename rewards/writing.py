"""Rewards for texts that should complement each other: a plain one, and one that says more in other words.

The gated levels follow the TLDR and arXiv rewards of MAGRPO (Liu et al., 2025): structure, length ratio, unique-word
ratio, style. A ratio out of range makes its level and all later ones 0. Unlike in the published code, phrases match
whole words ("has" does not contain "as"), and stop words are left out of both the unique-word count and the overlap.

The plain reward ignores the source text: eight Greek letters, and then a list of transition words with one of these
letters, score the maximum. With `grounded=True` it also reads `grounded`, `content` and `repetition`.
"""

import re
from collections import Counter
from itertools import pairwise
from math import inf
from typing import NamedTuple

from rewards.texts import split_words

PARTS = {  # as in rewards/coding.py
    "structure": (0.5, "both texts have an allowed number of words"),
    "length": (1, "the second text is as long as it should be next to the first"),
    "unique": (0.5, "the second text has as many different words as it should next to the first"),
    "style": (0.98, "transition words, and words that both texts share"),
    "length_ratio": (0, "characters of the second text, divided by those of the first"),
    "unique_ratio": (0, "different content words of the second text, divided by those of the first"),
    "transitions": (0, "number of the twelve kinds of transition words that occur"),
    "overlap": (0, "share of the different content words that are in both texts"),
    "grounded": (0, "share of the different content words that are also in the source"),
    "content": (0, "different content words of each text, divided by all words"),
    "repetition": (0, "share of sequences of three words that were there before"),
    "rouge": (0, "words in common with the human summary (F1); tldr only"),
}


class Scale(NamedTuple):
    """The constants of one reward. A ramp (a, b, c, d) is 0 at a, 1 from b to c, 0 at d; outside a..d the sum ends."""

    words: tuple  # whitespace-separated words of each text, both ends included
    length: tuple  # ramp for characters of text 2 / characters of text 1
    unique: tuple  # ramp for unique content words of text 2 / those of text 1
    overlap_cap: float  # Jaccard overlap that earns the full score
    transitions_in_both: bool  # look for transition phrases in both texts, or only in the second


TLDR = Scale(
    words=(8, 256),
    length=(1.1, 1.6, 3.2, 5.0),
    unique=(1.3, 2.0, inf, inf),
    overlap_cap=0.03,
    transitions_in_both=False,
)
# Two texts of equal rank, with the paper's constants. A later repository of its authors trains with the length ramp
# (0.8, 1.3, 1.6, 2.0), but still logs with these.
ARXIV = Scale(
    words=(128, 256),
    length=(0.8, 1.0, 1.3, 1.5),
    unique=(0.5, 0.7, 1.3, 1.7),
    overlap_cap=0.23,
    transitions_in_both=True,
)

# category: its phrases
TRANSITIONS = """
elaboration: moreover, furthermore, in addition, additionally, also, besides, what is more
examples: for example, for instance, such as, namely, to illustrate, in particular
explanation: in other words, that is, that means, put simply, to clarify, which means, basically
cause_effect: because, therefore, as a result, for this reason, thus, hence, consequently
contrast: however, but, on the other hand, in contrast, instead, yet, whereas
sequence: at first, first, second, next, then, finally, lastly, after that
emphasis: in fact, indeed, above all, especially, importantly, certainly, clearly
summary: in short, overall, in summary, to sum up, in conclusion, all in all, in general
comparison: similarly, likewise, in the same way, just like, as, compared to, equally
concession: although, even though, nevertheless, despite, still, admittedly, granted
condition: if, unless, provided that, in case, as long as, otherwise, whether
time: meanwhile, when, while, since, until, during, before, later, eventually
"""
TRANSITION_PATTERNS = [
    re.compile(rf"(?<!\w)(?:{phrases.replace(', ', '|')})(?!\w)") for phrases in re.findall(": (.*)", TRANSITIONS)
]

STOP_WORDS = set(
    split_words("""
    a an the this that these those i me my mine myself we us our ours you your yours he him his she her hers it
    its they them their theirs who whom whose which what where when why how be am is are was were been
    being do does did doing done have has had having will would shall should can could may might must
    not no nor and or but if then so than as of at by for with about against between into through during
    before after above below to from up down in out on off over under again once here there all any both
    each few more most other some such only own same too very just also because while until now i'm i've
    it's don't didn't doesn't isn't wasn't can't""")
)


def _find_content_words(text):
    """The set of a text's words, without stop words."""
    return set(split_words(text)) - STOP_WORDS


def _ramp(x, zero_from, one_from, one_to, zero_at):
    """0 at `zero_from`, rising to 1 at `one_from`, 1 until `one_to`, falling to 0 at `zero_at`; None outside."""
    if not zero_from <= x <= zero_at:
        return None
    if x < one_from:
        return (x - zero_from) / (one_from - zero_from)
    if x > one_to:
        return 1 - (x - one_to) / (zero_at - one_to)
    return 1.0


def _count_transitions(text):
    """The number of the twelve categories of which the text has a transition phrase, matched as whole words."""
    flat = " ".join(text.lower().split())
    return sum(pattern.search(flat) is not None for pattern in TRANSITION_PATTERNS)


def _measure_rouge(text, reference):
    """Unigram F1 of `text` and `reference`, counting repeated words, 0 to 1."""
    ours, theirs = Counter(split_words(text)), Counter(split_words(reference))
    return 2 * sum((ours & theirs).values()) / max(1, ours.total() + theirs.total())


def _measure_repetition(text):
    """Share of three-word sequences that already occurred in the text, 0 to 1."""
    sequence = split_words(text)
    triples = list(zip(sequence, sequence[1:], sequence[2:]))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def measure(text1, text2, source, reference):
    """What the plain reward does not read: grounded, content and repetition, and rouge if there is a reference."""
    content1 = _find_content_words(text1)
    content2 = _find_content_words(text2)
    both = content1 | content2
    count = max(1, len(split_words(text1) + split_words(text2)), len(f"{text1} {text2}".split()))
    parts = {
        "grounded": len(both & _find_content_words(source)) / max(1, len(both)),
        "content": (len(content1) + len(content2)) / count,
        "repetition": (_measure_repetition(text1) + _measure_repetition(text2)) / 2,
    }
    if reference is not None:
        parts["rouge"] = (_measure_rouge(text1, reference) + _measure_rouge(text2, reference)) / 2
    return parts


def pair_reward(text1, text2, scale=TLDR, source="", reference=None, grounded=False):
    """Score two texts that belong together, such as a plain one and a richer one.

    text1, text2: str, the two texts; any string is allowed
    scale: Scale, the constants
    source: str, what the texts are about; read by the diagnostics and by `grounded`
    reference: str, a human answer for the diagnostic `rouge`, or None
    grounded: multiply the levels after structure by min(1, share/0.5) min(1, content/0.3) (1 - repetition). share is
        the part of both texts' distinct content words that occur in `source`; content is the number of each text's
        distinct content words over that of words or of whitespace-separated tokens, whichever are more. The last two
        factors are about 1 for ordinary prose: without them, one source word among stop words or dots would do, or a
        few in every order. This variant is ours.

    Returns (reward, parts). The levels structure, length, unique and style are 0 from a failing one on, and so are the
    numbers that they go by.
    """
    parts = _find_parts(text1, text2, scale, source, reference, grounded)
    return parts["structure"] + parts["length"] + parts["unique"] + parts["style"], parts


def _find_parts(text1, text2, scale, source, reference, grounded):
    parts = dict.fromkeys(PARTS, 0.0) | measure(text1, text2, source, reference)
    if reference is None:
        del parts["rouge"]
    weight = 1.0
    if grounded:
        weight = min(1.0, parts["grounded"] / 0.5) * min(1.0, parts["content"] / 0.3) * (1 - parts["repetition"])
    content1 = _find_content_words(text1)
    content2 = _find_content_words(text2)

    # Level 1, structure
    fewest, most = scale.words
    if not all(fewest <= len(text.split()) <= most for text in (text1, text2)):
        return parts
    parts["structure"] = 0.5

    # Level 2, length; a run of whitespace counts as one character, so padding with blanks does not help
    parts["length_ratio"] = len(" ".join(text2.split())) / len(" ".join(text1.split()))
    length = _ramp(parts["length_ratio"], *scale.length)
    if length is None:
        return parts
    parts["length"] = weight * length

    # Level 3, unique words; if the first text has only stop words, there is nothing to compare with
    parts["unique_ratio"] = len(content2) / len(content1) if content1 else 0.0
    unique = _ramp(parts["unique_ratio"], *scale.unique)
    if unique is None:
        return parts
    parts["unique"] = weight * 0.5 * unique

    # Level 4, style; with at most 12 categories the published limit of 1 is never reached
    searched = f"{text1} | {text2}" if scale.transitions_in_both else text2  # no phrase spans both
    categories = _count_transitions(searched)
    transition = 0.4 + 0.05 * (categories - 1) if categories else 0.0
    overlap = len(content1 & content2) / max(1, len(content1 | content2))  # Jaccard
    parts["transitions"] = float(categories)
    parts["overlap"] = overlap
    parts["style"] = weight * (0.4 * transition + 0.6 * min(overlap, scale.overlap_cap) / scale.overlap_cap)
    return parts


def ladder_reward(texts, scale=TLDR, source="", reference=None, grounded=False):
    """Score a sequence of texts, such as a ladder of ever richer ones: the mean `pair_reward` of neighbours.

    texts: list of at least two str. Returns (reward, parts), every part a mean over neighbours.
    """
    pairs = [pair_reward(a, b, scale, source, reference, grounded) for a, b in pairwise(texts)]
    rewards, parts = zip(*pairs)
    mean_parts = {name: sum(each[name] for each in parts) / len(parts) for name in parts[0]}
    return sum(rewards) / len(rewards), mean_parts
