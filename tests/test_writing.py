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


def text(num_words, first=0, num_chars=None):
    """Different content words from index `first` on, the last one stretched until there are `num_chars` characters."""
    made = " ".join(WORDS[first : first + num_words])
    return made + "y" * ((num_chars or len(made)) - len(made))


def test_structure_bounds_are_inclusive():
    for scale, fewest, other in (TLDR, 8, 20), (ARXIV, 128, 200):
        for n, expected in ((fewest - 1, 0.0), (fewest, 0.5), (256, 0.5), (257, 0.0)):
            assert pair_reward(text(n), text(other), scale)[1]["structure"] == expected
            assert pair_reward(text(other), text(n), scale)[1]["structure"] == expected


@pytest.mark.parametrize(
    "scale, words1, words2, chars1, lengths",
    [
        (TLDR, 8, 16, 100, {109: None, 110: 0, 135: 0.5, 160: 1, 320: 1, 410: 0.5, 500: 0, 501: None}),
        (ARXIV, 130, 130, 1000, {799: None, 800: 0, 900: 0.5, 1000: 1, 1300: 1, 1400: 0.5, 1500: 0, 1501: None}),
    ],
)
def test_length_ratio(scale, words1, words2, chars1, lengths):
    for chars2, length in lengths.items():  # at an end of the ramp it is worth nothing, and is not a stop
        reward, parts = pair_reward(text(words1, num_chars=chars1), text(words2, num_chars=chars2), scale)
        assert parts["length_ratio"] == chars2 / chars1
        assert parts["length"] == pytest.approx(length or 0, abs=1e-12)
        # 0.5 for words; the overlap is over its cap: 0.6; no transitions
        assert reward == pytest.approx(0.5 + (0 if length is None else length + 0.5 + 0.6))


@pytest.mark.parametrize(
    "scale, fill, uniques",
    [
        (TLDR, (20, 50), {(10, 12): None, (10, 13): 0, (20, 33): 0.25, (10, 20): 0.5, (10, 30): 0.5}),
        (ARXIV, (200, 200), {(200, 99): None, (200, 100): 0, (200, 120): 0.25, (200, 140): 0.5}),
        (ARXIV, (200, 200), {(100, 130): 0.5, (100, 150): 0.25, (100, 170): 0, (100, 171): None}),
    ],
)
def test_unique_word_ratio(scale, fill, uniques):
    # The stop word "the" fills the texts up, so that their lengths pass. All words of one are the other's.
    for counts, unique in uniques.items():
        one, two = (text(n) + " the" * (total - n) for n, total in zip(counts, fill))
        reward, parts = pair_reward(one, two, scale)
        assert parts["unique_ratio"] == counts[1] / counts[0]
        assert parts["unique"] == pytest.approx(unique or 0, abs=1e-12)
        assert reward == pytest.approx(0.5 + parts["length"] + (0 if unique is None else unique + 0.6))


def test_stop_words_count_neither_as_unique_words_nor_as_overlap():
    stop = " ".join(sorted(STOP_WORDS)[:20])
    _, parts = pair_reward(text(8, num_chars=100), text(8) + " " + stop)
    assert parts["unique_ratio"] == 1.0 and parts["unique"] == 0
    _, parts = pair_reward(text(8) + " the of and", text(17, first=50) + " the of and")
    assert parts["unique"] == 0.5 and parts["overlap"] == 0


@pytest.mark.parametrize("k", range(13))
def test_transitions(k):
    phrases = " ".join(phrases[0] for phrases in list(TRANSITIONS.values())[:k])
    reward, parts = pair_reward(text(30, num_chars=300), text(62, first=100, num_chars=600) + " " + phrases)
    t = 0 if k == 0 else 0.4 + 0.05 * (k - 1)
    assert parts["transitions"] == k
    assert parts["style"] == pytest.approx(0.4 * t)
    assert reward == pytest.approx(0.5 + 1 + 0.5 + 0.4 * t)


