"""The tldr and arxiv rewards against numbers worked out by hand."""

import pytest
from toy import rows_of

from rewards.writing import ARXIV, TLDR, ladder_reward, pair_reward

# Words of four letters: n of them make 5n - 1 characters, and every one is a content word.
LETTERS = "bcdfghjklmnpqrstvwxz"
WORDS = [f"{a}{b}zq" for a in LETTERS for b in LETTERS]
SCALES = {"tldr": TLDR, "arxiv": ARXIV}
LEVELS = ["structure", "length", "unique", "style"]


def text(num_words, first=0, num_chars=0, times=0):
    """Different content words from index `first` on, the last stretched to make `num_chars`, then "the" some times."""
    words = " ".join(WORDS[first : first + num_words])
    return words.ljust(num_chars, "y") + " the" * times


# Scale | both texts, as arguments of text() | what the levels earn, up to where the sum ends | a diagnostic
PAIRS = """
tldr  | 7         | 20          | 0               | length_ratio 0
tldr  | 8         | 20          | 0.5 1 0.5 0.6   | overlap 0.4
tldr  | 20        | 7           | 0               | length_ratio 0
tldr  | 20        | 8           | 0.5             | length_ratio 0.393939
tldr  | 256       | 20          | 0.5             | unique_ratio 0
tldr  | 257       | 20          | 0               | unique_ratio 0
tldr  | 20        | 256         | 0.5             | overlap 0
tldr  | 20        | 257         | 0               | overlap 0
arxiv | 127       | 200         | 0               | overlap 0
arxiv | 128       | 200         | 0.5             | overlap 0
arxiv | 200       | 127         | 0               | overlap 0
arxiv | 200       | 128         | 0.5             | overlap 0
arxiv | 200       | 256         | 0.5 1 0.5 0.6   | overlap 0.78125
arxiv | 200       | 257         | 0               | overlap 0
tldr  | 8 0 100   | 16 0 109    | 0.5             | length_ratio 1.09
tldr  | 8 0 100   | 16 0 110    | 0.5 0 0.5 0.6   | length_ratio 1.1
tldr  | 8 0 100   | 16 0 135    | 0.5 0.5 0.5 0.6 | length_ratio 1.35
tldr  | 8 0 100   | 16 0 160    | 0.5 1 0.5 0.6   | length_ratio 1.6
tldr  | 8 0 100   | 16 0 320    | 0.5 1 0.5 0.6   | length_ratio 3.2
tldr  | 8 0 100   | 16 0 410    | 0.5 0.5 0.5 0.6 | length_ratio 4.1
tldr  | 8 0 100   | 16 0 500    | 0.5 0 0.5 0.6   | length_ratio 5
tldr  | 8 0 100   | 16 0 501    | 0.5             | length_ratio 5.01
arxiv | 130 0 999 | 130 0 799   | 0.5             | unique_ratio 0
arxiv | 130 0 990 | 130 0 792   | 0.5 0 0.5 0.6   | length_ratio 0.8
arxiv | 130 0 990 | 130 0 891   | 0.5 0.5 0.5 0.6 | length_ratio 0.9
arxiv | 130 0 990 | 130 0 990   | 0.5 1 0.5 0.6   | length_ratio 1
arxiv | 130 0 990 | 130 0 1287  | 0.5 1 0.5 0.6   | length_ratio 1.3
arxiv | 130 0 990 | 130 0 1386  | 0.5 0.5 0.5 0.6 | length_ratio 1.4
arxiv | 130 0 990 | 130 0 1485  | 0.5 0 0.5 0.6   | length_ratio 1.5
arxiv | 130 0 990 | 130 0 1486  | 0.5             | unique_ratio 0
tldr  | 10 0 0 10 | 12 0 0 38   | 0.5 1           | unique_ratio 1.2
tldr  | 10 0 0 10 | 13 0 0 37   | 0.5 1 0 0.6     | unique_ratio 1.3
tldr  | 20        | 33 0 0 17   | 0.5 1 0.25 0.6  | unique_ratio 1.65
tldr  | 10 0 0 10 | 20 0 0 30   | 0.5 1 0.5 0.6   | unique_ratio 2
tldr  | 10 0 0 10 | 30 0 0 20   | 0.5 1 0.5 0.6   | unique_ratio 3
arxiv | 200       | 99 0 900 99 | 0.5 1           | unique_ratio 0.495
arxiv | 200       | 100 0 900 99 | 0.5 1 0 0.6    | unique_ratio 0.5
arxiv | 200       | 120 0 900 99 | 0.5 1 0.25 0.6 | unique_ratio 0.6
arxiv | 200       | 140 0 900 99 | 0.5 1 0.5 0.6  | unique_ratio 0.7
arxiv | 100 0 0 99 | 130 0 0 70 | 0.5 1 0.5 0.6   | unique_ratio 1.3
arxiv | 100 0 0 99 | 150 0 0 50 | 0.5 1 0.25 0.6  | unique_ratio 1.5
arxiv | 100 0 0 99 | 170 0 0 30 | 0.5 1 0 0.6     | unique_ratio 1.7
arxiv | 100 0 0 99 | 171 0 0 30 | 0.5 1           | unique_ratio 1.71
tldr  | 33        | 68 32       | 0.5 1 0.5 0.2   | overlap 0.01
tldr  | 33        | 68          | 0.5 1 0.5 0.6   | overlap 0.485294
arxiv | 61 0 0 80 | 62 61 0 80  | 0.5 1 0.5 0     | overlap 0
arxiv | 61 0 0 80 | 62 51 0 80  | 0.5 1 0.5 0.230858 | overlap 0.08849558
arxiv | 61 0 0 80 | 62 38 0 80  | 0.5 1 0.5 0.6   | overlap 0.23
arxiv | 61 0 0 80 | 62 37 0 80  | 0.5 1 0.5 0.6   | overlap 0.242424
"""


