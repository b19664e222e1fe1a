"""What a run will need, before it is started: memory by simulation, operations and bytes by formula, checks."""
