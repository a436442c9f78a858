"""What a training step needs in memory and time, and what to change if it does not fit."""
