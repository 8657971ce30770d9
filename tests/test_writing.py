"""The tldr and arxiv rewards against numbers worked out by hand."""

import pytest

from rewards.writing import (
    ARXIV,
    STOP_WORDS,
    TLDR,
    TRANSITIONS,
    ladder_reward,
    pair_reward,
    transition_categories,
)

# Words of four letters: n of them make 5n - 1 characters, and every one is a content word.
LETTERS = "bcdfghjklmnpqrstvwxz"
WORDS = [f"{a}{b}zq" for a in LETTERS for b in LETTERS]


def text(num_words, first=0, num_chars=0, fill=""):
    """Different content words from index `first` on, the last one stretched until there are `num_chars` characters."""
    words = " ".join(WORDS[first : first + num_words])
    return words.ljust(num_chars, "y") + fill


@pytest.mark.parametrize("scale, fewest, other", [(TLDR, 8, 20), (ARXIV, 128, 200)])
def test_structure_bounds_are_inclusive(scale, fewest, other):
    """Fails if a text of the fewest or the most words earns nothing, or one beyond them earns something."""
    for n, structure in {fewest - 1: 0, fewest: 0.5, 256: 0.5, 257: 0}.items():
        for one, two in (text(n), text(other)), (text(other), text(n)):
            assert pair_reward(one, two, scale)[1]["structure"] == structure


@pytest.mark.parametrize(
    "scale, words1, words2, chars1, lengths",
    [
        (TLDR, 8, 16, 100, {109: None, 110: 0, 135: 0.5, 160: 1, 320: 1, 410: 0.5, 500: 0, 501: None}),
        (ARXIV, 130, 130, 1000, {799: None, 800: 0, 900: 0.5, 1000: 1, 1300: 1, 1400: 0.5, 1500: 0, 1501: None}),
    ],
)
def test_length_ratio(scale, words1, words2, chars1, lengths):
    """Fails if a bound of the length ramp is another, or if an end of it, which is worth nothing, stops the sum."""
    for chars2, length in lengths.items():
        reward, parts = pair_reward(text(words1, num_chars=chars1), text(words2, num_chars=chars2), scale)
        assert parts["length_ratio"] == chars2 / chars1
        assert parts["length"] == pytest.approx(length or 0, abs=1e-12)
        # 0.5 for words; the overlap is over its cap: 0.6; no transitions
        assert reward == pytest.approx(0.5 if length is None else 0.5 + length + 0.5 + 0.6)


UNIQUE = {  # scale and numbers of words of two texts -> unique content words of both -> what that earns
    (TLDR, 20, 50): {
        (10, 12): None,
        (10, 13): 0,
        (20, 33): 0.25,
        (10, 20): 0.5,
        (10, 30): 0.5,
    },
    (ARXIV, 200, 200): {
        (200, 99): None,
        (200, 100): 0,
        (200, 120): 0.25,
        (200, 140): 0.5,
        (100, 130): 0.5,
        (100, 150): 0.25,
        (100, 170): 0,
        (100, 171): None,
    },
}


@pytest.mark.parametrize("scale, words1, words2", UNIQUE)
def test_unique_word_ratio(scale, words1, words2):
    """Fails if a bound of the ramp of unique words is another."""
    for (unique1, unique2), unique in UNIQUE[scale, words1, words2].items():
        # The stop word "the" fills the texts up, or else their lengths would fail. All words of one are the other's.
        one = text(unique1, fill=" the" * (words1 - unique1))
        two = text(unique2, fill=" the" * (words2 - unique2))
        reward, parts = pair_reward(one, two, scale)
        assert parts["unique_ratio"] == unique2 / unique1
        assert parts["unique"] == pytest.approx(unique or 0, abs=1e-12)
        style = 0 if unique is None else 0.6
        assert reward == pytest.approx(0.5 + parts["length"] + parts["unique"] + style)


def test_stop_words_count_neither_as_unique_words_nor_as_overlap():
    """Fails if stop words make a text richer, or two texts alike."""
    stop_words = " " + " ".join(sorted(STOP_WORDS)[:20])
    _, parts = pair_reward(text(20, fill=" the of and"), text(40, first=50, fill=stop_words))
    assert (parts["unique_ratio"], parts["overlap"]) == (2, 0)


