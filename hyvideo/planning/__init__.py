"""What a run will need, before it is started: a rehearsal on GPUs that do not exist, and what is read off it."""
