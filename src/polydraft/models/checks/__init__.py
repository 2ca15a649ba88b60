"""What a model must be and do before it is trusted with token trees, and how its passes leave it as it was."""
