"""What is measured for research, and is in no wheel: limits of rules, and what passes, rules and planners cost."""
