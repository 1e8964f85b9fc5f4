"""The laws: one list of everything that is rewritten, read off the functions that do it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from codetta.capture.appends import rows_are_appended
from codetta.capture.attention import heads_are_shared, mask_has_a_name, stays_whole
from codetta.capture.columns import cut_commutes, expand
from codetta.capture.embedding import embedding_adds_up
from codetta.capture.inner_products import inner_product_passes
from codetta.capture.loss import loss_takes_the_head
from codetta.capture.paddings import paddings_join
from codetta.capture.reader import late_is_staged
from codetta.capture.repeats import whole_slice_vanishes
from codetta.capture.sums import sums_of_products_join
from codetta.capture.weight_gradients import gradients_look_again, row_scale_crosses
from codetta.placement import Placement
from codetta.rewrite.columns import join_rises, part_sinks_to_leaves
from codetta.rewrite.gradient import inner_product_moves
from codetta.rewrite.onesided import one_plus_is_one_sided
from codetta.rewrite.scale import row_scale_commutes
from codetta.rewrite.statistic import variance_is_a_moment
from codetta.stat import Stat

NUMERICS = ("Exact", "Reassociates")


@dataclass(frozen=True)
class Law:
    """before -> after, its numeric class, and what there is to say about it."""

    name: str
    before: str
    after: str
    numerics: str
    text: str
    place: str  # where it is written


def laws() -> list[Law]:
    """Every law, in the order in which a graph meets them."""
    return [
        _law("row_scale_commutes", row_scale_commutes),
        _law("products_merge", Placement.products_merge),
        _law("cut_commutes", cut_commutes),
        _law("statistic_splits", Stat),
        _law("variance_is_a_moment", variance_is_a_moment),
        _law("late_is_staged", late_is_staged),
        _law("inner_product_moves", inner_product_moves),
        _law("inner_product_passes", inner_product_passes),
        _law("row_scale_crosses", row_scale_crosses),
        _law("sums_of_products_join", sums_of_products_join),
        _law("gradients_look_again", gradients_look_again),
        _law("one_plus_is_one_sided", one_plus_is_one_sided),
        _law("join_rises", join_rises),
        _law("repeat_joins", expand),
        _law("part_sinks_to_leaves", part_sinks_to_leaves),
        _law("attention_stays_whole", stays_whole),
        _law("heads_are_shared", heads_are_shared),
        _law("mask_has_a_name", mask_has_a_name),
        _law("whole_slice_vanishes", whole_slice_vanishes),
        _law("rows_are_appended", rows_are_appended),
        _law("loss_takes_the_head", loss_takes_the_head),
        _law("embedding_adds_up", embedding_adds_up),
        _law("paddings_join", paddings_join),
    ]


def _law(name: str, what: Any) -> Law:
    """Read off the docstring: `before -> after`, then a paragraph that begins with the numeric class."""
    first, _, rest = inspect.cleandoc(what.__doc__ or "").partition("\n")
    before, arrow, after = first.partition("->")
    text = " ".join(rest.split())
    numerics = text.split(".")[0].split(",")[0]
    assert arrow and numerics in NUMERICS, f"{name}: its docstring gives no law"
    return Law(name, before.strip(), after.strip().rstrip("."), numerics, text, what.__module__)
