"""Runs on top of `klgrad.trl`: models, tasks, evaluation, checkpoints that lead back, and what is drawn of them.

This package needs `klgrad[train]`; nothing below it does.
"""
