"""A small part of a product of choices in which all pairs of choices occur."""

import itertools
import random


def cover(cases, seed=0):
    """Returns some of the cases, in their order, that have all pairs of the whole.

    Greedy: the case with most pairs that no case before it had.

    Args:
        cases: Tuples of the same length; a pair is two places and what stands there.
        seed: Of the choice among equals. Some lead to fewer cases than others.
    """
    order = random.Random(seed).sample(cases, len(cases))
    pairs_of = {case: pairs(case) for case in cases}
    missing, chosen = set().union(*pairs_of.values()), set()
    while missing:
        best = max(order, key=lambda case: len(pairs_of[case] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return [case for case in cases if case in chosen]


def pairs(case):
    """The pairs of choices in a case."""
    return set(itertools.combinations(enumerate(case), 2))
