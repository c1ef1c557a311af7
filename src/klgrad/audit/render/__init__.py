"""Audit results as text, Markdown, JSON, a terminal table, or an HTML page."""
