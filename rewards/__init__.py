"""Rewards as pure functions; nothing here knows of tasks, agents or models."""
