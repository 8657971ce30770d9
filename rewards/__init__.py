"""Rewards as pure functions; nothing here depends on tasks, agents or models."""
