"""The first hour on one GPU: what an 8-GPU run depends on, most doubtful first, without weights or network."""
