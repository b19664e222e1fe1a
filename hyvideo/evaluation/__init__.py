"""How good a model is, with the uncertainty of the answer."""
