"""What explains a job that fails: a record of launches, an alarm among ranks, and which rank is to blame."""
