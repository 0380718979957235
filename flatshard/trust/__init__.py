"""Finds the cause of a failed job: a record of launches, an alarm among ranks, and a comparison of records."""
