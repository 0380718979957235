"""What must happen in one order on every rank, on ranks that are interpreters of their own."""