@pytest.mark.parametrize("categories", range(13))
def test_transitions(categories):
    """Fails if a category is not found or is worth another sum, or if phrases of the plain text count."""
    phrases = [phrases[0] for phrases in TRANSITIONS.values()]
    two = text(62, first=100, num_chars=600, fill=" " + " ".join(phrases[:categories]))
    reward, parts = pair_reward(text(30, num_chars=300, fill=" whereas"), two)
    style = 0.4 * (0.4 + 0.05 * (categories - 1)) if categories else 0
    assert parts["transitions"] == categories
    assert parts["style"] == pytest.approx(style)
    assert reward == pytest.approx(0.5 + 1 + 0.5 + style)


@pytest.mark.parametrize(
    "scale, words1, words2, fill, shared, overlap, style",
    [
        (TLDR, 33, 68, 0, 1, 1 / 100, 0.6 / 3),
        (TLDR, 33, 68, 0, 33, 33 / 68, 0.6),
        (ARXIV, 61, 62, 80, 0, 0, 0),
        (ARXIV, 61, 62, 80, 23, 0.23, 0.6),
        (ARXIV, 61, 62, 80, 24, 24 / 99, 0.6),
    ],
)
def test_overlap_is_capped(scale, words1, words2, fill, shared, overlap, style):
    """Fails if the overlap is not the share of common words, or if the cap of a scale is another."""
    one = text(words1, fill=" the" * fill)
    two = text(words2, first=words1 - shared, fill=" the" * fill)
    _, parts = pair_reward(one, two, scale)
    assert parts["overlap"] == pytest.approx(overlap)
    assert parts["style"] == pytest.approx(style)


@pytest.mark.parametrize(
    "phrase1, phrase2, categories",
    [
        ("moreover", "", 1),
        ("", "moreover", 1),
        ("moreover", "furthermore", 1),  # a category counts once
        ("moreover", "however", 2),
        ("in", "addition", 0),  # no phrase from one text into the other
    ],
)
def test_arxiv_looks_for_transitions_in_both_texts(phrase1, phrase2, categories):
    """Fails if only one text is searched, or if a phrase begins in one and ends in the other."""
    _, parts = pair_reward(text(130, fill=f" {phrase1}"), text(130, 200, fill=f" {phrase2}"), ARXIV)
    assert parts["transitions"] == categories


def test_phrases_are_whole_words():
    """Fails if "has" contains "as", or if a phrase is not found over the end of a line."""
    assert transition_categories("she has a bass and a button") == 0  # as, but
    assert transition_categories("As a\n  Result, nothing") == 2  # "as" (comparison) and "as a result" (cause)


def test_grounded_weight():
    """Fails if words from elsewhere earn as much as those of the source, or if more than half are asked for."""
    plain, parts = pair_reward(text(8), text(16), source=text(4))
    assert parts["grounded"] == 0.25  # 4 of 16
    for source, weight in {text(4): 0.5, text(8): 1, "": 0}.items():
        reward, _ = pair_reward(text(8), text(16), source=source, grounded=True)
        assert reward == pytest.approx(0.5 + (plain - 0.5) * weight)


def test_rouge_and_repetition():
    """Fails if a diagnostic counts a word or a triple twice."""
    _, parts = pair_reward("a cat sat on the mat all day", "x " * 10, reference="a dog sat all night")
    # shared: a, sat, all: 2 * 3 / (8 + 5); the second text shares nothing
    assert parts["rouge"] == pytest.approx((6 / 13 + 0) / 2)
    # "x" ten times: eight triples, one of them new
    assert parts["repetition"] == pytest.approx((0 + 7 / 8) / 2)


def test_ladder_is_the_mean_over_neighbours():
    """Fails if a neighbour is left out, or if the first and the last text are compared."""
    a, b, c = text(8), text(16), text(20)
    first, _ = pair_reward(a, b)
    second, _ = pair_reward(b, c)
    assert first != second
    reward, _ = ladder_reward([a, b, c])
    assert reward == pytest.approx((first + second) / 2)
