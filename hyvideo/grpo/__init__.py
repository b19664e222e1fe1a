"""The paper's learning rule as pure functions of tensors and numbers: advantages, losses, trust region, step choice."""
