"""What queues, exchanges and bindings of kombu are called in pgqueue. Different names stay different."""

import re

__all__ = ["binding", "queue_name", "topic"]

_PLAIN_QUEUE = re.compile(r"_(?!x[0-9a-f]{2})|[a-z0-9-]")
_PLAIN_WORD = re.compile(r"[^.*#%\x00-\x1f\x7f]")


def queue_name(prefix: str, name: str) -> str:
    """The queue of pgqueue: other characters than `a-z`, `0-9`, `-` and `_` become `_x` and two hex digits a byte."""
    return prefix + "".join([_escape(name, place) for place in range(len(name))])


def _escape(name: str, place: int) -> str:
    if _PLAIN_QUEUE.match(name, place):
        return name[place]
    return "".join([f"_x{byte:02x}" for byte in name[place].encode("utf-8", "surrogatepass")])


def topic(kind: str, exchange: str, routing_key: str) -> str:
    """The topic to which an exchange publishes."""
    if kind == "fanout":
        return f"kombu.fanout.{_word(exchange)}"
    if kind == "direct":
        return f"kombu.direct.{_word(exchange)}.{_word(routing_key)}"
    return f"kombu.topic.{_word(exchange)}.{'.'.join(map(_word, routing_key.split('.')))}"


def binding(kind: str, exchange: str, routing_key: str) -> str:
    """The topic to which a bound queue subscribes. In a topic exchange, the words `*` and `#` are wildcards."""
    if kind != "topic":
        return topic(kind, exchange, routing_key)
    words = [word if word in ("*", "#") else _word(word) for word in routing_key.split(".")]
    # Several # in a row match the same as one.
    kept = [word for place, word in enumerate(words) if not (word == "#" and words[place - 1 : place] == ["#"])]
    return f"kombu.topic.{_word(exchange)}.{'.'.join(kept)}"


def _word(text: str) -> str:
    plain = [char if _PLAIN_WORD.match(char) else "".join([f"%{byte:02x}" for byte in char.encode()]) for char in text]
    return "".join(plain) or "%"
