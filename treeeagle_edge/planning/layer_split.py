"""Splits a run's layers over several cards, where no card alone has room or where the person asks for it."""

from __future__ import annotations

from collections.abc import Callable

from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.planning.card_shares import Card
from treeeagle_edge.planning.memory_plan import MemoryPlan

# plans a context (tokens) over these cards; over none, on the chosen device
Planner = Callable[[int, tuple[Card, ...]], MemoryPlan]


def arrange(planned: Planner, context: int, hardware: Hardware) -> MemoryPlan:
    """The plan of `context` on one card where it fits, else over as few cards as have room, those with most free first.

    Where all cards together do not suffice, it is the plan over all of them, which does not fit. Cards that the person
    named are all used, in their order.
    """
    cards = hardware.cards
    if hardware.asked_together:
        return planned(context, cards)
    plan = planned(context, ())
    for count in range(2, len(cards) + 1):
        if plan.fits:
            break
        plan = planned(context, cards[:count])
    return plan


def longest_contexts(planned: Planner, plan: MemoryPlan, context: int, hardware: Hardware) -> list[int]:
    """Shorter contexts for a `plan` that does not fit: first the longest on one card, where rounds are faster."""
    if not plan.cards or hardware.asked_together:
        return [plan.longest_context]
    return [planned(context, ()).longest_context, plan.longest_context]
