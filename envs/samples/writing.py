"""Posts to summarize and abstracts to expand, made offline from small grammars."""

import random

from envs.samples import find_split, read_groups, read_list, read_table

# ---------------------------------------------------------------- posts

# person | subreddit
PERSONS = read_table("""
roommate | roommates
neighbor | neighbors
landlord | neighbors
sister | family
brother | family
mother | family
cousin | family
girlfriend | relationships
boyfriend | relationships
friend | relationships
boss | work
coworker | work
""")
PROBLEMS = read_list("""
    plays loud music at night, keeps borrowing money from me, reads my private messages
    never pays the shared bills, forgets every single promise, talks about me behind my back
    leaves dirty dishes everywhere, is always an hour late, ignores all my calls, brings strangers into the house
    lies about small things, breaks things and hides it
""")
DURATIONS = read_list("two weeks, a month, three months, half a year, a year, two years, ten days, five years")
FEELINGS = read_list("angry, tired, lonely, confused, guilty, nervous, hurt, ashamed")
ATTEMPTS = read_list("""
    asked them to stop, wrote a long letter, set a clear rule, offered to help, made a shared plan
    complained to a manager, stayed silent, bought a small gift
""")
OUTCOMES = read_list("""
    nothing changed, it only got worse, they laughed at me, they cried and apologized, we had a big fight
    it helped for one week, they stopped talking to me, they promised to change
""")
QUESTIONS = read_list("""
    move out, end it now, ask a counselor, say it again, forgive them, wait a little longer, tell the others
    look for a new place
""")

POST_WORDINGS = [
    "My {person} {problem}. This has been going on for {duration} and I feel {feeling}. I {attempt}, but {outcome}. "
    "Should I {question}?",
    "I feel {feeling}. For {duration} now my {person} {problem}. I {attempt} and {outcome}. "
    "Is it right to {question}?",
    "I need advice. My {person} {problem} and it makes me {feeling}. It started {duration} ago. I {attempt}. "
    "After that {outcome}. Do I {question}?",
]

# One list per fact, in the order of a summary. Some sentences get opening words from OPENERS.
SENTENCES = read_groups("""
My {person} {problem}.
The post is about a {person} who {problem}.
The writer's {person} {problem}.

It has been going on for {duration}.
This started {duration} ago and the writer feels {feeling}.
I have felt {feeling} for {duration}.

I {attempt}.
The writer {attempt} to make things better.
I {attempt} and hoped for a change.

After that {outcome}.
In the end {outcome}.
The answer was clear and {outcome}.

Should I {question}?
Now the question is whether to {question}.
I wonder if I should {question}.
""")
OPENERS = read_groups("""
In short,
Basically,
In general,

In fact,
Meanwhile,
Moreover,

Therefore
At first
For example,

However,
As a result,
Unfortunately,

Finally,
Overall,
For this reason,
""")


def _draw_post_facts(split, count, rng):
    """`count` different combinations of facts; person, problem and attempt decide the split."""
    chosen = {}
    while len(chosen) < count:
        p, q, a = (rng.randrange(len(options)) for options in (PERSONS, PROBLEMS, ATTEMPTS))
        if find_split(p, q, a) != split:
            continue
        person, subreddit = PERSONS[p]
        facts = {
            "person": person,
            "subreddit": subreddit,
            "problem": PROBLEMS[q],
            "attempt": ATTEMPTS[a],
            "duration": rng.choice(DURATIONS),
            "feeling": rng.choice(FEELINGS),
            "outcome": rng.choice(OUTCOMES),
            "question": rng.choice(QUESTIONS),
        }
        # a repeated combination changes nothing
        chosen[tuple(facts.values())] = facts
    return chosen.values()


def _write_post(facts, rng):
    """A post, and a summary of two sentences, in the columns of trl-lib/tldr."""
    body = rng.choice(POST_WORDINGS).format(**facts)
    title = f"My {facts['person']} {facts['problem']}"
    prompt = f"SUBREDDIT: r/{facts['subreddit']}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"
    return {"prompt": prompt, "completion": _write_summary(facts, 2, 0.0, rng)}


def _write_summary(facts, num_sentences, opener_rate, rng):
    """`num_sentences` of the five facts, in order, one sentence each."""
    sentences = []
    for k in sorted(rng.sample(range(len(SENTENCES)), num_sentences)):
        sentence = rng.choice(SENTENCES[k]).format(**facts)
        if rng.random() < opener_rate:
            first = sentence if sentence.startswith("I ") else sentence[0].lower() + sentence[1:]
            sentence = f"{rng.choice(OPENERS[k])} {first}"
        sentences.append(sentence)
    return " ".join(sentences)


def make_posts(split, count, seed):
    """Posts in the columns of trl-lib/tldr.

    Returns `count` dicts: prompt ("SUBREDDIT: ... TITLE: ... POST: ... TL;DR:") and completion (a summary of two
    sentences).
    """
    rng = random.Random(f"posts {split} {seed}")
    return [_write_post(facts, rng) for facts in _draw_post_facts(split, count, rng)]


