"""`polydraft limits` and the subjects of `polydraft bench`: options, who carries them out, and what they do."""

from polydraft_lab.commands.options import (
    BenchLatticeOptions,
    BenchPassesOptions,
    BenchPipelinesOptions,
    BenchPlannerOptions,
    BenchRulesOptions,
    LimitsOptions,
)

COMMANDS: dict[str, tuple[type, str, str]] = {
    "limits": (
        LimitsOptions,
        "polydraft_lab.commands.run_limits:run_limits",
        "Measure on real text what every rule accepts and what the best possible rule would.",
    ),
    "passes": (
        BenchPassesOptions,
        "polydraft_lab.commands.run_passes:run_passes",
        "Time passes of the target and of its drafts, by the tokens that they score and those known before.",
    ),
    "rules": (
        BenchRulesOptions,
        "polydraft_lab.commands.run_rules:run_rules",
        "Measure what rules cost and accept at a node, what they take of a step, and what the optimum itself costs.",
    ),
    "planner": (
        BenchPlannerOptions,
        "polydraft_lab.commands.run_planner:run_planner",
        "Compare the planner with plain decoding and fixed trees, also where drafts do not pay.",
    ),
    "pipelines": (
        BenchPipelinesOptions,
        "polydraft_lab.commands.run_pipelines:run_pipelines",
        "Simulate PPD and SPEED, which begin tokens on guesses of an early layer: no time of them is measured.",
    ),
    "lattice": (
        BenchLatticeOptions,
        "polydraft_lab.commands.run_lattice:run_lattice",
        "Compare chains and trees of one draft head under many rules, at equal numbers of drafts.",
    ),
}
