"""Measurements, one question per file. Each prints a table and one line of JSON."""
