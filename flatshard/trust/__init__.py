"""What tells people what happened when ranks part: a record of launches, an alarm among ranks, and who is to blame."""