def demonstrate_posts(count, per_post, seed):
    """Train posts with texts to imitate: prompt, completion as in `make_posts`, and `demonstrations`.

    The demonstrations of a post are `per_post` summaries of 1 to 5 sentences, drawn independently of each other; about
    a quarter of the sentences open with a transition word. They do not teach which agent should be brief.
    """
    rng = random.Random(f"demonstrated posts {seed}")
    return [
        {
            **_write_post(facts, rng),
            "demonstrations": [_write_summary(facts, rng.randint(1, 5), 0.25, rng) for _ in range(per_post)],
        }
        for facts in _draw_post_facts("train", count, rng)
    ]


# ---------------------------------------------------------------- abstracts

METHODS = read_list("""
    a simple linear model, a small neural network, a random walk, a greedy search, a mixture of experts
    a tree of decisions, a sparse matrix method, a sampling scheme
""")
OBSTACLES = read_list("""
    missing data, slow convergence, label noise, high cost, class imbalance, constant change, model error
    signal delay, low resolution
""")
FIELDS = read_list("""
    weather forecasts, traffic lights, protein maps, star catalogs, translation systems, power networks
    crop yields, river floods, crystal structures
""")
FINDINGS = read_list("""
    the error falls by half, ten samples are enough, the cost grows only slowly, the result holds for all sizes
    old methods fail early, the answer does not depend on the start
""")
CHECKS = read_list("a public benchmark, three real records, a long simulation, a field study, a large survey")

ABSTRACT_WORDINGS = [
    "We study {obstacle} in {field}. We propose {method} and test it on {check}. We find that {finding}.",
    "In {field}, {obstacle} is a common problem. Here we use {method}. On {check} we show that {finding}.",
    "This paper presents {method} for {field} with {obstacle}. With {check} we show that {finding}.",
]

# For each part of an introduction, its sentences in order.
INTRODUCTION = read_groups("""
Over many years {field} have become an important subject of research in science and in daily life.
Most of the work on {field} assumes that everything that matters can be measured without any error.
In practice, however, those who work with {field} often have to deal with {obstacle} from the first day.
Earlier studies described {obstacle} in detail, but they did not say what should be done about it.

This is a serious problem because {obstacle} can hide the very effect that we would like to see.
As a result, decisions about {field} are still made by hand, which is slow and sometimes wrong.
A better answer to {obstacle} would therefore help everyone who has to rely on {field} in their work.
We ask whether there is a way to handle {obstacle} that is easy to explain and cheap to use.

To this end we propose {method}, which takes {obstacle} into account from the beginning.
First we describe {method} in general, and then we show how its few parameters can be chosen.
We test {method} on {check}, and compare it with what is commonly used for {field} today.
In particular, we look at how {method} behaves when {obstacle} becomes more and more severe.

Our main result is that {finding}, and that this remains true when the setting is changed.
Since {finding}, it seems possible to use {method} for {field} without any further preparation.
For example, those who plan with {field} could spend less time on {obstacle} and more on what follows.
Although our study is limited to {check}, we expect that {method} is of use for similar questions.
""")


def _draw_abstract_facts(split, count, rng):
    """`count` sets of facts; method, obstacle and field decide the split."""
    chosen = []
    while len(chosen) < count:
        m, o, f = (rng.randrange(len(options)) for options in (METHODS, OBSTACLES, FIELDS))
        if find_split(m, o, f) == split:
            facts = {"method": METHODS[m], "obstacle": OBSTACLES[o], "field": FIELDS[f]}
            chosen.append({**facts, "finding": rng.choice(FINDINGS), "check": rng.choice(CHECKS)})
    return chosen


def _write_abstract(number, facts, rng):
    return {"article_id": f"sample.{number}", "abstract_text": rng.choice(ABSTRACT_WORDINGS).format(**facts)}


def make_abstracts(split, count, seed):
    """Abstracts in the columns of OpenMLRL/arXiv_abstract that are read: article_id and abstract_text.

    Returns `count` dicts.
    """
    rng = random.Random(f"abstracts {split} {seed}")
    return [_write_abstract(i, facts, rng) for i, facts in enumerate(_draw_abstract_facts(split, count, rng))]


def demonstrate_abstracts(count, per_abstract, seed):
    """Train abstracts with texts to imitate: the columns of `make_abstracts`, and `demonstrations`.

    The demonstrations of an abstract are `per_abstract` paragraphs of 7 to 14 sentences (126 to 284 words), drawn
    independently of each other from all parts of an introduction: agents that imitate them still have to learn to
    keep to their own parts, and to the length that the reward asks for.
    """
    rng = random.Random(f"demonstrated abstracts {seed}")
    sentences = [sentence for part in INTRODUCTION for sentence in part]
    return [
        {
            **_write_abstract(i, facts, rng),
            "demonstrations": [
                " ".join(sentences[k].format(**facts) for k in sorted(rng.sample(range(16), rng.randint(7, 14))))
                for _ in range(per_abstract)
            ],
        }
        for i, facts in enumerate(_draw_abstract_facts("train", count, rng))
    ]
