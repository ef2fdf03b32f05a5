"""What every refusal has to say, and how."""

from __future__ import annotations


def check_message(message: str, *parts: str) -> None:
    """The shape every message has, and what this one must name."""
    assert message.splitlines()[-1].startswith("Remedy: "), message
    for part in parts:
        assert part in message, f"no {part!r} in\n{message}"
