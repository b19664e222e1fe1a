"""The noise schedule and the four rollout transitions: one step of denoising as a Gaussian with a mean and a std."""
