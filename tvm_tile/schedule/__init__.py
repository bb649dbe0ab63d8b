"""Schedule rules: every decision between tile IR and code, one file each, written as annotations.

- `decide(func, hw)` applies a rule set; `default_rules()` is a plain list that can be extended or replaced.
- `Rule(name, apply)`, `Decision`, `NotApplicable`, `TileSchedule` are what a rule is made of.
- `explain(func_or_kernel)` prints what was decided and why.
- `decisions` knows the annotations' form and reads them back.
"""

from .decide import decide, default_rules
from .explain import explain
from .layout_check import check_layouts
from .rule import Decision, NotApplicable, Rule, TileSchedule

__all__ = [
    "Decision",
    "NotApplicable",
    "Rule",
    "TileSchedule",
    "check_layouts",
    "decide",
    "default_rules",
    "explain",
]
