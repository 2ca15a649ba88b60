"""What heads of each family learn by: their passes over texts that the target wrote, and their losses."""
