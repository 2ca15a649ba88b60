"""Speed: arms that continue the same prompts in turn, their speed-ups with intervals, and what bounds them."""

from polydraft.bench.speed.arms import PLAIN, Arm, Generated, PromptBatch, drafting_arm, plain_arm, rounded_arm
from polydraft.bench.speed.hugging_face_arms import LOOKUP_TOKENS, assisted_arm, hugging_face_arm, lookup_arm
from polydraft.bench.speed.measuring import check_arms, check_batches, measure_rounds, measure_speed, prompts_that_fit
from polydraft.bench.speed.page import (
    cluster_in_words,
    difference_table,
    equality_in_words,
    kind_table,
    lossy_arms,
    speed_table,
    verdicts,
    write_report,
)
from polydraft.bench.speed.records import SpeedRecord, SpeedResults, read_speed_results, speed_conditions
from polydraft.bench.speed.replay import Replay, check_known
from polydraft.bench.speed.schedule import Round, SpeedSettings, left_out, rounds
from polydraft.bench.speed.summary import ArmResult, differences_in, judged_machine, summarise_speed, typical_load

__all__ = [
    "LOOKUP_TOKENS",
    "PLAIN",
    "Arm",
    "ArmResult",
    "Generated",
    "PromptBatch",
    "Replay",
    "Round",
    "SpeedRecord",
    "SpeedResults",
    "SpeedSettings",
    "assisted_arm",
    "check_arms",
    "check_batches",
    "check_known",
    "cluster_in_words",
    "difference_table",
    "differences_in",
    "drafting_arm",
    "equality_in_words",
    "hugging_face_arm",
    "judged_machine",
    "kind_table",
    "left_out",
    "lookup_arm",
    "lossy_arms",
    "measure_rounds",
    "measure_speed",
    "plain_arm",
    "prompts_that_fit",
    "read_speed_results",
    "rounded_arm",
    "rounds",
    "speed_conditions",
    "speed_table",
    "summarise_speed",
    "typical_load",
    "verdicts",
    "write_report",
]
