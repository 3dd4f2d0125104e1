"""The texts of the needle bench: facts lie beyond the window, and every accepted answer follows from the text."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tamis.bench.retrieval_tasks import WORDS, RetrievalTexts, make_texts, retrieval_tasks, tokens_of_texts

NAMES, LENGTH, WINDOW = 8, 96, 9
TASKS = {task.name: task for task in retrieval_tasks(NAMES)}


def texts_of(name: str, count: int = 12, length: int = LENGTH) -> RetrievalTexts:
    return make_texts(TASKS[name], count, length, WINDOW, NAMES, torch.Generator().manual_seed(0))


def facts_in(tokens: list[int]) -> dict[int, tuple[int, int]]:
    """Return the two names of the fact at each position that holds one."""
    first_fact, end = WORDS + NAMES, tokens_of_texts(NAMES) - 1
    return {at: divmod(t - first_fact, NAMES) for at, t in enumerate(tokens) if first_fact <= t < end}


@pytest.mark.parametrize("name", ["single", "keys", "values", "tracking-2", "tracking-4"])
def test_every_answer_follows_from_a_fact_beyond_the_window(name: str) -> None:
    task, texts = TASKS[name], texts_of(name)
    for tokens, at_QA, accepted_QAA, depths_QA in zip(
        texts.tokens_NL.tolist(), texts.at_NQA, texts.accepted_NQAA, texts.depths_NQA, strict=True
    ):
        facts = facts_in(tokens)
        assert len(facts) == task.questions * task.answers
        assert max(facts) < LENGTH - task.tail - WINDOW
        assert all(WORDS <= token < WORDS + NAMES for token in tokens[LENGTH - task.tail :])
        for at, accepted, depth in zip(at_QA.flatten(), accepted_QAA.flatten(0, 1), depths_QA.flatten(), strict=True):
            place = round(depth.item() * (LENGTH - task.tail - WINDOW - 1))
            question, answer = tokens[at] - WORDS, tokens[at + 1] - WORDS
            assert facts[place] == (question, answer)
            following = {second for first, second in facts.values() if first == question}
            assert {token - WORDS for token in accepted.tolist() if token >= 0} <= following
            assert answer + WORDS in accepted


def test_values_may_come_in_any_order_but_not_twice() -> None:
    texts = texts_of("values", count=1)
    first, second, third = texts.tokens_NL[0][texts.at_NQA[0, 0] + 1].tolist()
    assert texts.accepted_NQAA[0, 0].tolist() == [[first, second, third], [-1, second, third], [-1, -1, third]]


def test_facts_of_several_keys_are_neighbours_and_a_chain_never_branches() -> None:
    for tokens in texts_of("keys").tokens_NL.tolist():
        places = sorted(facts_in(tokens))
        assert places == list(range(places[0], places[0] + 4))
    for tokens in texts_of("tracking-2").tokens_NL.tolist():
        assert len({first for first, _ in facts_in(tokens).values()}) == 6


def test_a_fact_of_several_tokens_is_written_so_often_in_a_row() -> None:
    texts = make_texts(TASKS["tracking-2"], 12, LENGTH, WINDOW, NAMES, torch.Generator().manual_seed(0), repeats=3)
    for tokens, depths_QA in zip(texts.tokens_NL.tolist(), texts.depths_NQA, strict=True):
        facts, reach = facts_in(tokens), LENGTH - TASKS["tracking-2"].tail - WINDOW
        assert len(facts) == 3 * 6 and max(facts) < reach
        for depth in depths_QA.flatten().tolist():
            place = round(depth * (reach - 1))
            assert facts[place] == facts[place + 1] == facts[place + 2]


def test_common_words_are_the_most_frequent_ones() -> None:
    texts = texts_of("common", count=4, length=1000)
    assert texts.depths_NQA.isnan().all()
    for tokens, at_QA in zip(texts.tokens_NL.tolist(), texts.at_NQA, strict=True):
        counted = Counter(tokens[: int(at_QA[0, 0])])
        assert {word for word, _ in counted.most_common(3)} == {tokens[at + 1] for at in at_QA[0].tolist()}
        assert tokens[at_QA[0, 0]] == tokens_of_texts(NAMES) - 1


def test_a_text_too_short_and_too_few_names_are_refused() -> None:
    with pytest.raises(ValueError, match="24 tokens leave no room for the task tracking-4 beyond a window of 9"):
        make_texts(TASKS["tracking-4"], 1, 24, WINDOW, NAMES, torch.Generator())
    with pytest.raises(ValueError, match="the task tracking-4 needs 6 names, got 5"):
        make_texts(TASKS["tracking-4"], 1, LENGTH, WINDOW, 5, torch.Generator())