@pytest.mark.parametrize("scale, one, two, levels, diagnostic", rows_of(PAIRS))
def test_levels(scale, one, two, levels, diagnostic):
    """Fails if a bound, a ramp or a cap is another, the end of a ramp stops the sum, or a stop word counts."""
    texts = [text(*map(int, arguments.split())) for arguments in (one, two)]
    reward, parts = pair_reward(*texts, SCALES[scale])
    expected = [float(level) for level in levels.split()]
    name, value = diagnostic.split()
    assert reward == pytest.approx(sum(expected), abs=1e-6)
    assert [parts[level] for level in LEVELS] == pytest.approx(expected + [0] * (4 - len(expected)), abs=1e-6)
    assert parts[name] == pytest.approx(float(value), rel=1e-5)


# Scale | what comes after the first text | before the second | categories of transitions | what the style earns
TRANSITIONS = """
tldr  | whereas | | 0 | 0
tldr  | whereas | moreover | 1 | 0.16
tldr  | | moreover for example | 2 | 0.18
tldr  | | moreover for example that is thus however | 5 | 0.24
tldr  | | moreover for example that is thus however next indeed overall likewise despite if when | 12 | 0.38
arxiv | moreover | | 1 | 0.16
arxiv | | moreover | 1 | 0.16
arxiv | moreover | furthermore | 1 | 0.16
arxiv | moreover | however | 2 | 0.18
arxiv | in | addition | 0 | 0
arxiv | | she has a bass, a button | 0 | 0
arxiv | | As a  Result, nothing | 2 | 0.18
"""


@pytest.mark.parametrize("scale, one, two, count, style", rows_of(TRANSITIONS))
def test_each_category_of_transitions_counts_once(scale, one, two, count, style):
    """Fails if a category is not found or is worth another sum, or if "has" contains "as".

    Or if the plain text of tldr or only one of arxiv is searched, or a phrase begins in one and ends in the other.
    """
    _, parts = pair_reward(f"{text(130)} {one}", f"{two} {text(180, 200)}", SCALES[scale])
    assert parts["unique"] > 0
    assert parts["transitions"] == int(count)
    assert parts["style"] == pytest.approx(float(style))


def test_grounded_weight():
    """Fails if words from elsewhere earn as much as those of the source, or if more than half are asked for."""
    plain, _ = pair_reward(text(8), text(16))
    for num_words, weight in {4: 0.5, 8: 1, 0: 0}.items():
        reward, parts = pair_reward(text(8), text(16), source=text(num_words), grounded=True)
        assert parts["grounded"] == num_words / 16
        assert reward == pytest.approx(0.5 + (plain - 0.5) * weight)


def test_rouge_and_repetition():
    """Fails if a diagnostic counts a word or a triple twice."""
    _, parts = pair_reward("a cat sat on the mat all day", "x " * 10, reference="a dog sat all night")
    # shared: a, sat, all: 2 * 3 / (8 + 5); the second text shares nothing; the mean is half of that
    assert parts["rouge"] == pytest.approx(3 / 13)
    # "x" ten times: eight triples, one of them new; the first text repeats none
    assert parts["repetition"] == pytest.approx(7 / 16)


def test_ladder_is_the_mean_over_neighbours():
    """Fails if a neighbour is left out, or if the first and the last text are compared."""
    a, b, c = text(8), text(16), text(20)
    assert ladder_reward([a, b, c])[0] == pytest.approx((pair_reward(a, b)[0] + pair_reward(b, c)[0]) / 2)
