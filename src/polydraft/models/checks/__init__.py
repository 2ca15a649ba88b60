"""What a model must be and do before it is trusted with token trees, and how its passes leave it as it was."""

from polydraft.models.checks.evaluation import evaluating
from polydraft.models.checks.shapes import kept_shapes
from polydraft.models.checks.supported import check_architecture, check_model, check_supported
from polydraft.models.checks.trial import check_trial

__all__ = ["check_architecture", "check_model", "check_supported", "check_trial", "evaluating", "kept_shapes"]
