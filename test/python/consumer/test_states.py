"""The states of a message in a consumer: the table of the chapter on consumers is the table of the code."""

import re
from itertools import product
from pathlib import Path

import pytest

from pgqueue import testing
from pgqueue.consumer.delivery import TRANSITIONS, ClaimedMessage, IllegalTransition, State

DOCUMENT = Path(__file__).resolve().parents[3] / "python/src/pgqueue/consumer/README.md"
TABLE = DOCUMENT.read_text(encoding="utf-8").partition("\n| State | Meaning |")[2].partition("\n\n")[0]
ROWS = re.findall(r"^\| `(\w+)` \| .+? \|(.*)\|$", TABLE, re.MULTILINE)


def test_the_document_has_the_transitions_of_the_code() -> None:
    documented = {State(name): frozenset(map(State, re.findall(r"`(\w+)`", after))) for name, after in ROWS}
    assert len(ROWS) == len(documented)
    assert documented == TRANSITIONS


@pytest.mark.parametrize(("before", "after"), list(product(State, State)), ids=lambda state: state.value)
def test_a_message_makes_the_legal_transitions_and_no_others(before: State, after: State) -> None:
    message = ClaimedMessage(testing.message(1, id=1))
    message.state = before
    if after in TRANSITIONS[before]:
        message.become(after)
        assert message.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"message 1 is {before.value}: it cannot become {after.value}"):
            message.become(after)
        assert not message.try_become(after)
        assert message.state is before
