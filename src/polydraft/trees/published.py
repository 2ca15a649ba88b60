"""Static trees that authors of heads publish, and measure with."""

from polydraft.trees.tree import TreeShape

EAGLE_25 = TreeShape(((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)))
"""The static tree of EAGLE-1 (arXiv 2401.15077, figure 7): 25 drafts, depth 5."""

MEDUSA_63 = TreeShape(
    (
        (10,),
        (10, 7, 3, 2, 1, 1, 1, 1, 1, 1),
        (10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1),
        (2,),
    )
)
"""The tree that Medusa publishes for its 7B heads (arXiv 2401.10774, section 2.3.3): 63 drafts, depth 4."""

FALCON_165 = TreeShape(
    (
        (20,),
        (10, 2, 2, 1),
        (10, 2, 2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 1),
        (10, 2, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 1, 1, 2, 0, 1, 1),
        (10, 2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1),
        (9, 2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
        (9, 2, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1),
        (8, 2, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    )
)
"""The tree that Falcon's authors measure with (Bestpay-inc/Falcon, `kmask2_8layer_tree`): 165 drafts, depth 8."""