def test_overlap_is_capped():
    # one shared word of 99 + 1: j = 1/100, a third of the cap
    _, parts = pair_reward(text(33), text(68, first=32))
    assert parts["overlap"] == pytest.approx(1 / 100)
    assert parts["style"] == pytest.approx(0.6 / 3)
    assert pair_reward(text(20), text(40))[1]["style"] == pytest.approx(0.6)


@pytest.mark.parametrize("shared, overlap", [(0, 0), (23, 0.23), (24, 24 / 99)])
def test_arxiv_overlap_is_capped_at_23_percent(shared, overlap):
    # 61 and 62 content words: 123 - shared different ones; 23 of 100 are exactly the cap.
    one, two = text(61) + " the" * 80, text(62, first=61 - shared) + " the" * 80
    _, parts = pair_reward(one, two, ARXIV)
    assert parts["overlap"] == pytest.approx(overlap)
    assert parts["style"] == pytest.approx(0.6 * min(overlap, 0.23) / 0.23)


def test_arxiv_looks_for_transitions_in_both_texts():
    first, second = text(130), text(130, first=200)
    for one, two, k in (
        ("moreover", "", 1),
        ("", "moreover", 1),
        ("moreover", "furthermore", 1),  # a category counts once
        ("moreover", "however", 2),
    ):
        _, parts = pair_reward(f"{first} {one}", f"{second} {two}", ARXIV)
        assert parts["transitions"] == k
        assert parts["style"] == pytest.approx(0.4 * (0.4 + 0.05 * (k - 1)))
    _, parts = pair_reward(first + " in", "addition " + second, ARXIV)  # no phrase from one text into the other
    assert parts["transitions"] == 0
    _, parts = pair_reward(text(8) + " moreover", text(17, first=50), TLDR)  # where only the second text counts
    assert parts["transitions"] == 0


def test_phrases_are_whole_words():
    assert transition_categories("she has a bass and a button") == 0  # as, but
    assert transition_categories("As a\n  Result, nothing") == 2  # "as" (comparison) and "as a result" (cause)


def test_grounded_weight():
    plain = pair_reward(text(8), text(16), source=text(4))
    assert plain[1]["grounded"] == 0.25  # 4 of 16
    reward, parts = pair_reward(text(8), text(16), source=text(4), grounded=True)
    assert reward == pytest.approx(0.5 + (plain[0] - 0.5) / 2)
    assert reward == pytest.approx(sum(parts[k] for k in ("structure", "length", "unique", "style")))
    assert pair_reward(text(8), text(16), source=text(8), grounded=True)[0] == plain[0]  # half is enough
    assert pair_reward(text(8), text(16), source="", grounded=True)[0] == 0.5  # however much the plain reward pays


def test_rouge_and_repetition():
    _, parts = pair_reward("a cat sat on the mat all day", "x " * 10, reference="a dog sat all night")
    # shared: a, sat, all: 2 * 3 / (8 + 5); the second text shares nothing
    assert parts["rouge"] == pytest.approx((6 / 13 + 0) / 2)
    # "x" ten times: eight runs of three, one of them new
    assert parts["repetition"] == pytest.approx((0 + 7 / 8) / 2)


def test_ladder_is_the_mean_over_neighbours():
    a, b, c = text(8), text(16), text(20)
    assert pair_reward(a, b)[0] != pair_reward(b, c)[0]
    reward, parts = ladder_reward([a, b, c])
    assert reward == pytest.approx((pair_reward(a, b)[0] + pair_reward(b, c)[0]) / 2)
    assert parts["length"] == pytest.approx((pair_reward(a, b)[1]["length"] + pair_reward(b, c)[1]["length"]) / 2)


def test_long_texts_take_no_time():
    """A text that hangs the reward of a whole batch."""
    assert pair_reward("word " * 200_000, "a" * 1_000_000)[0] == 0
