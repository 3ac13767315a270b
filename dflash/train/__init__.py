"""Training: one drafter step, the loop around it, and everything that must outlive a crash."""
