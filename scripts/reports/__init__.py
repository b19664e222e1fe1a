"""What people read: the report of a run, galleries, preference studies and pictures."""
