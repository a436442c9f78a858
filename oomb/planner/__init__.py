"""Predict memory and time of a training step, and find what to change if it does not fit."""
